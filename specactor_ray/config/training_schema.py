"""Configuration sections that only training uses; see `schema.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from specactor_ray.config.accelerators import accelerator_type
from specactor_ray.config.fields import at_least, limited, not_empty, one_of, positive

LARGEST_REWARD = 1e18
"""Largest absolute reward: float32, the type of losses, holds the square of a value of this size."""


class AlgorithmName(str, Enum):
    """Policy-gradient algorithms: presets of the other keys (`config/recipes.py`). Formulas and sources are in
    `learner/algorithms.py`."""

    grpo = "grpo"
    """Group-relative advantages, no value model."""
    dr_grpo = "dr_grpo"
    """GRPO without the two divisions that depend on the rewards' deviation and on the length."""
    dapo = "dapo"
    """GRPO with clip-higher, token-level loss, dynamic sampling and overlong shaping."""
    gspo = "gspo"
    """GRPO with the ratio of whole outputs."""
    cispo = "cispo"
    """GRPO with capped ratios as weights, so that no token loses its gradient."""
    ppo = "ppo"
    """Value head on the policy, generalised advantage estimation."""
    rloo = "rloo"
    """REINFORCE with the other samples of the group as baseline."""
    reinforce_pp = "reinforce_pp"
    """REINFORCE++: rewards whitened over all tokens of the step, no groups."""


class LossAggregation(str, Enum):
    """Reduction of per-token losses to one number."""

    token = "token"
    """Every token of the batch has the same weight."""
    sequence = "sequence"
    """Every sample has the same weight; its tokens are averaged."""
    constant = "constant"
    """Sum divided by samples x sampling.max_tokens, regardless of the lengths."""


class Importance(str, Enum):
    """Weights against the difference between the trainer's and the rollout's probabilities."""

    off = "off"
    """None."""
    token = "token"
    """Every token by min(ratio, cap)."""
    sequence = "sequence"
    """Every token by min(product of the output's ratios, cap)."""
    mask = "mask"
    """As `sequence`, but outputs beyond the cap have weight 0."""


class TrainerBackend(str, Enum):
    """Engine of the policy update."""

    torch = "torch"
    """One process."""
    deepspeed = "deepspeed"
    """ZeRO over `trainer.ranks` processes."""


class WeightTransport(str, Enum):
    """Way of new weights from the trainer to the verifiers."""

    auto = "auto"
    """`object_store`."""
    object_store = "object_store"
    """Ray's object store, which verifiers of the trainer's node map without a copy."""
    broadcast = "broadcast"
    """One broadcast to all verifiers, by gloo, or by NCCL where both sides have GPUs; the object store if it fails."""


class Schedule(str, Enum):
    """Learning rate after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class AlgorithmConfig:
    """The policy-gradient algorithm. Keys that are null have the algorithm's own value."""

    name: AlgorithmName = AlgorithmName.grpo
    """`grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `ppo`, `rloo` or `reinforce_pp`: sets the keys that are null."""
    advantages: str | None = None
    """`group` (against the group's mean), `leave_one_out` (against the mean of the others), `batch` (whitened over the
    tokens of the step), or a function of your own as `package.module:function`. Default: leave_one_out for rloo, batch
    for reinforce_pp, a value head for ppo, else group."""
    loss: str | None = None
    """`clip` (PPO's clipped ratio of each token), `sequence_clip` (of the whole output), `cispo`, or a function of your
    own as `package.module:function`. Default: sequence_clip for gspo, cispo for cispo, else clip."""
    clip_low: float | None = positive(None, up_to=1.0)
    """Clip range of the ratio below 1; 1 is no limit. Default: 0.0003 for gspo, 1 for cispo, else 0.2."""
    clip_high: float | None = positive(None)
    """Clip range of the ratio above 1. Default: 0.28 for dapo, 0.0004 for gspo, 4 for cispo, else clip_low."""
    clip_dual: float = limited(lambda value: 1.0 < value <= 1e9, "use a number above 1 (3 is common).", default=3.0)
    """Largest ratio that counts where the advantage is negative (dual clip), and in the KL term."""
    loss_aggregation: LossAggregation | None = None
    """`token`, `sequence` or `constant`. Default: sequence for grpo and gspo, constant for dr_grpo, else token."""
    scale_by_std: bool | None = None
    """Advantages `group`: divide by the standard deviation of the group's rewards. Default: false for dr_grpo, else
    true."""
    mask_truncated: bool = False
    """Leave outputs that were cut off at sampling.max_tokens out of the update (DAPO's overlong filtering); their
    rewards still count in their groups."""
    dynamic_sampling: bool | None = None
    """Replace groups with equal rewards by further prompts while others run. Default: true for dapo, else false."""
    max_sampling_rounds: int = at_least(1, default=4)
    """Most prompts of a step under dynamic sampling, as a multiple of trainer.prompts_per_step; then the step uses the
    groups that it has."""
    overlong_buffer: int | None = at_least(0, default=None)
    """Tokens of the ramp below sampling.max_tokens on which long outputs lose up to 1 of reward; 0: none. Default: a
    fifth of sampling.max_tokens for dapo, else 0."""
    entropy_coef: float = at_least(0, 0.0)
    """Weight of the entropy bonus."""
    kl_coef: float = at_least(0, 0.0)
    """Weight of the KL divergence to the initial model of the training; 0 keeps no such model."""
    gae_lambda: float = positive(0.95, up_to=1.0)
    """ppo: λ of the generalised advantage estimate."""
    value_coef: float = at_least(0, 0.5)
    """ppo: weight of the value loss."""
    importance: Importance | None = None
    """Weights by the ratio of the trainer's and the rollout's probabilities, without gradient: `off`, `token`,
    `sequence` or `mask`. Default: token with trainer.max_staleness, with importance_cap, and unless target.dtype and
    trainer.dtype are both float32, where the two differ by rounding only; else off."""
    importance_cap: float | None = positive(None)
    """Cap of these weights. Default: 2 for token, 3 for sequence and mask."""


@dataclass
class RewardFunctionConfig:
    """One reward function; the reward of a sample is the weighted sum over them."""

    name: str = "exact_match"
    """`reasoning_gym` (the task's own scorer), `math` (math-verify), `exact_match`, `length`, or a function of your own
    as `package.module:function`: of one output, or in the form of TRL or of verl."""
    weight: float = limited(math.isfinite, "use a finite number.", default=1.0)
    """Factor of its value in the sum."""


@dataclass
class RewardConfig:
    """Scoring of outputs."""

    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """Functions; the reward is their weighted sum. Default: `reasoning_gym` for its tasks, else `exact_match`."""
    answer_pattern: str | None = None
    """Regular expression; the last match in the output that is not blank (its first group, if it has one) is the
    answer that is scored. Default: the whole output, white space stripped."""
    timeout_s: float = positive(10.0)
    """Longest time for scoring one sample, in seconds; with a function of a batch, n times as long for n samples."""
    failure_value: float | None = limited(
        lambda value: abs(value) <= LARGEST_REWARD,
        f"use a number up to {LARGEST_REWARD:g}, or null to leave such samples out.",
        default=None,
    )
    """Reward of a sample that could not be scored: a function raised or took too long, or its process died several
    times. Null leaves the sample out of training; the others of its group are compared without it."""
    workers: int = at_least(1, default=2)
    """Samples scored at once, in separate processes."""
    pass_threshold: float = limited(math.isfinite, "use a finite number.", default=1.0)
    """Least reward of a sample that counts as passed."""


@dataclass
class EnvironmentConfig:
    """Environment between the model's turns. A sample is a conversation then, of sampling.max_tokens own tokens."""

    name: str | None = not_empty()
    """`calculator` (answers calls of a tool), `retry` (wrong answers may be corrected), or a class of your own as
    `package.module:Class`. Null: a sample is one output."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    max_turns: int = at_least(1, default=8)
    """Most turns of the model in a sample."""
    turn_tokens: int | None = at_least(1, default=None)
    """Most tokens of one turn. Default: the rest of sampling.max_tokens."""
    keep_outputs: bool = False
    """Accept a chat template that changes earlier outputs (drops thoughts, trims): they stay in the context as sampled.
    Without it such a template is refused."""
    timeout_s: float = positive(30.0)
    """Longest time of one step of an environment, in seconds."""
    workers: int = at_least(1, default=2)
    """Steps of environments at once, in separate processes."""


@dataclass
class EvaluationConfig:
    """Evaluation during training, on prompts that are not trained on: before the first step, every `every` steps and
    after the last. Without `path` and `share` there is none."""

    path: str | None = not_empty()
    """Held-out tasks, in any form that data.path takes, with the same keys of prompts and answers."""
    share: float = limited(lambda value: 0.0 <= value < 1.0, "use 0 or more, below 1.", default=0.0)
    """Share of the prompts of data.path that are held out: they are evaluated, and never trained on. A function of
    evaluation.seed and the prompt."""
    every: int = at_least(1, default=10)
    """Steps between evaluations."""
    n: int = at_least(1, default=1)
    """Samples per prompt."""
    limit: int | None = at_least(1, default=200, auto=False)
    """Use only the first held-out tasks, up to this number; null: all."""
    temperature: float | None = at_least(0, default=None)
    """Temperature of sampling. Default: sampling.temperature."""
    seed: int = at_least(0, default=1_000_000)
    """Seed of the samples, the same at every evaluation, of generated tasks, and of the choice of `share`. Far from
    sampling.seed: neighbouring seeds generate the same tasks."""
    split: str = "test"
    """Split of `hf:` datasets."""
    options: dict[str, Any] = field(default_factory=dict)
    """As data.options, for `path`."""

    @property
    def is_on(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.path is not None or self.share > 0.0


@dataclass
class LoraConfig:
    """Training of a low-rank adapter in place of all weights (LoRA, through peft)."""

    rank: int | None = at_least(1, default=None, auto=False)
    """Rank of the adapter's matrices. Null trains all weights."""
    alpha: int = at_least(1, default=32)
    """The adapter's product of matrices is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Linear layers that get an adapter, by the last part or parts of their names, such as `[q_proj, v_proj]`. Default:
    all but the output layer."""


@dataclass
class TrainerConfig:
    """The policy update."""

    backend: TrainerBackend = TrainerBackend.torch
    """`torch` or `deepspeed`."""
    ranks: int = at_least(1, default=1)
    """deepspeed: number of processes."""
    zero_stage: int = limited(lambda value: value in (1, 2, 3), "use 1, 2 or 3.", default=2)
    """deepspeed: ZeRO stage 1, 2 or 3."""
    cores: int | None = at_least(1, default=None)
    """CPU cores of each rank. Default: all of the node, shared with the verifiers: the two take turns."""
    gpus: int = at_least(0, default=0)
    """GPUs of each rank; 0 trains on the CPU."""
    accelerator: str | None = accelerator_type()
    """Kind of these GPUs, as `target.accelerator`, which trainer.colocate takes for it."""
    colocate: bool = False
    """Each rank has the GPU of a verifier, in turns with it; sets trainer.offload."""
    dtype: str = one_of(("float32", "bfloat16"), default="float32")
    """Arithmetic of forward and backward: float32, or bfloat16 (autocast; weights and optimizer stay float32)."""
    steps: int = at_least(1, default=100)
    """Number of policy updates of the whole run."""
    prompts_per_step: int = at_least(1, default=8)
    """Number of prompts of one step; each is sampled data.n times."""
    max_staleness: int = at_least(0, default=0)
    """Largest age, in versions, of the weights with which a step's outputs begin. 0: rollout and update take turns.
    Above, rollouts of later steps run while the trainer updates, and continue with new weights after their tokens."""
    learning_rate: float = positive(1.0e-6, up_to=1.0)
    """Peak learning rate of AdamW."""
    weight_decay: float = at_least(0, 0.0)
    """Weight decay of AdamW; not applied to norms and biases."""
    warmup_steps: int = at_least(0, default=0)
    """Steps of linear warm-up."""
    schedule: Schedule = Schedule.constant
    """`constant`, or a `linear` or `cosine` decay that would reach 0 one step after the last."""
    max_grad_norm: float = positive(1.0)
    """Gradients are clipped to this norm."""
    mini_batches: int = at_least(1, default=1)
    """Optimizer steps per pass over the samples of a step."""
    epochs: int = at_least(1, default=1)
    """Passes over the samples of a step."""
    micro_batch_tokens: int = at_least(1, default=4096)
    """Most tokens in one forward and backward, unless one sample is longer. Padding counts, for models that need it:
    those with windows, recurrence or convolutions."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Training of an adapter in place of all weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    offload: bool = False
    """Verifiers and trainer have memory on the device in turns: during updates verifiers and hosted drafters sleep;
    otherwise weights, optimizer and reference of the trainer are in host memory. On CPUs only caches are given up."""
    max_bad_steps: int = at_least(1, default=3)
    """Number of steps in a row with a loss that is not finite, or without a sample to use, after which the run stops,
    with a checkpoint."""
    weight_bucket_mb: int = at_least(1, default=256)
    """Size of one piece of weights sent to the verifiers, in 2**20 bytes."""
    weight_transport: WeightTransport = WeightTransport.auto
    """`object_store`, or `broadcast`: a process group of the trainer and all verifiers; whatever fails in it comes from
    the object store. `auto` is `object_store`."""
    stall_timeout_s: float = positive(600.0)
    """Longest time in seconds without progress of a rank (a micro-batch, an optimizer step, a bucket of weights, a file
    written, the model loaded) until it counts as hung and the run ends. Raise it if one of these takes longer."""


class OnlineWhere(str, Enum):
    """Part of the run that trains a drafter during training."""

    off = "off"
    """No training: the drafter stays as it was loaded."""
    trainer = "trainer"
    """The trainer's first rank, after each policy update."""


@dataclass
class OnlineConfig:
    """Training of an EAGLE head beside the policy, on the samples of each step."""

    where: OnlineWhere = OnlineWhere.off
    """`off`, or `trainer`: the trainer trains the head on the samples of each step, after the policy update."""
    learning_rate: float = positive(1.0e-4)
    """Learning rate of AdamW."""
    buffer_tokens: int = at_least(2, default=8192)
    """Most positions used in one step; if its samples have more, they are chosen at random. The hidden states of one
    position take 4 bytes x three layers x the target's hidden size."""
    batch_tokens: int = at_least(2, default=256)
    """Most positions of one optimizer step of the head."""
    passes: int = at_least(1, default=4)
    """Number of passes over each position."""
    steps_per_version: int = at_least(1, default=16)
    """Optimizer steps of the head after which its weights become a new version, with a number that is one higher."""
    depths: int = limited(lambda value: 1 <= value <= 16, "use 1 to 16.", default=3)
    """Tokens ahead that are trained, which is how often the head's own predictions are fed back."""


@dataclass
class CheckpointConfig:
    """Times and folder of checkpoints."""

    dir: str | None = None
    """Folder of the checkpoints. Default: `checkpoints` in the run's folder."""
    every: int = at_least(1, default=10)
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = at_least(1, default=2)
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the best checkpoint: that of the evaluation with the highest mean reward, which is saved at once;
    without `evaluation` that of the best training reward, as a mean over its last steps."""


@dataclass
class TrackingConfig:
    """Destinations of the metrics of training, besides the terminal and `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard events to `tensorboard/` in the run's folder (if the package is installed)."""
    wandb_project: str | None = None
    """Weights & Biases project; needs `pip install wandb`."""
    completions: int | None = at_least(0, default=32, auto=False)
    """Most outputs of a step that are written to `completions.jsonl`, whole groups first, beside all outputs of
    evaluations; 0: no such file, null: all."""

"""The configuration sections that only training uses; see `schema.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from specactor_ray.config.ranges import above_zero, at_least, below_one, limited, not_empty, not_negative


class AlgorithmName(str, Enum):
    """Policy-gradient algorithms; formulas and sources in `learner/algorithms.py`."""

    grpo = "grpo"
    """Group-relative advantages, no value model."""
    dapo = "dapo"
    """GRPO with clip-higher, token-level loss, dynamic sampling and overlong shaping."""
    ppo = "ppo"
    """Value head on the policy, generalised advantage estimation."""
    rloo = "rloo"
    """REINFORCE with the other samples of the group as baseline."""


class LossAggregation(str, Enum):
    """How per-token losses become one number."""

    token = "token"
    """Every token of the batch counts alike."""
    sequence = "sequence"
    """Every sample counts alike; its tokens are averaged."""
    constant = "constant"
    """Divided by samples x sampling.max_tokens, whatever the lengths."""


class TrainerBackend(str, Enum):
    """What computes the policy update."""

    torch = "torch"
    """One process."""
    deepspeed = "deepspeed"
    """ZeRO over `trainer.ranks` processes."""


class Schedule(str, Enum):
    """Learning rate after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class AlgorithmConfig:
    """The policy-gradient algorithm. Keys that are null take the algorithm's own value."""

    name: AlgorithmName = AlgorithmName.grpo
    """`grpo`, `dapo`, `ppo` or `rloo`."""
    clip_low: float = above_zero(0.2, up_to=1.0)
    """How far below 1 the probability ratio of a token counts."""
    clip_high: float | None = above_zero(None)
    """How far above 1 it counts. Default: clip_low; 0.28 for dapo."""
    loss_aggregation: LossAggregation | None = None
    """`token`, `sequence` or `constant`. Default: sequence for grpo, token for the others."""
    scale_by_std: bool = True
    """grpo, dapo: divide advantages by the standard deviation of the group's rewards."""
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal by more prompts. Default: true for dapo, else false."""
    max_sampling_rounds: int = at_least(1, default=4)
    """Most rounds of prompts per step under dynamic sampling; then the step takes what there is."""
    overlong_buffer: int | None = at_least(0, default=None)
    """Width in tokens of the ramp below sampling.max_tokens on which long outputs lose reward; 0: none.
    Default: an eighth of sampling.max_tokens for dapo, else 0."""
    overlong_penalty: float = not_negative(1.0)
    """Reward lost by an output that reaches sampling.max_tokens."""
    entropy_coef: float = not_negative(0.0)
    """Weight of the entropy bonus."""
    kl_coef: float = not_negative(0.0)
    """Weight of the KL divergence to the model that training started from; 0 keeps no such model."""
    gamma: float = above_zero(1.0, up_to=1.0)
    """ppo: discount."""
    gae_lambda: float = above_zero(0.95, up_to=1.0)
    """ppo: λ of the generalised advantage estimate."""
    value_coef: float = not_negative(0.5)
    """ppo: weight of the value loss."""
    value_clip: float | None = above_zero(0.2)
    """ppo: how far a value may move from its old one and still count; null: anywhere."""
    importance_cap: float | None = above_zero(None)
    """Weigh every token by min(trainer's probability / rollout's, cap). Null: 2 with trainer.max_staleness, else no
    weights; the two differ by rounding only where both run in the same precision."""
    max_logprob_gap: float = above_zero(0.05)
    """Warn when the rollout's and the trainer's log-probabilities differ by more than this on average."""


@dataclass
class RewardFunctionConfig:
    """One reward function; the reward of a sample is the weighted sum over them."""

    name: str = "exact_match"
    """`reasoning_gym` (the task's own scorer), `math` (math-verify), `exact_match`, `length`, or a function of your
    own as `package.module:function`."""
    weight: float = 1.0
    """Factor of its value."""


@dataclass
class RewardConfig:
    """How outputs are scored."""

    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """Their weighted sum is the reward. Default: `reasoning_gym` for its tasks, else `exact_match`."""
    answer_pattern: str | None = None
    """Regular expression whose last match in the output (its first group, if it has one) is the answer that is
    scored. Default: the whole output, white space stripped."""
    timeout_s: float = above_zero(10.0)
    """Longest time one sample may take to score."""
    failure_value: float | None = limited(
        math.isfinite, "is out of range.", "use a finite number, or null to leave such samples out.", default=None
    )
    """Reward of a sample that could not be scored: a function raised or took too long, or its process died several
    times. Null leaves the sample out of training; the others of its group are compared without it."""
    workers: int = at_least(1, default=2)
    """Samples scored at once, in processes of their own."""
    pass_threshold: float = 1.0
    """A sample with at least this reward counts as passed."""


@dataclass
class EnvironmentConfig:
    """What answers the model between its turns. A sample is a conversation then, of sampling.max_tokens own tokens."""

    name: str | None = not_empty()
    """`calculator` (answers calls of a tool), `retry` (wrong answers may be corrected), or a class of your own as
    `package.module:Class`. Null: a sample is one output."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class."""
    max_turns: int = at_least(1, default=8)
    """Most turns of the model in a sample."""
    turn_tokens: int | None = at_least(1, default=None)
    """Most tokens of one turn. Default: what is left of sampling.max_tokens."""
    timeout_s: float = above_zero(30.0)
    """Longest time of one step of an environment."""
    workers: int = at_least(1, default=2)
    """Steps of environments at once, in processes of their own."""


@dataclass
class TrainerConfig:
    """The policy update."""

    backend: TrainerBackend = TrainerBackend.torch
    """`torch` or `deepspeed`."""
    ranks: int = at_least(1, default=1)
    """deepspeed: number of processes."""
    zero_stage: int = limited(lambda value: value in (1, 2, 3), "is not a ZeRO stage.", "use 1, 2 or 3.", default=2)
    """deepspeed: ZeRO stage 1, 2 or 3."""
    cores: int | None = at_least(1, default=None)
    """CPU cores of each rank. Default: all of the node, shared with the verifiers: the two take turns."""
    gpus: int = at_least(0, default=0)
    """GPUs of each rank; 0 trains on the CPU."""
    dtype: str = limited(
        lambda value: value in ("float32", "bfloat16"), "is not known.", "use float32 or bfloat16.", default="float32"
    )
    """Arithmetic of forward and backward: float32, or bfloat16 (autocast; weights and optimizer stay float32)."""
    steps: int = at_least(1, default=100)
    """Policy updates of the whole run."""
    prompts_per_step: int = at_least(1, default=8)
    """Prompts of one step; each is sampled data.n times."""
    max_staleness: int = at_least(0, default=0)
    """How many versions old the weights may be that a step's outputs begin with. 0: rollout and update take turns.
    Above, rollouts of later steps run while the trainer updates, and go on with new weights behind their tokens."""
    learning_rate: float = above_zero(1.0e-6, up_to=1.0)
    """Peak learning rate of AdamW."""
    beta1: float = below_one(0.9)
    """AdamW."""
    beta2: float = below_one(0.999)
    """AdamW."""
    weight_decay: float = not_negative(0.0)
    """AdamW; not applied to norms and biases."""
    warmup_steps: int = at_least(0, default=0)
    """Steps of linear warm-up."""
    schedule: Schedule = Schedule.constant
    """`constant`, `linear` or `cosine`, down to 0 at the last step."""
    max_grad_norm: float = above_zero(1.0)
    """Gradients are clipped to this norm."""
    mini_batches: int = at_least(1, default=1)
    """Optimizer steps per pass over the samples of a step."""
    epochs: int = at_least(1, default=1)
    """Passes over the samples of a step."""
    micro_batch_tokens: int = at_least(1, default=4096)
    """Most tokens, padding included, in one forward and backward."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    offload: bool = False
    """Between updates, move the optimizer's state to host memory and, during updates, let verifiers give up their
    key/value caches: for a trainer and verifiers on the same device."""
    max_bad_steps: int = at_least(1, default=3)
    """After this many steps in a row with a loss that is not finite, or with every reward failed, the run stops, with a
    checkpoint."""
    weight_bucket_mb: int = at_least(1, default=256)
    """Size of one piece of weights on its way to the verifiers, in 2**20 bytes."""
    stall_timeout_s: float = above_zero(600.0)
    """Longest time without progress of a rank (a micro-batch, an optimizer step, a bucket of weights, a file written,
    the model loaded) until it counts as hung and the run ends. Raise it where one of these takes longer."""


@dataclass
class CheckpointConfig:
    """When and where training saves itself."""

    dir: str | None = None
    """Folder of the checkpoints. Default: `checkpoints` in the run's folder."""
    every: int = at_least(1, default=10)
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = at_least(1, default=2)
    """Newest checkpoints to keep."""
    keep_best: bool = True
    """Keep the one with the best reward too, as a mean over its last steps."""


@dataclass
class TrackingConfig:
    """Where the metrics of training go, beside the terminal and `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard events to `tensorboard/` in the run's folder (where the package is installed)."""
    wandb_project: str | None = None
    """Weights & Biases project; needs `pip install wandb`."""

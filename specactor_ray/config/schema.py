"""Every configuration key, with its type, allowed values, default and meaning; `rules.py` has relations between keys.

A YAML file or a dotlist override may set exactly these keys.
This module imports nothing heavy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

from specactor_ray.config.accelerators import accelerator_type
from specactor_ray.config.fields import at_least, limited, not_empty, one_of, positive
from specactor_ray.config.training_schema import (
    AlgorithmConfig,
    CheckpointConfig,
    EnvironmentConfig,
    EvaluationConfig,
    OnlineConfig,
    RewardConfig,
    TrackingConfig,
    TrainerConfig,
)
from specactor_ray.core.types import SamplingParams

AUTO = "auto"
"""A value that is derived from the device. `auto` for a number is read as null."""
BACKENDS = ("hf", "vllm")
DTYPES = (AUTO, "float32", "bfloat16", "float16")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
MAX_WINDOW = 128
MAX_BRANCHES = 16
_T = TypeVar("_T")
if TYPE_CHECKING:
    Auto = Annotated[_T, "null until it is resolved"]
else:
    Auto = Optional
_UNRESOLVED: Any = None
_ADMITTED = 128
"""Positions of a step beside one of each row, for a prompt that enters: the largest window of vLLM."""


def _window(default: int | None) -> Any:
    fix = f"use 1 to {MAX_WINDOW}; mode=plain drafts nothing."
    return limited(lambda value: 1 <= value <= MAX_WINDOW, fix, default)


class ModeName(str, Enum):
    """Way of drafting for requests."""

    auto = "auto"
    """The fastest by the costs in `profile`; without one coupled or decoupled, by the existing devices."""
    plain = "plain"
    coupled = "coupled"
    decoupled = "decoupled"


class VerifyPolicy(str, Enum):
    """Number of the supplied draft tokens that a step verifies."""

    auto = "auto"
    """As many as pay, by the measured cost of a step and each request's acceptance."""
    all = "all"
    """All of them, up to the window."""


class RaceName(str, Enum):
    """Time at which several draft methods race for one request (Fastest-of-N)."""

    off = "off"
    """Never: a request has one model, the most promising one that has room, besides the lookups."""
    tail = "tail"
    """In the tail of a rollout, when few requests are left and drafters are idle; before that like `off`."""
    always = "always"
    """From the beginning, if a drafter has room."""


@dataclass
class RunConfig:
    """Output folder and name of a run."""

    name: str | None = None
    """Name of the run; names its actors and its folder. Default: date, time and a random suffix."""
    dir: str = not_empty("runs")
    """Folder that holds one folder per run (resolved configuration, summary, logs)."""
    log_level: str = one_of(LOG_LEVELS, default="WARNING")
    """Logging level of the driver and of the actors: DEBUG, INFO, WARNING or ERROR."""


@dataclass
class ClusterConfig:
    """Ray cluster of a run, and placement of actors on it."""

    address: str = not_empty(factory=lambda: os.environ.get("RAY_ADDRESS") or "local")
    """`local` starts a private cluster for the run and stops it at the end; `host:port` is the address of a running
    cluster; `auto` is RAY_ADDRESS, else the newest `ray start` of this machine. Default: RAY_ADDRESS, which Ray sets in
    its jobs, else `local`."""
    num_cpus: int | None = at_least(1, default=None)
    """CPUs of a `local` cluster. Default: the cores that this process may use."""
    num_gpus: int | None = at_least(0, default=None)
    """GPUs of a `local` cluster. Default: those that Ray detects."""
    placement_timeout_s: float = positive(60.0)
    """Longest wait for the placement groups of the run; after it demand and supply are shown and the run ends."""
    pin_cores: bool = True
    """Pin every actor to its own CPU cores (sched_setaffinity). If false, drafting and verification may share cores, so
    the decoupling is not enforced; only for development on machines with too few cores."""
    start_timeout_s: float = positive(300.0)
    """Longest wait for an actor to load its model."""
    health_interval_s: float = positive(2.0)
    """Seconds between health checks of an actor."""
    health_timeout_s: float = positive(15.0)
    """An actor that has not answered a health check for this long is replaced."""
    stall_timeout_s: float = positive(300.0)
    """A verifier or draft actor that answers but has spent this long in one step is replaced. Must exceed the longest
    prefill."""


@dataclass
class TargetConfig:
    """The target model and the verifiers that serve it."""

    model: str = not_empty("smollm2-135m")
    """A local directory, a Hugging Face id, or the built-in `smollm2-135m`. `org/name@REVISION` pins an id to a commit,
    tag or branch. For measurements `smollm2-135m@7b` is the built-in model padded by zeros to that size (its text at
    the cost of 7 billion parameters), and `smollm2-135m~0.7` a drafter for it, right in 0.7 of its draws."""
    backend: str = one_of(BACKENDS, default="hf")
    """Engine that runs the target: `hf` (transformers model with a paged cache) or `vllm` (its scheduler, paged
    attention and kernels, with the same tokens as `hf` up to near-ties)."""
    replicas: int = at_least(1, default=1)
    """Number of verifiers; requests are distributed over them."""
    cores: Auto[int] = at_least(1, default=_UNRESOLVED)
    """CPU cores of each verifier (its torch threads, pinned). Default: 1 on the CPU; on GPUs 4 and one more for each
    rank, fewer on smaller machines."""
    gpus: int = at_least(0, default=0)
    """GPUs of each verifier; 0 runs on the CPU."""
    accelerator: str | None = accelerator_type()
    """Kind of these GPUs: one of Ray's accelerator types, such as `H100`, `'in(H100, H200)'` or `'!T4'` (YAML
    needs the quotes), or a label of nodes, such as `market-type=spot`; commas stand between several conditions.
    Default: any."""
    tensor_parallel: int = at_least(1, default=1)
    """For `vllm`: ranks over which the model of a verifier is split, each on its own GPU or on its share of the
    verifier's cores."""
    dtype: str = one_of(DTYPES, default=AUTO)
    """Data type of weights and activations: float32, bfloat16, float16, or `auto`: bfloat16 on GPUs and, for `hf`, on
    CPUs with AVX512_BF16, else float32; in training on CPUs, that of trainer.dtype. A resumed run keeps the resolved
    `auto`."""
    batch_invariant: bool = False
    """Take kernels that give a row the same bits whatever shares its batch: on GPUs, too, tokens are then those of
    plain decoding in every mode, and steps are slower. `hf` multiplies by kernels of its own, `vllm` runs in its
    batch-invariant mode; what has no such kernels is refused. On CPUs nothing changes, and mixtures of experts, with
    tokens that agree up to near-ties, are refused."""
    max_model_len: int | None = at_least(2, default=None)
    """Most prompt + output tokens of a request. Default: the model's limit."""
    max_batch: Auto[int] = at_least(1, default=_UNRESOLVED)
    """Most requests a verifier runs at once. Default: 16 on the CPU, 128 on GPUs."""
    max_step_tokens: Auto[int] = at_least(1, default=_UNRESOLVED)
    """Most positions (prefill chunks + verify tokens) in one forward; long prompts are prefilled in chunks. Default:
    512 on the CPU, 2048 on GPUs, and at least max_batch + 128. At least max_batch, for `vllm` max_batch + window."""
    kv_cache_gb: Auto[float] = positive(_UNRESOLVED)
    """Key/value cache of each rank of a verifier, in 2**30 bytes. Default: the need of max_batch requests of
    max_model_len tokens; on a GPU at most the rest after weights, activations and graphs, on the CPU at most 1 (one
    request, if that takes more) and a quarter of the free memory."""
    trust_remote_code: bool = False
    """Run model code from the checkpoint. Read it first, and pin the id to the commit that you read."""
    compiled: bool = True
    """For `vllm`: compile the model at every start. With false it starts in seconds instead of a minute (SmolLM2 on two
    cores), and steps are 5 to 25% slower."""
    updates: bool = False
    """For `vllm`: try an update of the weights at the start, and refuse a model that cannot take it. Training and verl
    set it; set it for a server that a trainer updates."""
    engine_arguments: dict[str, Any] = field(default_factory=dict)
    """For `vllm`: further arguments of its engine (`EngineArgs`), such as {kv_cache_dtype: fp8}. Arguments that other
    keys set, and those that keyed sampling does not support, are refused."""
    record_margins: bool = False
    """Record the distance of the second-best token, to distinguish near-ties from errors."""
    hidden_layers: list[int] = field(default_factory=list)
    """Decoder layers with hidden states that are exported for committed positions (for EAGLE heads)."""

    def __post_init__(self) -> None:
        """Set the defaults that depend on `gpus`."""
        if self.cores is None and not self.gpus:
            self.cores = 1
        if self.max_batch is None:
            self.max_batch = 128 if self.gpus else 16
        if self.max_step_tokens is None:
            self.max_step_tokens = max(self.max_batch + _ADMITTED, 2048 if self.gpus else 512)


@dataclass
class DrafterConfig:
    """One draft method: inside every verifier (hosted), or with its own draft actors."""

    method: str = "ngram"
    """`ngram` (copies the tokens after an earlier match of the last tokens in prompt, output and earlier outputs of the
    prompt), `suffix` (counts these tokens, also in running samples and in other prompts' outputs), `draft_model` (a
    smaller model), `eagle` (a head on the target's hidden states), or a proposer of your own as `package.module:Class`,
    derived from `RowProposer` (`specactor_ray.draft.rows`) or `Proposer`, made with this section as its only argument
    (`docs/api.md`). If a hosted one hangs, its verifier hangs until `cluster.stall_timeout_s` replaces it."""
    hosted: bool | None = None
    """Run the drafter inside each verifier, without messages and extra cores; else in draft actors. Default: true for
    lookups, and for all drafters in mode `coupled`. `false` gives a lookup its own draft actors, and `mode: auto` is
    then `decoupled`."""
    replicas: int = at_least(0, default=1)
    """Number of draft actors; `specactor scale` changes it during the run. Hosted: 0 turns the method off."""
    cores: float = 1.0
    """CPU cores of each draft actor: a whole number of its own, or a share below 1 (0.25) of a core that other draft
    actors of the run share, never a verifier. Hosted: unused, but `mode: auto` on CPUs gives them to the verifier."""
    gpus: int = at_least(0, default=0)
    """GPUs of each draft actor; 0 runs on the CPU. Hosted: unused, the verifier's device drafts."""
    accelerator: str | None = accelerator_type()
    """Kind of these GPUs, as `target.accelerator`; cheaper or older ones than the target's may do. Hosted: unused."""
    window: int | None = _window(None)
    """Draft window of this method. Default: `speculation.window`."""
    model: str | None = None
    """For `draft_model`: a local directory, a Hugging Face id or a built-in name, with the target's vocabulary. For
    `eagle`: the directory of a head that was trained for this target."""
    dtype: str = one_of(DTYPES, default=AUTO)
    """For `draft_model` and `eagle`, data type of weights and activations: float32, bfloat16, float16, or `auto`:
    bfloat16 on GPUs and on CPUs with AVX512_BF16, else float32."""
    trust_remote_code: bool = False
    """For `draft_model`: run model code from the checkpoint."""
    kv_cache_gb: Auto[float] = positive(_UNRESOLVED)
    """For `draft_model` and `eagle`: key/value cache, in 2**30 bytes. Default: the need of max_batch requests, at most
    a tenth of a GPU, or 0.5 on the CPU."""
    max_batch: Auto[int] = at_least(1, default=_UNRESOLVED)
    """Most requests that one draft actor drafts for at once; those beyond it have no drafts. Default: all that its
    verifiers run at once."""
    min_match: int = at_least(1, default=2)
    """For `ngram` and `suffix`: shortest suffix that counts as a match."""
    max_match: int = at_least(1, default=8)
    """For `ngram` and `suffix`: longest suffix that is looked up."""
    history_tokens: int | None = at_least(0, default=None)
    """For `ngram` and `suffix`: most output tokens kept, including running ones, at 32 to 40 and 48 to 64 bytes per
    token. `ngram` reads those of the same prompt, `suffix` all. 0 keeps none. Default: 65536 and 1048576."""
    online: OnlineConfig = field(default_factory=OnlineConfig)
    """For `eagle`: training on the samples of RL training."""


MAX_METHODS = 8
"""Most draft methods for which a verifier keeps statistics."""
VERIFIERS_PER_GROUP = 8
"""Most verifiers that share draft actors."""


@dataclass
class SpeculationConfig:
    """Distance that drafters run ahead, and selection of the draft tokens to verify."""

    window: Auto[int] = _window(_UNRESOLVED)  # noqa: RUF009
    """Draft window: most tokens past the last received commit. `auto`: 8; 16 where draft actors branch."""
    branches: Auto[int] = limited(  # noqa: RUF009
        lambda value: 0 <= value <= MAX_BRANCHES, f"use auto, 0 (none) or up to {MAX_BRANCHES}.", _UNRESOLVED
    )
    """Most branches of a request and drafter: drafted outcomes of the verification in progress, one of which is the
    next tail if the main chain is refuted. `auto`: 16 if the method can branch (`draft_model`, `eagle`). 0: none.
    Hosted drafters, which take turns with their verifier, have none."""
    verify: VerifyPolicy = VerifyPolicy.auto
    """Draft tokens that a step verifies: `auto`, those that pay by measured cost and acceptance, or `all`. With `all`,
    `coupled` verifiers draft whole windows at every step."""
    draft_wait_s: float = at_least(0, default=0.0)
    """`decoupled`: longest wait in seconds per step for the first draft token of requests that have none; it may pay
    for a cheap drafter beside long steps of few requests (`docs/drafters.md`)."""
    race: RaceName = RaceName.tail
    """When several draft methods race for one request: `off`, `tail` or `always`. In mode `coupled`, in which drafters
    take turns with the verifier, only `always` races. With `always` drafting is never suspended."""
    race_below: int | None = at_least(1, default=None)
    """`tail`: the race begins when a verifier has at most this many requests and none of them waits. Default: a quarter
    of target.max_batch, at least 1."""


@dataclass
class MixtureConfig:
    """One source of a mixture of tasks. Keys that are null have the value of the same key of `data`."""

    path: str = not_empty("")
    """Tasks, as in data.path."""
    weight: float = positive(1.0)
    """Share of the tasks, relative to the other weights; no count of tasks is a whole one off. A source that ends
    before the others begins again, in another order."""
    name: str | None = not_empty()
    """Name of the source in metrics, and `data_source` of its tasks. Default: that of the row, else the path."""
    prompt_key: str | None = None
    """Key or column of the prompt."""
    answer_key: str | None = None
    """Key or column of the reference answer."""
    map: str | None = not_empty()
    """Function from row to row."""
    system_prompt: str | None = None
    """Text before every prompt."""
    split: str | None = None
    """Split of `hf:` datasets."""
    options: dict[str, Any] | None = None
    """Parameters of the task, or of `datasets.load_dataset`."""
    limit: int | None = at_least(1, default=None, auto=False)
    """Use only the first prompts."""


@dataclass
class DataConfig:
    """Prompts."""

    path: str | None = not_empty()
    """Prompts: `.jsonl` (objects with `prompt` or chat `messages`) or a text file (one prompt per line). Training also
    accepts `.parquet`, `reasoning_gym:TASK` (generated tasks) and `hf:DATASET` (Hugging Face)."""
    mixture: list[MixtureConfig] = field(default_factory=list)
    """Training: several sources with weights, in place of data.path."""
    map: str | None = not_empty()
    """Training: function of your own, as `package.module:function`, from each row (a dict) to the row with prompt and
    answer, or to None, which leaves it out. `specactor_ray.trainer.mappings:gsm8k` is for the columns of GSM8K."""
    n: int = at_least(1, default=1)
    """Samples per prompt (the group size)."""
    limit: int | None = at_least(1, default=None, auto=False)
    """Use only the first prompts, up to this number."""
    chat: bool = True
    """Wrap `prompt` as one user message of the model's chat template, if it has one. Messages are literal text."""
    add_special_tokens: bool = True
    """chat=false: add the tokenizer's BOS to `prompt`, unless it begins with it."""
    split_special_tokens: bool = False
    """chat=false: read `prompt` as literal text. By default its control tokens are read: it is rendered on purpose."""
    system_prompt: str | None = None
    """Training: text before every prompt, as a system message."""
    prompt_key: str = "prompt"
    """Training: key or column of the prompt."""
    answer_key: str = "answer"
    """Key or column of the reference answer; reward functions receive the others as metadata."""
    split: str = "train"
    """Split of `hf:` datasets."""
    options: dict[str, Any] = field(default_factory=dict)
    """`reasoning_gym:` parameters of the task; `hf:` further arguments of `datasets.load_dataset`."""
    shuffle: bool = True
    """Training: a new order in every epoch, a function of sampling.seed."""


@dataclass
class PacedConfig:
    """Paced devices: models on CPUs compute real tokens, and their forwards last as long as those of other models on
    GPUs (`specactor bench rollout --paced`)."""

    device: str | None = not_empty()
    """Hardware file of the emulated GPUs, such as h100; null: forwards take their own time."""
    stretch: float = positive(40.0)
    """Factor of all durations, with which this machine's forwards end in time."""
    target: str = "qwen2.5-32b"
    """Emulated target, a shape of conf/simulation/hardware/models.yaml."""
    target_gpus: int = at_least(1, default=4)
    """Emulated GPUs of each verifier."""
    drafter: str = "qwen2.5-0.5b"
    """Emulated model of `draft_model`. Lookups take their own time."""
    drafter_gpus: int = at_least(1, default=1)
    """Emulated GPUs of each draft actor; a hosted drafter is on those of its verifier."""


@dataclass
class Config:
    """The whole configuration of a rollout or a training run."""

    mode: ModeName = ModeName.auto
    """`plain` (no drafters), `coupled` (every verifier drafts itself: drafting and verification take turns on its
    device), `decoupled` (draft actors run ahead on their own cores or GPUs), or `auto`, chosen before anything starts:
    by `profile` if it is set; else for a target on CPUs `coupled`, and the verifiers get the draft actors' cores; on
    GPUs `decoupled` if draft actors find room, else `coupled`. Both stop drafting while it does not pay."""
    profile: str | None = not_empty()
    """`summary.json` of an earlier run of this target with drafts, on the same kind of machine. With it `mode: auto`
    chooses, by the costs and acceptance that the run measured, the mode (plain included), target.replicas,
    target.cores, target.max_batch, the draft method with its replicas and cores, and speculation.window: for all cores
    (or GPUs) of a `local` cluster, elsewhere for those that the configuration needs as written."""
    run: RunConfig = field(default_factory=RunConfig)
    """Output folder and name of the run."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Ray cluster, and placement of actors on it."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The target model and its verifiers."""
    drafters: list[DrafterConfig] = field(default_factory=list)
    """Draft methods, one element each; `mode: plain` uses none of them. `mode: auto` adds `suffix` to an empty list."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """Distance that drafters run ahead, and longest wait of a verifier."""
    paced: PacedConfig = field(default_factory=PacedConfig)
    """Emulated devices."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling of tokens."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts and outputs."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Training: the policy-gradient algorithm."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Training: scoring of outputs."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Training: environment that answers the model between its turns."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Training: evaluation on held-out prompts."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Training: the policy update."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Training: times and folder of checkpoints."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Training: destinations of metrics."""
    resume: str = "never"
    """`never` starts a new run. `auto` continues the run of run.name, or without it the latest in run.dir that was not
    finished; if there is none it starts a new one. Training continues from the newest sound checkpoint, or from the
    folder of one that is named here."""

"""RL post-training end to end; implements `specactor train` and `jobs/train.py`. The algorithm is in `steps.py`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specactor_ray.config import Config
from specactor_ray.config.methods import is_named, online_drafter
from specactor_ray.config.recipes import make_recipe
from specactor_ray.config.rules import validate_training
from specactor_ray.config.schema import AUTO, DrafterConfig, TargetConfig
from specactor_ray.config.training_schema import RewardFunctionConfig, TrainerBackend, WeightTransport
from specactor_ray.core import progress
from specactor_ray.core.console import say
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.files import expanded, require_folder
from specactor_ray.core.progress import PhaseProgress
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts
from specactor_ray.models.loading import load_tokenizer
from specactor_ray.models.shapes import ITEM_BYTES, count_parameters, head_dim, key_value_heads
from specactor_ray.rollout.prompts import ChatTurns, Prompt, encode_prompt, text_options
from specactor_ray.runs.folder import SUMMARY_FILE, RunOutcome, discard_run_folder
from specactor_ray.runs.records import METRICS_FILE
from specactor_ray.runs.training import TrainingRun, keep_dtype, open_run
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.memory import PROCESS_BYTES, check_memory, check_turn_of_trainer, plan_rollout_memory
from specactor_ray.startup.resolve import Resolved, resolve
from specactor_ray.target.sizes import gib
from specactor_ray.trainer.data import TaskStream, open_source
from specactor_ray.trainer.environment import Environment, check_environment, make_environment
from specactor_ray.trainer.evaluation import evaluation_tasks, hold_out
from specactor_ray.trainer.record import StepRecorder
from specactor_ray.trainer.rewards import RewardPool, Scorer, check_rewards, missing_answer
from specactor_ray.trainer.steps import Training, Watch

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.trainer.experience import ExperienceMaker

_FLOAT32 = 4
FIXES = (
    "a smaller trainer.micro_batch_tokens, target.max_model_len, target.kv_cache_gb or target.replicas, "
    "trainer.gradient_checkpointing=true, or algorithm.kl_coef=0."
)


Beside = Callable[["Rollout", "ExperienceMaker"], contextlib.AbstractContextManager[tuple[Any, Any]]]


def train(
    config: Config,
    console: Console,
    watch: Watch = lambda training: None,
    beside: Beside | None = None,
    ready: tuple[Resolved, TaskStream] | None = None,
) -> RunOutcome:
    """Train until `trainer.steps`, or until interrupted (Ctrl-C, SIGTERM: with a checkpoint). `watch`: see `Training`.
    `beside`: context with what stands for the rollout and the maker of experience, such as those of a comparison.
    `ready`: the result of `checked`, if it was called before.

    Raises:
        UserError: The configuration, the data or the cluster are wrong; raised before anything is started.
        SpecActorError: The trainer or all verifiers were lost, or the loss stayed non-finite; checkpoints are kept.
    """
    resolved, stream = ready or checked(config)
    config, machine = resolved.config, Machine.here()
    for line in resolved.choices:
        say(console, line)
    with sigterm_interrupts():
        memory = plan_memory(config, longest_sample(resolved, stream))
        check_memory(config, machine.free_bytes, memory, FIXES)
        check_turn_of_trainer(config, machine, memory)
        run = open_run(config, stream.size)  # after all refusals: it removes what a resumed run repeats
        try:
            stream.position, stream.skipped = run.state.position, run.state.skipped_tasks
            announce(resolved, run, memory, console, len(stream.held_out))
            return _train(resolved, run, stream, console, watch, beside)
        except BaseException as error:
            run.close()
            if run.checkpoint is None and not any(
                (run.folder / name).exists() for name in (METRICS_FILE, SUMMARY_FILE)
            ):
                discard_run_folder(run.folder)
                if isinstance(error, KeyboardInterrupt):
                    say(console, "interrupted before the first step; nothing was kept")
            raise
        finally:
            run.close()


def _train(
    resolved: Resolved, run: TrainingRun, stream: TaskStream, console: Console, watch: Watch, beside: Beside | None
) -> RunOutcome:
    """Start all parts and run the steps."""
    config = resolved.config
    with progress.start_phase("loading torch and Ray"), signals_deferred():  # takes seconds, so only after the checks
        from specactor_ray.rollout.rollout import Rollout
        from specactor_ray.trainer.conversations import Conversations
        from specactor_ray.trainer.experience import AheadMaker, ExperienceMaker
        from specactor_ray.trainer.trainer_ranks import trainer_group

    show = partial(say, console)
    with contextlib.ExitStack() as parts:
        record = StepRecorder(config, run, show, console.width)
        parts.enter_context(PhaseProgress(console, "training", config.trainer.steps, poll=record.show_progress))
        rollout = parts.enter_context(Rollout(resolved))
        if config.trainer.offload:
            rollout.sleep()
        trainer = parts.enter_context(trainer_group(config, rollout.run_name, run.checkpoint))
        if config.trainer.offload:
            trainer.offload()
            rollout.wake()
        parts.enter_context(record.open(rollout))
        if config.environment.name is None:
            workers: RewardPool | Conversations = RewardPool(config.reward, config.reward.workers)
        else:
            workers = Conversations(config, _tokenizer(config.target), resolved.context)
        parts.enter_context(workers)
        maker, ahead = ExperienceMaker(config, make_recipe(config), stream, workers), None
        evaluate = maker.evaluate if stream.held_out else None
        if beside is not None:
            rollout, maker = parts.enter_context(beside(rollout, maker))
        if config.trainer.max_staleness:
            ahead = AheadMaker(maker, config.trainer.max_staleness, config.trainer.steps)
            parts.callback(ahead.close)
        return Training(config, run, rollout, trainer, ahead or maker, record, show, watch, evaluate).run()


def _tokenizer(target: TargetConfig) -> Any:
    return load_tokenizer(target.model, trust_remote_code=target.trust_remote_code)


# ---- checks that need no cluster ----


def checked(config: Config) -> tuple[Resolved, TaskStream]:
    """The configuration of a training run as it runs, and its tasks. Raises as `train`; nothing is started."""
    config = prepared(config)
    for key, folder in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
        if folder:
            require_folder(expanded(folder), key)
    resolved = resolve(config, Machine.here(), trains=True)
    return resolved, checked_tasks(resolved)


def dtype_note(ours: str, trainers: str) -> list[str]:
    """A line about the types of rollout and update, if they differ: so do the log-probabilities of the same tokens."""
    if ours == trainers:
        return []
    what = f"target.dtype is {ours}, and trainer.dtype {trainers}: log-probabilities of rollout and update differ (gap)"
    return [f"{what}; target.dtype={trainers} makes them equal, algorithm.importance corrects for it"]


def prepared(config: Config) -> Config:
    """A copy with the values of a training run that depend on other sections. `target.dtype: auto` is that of the run
    which `resume` continues, else on CPUs the trainer's float32, so that both compute the same log-probabilities; on
    GPUs it would take several times as long. ConfigError: it cannot work."""
    config = copy.deepcopy(config)
    config.trainer.offload |= config.trainer.colocate
    validate_training(config)
    config.target.updates = True
    keep_dtype(config)
    if config.target.dtype == AUTO and not config.target.gpus and config.trainer.dtype == "float32":
        config.target.dtype = "float32"
    if config.trainer.weight_transport is WeightTransport.broadcast:
        from specactor_ray.actors.broadcast import require_broadcast  # torch takes seconds

        require_broadcast(config)
    paths = [one.path for one in config.data.mixture] or [config.data.path or ""]
    generated = all(path.startswith("reasoning_gym:") for path in paths)
    if not config.reward.functions:
        config.reward.functions = [RewardFunctionConfig("reasoning_gym" if generated else "exact_match")]
    Scorer(config.reward)
    recipe = make_recipe(config)
    if is_named(str(recipe.advantages)) or is_named(str(recipe.loss)):
        from specactor_ray.learner.trial import try_functions  # torch takes seconds

        try_functions(recipe)
    if config.environment.name is not None:
        make_environment(config.environment)
    if any(term.name == "reasoning_gym" for term in config.reward.functions):
        held_out = [] if config.evaluation.path is None else [config.evaluation.path]
        if others := [path for path in (*paths, *held_out) if not path.startswith("reasoning_gym:")]:
            problem = f"reasoning_gym scores its own tasks only, and there are tasks from {', '.join(others)}."
            raise ConfigError("reward.functions", problem, "use exact_match, math, or package.module:function.")
    return config


@progress.start_phase("checking tasks and rewards")
def checked_tasks(resolved: Resolved) -> TaskStream:
    """The tasks in their order, from the first one on; at least one of them fits the model, the chat template supports
    the environment, which answers, and the user's reward functions return numbers. Raises ConfigError, InputError."""
    config, data = resolved.config, resolved.config.data
    source = open_source(data, config.sampling.seed)  # its errors are reported before the tokenizer is loaded
    tokenizer = _tokenizer(config.target)
    if config.environment.name is not None:
        role = getattr(make_environment(config.environment), "role", Environment.role)
        ChatTurns(tokenizer, config.environment.keep_outputs).between([{"role": role, "content": "Answer"}], ())

    def count_tokens(prompt: Prompt) -> int:
        return len(encode_prompt(tokenizer, prompt, data.chat, most=resolved.context, **text_options(data)))

    most, is_held_out = resolved.max_prompt_tokens, hold_out(config.evaluation, source)
    stream = TaskStream(source, config.sampling.seed, count_tokens, most, data.shuffle, is_held_out)
    first = stream.take(2)
    check_rewards(config, first, missing_answer(config, source))
    check_environment(config, first)
    stream.held_out = evaluation_tasks(config, stream)
    stream.position = stream.skipped = 0
    return stream


def announce(
    resolved: Resolved, run: TrainingRun, memory: Mapping[str, float], console: Console, held_out: int
) -> None:
    """Print the run, the checkpoint it continues from, the number of prompts to evaluate on, and its memory need."""
    config = resolved.config
    for part, size in memory.items():
        say(console, f"memory: {part}: {gib(size)}")
    samples = config.trainer.prompts_per_step * config.data.n
    what = f"{config.algorithm.name.value}, {config.trainer.steps} steps of {samples} samples"
    say(console, f"run {config.run.name}: {what}, mode {config.mode.value}; results go to {run.folder}")
    if held_out:
        each = f"{held_out} held-out prompts x {config.evaluation.n}"
        say(console, f"evaluation: {each}, at the start, every {config.evaluation.every} steps and at the end")
    for note in (*dtype_note(config.target.dtype, config.trainer.dtype), *resolved.notes):
        say(console, note)
    if run.checkpoint is not None:
        say(console, f"run {config.run.name}: continues from {run.checkpoint} (step {run.state.step})")


def longest_sample(resolved: Resolved, stream: TaskStream) -> int:
    """Most tokens of a sample: the longest prompt with the longest output, or the context, which the messages of an
    environment may fill."""
    if resolved.config.environment.name is not None:
        return resolved.context
    return stream.longest_prompt() + resolved.config.sampling.max_tokens


def plan_memory(config: Config, longest: int) -> dict[str, float]:
    """Peak memory of each part of the run: estimates in bytes, on the safe side. `longest`: `longest_sample`.
    ConfigError: the adapter does not fit the model."""
    target, trainer = config.target, config.trainer
    size, text = count_parameters(target.model, target.trust_remote_code)
    plan = plan_rollout_memory(config)
    taught = online_drafter(config)
    if taught is not None:
        plan[f"trainer, learning of {taught.method}"] = _held_by_learner(taught, target)
    trained, held = size, size
    if trainer.lora.rank is not None:
        from specactor_ray.models.adapter import adapter_size

        trained = adapter_size(target, trainer.lora)
        held += trained
    # Weights, gradients and two moments in float32; ZeRO spreads them (stage 3 all, below only the moments).
    states = (held + 3 * trained) * _FLOAT32 * 1.0 + trainer.ranks * PROCESS_BYTES
    if trainer.ranks > 1 and trainer.zero_stage < 3:
        states += (trainer.ranks - 1) * (held + trained) * _FLOAT32
    plan["trainer, weights, gradients, moments"] = states
    item = ITEM_BYTES[trainer.dtype]
    if item < _FLOAT32:
        plan["trainer, weights as autocast rounds them"] = trainer.ranks * size * item * 1.0
    if config.algorithm.kl_coef and trainer.lora.rank is None:
        # Its linear layers are in trainer.dtype, its embedding is not.
        embedding = int(text.vocab_size) * int(text.hidden_size)
        copies = 1 if trainer.backend is TrainerBackend.deepspeed and trainer.zero_stage == 3 else trainer.ranks
        plan["trainer, reference model"] = copies * (size * item + embedding * (_FLOAT32 - item)) * 1.0
    whole_step = trainer.prompts_per_step * config.data.n * longest
    tokens = max(min(trainer.micro_batch_tokens, whole_step), longest)  # a longer sample is a micro-batch by itself
    plan["trainer, activations"] = trainer.ranks * activation_bytes(text, tokens, trainer.gradient_checkpointing)
    # The version in the object store, and the next one while it is sent.
    sent = 1.0 * size * ITEM_BYTES[target.dtype]
    plan["object store, two versions of the weights"] = 2.0 * sent
    if trainer.weight_transport is WeightTransport.broadcast:
        plan[f"verifiers, {target.replicas} x weights that arrive"] = target.replicas * sent
    return plan


def _held_by_learner(drafter: DrafterConfig, target: TargetConfig) -> float:
    """Bytes of a head, of gradients and moments of all but its embedding, and of its hidden states, in float32."""
    from specactor_ray.draft.eagle.checkpoint import empty_head

    assert drafter.model is not None  # validated
    head = empty_head(drafter.model, target)
    size = sum(parameter.numel() for parameter in head.parameters())
    trained = size - head.embed_tokens.weight.numel()
    states = drafter.online.buffer_tokens * head.config.feature_size
    return float(_FLOAT32 * (size + 3 * trained + states))


def activation_bytes(text: Any, tokens: int, recomputed: bool) -> float:
    """Bytes of one forward and backward in float32 of a model with grouped queries and gated layers: what autograd
    keeps of each layer, or its input and one layer that is computed again, with the gradient of a matrix; and four
    arrays of a chunk's logits, beside the gradient of the output layer where several chunks add to it."""
    from specactor_ray.learner.engine import CHUNK_TOKENS

    hidden, layers, heads = int(text.hidden_size), int(text.num_hidden_layers), int(text.num_attention_heads)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    layer = 9 * hidden + 2 * key_value_heads(text) * head_dim(text) + 4 * inner + heads
    vocabulary = int(text.vocab_size)
    logits = 4 * vocabulary * min(tokens, CHUNK_TOKENS) + (tokens > CHUNK_TOKENS) * vocabulary * hidden
    if recomputed:
        kept = layers * hidden * tokens + max(logits, layer * tokens + hidden * inner)
    else:
        kept = layers * layer * tokens + logits
    return float(_FLOAT32 * (kept + 5 * hidden * tokens))

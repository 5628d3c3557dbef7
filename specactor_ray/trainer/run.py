"""RL post-training end to end; implements `specactor train` and `jobs/train.py`. The algorithm is in `steps.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from specactor_ray.config import Config
from specactor_ray.config.methods import taught_by_trainer
from specactor_ray.config.schema import AUTO
from specactor_ray.core.console import say
from specactor_ray.core.files import require_folder
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts
from specactor_ray.rollout.preflight import refuse_early
from specactor_ray.runs.folder import discard_run_folder
from specactor_ray.runs.training import TrainingRun, open_run
from specactor_ray.trainer.ahead import AheadMaker
from specactor_ray.trainer.data import TaskStream
from specactor_ray.trainer.display import TrainingDisplay
from specactor_ray.trainer.record import StepRecorder
from specactor_ray.trainer.saver import Saver
from specactor_ray.trainer.setup import announce, checked_memory, checked_tasks, open_conversations, prepare
from specactor_ray.trainer.steps import MakerPart, TrainingParts, TrainOutcome, run_steps


def train(
    config: Config,
    console: Console,
    display: TrainingDisplay | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> TrainOutcome:
    """Train until `trainer.steps`, or until interrupted (Ctrl-C, SIGTERM: with a checkpoint).

    Args:
        config: The run; `run.name` is set if it has no value. `plan: auto` and `mode: auto` are resolved in a copy
            before anything is written or started.
        display: Shows the steps. Default: all figures of each, on the console.
        enough: Called after every step; returns whether to end before `trainer.steps`.

    Raises:
        UserError: The configuration, the data or the cluster are wrong; raised before anything is started.
        SpecActorError: The trainer or all verifiers were lost, or the loss stayed non-finite; checkpoints are kept.
    """
    keep_dtype = config.target.dtype == AUTO
    config, lines = refuse_early(config, trains=True)
    for key, folder in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
        if folder:
            require_folder(Path(folder).expanduser(), key)
    prepare(config)
    stream = checked_tasks(config)
    for line in lines:
        say(console, line)
    with sigterm_interrupts():
        run = open_run(config, stream.order.size, keep_dtype=keep_dtype)
        try:
            stream.order.position, stream.skipped = run.state.position, run.state.skipped_tasks
            announce(config, run, checked_memory(config), console)
            display = display or TrainingDisplay(console, config.trainer.steps)
            return _train(config, run, stream, console, display, enough)
        except BaseException as error:
            run.close()
            if run.checkpoint is None and not (run.metrics_file.exists() or run.summary_file.exists() or run.lost):
                discard_run_folder(run.folder)
                if isinstance(error, KeyboardInterrupt):
                    say(console, "interrupted before the first step; nothing was kept")
            raise
        finally:
            run.close()


def _train(
    config: Config,
    run: TrainingRun,
    stream: TaskStream,
    console: Console,
    display: TrainingDisplay,
    enough: Callable[[], bool],
) -> TrainOutcome:
    """Start all parts and run the steps."""
    with signals_deferred():  # takes seconds, so only after the checks
        from specactor_ray.learner.recipe import make_recipe
        from specactor_ray.rollout.rollout import Rollout
        from specactor_ray.trainer.experience import ExperienceMaker
        from specactor_ray.trainer.reward_runner import RewardRunner
        from specactor_ray.trainer.trainer_group import TrainerGroup

    pupil = taught_by_trainer(config)
    with (
        display,
        Rollout(config) as rollout,
        TrainerGroup(config, rollout.run_name, run.checkpoint) as trainer,
        StepRecorder(config, run, rollout, display) as record,
        RewardRunner(config.reward) as rewards,
        open_conversations(config) or contextlib.nullcontext() as conversations,
        contextlib.ExitStack() as parts,
    ):
        maker: MakerPart = ExperienceMaker(config, make_recipe(config), stream, rewards, record.timed, conversations)
        if config.trainer.max_staleness:
            ahead = AheadMaker(maker, config.trainer.max_staleness, config.trainer.steps)
            maker = parts.enter_context(contextlib.closing(ahead))
        return run_steps(
            TrainingParts(
                config=config,
                rollout=rollout,
                trainer=trainer,
                maker=maker,
                record=record,
                saver=Saver(run.store, trainer.save, run.state, run.is_saved, run.check_lease),
                sampling=config.sampling,
                pupil=None if pupil is None else pupil.method,
                say=lambda line: say(console, line),
                enough=enough,
            )
        )

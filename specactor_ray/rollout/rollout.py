"""The public API: start the actors a configuration asks for, stream trajectories, scale drafters, clean up."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from specactor_ray.cluster.connection import Connection, connect
from specactor_ray.config import Config, load_config
from specactor_ray.config.lending import lendable_methods
from specactor_ray.config.schema import ModeName
from specactor_ray.controller.start import start_controller
from specactor_ray.controller.state import Phase
from specactor_ray.controller.weights import TRAINER
from specactor_ray.errors import InputError, SpecActorError
from specactor_ray.messages import RequestStats, SamplingParams, WeightSet
from specactor_ray.rollout.compatibility import (
    check_drafters_fit_target,
    export_what_drafters_read,
    warn_without_drafters,
)
from specactor_ray.rollout.dispatch import Dispatcher
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.memory import require_memory
from specactor_ray.rollout.metrics import RolloutMetrics
from specactor_ray.rollout.planning import ladder_priors, resolve_plan
from specactor_ray.rollout.prompts import Prompt, encode_prompt, sampling_from_config
from specactor_ray.rollout.spares import Spares
from specactor_ray.rollout.target_checks import check_target
from specactor_ray.rollout.trajectory import Trajectory
from specactor_ray.sampling import derive_seed

logger = logging.getLogger(__name__)

Sampling = SamplingParams | Sequence[SamplingParams]
"""One for all prompts, or one for each."""


class Rollout:
    """A running set of verifiers and draft actors that turns prompts into trajectories.

    ```python
    with Rollout.from_config("conf/local_cpu.yaml") as rollout:
        for trajectory in rollout.stream(prompts, SamplingParams(temperature=1.0, max_tokens=128, seed=7), n=4):
            ...
    ```

    One stream runs at a time. Leaving the `with` block ends every actor and, for a `local` cluster, the cluster.

    Raises:
        ConfigError, ModelLoadError, ClusterError: The configuration cannot be served; nothing is left running.
    """

    def __init__(self, config: Config) -> None:
        check_target(config)
        config, plan_lines = resolve_plan(config)
        for line in plan_lines:
            logger.info("%s", line)
        config = export_what_drafters_read(config)
        self.config = config
        self._closed = False
        self._streams = 0
        self._streaming = False
        self._weight_version = 0
        priors = ladder_priors(config)
        self._tokenizer = check_drafters_fit_target(config)
        require_memory(config)
        warn_without_drafters(config)
        self._connection: Connection = connect(config.cluster)
        try:
            self._controller, self.run_name = start_controller(config, priors=priors)
            self._dispatcher = Dispatcher(
                fetch_view=self._controller.view.remote,
                outstanding_per_verifier=2 * config.target.max_batch,
                no_verifier_timeout_s=config.cluster.start_timeout_s + config.cluster.placement_timeout_s,
                spares=Spares(self._controller, config.cluster.start_timeout_s) if lendable_methods(config) else None,
            )
        except BaseException:
            self._connection.close()
            raise

    @classmethod
    def from_config(cls, config: Config | str | Path, overrides: Sequence[str] = ()) -> Rollout:
        """Start from a `Config`, or from a YAML file with dotlist overrides such as `target.max_batch=8`."""
        if not isinstance(config, Config):
            config = load_config(config, overrides)
        return cls(config)

    def __enter__(self) -> Rollout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all actors and leave the cluster as it was found. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            ray.get(self._controller.shutdown.remote(), timeout=60)
            ray.kill(self._controller)
        except Exception:
            logger.exception("the controller did not shut down in order; its actors end with this process")
        finally:
            self._connection.close()

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, n: int | None = None
    ) -> Iterator[Trajectory]:
        """Yield `len(prompts) * n` trajectories in the order they finish.

        Args:
            prompts: Texts, chat messages or lists of token ids.
            sampling: How to sample, for all prompts or one for each; its seed is the run's, each sample's own is
                derived from it. Default: the configuration's.
            n: Samples per prompt. Default: `data.n`.

        A prompt that cannot run ends as a trajectory with `finish_reason` `error` and its reason; the others go on.

        Raises:
            InputError: No prompts, another number of samplings, n < 1, or another stream of this rollout is open.
            ActorLostError: No verifier could be had any more.
        """
        sampling = sampling_from_config(self.config) if sampling is None else sampling
        n = self.config.data.n if n is None else n
        if isinstance(prompts, str):
            raise InputError("prompts must be a list; put a single text into one: [prompt]")
        if not prompts:
            raise InputError("there are no prompts to roll out")
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        strange = [one for one in each if not isinstance(one, SamplingParams)]
        if strange:
            raise InputError(
                f"sampling must be SamplingParams, one for all prompts or a list of them; got {strange[0]!r}"
            )
        if len(each) != len(prompts):
            raise InputError(
                f"sampling has {len(each)} entries for {len(prompts)} prompts; give one for each, or one for all"
            )
        if n < 1:
            raise InputError(f"n is {n}; it must be 1 or more")
        if self._streaming:
            raise InputError("another stream of this rollout is still open; exhaust or close it first")
        return self._stream(list(prompts), each, n)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, n: int | None = None
    ) -> list[Trajectory]:
        """All trajectories at once, ordered by prompt and sample."""
        done = list(self.stream(prompts, sampling, n))
        return sorted(done, key=lambda trajectory: (trajectory.prompt_index, trajectory.sample_index))

    def scale(self, drafters: Mapping[str, int]) -> None:
        """Set how many draft actors of each method there should be; takes effect while the rollout goes on.

        Raises:
            ConfigError: A method is not in the configuration, or a number is negative.
        """
        get_or_raise(self._controller.scale.remote(dict(drafters)))

    def update_weights(self, weights: WeightSet) -> None:
        """Give every verifier, and the drafters that follow the policy, a new version of the target's weights.

        Returns when all have it. A verifier or draft actor that joins later gets it before it serves.

        Raises:
            InputError: A stream is open: its trajectories would mix two versions.
            SpecActorError: The weights were not taken in time.
        """
        if self._streaming:
            raise InputError("weights cannot change while a stream is open; exhaust or close it first")
        timeout_s = self.config.cluster.start_timeout_s
        get_or_raise(self._controller.set_weights.remote(weights, timeout_s), timeout_s + 60.0)
        self._weight_version = weights.version
        self._dispatcher.expect_version(weights.version)

    def update_drafter(self, method: str, weights: WeightSet) -> None:
        """Give the draft actors of a method that the trainer teaches (`online.where=trainer`) a newer version of its
        weights. Returns before they have it: no token depends on when they do."""
        get_or_raise(self._controller.offer_weights.remote(method, TRAINER, weights))

    def sleep(self) -> None:
        """Let the verifiers give up their caches' memory until the next stream (or `wake`)."""
        self._call_verifiers("sleep")

    def wake(self) -> None:
        """Let the verifiers take their memory back."""
        self._call_verifiers("wake")

    def _call_verifiers(self, method: str) -> None:
        if self._streaming:
            raise InputError(f"{method}: a stream is open; exhaust or close it first")
        get_or_raise([getattr(handle, method).remote() for handle in self._all_verifiers()])

    def _all_verifiers(self) -> list[Any]:
        """Handles of the verifiers that serve; between two streams those that were lent at the last tail as well."""
        if not self._streaming and not self._dispatcher.await_spares():
            raise SpecActorError("verifiers whose seats were lent to draft actors did not come back in time")
        return list(get_or_raise(self._controller.view.remote()).verifiers.values())

    def status(self) -> list[dict[str, Any]]:
        """One row per actor: id, kind, phase, placement and counters."""
        return get_or_raise(self._controller.status.remote())

    def metrics(self) -> RolloutMetrics:
        """Counters over all verifiers since the start or the last `reset_metrics`."""
        # A copy: progress is shown from another thread, while verifiers may join.
        return RolloutMetrics.merge(self._dispatcher.counters.copy().values())

    def reset_metrics(self) -> None:
        """Set the verifiers' counters to zero (after a warm-up)."""
        ray.get([handle.reset_metrics.remote() for handle in self._all_verifiers()])
        self._dispatcher.counters.clear()

    def forget_history(self) -> None:
        """Let drafters forget earlier outputs, as if they had just been started; for benchmarks."""
        view = get_or_raise(self._controller.view.remote())
        ready = [endpoint.handle for endpoint in view.drafters if endpoint.phase is Phase.READY]
        get_or_raise([handle.forget_history.remote() for handle in (*ready, *view.verifiers.values())])

    @property
    def address(self) -> str:
        """`host:port` of the Ray cluster, for `cluster.address` of another process."""
        return self._connection.address

    @property
    def moved_requests(self) -> int:
        """How often a request was moved from one healthy verifier to another since the start."""
        return self._dispatcher.moves

    @property
    def reissued_requests(self) -> int:
        """How often a request was given to another verifier because its own was gone, since the start."""
        return self._dispatcher.reissues

    @property
    def committed_tokens(self) -> int:
        """Output tokens journaled since the start."""
        return self._dispatcher.journal.committed_tokens

    def _stream(self, prompts: list[Prompt], sampling: list[SamplingParams], n: int) -> Iterator[Trajectory]:
        self._streaming = True
        self._streams += 1
        try:
            entries, refused = [], []
            places = {}
            for prompt_index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
                for sample_index in range(n):
                    seed = derive_seed(params.seed, prompt_index, sample_index)
                    request_id = f"{self._streams}-{prompt_index}-{sample_index}"
                    entry = JournalEntry(request_id, (), replace(params, seed=seed))
                    places[request_id] = (prompt_index, sample_index)
                    try:
                        entry.prompt_token_ids = encode_prompt(self._tokenizer, prompt, self.config.data.chat)
                        entries.append(entry)
                    except InputError as error:
                        refused.append((entry, str(error)))
            for entry, reason in refused:
                yield self._trajectory(entry, places[entry.request_id], prompts, reason)
            for entry in self._dispatcher.run(entries):
                yield self._trajectory(entry, places[entry.request_id], prompts)
        finally:
            self._streaming = False

    def _trajectory(
        self, entry: JournalEntry, place: tuple[int, int], prompts: Sequence[Prompt], error: str = ""
    ) -> Trajectory:
        finished = entry.finished
        text = self._tokenizer.decode(entry.token_ids, skip_special_tokens=True) if self._tokenizer else ""
        return Trajectory(
            request_id=entry.request_id,
            prompt_index=place[0],
            sample_index=place[1],
            prompt_token_ids=entry.prompt_token_ids,
            token_ids=tuple(entry.token_ids),
            logprobs=tuple(entry.logprobs),
            text=text,
            finish_reason=finished.finish_reason if finished else "error",
            sampling=entry.sampling,
            stats=finished.stats if finished else RequestStats(),
            error=finished.error if finished else error,
            margins=None if entry.margins is None else tuple(entry.margins),
            prompt=prompts[place[0]],
            weight_version=self._weight_version,
        )


def get_or_raise(ref: Any, timeout_s: float = 60.0) -> Any:
    """`ray.get` that raises the original error of this package instead of Ray's wrapping of it."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


def needs_drafters(config: Config) -> bool:
    """Whether the configuration's mode uses draft actors."""
    return config.mode is not ModeName.plain


def default_run_dir(config: Config, run_name: str) -> Path:
    """Folder of a run, under `run.dir`."""
    return Path(os.path.expanduser(config.run.dir)) / run_name

"""The public API: start the actors of a configuration, stream trajectories, scale drafters, clean up."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from specactor_ray.actors.process import put_weights
from specactor_ray.actors.specs import ClusterView
from specactor_ray.cluster.calls import Calls
from specactor_ray.cluster.connection import connect
from specactor_ray.cluster.metrics import INTERVAL_S
from specactor_ray.config import Config, load_config
from specactor_ray.config.methods import unused_branches
from specactor_ray.config.schema import TargetConfig
from specactor_ray.controller.controller import start_controller
from specactor_ray.core.clock import SYSTEM
from specactor_ray.core.console import log_by_default
from specactor_ray.core.errors import InputError, ModelLoadError
from specactor_ray.core.jit import is_cold
from specactor_ray.core.metrics import Row as MetricRow
from specactor_ray.core.metrics import drafter_health
from specactor_ray.core.progress import start_phase
from specactor_ray.core.signals import interruption
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.loading import load_tokenizer, locate_model
from specactor_ray.models.weight_buckets import WeightLayout, Weights
from specactor_ray.rollout.dispatch import WeightPolicy, policy_of
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.rollout.operations import actors_status, ask, call_all
from specactor_ray.rollout.prompts import Encoded, Prompt, Row, encode_prompts, split_row
from specactor_ray.rollout.queue import RequestQueue
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory, trajectory_of
from specactor_ray.sampling.seeds import sample_of
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import Resolved, resolve
from specactor_ray.transport.messages import WeightSet

logger = logging.getLogger(__name__)

Sampling = SamplingParams | Sequence[SamplingParams]
"""One for all prompts, or one for each."""


class Rollout:
    """A running set of verifiers and draft actors that turns prompts into trajectories.

    ```python
    with Rollout.from_config("local_cpu") as rollout:
        for trajectory in rollout.stream(prompts, SamplingParams(temperature=1.0, max_tokens=128, seed=7), n=4):
            ...
    ```

    Several streams may be open at once, and `queue` takes single requests at the same time. Leaving the `with` block
    ends all actors and, for a `local` cluster, the cluster.

    Raises:
        ConfigError, ModelLoadError, ClusterError: The configuration cannot be served; nothing is left running.
    """

    def __init__(self, config: Config | Resolved) -> None:
        log_by_default()
        begin = SYSTEM.now()
        self.progress = (0, 0)
        """Number of ended trajectories of the newest stream, and its total."""
        self.resolved = config if isinstance(config, Resolved) else _resolved(config)
        self.config = config = self.resolved.config
        self._tokenizer = _tokenizer_of(config.target)
        if unused := unused_branches(config):
            logger.warning("%s", unused)
        self._held = contextlib.ExitStack()
        """All that `close` ends, the last one first."""
        compiling = "the first start on a machine compiles kernels, for up to a minute" if is_cold() else ""
        try:
            self.address = self._held.enter_context(connect(config.cluster))
            """`host:port` of the Ray cluster, for `cluster.address` of another process."""
            with start_phase(f"starting {config.mode.value} actors", compiling):
                self._controller, self.run_name = start_controller(config, held=self._held)
                self._calls = Calls()
                self.queue = RequestQueue(config, self._controller, self._calls)
                """Takes single requests, at any time and from any thread."""
                self._held.callback(self.queue.close)
                self.queue.tokenizer = self._tokenizer
                self.queue.context = self.resolved.context
            self._ends = SYSTEM.event()
            self._held.callback(self._ends.set)
            self._exporting = SYSTEM.spawn(self._export_metrics, "metrics")
            logger.info("run %s: mode %s, ready after %.1f s", self.run_name, config.mode.value, SYSTEM.now() - begin)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                logger.warning("%s: ending what has started, some seconds; again ends at once", interruption(error))
            self._held.close()
            raise

    @classmethod
    def from_config(cls, config: Config | str | Path | None = None, overrides: Sequence[str] = ()) -> Rollout:
        """Start from a `Config`, or from a YAML file or a shipped configuration (`local_cpu`) with overrides such as
        `target.max_batch=8`; without either, from the defaults."""
        if not isinstance(config, Config):
            config = load_config(config, overrides)
        return cls(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether no further request is accepted."""
        return self.queue.closed

    def close(self) -> None:
        """End all actors and restore the state of the cluster. Idempotent."""
        if self.closed:
            return
        self._ends.set()
        self._exporting.join(INTERVAL_S)
        self._held.close()

    def stream(
        self,
        prompts: Sequence[Prompt | Row],
        sampling: Sampling | None = None,
        n: int | None = None,
        skip: Collection[tuple[int, int]] = (),
        encoded: Sequence[Encoded] | None = None,
    ) -> Iterator[Trajectory]:
        """Yield `len(prompts) * n` trajectories in the order they finish. A prompt that cannot run ends as one with
        `finish_reason` `error` and its reason; the others continue.

        Args:
            prompts: Texts, chat messages, lists of token ids, or rows with one of them and columns of your own, which
                trajectories carry on.
            sampling: For all prompts or one for each, default: the configuration's. Each sample's seed is derived from
                its seed.
            n: Samples per prompt. Default: `data.n`.
            skip: `(prompt index, sample index)` of trajectories to leave out, since they exist already.
            encoded: Result of `encode_prompts`. Default: computed here.

        Raises:
            InputError: No prompts, another number of samplings, n < 1, or the rollout is closed.
            ActorLostError: No verifier was available.
        """
        self.queue.require_open()
        n = self.config.data.n if n is None else n
        if isinstance(prompts, str):
            raise InputError("prompts must be a list; put a single text into one: [prompt]")
        if not prompts:
            raise InputError("there are no prompts to roll out")
        for number, row in enumerate(prompts, start=1):
            split_row(row, f"prompt {number}")
        if n < 1:
            raise InputError(f"n is {n}; it must be 1 or more")
        return self._stream(list(prompts), self._samplings(sampling, len(prompts)), n, frozenset(skip), encoded)

    def _samplings(self, sampling: Sampling | None, count: int) -> list[SamplingParams]:
        """Sampling parameters of each prompt."""
        sampling = self.config.sampling if sampling is None else sampling
        each = [sampling] * count if isinstance(sampling, SamplingParams | Mapping) else list(sampling)
        strange = [one for one in each if not isinstance(one, SamplingParams)]
        if strange:
            raise InputError(
                f"sampling must be SamplingParams, one for all prompts or a list of them; got {strange[0]!r}"
            )
        if len(each) != count:
            raise InputError(f"sampling has {len(each)} entries for {count} prompts; give one for each, or one for all")
        return each

    def _stream(
        self,
        rows: list[Prompt | Row],
        sampling: list[SamplingParams],
        n: int,
        skip: frozenset[tuple[int, int]],
        encoded: Sequence[Encoded] | None,
    ) -> Iterator[Trajectory]:
        with self.queue.opening_stream() as number:
            if encoded is None:
                options = {**self.queue.text_options, "most": self.queue.context}
                prompts = [split_row(row)[0] for row in rows]
                encoded = encode_prompts(self._tokenizer, prompts, self.config.data.chat, **options)
            entries = []
            for entry, reason in samples_of(encoded, sampling, n, skip, f"{number}-"):
                if reason:
                    entry.weight_version = self.weight_version
                    yield trajectory_of(entry, self._tokenizer, rows[entry.place[0]], reason)
                else:
                    entries.append(entry)
            self.progress = (0, len(entries))
            for done, entry in enumerate(self.queue.run(entries, number), start=1):
                self.progress = (done, len(entries))
                yield trajectory_of(entry, self._tokenizer, rows[entry.place[0]])

    def generate(
        self, prompts: Sequence[Prompt | Row], sampling: Sampling | None = None, n: int | None = None
    ) -> list[Trajectory]:
        """All trajectories at once, ordered by prompt and sample."""
        done = list(self.stream(prompts, sampling, n))
        return sorted(done, key=lambda trajectory: (trajectory.prompt_index, trajectory.sample_index))

    def update_weights(self, weights: Weights | WeightSet, policy: WeightPolicy | str | None = None) -> int:
        """Update the weights of all verifiers, and of the drafters that follow the policy. Returns the version, which
        trajectories carry from now on, when all verifiers have it.

        All tensors are checked before any verifier gets one; an InputError changes nothing. A verifier or draft actor
        that joins later gets them before it serves. The new version is also valid after a SpecActorError: verifiers
        take it as soon as they can, and no token of another version is accepted.

        Args:
            weights: A state dict, an iterable of (name, tensor), the directory of a Hugging Face checkpoint, the result
                of `prepare_weights`, or a `WeightSet` that a trainer actor has put into the object store.
            policy: See `WeightPolicy`. Without one single requests end first, and no stream may be open.

        Raises:
            InputError: A stream is open and no policy is given, a tensor does not fit the target, or the version of a
                `WeightSet` is below an earlier one.
            WeightsError: Verifiers cannot load the weights, or compute something else with them than transformers. They
                wait for the next version.
            SpecActorError: The weights were not taken in time.
        """
        if not isinstance(weights, WeightSet):
            if policy is None:
                self.queue.require_no_stream("weights cannot change")
            else:
                policy_of(policy)  # a wrong one is refused before any tensor is read
            weights = self.prepare_weights(weights)
        elif weights.probe is None:
            logger.warning("weights without a probe are not proved. Fix: put_weights(..., layout=layout)")
        return self.queue.update_weights(weights, policy)

    def prepare_weights(self, weights: Weights) -> WeightSet:
        """Check new weights and put them into the object store, for `update_weights`; requests continue. An InputError
        names a tensor that does not fit the target."""
        self.queue.require_open()
        layout = self.weight_layout
        return put_weights(self.weight_version + 1, layout.buckets(weights), self._calls, layout=layout)

    @property
    def weight_version(self) -> int:
        """Version of the policy's weights for new requests."""
        return self.queue.weight_version

    @functools.cached_property
    def weight_layout(self) -> WeightLayout:
        """Layout in which another process packs weights of the target, for `update_weights` with a `WeightSet`."""
        target = self.config.target
        size, trust = self.config.trainer.weight_bucket_mb * 2**20, target.trust_remote_code
        longest = target.max_model_len
        return WeightLayout.of(target.model, target.dtype, size, trust_remote_code=trust, max_model_len=longest)

    def update_drafter(self, weights: WeightSet) -> None:
        """Send a newer version of a draft method's weights, which the trainer trains, to its drafters. Returns before
        they arrive: no token depends on the time of arrival."""
        self._ask("offer_weights", weights)

    def sleep(self, keep_weights: bool = True) -> None:
        """Free the memory of the verifiers' caches, and on GPUs of their weights, until the next stream (or `wake`). No
        actor is started meanwhile. `keep_weights=False`: new ones come before, by `update_weights`, which also ends the
        hold of starts; the memory that they need must be free then."""
        self.queue.call_verifiers("sleep", keep_weights)

    def wake(self) -> None:
        """Allocate the memory of the verifiers again. WeightsError: theirs were not kept, and no new ones came."""
        self.queue.call_verifiers("wake")

    def forget_history(self) -> None:
        """Remove earlier outputs from the drafters' histories, as at their start; for benchmarks."""
        view = self.view()
        drafters = [endpoint.handle for endpoint in view.drafters]
        call_all(self._calls, [*drafters, *view.verifiers.values()], "forget_history")

    def reset_metrics(self) -> None:
        """Set the verifiers' counters to zero (after a warm-up)."""
        self.queue.reset_metrics()

    def metrics(self) -> RolloutMetrics:
        """See `RequestQueue.metrics`."""
        return self.queue.metrics()

    def metric_rows(self, verifiers: bool = True) -> Iterator[MetricRow]:
        """See `RequestQueue.metric_rows`."""
        return self.queue.metric_rows(verifiers)

    def view(self) -> ClusterView:
        """The controller's view of the actors."""
        view: ClusterView = self._ask("view")
        return view

    def status(self) -> list[dict[str, Any]]:
        """See `actors_status`."""
        return actors_status(self._ask, self._calls)

    def scale(self, drafters: Mapping[str, int]) -> None:
        """Set the number of draft actors of each method, during the rollout. A ConfigError names a wrong method or
        number."""
        self._ask("scale", dict(drafters))

    def _ask(self, method: str, *arguments: Any) -> Any:
        self.queue.require_open()
        return ask(self._calls, self._controller, method, *arguments)

    def fallbacks(self) -> list[str]:
        """Slower fallbacks that actors use, each once, as far as the actors answer; and settings without effect."""
        found = [unused] if (unused := unused_branches(self.config)) else []
        with contextlib.suppress(Exception):
            found += [what for row in self.status() for what in row["counters"].get("fallbacks", ())]
        return list(dict.fromkeys(found))

    def drafters(self) -> list[dict[str, Any]]:
        """Id, method, version and checksum of the weights of each drafter, draft tokens `tried` and `right` since, and
        `alarm`: none is right any more; empty if the actors do not answer."""
        with contextlib.suppress(Exception):
            return drafter_health(self.status())
        return []

    @property
    def model(self) -> str:
        """Name of the target for transformers: a directory, or a Hugging Face id without its `@revision`."""
        return str(locate_model(self.config.target.model)[0])

    @property
    def reissued_requests(self) -> int:
        """Number of times a request was given to another verifier because its own was gone, since the start."""
        return self.queue.dispatcher.reissues

    @property
    def committed_tokens(self) -> int:
        """Number of output tokens journaled since the start."""
        return self.queue.dispatcher.journal.committed_tokens

    @property
    def discarded_tokens(self) -> int:
        """Number of tokens received since the start that no output has: behind a stop text or an abort, or computed
        again by another verifier."""
        return self.queue.dispatcher.journal.discarded_tokens

    def _export_metrics(self) -> None:
        while not self._ends.wait(INTERVAL_S):
            self._calls.transport.export(lambda: self.metric_rows(verifiers=False), self.run_name)


def _resolved(config: Config) -> Resolved:
    resolved = resolve(config, Machine.here(), sampled=False)
    for line in resolved.choices:
        logger.info("%s", line)
    return resolved


def _tokenizer_of(target: TargetConfig) -> Any:
    """The target's tokenizer; None if the model directory has none: prompts must be token ids then."""
    try:
        return load_tokenizer(target.model, trust_remote_code=target.trust_remote_code)
    except ModelLoadError as error:
        logger.warning("%s Prompts must be lists of token ids.", error)
        return None


def samples_of(
    encoded: Sequence[Encoded],
    sampling: Sequence[SamplingParams],
    n: int,
    skip: Collection[tuple[int, int]],
    prefix: str = "",
) -> Iterator[tuple[JournalEntry, str]]:
    """Each request, and the reason if it cannot run; without the places (prompt index, sample index) in `skip`."""
    for prompt_index, ((token_ids, reason), params) in enumerate(zip(encoded, sampling, strict=True)):
        for place in ((prompt_index, one) for one in range(n)):
            if place not in skip:
                own = sample_of(params, *place)
                yield JournalEntry(f"{prefix}{place[0]}-{place[1]}", token_ids, own, place=place), reason

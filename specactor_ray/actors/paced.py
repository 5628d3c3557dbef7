"""Paced devices: the package's own engine and drafters on CPUs, whose forwards last as long as those of other models on
GPUs, times `paced.stretch`. Tokens, messages, processes, placement and decisions are real; durations are those of the
simulator's cost model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from specactor_ray.actors.process import ActorHost, collected_once
from specactor_ray.actors.specs import ActorSpec
from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import PacedConfig, TargetConfig
from specactor_ray.core.clock import SYSTEM, Clock
from specactor_ray.draft.chains import Chains
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer
from specactor_ray.plan.hardware import MERGE_LAYER_S, DraftTime, StepSeconds, paced_costs, shared_tokens
from specactor_ray.startup.memory import drafter_on_node, kept_by_trainer, target_on_node
from specactor_ray.target.base import NO_DRAFTS, Drafts, StepResult
from specactor_ray.target.hf import HfEngine

logger = logging.getLogger(__name__)
_FORWARDS, _MOST_LATE = 100, 0.05
"""Forwards after which a larger share of late ones than this is logged."""


@dataclass(frozen=True)
class PacedTimes:
    """Stretched durations of the emulated models."""

    target: StepSeconds
    draft: DraftTime


def paced_times(paced: PacedConfig) -> PacedTimes:
    """Durations of the emulated target and drafter. Raises as `paced_costs`."""
    target, draft = paced_costs(paced)
    merge_s = paced.stretch * draft.model.layers * MERGE_LAYER_S
    return PacedTimes(
        _stretched(target.seconds, paced.stretch), DraftTime(_stretched(draft.seconds, paced.stretch), merge_s=merge_s)
    )


def _stretched(seconds: StepSeconds, stretch: float) -> StepSeconds:
    return lambda *step: stretch * seconds(*step)


class Pace:
    """Ends forwards in time. The log has a warning if this machine does not keep up."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.now, self._sleep = clock.now, clock.sleep
        self._forwards = self._late = 0
        """Forwards since the last warning, and those that took longer by themselves than they should."""

    def wait(self, begin: float, seconds: float) -> float:
        """Wait until `seconds` have passed since `begin`, by `now`. Returns the seconds that passed."""
        left = begin + seconds - self.now()
        self._forwards, self._late = self._forwards + 1, self._late + (left < 0.0)
        if self._late > _MOST_LATE * max(self._forwards, _FORWARDS):
            message = "%d of %d forwards took longer than those of the paced device: raise paced.stretch (--stretch)"
            logger.warning(message, self._late, self._forwards)
            self._forwards = self._late = 0
        if left > 0.0:
            self._sleep(left)
        return self.now() - begin


class PacedEngine(HfEngine):
    """`HfEngine` whose steps last as long as those of the emulated target. It keeps no contexts of ended requests."""

    pace: Pace
    seconds: StepSeconds

    def step(self, drafts: Drafts = NO_DRAFTS, window: int = 0) -> StepResult:
        begin = self.pace.now()
        result = super().step(drafts, window)
        if result.num_tokens:
            context = int((self.table.prompts[result.rows] + result.starts).sum())
            decoded = result.num_tokens - result.num_prefill_tokens
            seconds = self.seconds(len(result.rows), decoded, context, result.num_prefill_tokens)
            result.forward_s, result.sampling_s = self.pace.wait(begin, seconds), 0.0
        self.reset_prefix_cache()
        return result


class PacedDraftModel(DraftModelProposer):
    """`DraftModelProposer` whose forwards last as long as those of the emulated drafter."""

    pace: Pace
    time: DraftTime
    _seconds = 0.0
    """Duration of the forwards of a call."""

    def extend(self) -> np.ndarray:
        begin, self._seconds = self.pace.now(), 0.0
        changed = super().extend()
        if self._seconds:
            self.pace.wait(begin, self._seconds)
        return changed

    def _run(
        self, chains: Chains, held: np.ndarray, counts: np.ndarray, tokens: np.ndarray, complete: np.ndarray
    ) -> torch.Tensor:
        ends = self._cache.lengths[held] + counts
        shared = shared_tokens(ends, self._known, chains.rows)
        prefill = len(tokens) - len(ends)
        self._seconds += self.time.seconds(len(ends), int(ends.sum()), shared, prefill)
        return super()._run(chains, held, counts, tokens, complete)


class PacedHost(ActorHost):
    """Services of an actor's process with paced models."""

    def __init__(self, paced: PacedConfig) -> None:
        super().__init__()
        self._times = paced_times(paced)

    @collected_once()
    def build_engine(self, spec: ActorSpec) -> PacedEngine:
        hosted = [spec.drafters[method] for method in spec.hosted]
        target = target_on_node(spec.config.target, hosted, kept_by_trainer(spec.config))
        engine = PacedEngine.from_config(target)
        engine.pace, engine.seconds = Pace(self.clock), self._times.target
        return engine

    @collected_once()
    def build_proposer(self, drafter: DrafterSpec, target: TargetConfig, device: str) -> Proposer:
        if drafter.model is None:
            return super().build_proposer(drafter, target, device)
        proposer = PacedDraftModel.from_config(drafter_on_node(drafter, target, device), target, device)
        proposer.pace, proposer.time = Pace(self.clock), self._times.draft
        return proposer

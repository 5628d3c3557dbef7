"""Paced devices beside the simulator: drafters replayed over recorded outputs, and the same rollouts, simulated."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from specactor_ray.actors.paced import paced_times
from specactor_ray.bench.variants import Variant, emulated_gpus
from specactor_ray.config.methods import DrafterSpec, drafter_specs
from specactor_ray.config.schema import MAX_BRANCHES, Config, ModeName, TargetConfig
from specactor_ray.draft.chains import MAIN, RANKS, Chains, ranges_of
from specactor_ray.draft.model import DraftModelProposer
from specactor_ray.draft.proposer import Proposer, build_proposer
from specactor_ray.plan.hardware import DraftTime
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.simulation._kernels import NO_GUESS
from specactor_ray.simulation.comparison import Result, SimulatedRollouts
from specactor_ray.simulation.scenario import MachineConfig, PythonConfig, ScenarioConfig, WorkloadConfig
from specactor_ray.simulation.world import LOOKUP, RecordedText, World
from specactor_ray.startup.memory import drafter_on_node
from specactor_ray.table.requests import TargetRequest
from specactor_ray.table.table import RequestTable
from specactor_ray.table.view import TableView

if TYPE_CHECKING:
    from specactor_ray.rollout.trajectory import Trajectory

_SEAT = 0


class _Recorder(DraftModelProposer):
    """Keeps the candidates of the newest draw of each main chain: row → tokens `(1 + RANKS,)` and gap."""

    found: dict[int, tuple[np.ndarray, float]]

    def _append(self, chains: Chains, tokens: np.ndarray, gaps: np.ndarray) -> np.ndarray:
        for i in np.flatnonzero(chains.numbers == MAIN).tolist():
            self.found[int(chains.rows[i])] = tokens[i], float(gaps[i])
        return super()._append(chains, tokens, gaps)


def record(config: Config, outputs: Sequence[Trajectory], vocab_size: int) -> RecordedText:
    """The outputs with the candidates of all draft methods at each position after the right tokens before it."""
    decoupled = copy.copy(config)
    decoupled.mode = ModeName.decoupled
    ranks: dict[int, dict[str, np.ndarray]] = {number: {} for number in range(len(outputs))}
    for method, spec in drafter_specs(decoupled).items():
        every = replace(spec, max_batch=len(outputs), branches=MAX_BRANCHES if spec.traits.branches else 0)
        for number, found in _ranks(_proposer(every, config.target), outputs, vocab_size).items():
            ranks[number][method] = found
    return RecordedText(
        vocab_size, {one.sampling.seed: (np.array(one.token_ids), ranks[n]) for n, one in enumerate(outputs)}
    )


def _proposer(spec: DrafterSpec, target: TargetConfig) -> Proposer:
    spec = drafter_on_node(spec, target, "cpu")
    if spec.model is None:
        return build_proposer(spec, target, "cpu")
    proposer = _Recorder.from_config(spec, target, "cpu")
    proposer.found = {}
    return proposer


def _ranks(proposer: Proposer, outputs: Sequence[Trajectory], vocab_size: int) -> dict[int, np.ndarray]:
    """Number of an output → ranks, int8 `(2, n)`, see `GeneratedText.ranks`."""
    table = RequestTable(1, getattr(getattr(proposer, "branches", None), "most", 0), vocab_size=vocab_size)
    view = TableView(table, _SEAT, 1, proposer.vocab_size)
    opened = {table.open(TargetRequest(str(n), one.prompt_token_ids, one.sampling)): n for n, one in enumerate(outputs)}
    ranks = {n: np.full((2, len(one.token_ids)), NO_GUESS, np.int8) for n, one in enumerate(outputs)}
    for position in range(max(len(one.token_ids) for one in outputs)):
        for row in [row for row, n in opened.items() if len(outputs[n].token_ids) <= position]:
            table.close(row)
            del opened[row]
        rows = np.array(sorted(opened), np.int32)
        while len(proposer.propose(view, rows)):
            if proposer.traits.looks_up:
                break
        truth = np.array([outputs[opened[row]].token_ids[position] for row in rows.tolist()], np.int32)
        for row, right in zip(rows.tolist(), truth.tolist(), strict=True):
            ranks[opened[row]][:, position] = _rank(proposer, view, row, right)
        table.follow(rows, np.full(len(rows), position), np.ones(len(rows), np.int32), truth)
    return ranks


def _rank(proposer: Proposer, view: TableView, row: int, right: int) -> tuple[int, int]:
    """The place of the right token among the candidates, and the range of the gap."""
    if isinstance(proposer, _Recorder):
        if (found := proposer.found.pop(row, None)) is None:
            return NO_GUESS, 0
        places = np.flatnonzero(found[0] == right)
        return int(places[0]) if len(places) else RANKS + 1, int(ranges_of(np.array([found[1]]))[0])
    tail = view.tail(row)
    return (int(tail[0] != right), 0) if len(tail) else (NO_GUESS, 0)


class _Recorded(SimulatedRollouts):
    """The rollout of recorded requests."""

    requests: Sequence[JournalEntry]

    def entries(self) -> list[JournalEntry]:
        return list(self.requests)


def simulate(variant: Variant, outputs: Sequence[Trajectory], text: RecordedText) -> Result:
    """The simulator's rollout of recorded outputs, with the durations of the paced devices. Raises SimulationError."""
    config = copy.deepcopy(variant.config)
    config.cluster.address = "auto"
    times = paced_times(config.paced)
    drafting = {one.method: times.draft if one.model else DraftTime(LOOKUP, True) for one in config.drafters}
    world = World(text, times.target, drafting, PythonConfig())
    scenario = ScenarioConfig(
        machines=[MachineConfig(1, 0, max(variant.total_cores, 1), config.paced.device)],
        workload=WorkloadConfig(requests=len(outputs), max_tokens=max(one.sampling.max_tokens for one in outputs)),
        config=config,
    )
    run = _Recorded(variant.label, scenario, [world])
    run.requests = [JournalEntry(f"0/{n}", one.prompt_token_ids, one.sampling) for n, one in enumerate(outputs)]
    try:
        return run.run()
    finally:
        run.kernel.close()


def beside_simulation(
    results: Iterable[Mapping[str, Any]],
    variants: Sequence[Variant],
    outputs_of: Mapping[tuple[str, int], Sequence[Trajectory]],
    vocab_size: int,
) -> list[dict[str, Any]]:
    """Results of the bench with `simulated` (tokens/s, acceptance length, ms of a forward), `error` (measured speed
    relative to the simulated one, less 1) and `gpus` (emulated). `outputs_of`: those of each workload and batch."""
    widest = max(variants, key=lambda one: len(one.config.drafters)).config
    largest = {workload: outputs_of[workload, batch] for workload, batch in sorted(outputs_of)}  # has all others
    texts = {workload: record(widest, outputs, vocab_size) for workload, outputs in largest.items()}
    found, by_name = list[dict[str, Any]](), {(one.label, one.batch): one for one in variants}
    for result in results:
        workload, batch = result["workload"], result["batch"]
        variant = by_name[result["variant"], batch]
        simulated = simulate(variant, outputs_of[workload, batch], texts[workload])
        found.append(
            {
                **result,
                "gpus": sum(emulated_gpus(variant.config)),
                "simulated": {
                    "tokens_per_s": simulated.tokens_per_s,
                    "acceptance_length": simulated.metrics.acceptance_length,
                    "forward_ms": 1e3 * simulated.metrics.forward_s / max(simulated.metrics.steps, 1),
                },
                "error": result["tokens_per_s"] / simulated.tokens_per_s - 1.0,
            }
        )
    return found

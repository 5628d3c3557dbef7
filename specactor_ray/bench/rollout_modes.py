"""Comparison of `specactor bench rollout` and `specactor demo`: variants by turns on the same prompts, seeds and cores.

Every variant has its own actors on one Ray cluster. Where memory allows, those of a batch size all run, and decode in
rounds, in an order that alternates: one of them at a time, so that all see the same minutes of the machine. A short
warm-up on its own prompt is not counted, and leaves nothing that a drafter could look up.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from specactor_ray.bench.variants import Variant, auto_of, plan_variants, side_by_side
from specactor_ray.bench.verdict import Round, verdict
from specactor_ray.cluster.names import new_run_name
from specactor_ray.config import Config, to_yaml
from specactor_ray.config.schema import ModeName
from specactor_ray.core.console import say
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import expanded, make_folder, refuse_existing, remove_if_empty, require_folder, write_json
from specactor_ray.core.machine import available_bytes, hardware, versions
from specactor_ray.core.progress import rollout_progress
from specactor_ray.core.signals import signals_deferred, sigterm_interrupts
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.prompts import Prompt, read_prompts
from specactor_ray.rollout.trajectory import RolloutMetrics
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.memory import plan_rollout_memory, settle_caches
from specactor_ray.startup.resolve import resolve, start_notes

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout
    from specactor_ray.rollout.trajectory import Trajectory

WARM_UP_PROMPTS: list[Prompt] = ["Name three colours.", "Count from one to five."]
WARM_UP = SamplingParams(temperature=0.0, max_tokens=8)
_MEMORY_SHARE = 0.7
"""Most of the free memory for variants that run side by side."""
_PACED_PROMPTS = 4
"""Prompts of a workload for paced devices, at least; batches above it have as many as requests run at once."""
Place = tuple[int, int]
"""Prompt index and sample index, which identify a request in two rollouts."""
Outputs = Mapping[Place, "Trajectory"]


@dataclass(frozen=True, eq=False)
class Workload:
    """Prompts and their sampling parameters. Equal by identity."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int
    """Samples per prompt."""


def plan_workloads(config: Config, paths: Sequence[Path], temperatures: Sequence[float]) -> list[Workload]:
    """One workload for every file of prompts (default: `data.path`), with its name, at every temperature (default: that
    of the configuration). At temperature 0 all samples of a prompt are copies, so it has one. Raises UserError without
    prompts, for a file that cannot be read, or two of the same name."""
    if not paths and config.data.path is None:
        raise ConfigError("data.path", "is not set.", "name a file of prompts: --prompts prompts.jsonl")
    key, paths = ("--prompts", paths) if paths else ("data.path", [Path(str(config.data.path))])
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        raise InputError("--prompts: two files have the same name, which names their workload")
    prompts = {path.stem: tuple(read_prompts(str(path), config.data.limit, key)) for path in paths}
    return [
        Workload(
            f"{name} T={heat:g}",
            prompts[name],
            replace(config.sampling, temperature=heat),
            config.data.n if heat else 1,
        )
        for name in names
        for heat in temperatures or [config.sampling.temperature]
    ]


def run_bench(
    config: Config,
    modes: Sequence[str],
    batches: Sequence[int],
    workloads: Sequence[Workload],
    output: Path | None,
    console: Console,
    rounds: int = 1,
) -> dict[str, Any]:
    """Measure all variants (see `plan_variants`) in rounds. Returns the report, which is written to `output` (default:
    `bench.json` in a new folder under `run.dir`), never over another file; after an interruption it has what was
    measured. UserError: the configuration, the prompts or the cluster are wrong."""
    output = output or expanded(config.run.dir) / f"bench-{new_run_name()}" / "bench.json"
    refuse_existing(output, "--output")
    require_folder(output.parent, "--output")
    auto, machine = auto_of(config) if "auto" in modes else None, Machine.here()
    config, first_notes = side_by_side(config)
    variants, notes = plan_variants(config, modes, batches, auto)
    resolved = resolve(config, machine)
    for one in variants:
        settle_caches(one.config, machine)
    first_notes += start_notes(variants[0].config, machine, resolved.identity)
    if config.data.n > 1 and any(workload.n == 1 for workload in workloads):
        notes.append(f"T=0: one sample of each prompt, as the others of data.n={config.data.n} would be its copies")
    groups = [[one for one in variants if one.batch == batch] for batch in dict.fromkeys(batches)]
    parts = {batch: [_part(one, batch) if config.paced.device else one for one in workloads] for batch in batches}
    if not _fit_together(groups):
        notes.append("the variants run one after the other, not by turns: a slower minute counts for one of them alone")
        groups = [[one] for one in variants]
    for note in (*first_notes, *notes):
        say(console, note)
    made = make_folder(output.parent, "--output")
    report = _head(config, workloads, output) | {"rounds": rounds, "notes": notes}
    bench = Bench(console)
    from specactor_ray.cluster.connection import connect  # takes seconds, so only after the checks

    try:
        with sigterm_interrupts():
            cluster = copy.copy(config.cluster)
            if cluster.address == "local":  # one of them runs at a time
                cluster.num_cpus = max(sum(one.total_cores for one in group) for group in groups)
            with connect(cluster):
                for number, group in enumerate(groups, start=1):
                    turns = [workload for workload in parts[group[0].batch] for _ in range(rounds)]
                    bench.measure(group, turns, f"[{number}/{len(groups)}] batch {group[0].batch}, ")
            report["results"] = _with_simulation(config, variants, bench, resolved.vocabulary, console)
        report["status"] = "complete"
    except KeyboardInterrupt:
        report["status"] = "interrupted"
    finally:
        report.setdefault("results", bench.results())
        if report["results"]:
            write_json(output, report, new=True)
        else:
            remove_if_empty(*made)
    return report


def _part(workload: Workload, batch: int) -> Workload:
    """The prompts of a workload for paced devices, on which a rollout of one request at a time takes long."""
    return replace(workload, prompts=workload.prompts[: max(batch, _PACED_PROMPTS)])


def _with_simulation(
    config: Config, variants: Sequence[Variant], bench: Bench, vocab_size: int, console: Console
) -> list[dict[str, Any]]:
    """The results, with the simulator's where devices are paced."""
    if not config.paced.device:
        return bench.results()
    from specactor_ray.bench.paced import beside_simulation

    say(console, "simulating the same rollouts")
    outputs_of = {(one.name, batch): list(outputs.values()) for (one, batch), outputs in bench.references.items()}
    return beside_simulation(bench.results(), variants, outputs_of, vocab_size)


def _fit_together(groups: Sequence[Sequence[Variant]]) -> bool:
    """Whether this machine has the memory for all variants of a batch size at once: GPUs are not shared."""
    first = groups[0][0].config
    if first.target.gpus or first.cluster.address != "local":
        return False
    needed = max(sum(sum(plan_rollout_memory(one.config).values()) for one in group) for group in groups)
    return needed <= _MEMORY_SHARE * available_bytes()


class Bench:
    """Measures variants, keeps their figures, and compares them with plain decoding of the same workload and batch.
    With `shows_turns` the console has a line or a bar for each turn."""

    def __init__(self, console: Console, shows_turns: bool = True) -> None:
        self._console, self._shows_turns = console, shows_turns
        self.measured: list[dict[str, Any]] = []
        """Figures of every variant and round so far."""
        self.outputs: dict[str, Outputs] = {}
        """Outputs of the latest round of each variant, by its label."""
        self.stopped = ""
        """Why the rounds ended, if that is worth a word; see `verdict`."""
        self.start_seconds = 0.0
        """Seconds that the start of the latest variant took."""
        self.references: dict[tuple[Workload, int], Outputs] = {}
        """Outputs of the first variant of each workload and batch, plain decoding."""
        self._works: dict[Workload, int] = {}

    def measure(self, variants: Sequence[Variant], rounds: Iterable[Workload], title: str) -> None:
        """Start the actors of all variants, warm up, time the workload of every round by turns, end the actors. Rounds
        are counted by the name of their workload. `title` begins each line of progress."""
        with signals_deferred():
            from specactor_ray.rollout.rollout import Rollout

        with ExitStack() as stack:
            running = list[tuple[Variant, Rollout, float]]()
            for variant in variants:
                say(self._console, f"{title}{variant.label}: starting")
                begin = time.monotonic()
                rollout = stack.enter_context(Rollout(variant.config))
                rollout.generate(WARM_UP_PROMPTS, WARM_UP, n=1)
                self.start_seconds = time.monotonic() - begin
                running.append((variant, rollout, self.start_seconds))
            done = Counter[str]()
            for workload in rounds:
                for variant, rollout, start_seconds in reversed(running) if done[workload.name] % 2 else running:
                    name = f"{title}{workload.name}, round {done[workload.name] + 1}: {variant.label}"
                    self._measure_running(rollout, variant, workload, start_seconds, name)
                done[workload.name] += 1

    def _measure_running(
        self, rollout: Rollout, variant: Variant, workload: Workload, start_seconds: float, title: str
    ) -> None:
        """Time a workload on a rollout that has started, and compare its tokens."""
        rollout.forget_history()  # drops outputs of the same prompts at another temperature
        rollout.reset_metrics()
        begin = time.monotonic()
        outputs, failures = self._roll_out(rollout, workload, title)
        seconds, metrics, actors = time.monotonic() - begin, rollout.metrics(), rollout.status()
        reference = self.references.setdefault((workload, variant.batch), outputs)
        self.outputs[variant.label] = outputs
        tokens = sum(len(output.token_ids) for output in outputs.values())
        self.measured.append(
            {
                **variant.facts(),
                "workload": workload.name,
                "start_seconds": round(start_seconds, 2),
                **figures_of(len(outputs), tokens, seconds, metrics),
                "work": self._works.setdefault(workload, len(self._works)),
                "best_length": best_length(outputs.values(), variant),
                "failures": dict(failures),
                "actors": actors,
                "differences": differences(reference, outputs),
            }
        )

    def results(self) -> list[dict[str, Any]]:
        """All figures so far, by batch and workload, with the ratio to the fastest plain variant of both."""
        order = list(dict.fromkeys(one["workload"] for one in self.measured))
        return with_ratios(
            sorted(merged(self.measured), key=lambda m: (m["batch"], order.index(m["workload"]))), self.stopped
        )

    def _roll_out(self, rollout: Rollout, workload: Workload, title: str) -> tuple[Outputs, Counter[str]]:
        outputs, failures = dict[Place, "Trajectory"](), Counter[str]()
        before = rollout.committed_tokens  # tokens of the warm-up

        def read() -> tuple[int, int, int, float]:
            tokens = rollout.committed_tokens - before
            return (len(outputs), failures.total(), tokens, rollout.metrics().acceptance_length)

        shown = rollout_progress(self._console, title, len(workload.prompts) * workload.n, read)
        with shown if self._shows_turns else nullcontext():
            for one in rollout.stream(workload.prompts, workload.sampling, workload.n):
                outputs[one.prompt_index, one.sample_index] = one
                if one.finish_reason == "error":
                    failures[one.error] += 1
        return outputs, failures


# ---- comparison ----


def differences(reference: Outputs, outputs: Outputs) -> list[dict[str, Any]]:
    """Every request with other tokens or another end than in the reference: `position` of the first differing token
    with both tokens and margins, or None and a `note` if the request is missing or ended otherwise, for example with an
    error."""
    found = []
    for place in sorted(reference.keys() | outputs.keys()):
        facts = _difference(reference.get(place), outputs.get(place))
        if facts:
            found.append({"prompt_index": place[0], "sample_index": place[1], "position": None, "note": "", **facts})
    return found


def _difference(expected: Trajectory | None, got: Trajectory | None) -> dict[str, Any]:
    """What differs in one request; empty if nothing does."""
    if expected is None or got is None:
        return {"note": f"{'the reference' if expected is None else 'this variant'} has no such request"}
    pairs = zip(expected.token_ids, got.token_ids, strict=False)
    position = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if position is not None:
        margin, own = (one.margins[position] if one.margins is not None else None for one in (expected, got))
        tokens = {"token": got.token_ids[position], "reference_token": expected.token_ids[position]}
        return {"position": position, **tokens, "margin": margin, "own_margin": own}
    ends = [f"{len(one.token_ids)} tokens ({one.finish_reason})" for one in (got, expected)]
    return {"note": f"{' in place of '.join(ends)} {got.error or expected.error}".strip()} if ends[0] != ends[1] else {}


def figures_of(requests: int, tokens: int, seconds: float, metrics: RolloutMetrics) -> dict[str, Any]:
    """Speed, counters, and the mean step split into its parts (milliseconds of a verifier's step)."""
    steps = max(metrics.steps, 1)
    parts = ("forward", "sampling", "protocol", "waiting")
    return {
        "seconds": round(seconds, 3),
        "requests": requests,
        "tokens": tokens,
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 3),
        "ms_per_step": {part: round(1e3 * getattr(metrics, f"{part}_s") / steps, 4) for part in parts},
        "metrics": metrics.to_dict(),
    }


def merged(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One result for each variant, batch and workload: sums over its rounds, with the speed of each in `rounds`."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for one in measured:
        groups.setdefault((one["batch"], one["workload"], one["variant"]), []).append(one)
    results = []
    for group in groups.values():
        requests, tokens, seconds = (sum(one[name] for one in group) for name in ("requests", "tokens", "seconds"))
        metrics = RolloutMetrics.merge(one["metrics"] for one in group)
        differences, works = [one["differences"] for one in group], {one["work"] for one in group}
        together = {
            **figures_of(requests, tokens, seconds, metrics),
            "rounds": [one["tokens_per_s"] for one in group],
            "round_lengths": [one["metrics"]["acceptance_length"] for one in group] if len(works) > 1 else None,
            "best_length": max((one["best_length"] for one in group if one["best_length"]), default=None),
            "differences": [*itertools.chain(*differences)],
        }
        results.append({**group[-1], **together})
    return results


def best_length(outputs: Iterable[Trajectory], variant: Variant) -> float | None:
    """Acceptance length of the best request, the largest ratio that drafts can bring: it may be the one that runs
    longest. None if requests run one at a time, where it is the acceptance length of all."""
    if variant.batch * variant.config.target.replicas == 1:
        return None
    return max(map(acceptance_length, outputs), default=1.0)


def acceptance_length(output: Trajectory) -> float:
    """Tokens per step of one output; 1 without a step."""
    stats = output.stats
    return max((output.num_own_tokens + stats.discarded) / stats.steps, 1.0) if stats.steps else 1.0


def paired_rounds(base: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[list[Round], float]:
    """The rounds of two results of `merged` in pairs, without those in which one of them gave no token; and the
    acceptance length of all, if they are of different work, else 1."""
    lengths = result["round_lengths"] or [1.0] * len(result["rounds"])
    turns = zip(base["rounds"], result["rounds"], lengths, strict=False)
    rounds = [Round(plain, drafted, max(length, 1.0)) for plain, drafted, length in turns if min(plain, drafted) > 0.0]
    return rounds, max(result["metrics"]["acceptance_length"], 1.0) if result["round_lengths"] else 1.0


def with_ratios(results: Sequence[Mapping[str, Any]], stopped: str = "") -> list[dict[str, Any]]:
    """The results of `merged` with `identical`, `ratio`, `baseline` (the fastest plain variant of its batch size and
    workload) added; those with drafts also with the `verdict` of their rounds beside the baseline, its `outcome`, its
    `interval` and the `spread`. `stopped`: see `verdict`."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["batch"], result["workload"]), []).append(result)
    found = []
    for (batch, workload), group in groups.items():
        plain = [one for one in group if one["mode"] == ModeName.plain.value]
        base = max(plain, key=lambda one: one["tokens_per_s"])
        for result in group:
            added = {
                "identical": result["requests"] - len(result["differences"]),
                "ratio": round(result["tokens_per_s"] / max(base["tokens_per_s"], 1e-9), 4),
                "interval": None,
                "spread": None,
                "verdict": "",
                "outcome": "",
                "baseline": result is base,
            }
            rounds, length = paired_rounds(base, result)
            if rounds and result["mode"] != ModeName.plain.value:
                subject = f"for {workload.replace(' T=', ' at T=')}, batch {batch}, {result['variant']}"
                most = max(result["best_length"] or 1.0, result["metrics"]["acceptance_length"])
                added |= verdict(rounds, subject, most, length, stopped)
            found.append({**result, **added})
    return found


def all_identical(report: Mapping[str, Any]) -> bool:
    """Whether every variant gave the tokens of plain decoding, in every request."""
    return not any(result["differences"] for result in report["results"])


def _head(config: Config, workloads: Sequence[Workload], output: Path) -> dict[str, Any]:
    return {
        "benchmark": "rollout modes",
        "status": "failed",
        "output": str(output),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "workloads": [
            {
                "name": workload.name,
                "prompts": len(workload.prompts),
                "samples_each": workload.n,
                "sampling": asdict(workload.sampling),
            }
            for workload in workloads
        ],
        "config": yaml.safe_load(to_yaml(config)),
        "versions": versions(),
        "hardware": hardware(),
    }

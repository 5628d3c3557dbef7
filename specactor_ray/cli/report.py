"""Tables for users, made from the plain data in the JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from specactor_ray.config.fields import KeyDoc
from specactor_ray.core.console import figures_table, make_table
from specactor_ray.core.metrics import drafter_health

_MOST_REASONS = 3
_MOST_DIFFERENCES = 10


def rollout_table(summary: Mapping[str, Any], verbose: bool = False) -> Table:
    """The figures of one rollout, one per row; those of its drafts only if `verbose`."""
    metrics, counts = summary["metrics"], summary["trajectories"]
    figures = [
        ("mode", summary["config"]["mode"]),
        ("trajectories", f"{counts['finished']} finished, {counts['failed']} failed, {counts['total']} in all"),
        ("tokens", f"{counts['tokens']:,} in these trajectories"),
        *(
            [("resumed", f"{summary['resumed']} of them were there; the speed below is of the rest")]
            * bool(summary["resumed"])
        ),
        ("generated", f"{summary['tokens']:,} tokens in {summary['seconds']:.1f} s"),
        ("tokens/s", f"{summary['tokens_per_s']:.1f}"),
    ]
    drafting = [
        ("discarded", f"{summary['discarded_tokens']:,} tokens behind stop texts, or computed twice"),
        ("acceptance length", f"{metrics['acceptance_length']:.2f} tokens per request and step"),
        ("acceptance rate", _share(metrics["acceptance_rate"], metrics["drafted_tokens"])),
        ("supply", f"{metrics['supply']:.2f} draft tokens per request and step"),
        ("requests with a draft", _share(metrics["supply_share"], metrics["row_steps"])),
        ("tails refuted", f"{metrics['refuted_tails']:,}; branches took the place of {metrics['rescued_tails']:,}"),
        ("right by draft position", _by_position(metrics)),
        ("protocol", f"{1e3 * metrics['protocol_s'] / max(metrics['steps'], 1):.2f} ms per step"),
    ]
    figures += [*_reward_rows(summary.get("rewards"))] + (drafting if verbose else [])
    if summary["fallbacks"]:
        figures.append(("fallbacks", "; ".join(summary["fallbacks"])))
    return figures_table(f"rollout {summary['run']} ({summary['status']})", figures)


def _reward_rows(rewards: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if rewards is None:
        return
    failed = sum(rewards["failures"].values())
    mean = "-" if rewards["mean"] is None else f"mean {rewards['mean']:.3f}"
    yield "reward", f"{mean} of {rewards['scored']} outputs" + f"; scoring failed for {failed}" * bool(failed)
    passes = {name: value for name, value in rewards.items() if name.startswith("pass@")}
    if passes:
        yield ", ".join(passes), ", ".join(f"{value:.1%}" for value in passes.values())


def training_table(name: str, results: Mapping[str, Any], totals: Mapping[str, Any], steps: str) -> Table:
    """What a training run came to."""
    drafted, seconds = totals["drafters"], totals["seconds"]
    phases = sorted((item for item in seconds.items() if item[0] != "step" and item[1]), key=lambda item: -item[1])
    whole = max(seconds["step"], 1e-9)
    figures = (
        ("steps", steps),
        ("reward", f"{_first_last_best(results)}; means of the training samples of a step"),
        *_evaluation_rows(results),
        ("tokens/s", number(results["tokens_per_s"], "{:.1f} of a rollout")),
        ("acceptance length", number(results["acceptance_length"], "{:.2f} tokens per request and step")),
        *([("drafts right", right_by_method(drafted, "{} {} of {:,}"))] if drafted else ()),
        ("rollout", number(results["rollout_share"], "{:.0%} of the time of a step")),
        ("seconds", ", ".join(f"{phase} {value:,.0f} ({value / whole:.0%})" for phase, value in phases)),
    )
    return figures_table(f"train {name}", figures)


def number(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def _first_last_best(results: Mapping[str, Any]) -> str:
    reward = ", ".join(f"{number(results[f'{which}_reward'])} {which}" for which in ("first", "last", "best"))
    return f"{reward} (step {number(results['best_step'], '{}')})"


def _evaluation_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Mean reward of the first, last and best evaluation, and its pass@k of the largest k."""
    found = {which: one for which in ("first", "last", "best") if (one := results[f"{which}_evaluation"])}
    ranked = sorted({name for one in found.values() for name in one if name.startswith("pass@")}, key=_number_behind)
    for name in ("mean", *ranked[-1:]):
        cells = [
            f"{one[name]:.3f} {which} (step {one['step']})" for which, one in found.items() if one.get(name) is not None
        ]
        if cells:
            about = "; mean rewards of held-out prompts" if name == "mean" else ""
            yield f"evaluation{'' if name == 'mean' else f', {name}'}", ", ".join(cells) + about


def _number_behind(name: str) -> int:
    """4 for `pass@4`."""
    return int(name.partition("@")[2])


def right_by_method(counts: Mapping[str, Sequence[int]], form: str = "{} {}") -> str:
    """Draft methods with the share of their tokens that were right, in a form that also gets the number of all."""
    return ", ".join(
        form.format(method, _share(accepted / max(drafted, 1), drafted), drafted)
        for method, (drafted, accepted) in counts.items()
    )


def trainings_table(rows: Iterable[tuple[str, str, int, Mapping[str, Any]]]) -> Table:
    """Several training runs side by side: name, status, number of steps and results of each."""
    found = [
        {
            "run": name,
            "status": status,
            "steps": str(steps),
            "reward first, last, best": ", ".join(
                number(results[f"{which}_reward"]) for which in ("first", "last", "best")
            ),
            "evaluation last, best": ", ".join(
                number((results[f"{which}_evaluation"] or {}).get("mean")) for which in ("last", "best")
            ),
            "tokens/s": number(results["tokens_per_s"], "{:.1f}"),
            "acc. length": number(results["acceptance_length"], "{:.2f}"),
            "rollout": number(results["rollout_share"], "{:.0%}"),
        }
        for name, status, steps, results in rows
    ]
    return make_table(found, "trainings", text=("run", "status"), caption="rollout: share of the time of a step.")


_BAR = 48
"""Characters of a bar of a whole step."""


def timeline_table(record: Mapping[str, Any]) -> Table:
    """Phases of a step as bars over its time, in the order of their begin."""
    spans = sorted(record["timeline"].items(), key=lambda item: item[1])
    first, last = min(begin for _, (begin, _) in spans), max(end for _, (_, end) in spans)
    scale = _BAR / max(last - first, 1e-9)
    rows = [
        {
            "phase": name,
            "begins, s": f"{begin:.2f}",
            "seconds": f"{end - begin:.2f}",
            f"{first:.1f} to {last:.1f} s": " " * int((begin - first) * scale)
            + "=" * max(round((end - begin) * scale), 1),
        }
        for name, (begin, end) in spans
    ]
    return make_table(rows, f"step {record['step']}", text=("phase", [*rows[0]][-1]))


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The curve of these values in a line of at most `width` characters, each the mean of as many values."""
    step = max(len(values) / width, 1.0)
    count = min(len(values), width)
    parts = [values[int(n * step) : max(int((n + 1) * step), int(n * step) + 1)] for n in range(count)]
    means = [sum(part) / len(part) for part in parts]
    least, most = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int(7.99 * (mean - least) / max(most - least, 1e-9))] for mean in means)


def reason_lines(reasons: Mapping[str, int]) -> list[str]:
    """The most frequent reasons of failure, one line each."""
    ranked = sorted(reasons.items(), key=lambda item: -item[1])
    lines = [f"  {count} failed: {reason}" for reason, count in ranked[:_MOST_REASONS]]
    if len(ranked) > _MOST_REASONS:
        lines.append(f"  and {len(ranked) - _MOST_REASONS} other reasons; each trajectory in the output names its own")
    return lines


def speed_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Speed of each measured variant, and whether its tokens are those of plain decoding."""
    caption = (
        "* baseline: the fastest plain variant of that batch and workload. estimated: the ratio that a rollout\n"
        "prints, from its steps alone. acc. length: tokens per request and step.\n"
        "variant: verifiers x cores of each, + cores of draft actors. fon: all methods."
    )
    rows = (
        {
            "tokens/s": f"{result['tokens_per_s']:.1f}",
            "ratio": f"{result['ratio']:.2f}" + "*" * result["baseline"],
            "95% interval": "-" if result["interval"] is None else "{:.2f} to {:.2f}".format(*result["interval"]),
            "estimated": f"{result['metrics']['speedup']:.2f}" if result["verdict"] else "-",
            "acc. length": f"{result['metrics']['acceptance_length']:.2f}",
            "identical": f"{result['identical']}/{result['requests']}",
        }
        for result in results
    )
    return _bench_table("speed", results, rows, caption)


def draft_table(results: Sequence[Mapping[str, Any]]) -> Table | None:
    """Acceptance of the drafts of each measured variant; None without a draft."""
    drafting = [result for result in results if result["metrics"]["drafted_tokens"]]
    caption = (
        "supply: usable draft tokens per request and step. acc. rate: verified ones\n"
        "that were right. right by position: of the 1st, 2nd, ... of a draft."
    )
    rows = (
        {
            "supply": f"{result['metrics']['supply']:.2f}",
            "acc. rate": f"{result['metrics']['acceptance_rate']:.1%}",
            "right by position": _by_position(result["metrics"]),
        }
        for result in drafting
    )
    return _bench_table("drafts", drafting, rows, caption) if drafting else None


def time_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Parts of the time of a step, in milliseconds."""
    rows = (
        {"steps": str(one["metrics"]["steps"]), **{part: f"{ms:.2f}" for part, ms in one["ms_per_step"].items()}}
        for one in results
    )
    return _bench_table("ms per step of a verifier", results, rows)


def paced_table(report: Mapping[str, Any]) -> Table | None:
    """Paced devices in their own time, beside the simulator; None without."""
    results = [result for result in report["results"] if "simulated" in result]
    if not results:
        return None
    stretch, plain = report["config"]["paced"]["stretch"], dict[tuple[int, str], float]()
    for one in (one for one in results if one["baseline"]):
        plain[one["batch"], one["workload"]] = one["tokens_per_s"] / one["gpus"]
    rows = (
        {
            "GPUs": f"{one['gpus']}",
            "tokens/s": f"{stretch * one['tokens_per_s']:.0f}",
            "sim.": f"{stretch * one['simulated']['tokens_per_s']:.0f}",
            "error": f"{one['error']:+.1%}",
            "x plain": f"{one['ratio']:.2f}",
            "per GPU": f"{one['tokens_per_s'] / one['gpus'] / plain[one['batch'], one['workload']]:.2f}",
            "length": f"{one['metrics']['acceptance_length']:.2f}",
            "sim. ": f"{one['simulated']['acceptance_length']:.2f}",
            "ms": f"{one['ms_per_step']['forward'] / stretch:.2f}",
            " sim.": f"{one['simulated']['forward_ms'] / stretch:.2f}",
        }
        for one in results
    )
    caption = (
        f"In the time of the device: durations divided by {stretch:g} (paced.stretch). sim.: the simulator's figure.\n"
        "GPUs: of verifiers and draft actors. per GPU: x plain, by GPUs. length: acceptance length. ms: a step."
    )
    return _bench_table(f"paced devices ({report['config']['paced']['device']})", results, rows, caption)


def _bench_table(
    title: str, results: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, str]], caption: str | None = None
) -> Table:
    """A table of variants, with the figures of each in `rows`."""
    whole = (
        {"batch": str(one["batch"]), "workload": one["workload"], "variant": one["variant"], **row}
        for one, row in zip(results, rows, strict=True)
    )
    return make_table(whole, title, text=("workload", "variant"), groups=("batch", "workload"), caption=caption)


def difference_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Differences of tokens from plain decoding: request, position, tokens and distance of the tie."""
    lines = [
        f"  {result['variant']}, batch {result['batch']}, {result['workload']}: {_difference(difference)}"
        for result in results
        for difference in result["differences"]
    ]
    if len(lines) > _MOST_DIFFERENCES:
        lines[_MOST_DIFFERENCES:] = [f"  and {len(lines) - _MOST_DIFFERENCES} more; all of them are in the JSON file"]
    return lines


def config_keys_table(keys: Iterable[KeyDoc]) -> Table:
    """Key, allowed values, default and meaning of every configuration key."""
    found = ({"key": one.key, "value": one.type, "default": _default(one.default), "meaning": one.doc} for one in keys)
    rows = [{name: Text(cell) for name, cell in row.items()} for row in found]
    table = make_table(rows, text=[*rows[0]], wrap=True)
    table.columns[0].no_wrap = True
    return table


MOST_PENDING = 3
"""Most actors without room that are shown one by one."""


def status_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per actor of a run, in the state of the controller; of actors without room only the first few."""
    pending = [row for row in rows if row.get("phase") == "pending"][MOST_PENDING:]
    shown = (
        {
            "actor": row.get("id"),
            "phase": row.get("phase"),
            "place": _place(row),
            "work": _work(row),
            "drafts right": "\n".join(map(_drafts, drafter_health([row]))),
            "note": row.get("note"),
        }
        for row in rows
        if row not in pending
    )
    cells = [{name: Text("" if cell is None else str(cell)) for name, cell in row.items()} for row in shown]
    caption = f"{len(pending)} more are pending" if pending else None
    return make_table(cells, text=[*cells[0]] if cells else (), wrap=True, caption=caption)


def alarm_lines(drafters: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each alarm, and for each drafter with failures or malformed messages."""
    lines = []
    for one in drafters:
        found = [_drafts(one)] if one["alarm"] else []
        found += [f"{one['failures']:,} drafts failed, the log has the first of each kind"] if one["failures"] else []
        found += [f"{one['malformed']:,} malformed messages were dropped"] if one["malformed"] else []
        lines += [f"  drafter {one['id']}: {what}" for what in found]
    return lines


def ladder_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Statistics of the verifiers on each draft method, per range of output positions; None before any draft.

    For each method and range, the verifier that tried it most is shown.
    """
    seen: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows:
        for standing in (row.get("counters") or {}).get("ladder") or ():
            place = standing["method"], standing["positions"]
            if place not in seen or standing["drafted"] > seen[place]["drafted"]:
                seen[place] = standing
    if not seen:
        return None
    caption = "acceptance: of a draft token after right ones. predicted tokens/s: of one request"
    shown = (
        {
            "method": method,
            "output positions": positions,
            "acceptance": f"{standing['acceptance']:.1%}",
            "ms per draft token": f"{1e3 * standing['token_s']:.2f}" if standing["token_s"] else "-",
            "predicted tokens/s": f"{standing['tgs']:.1f}",
        }
        for (method, positions), standing in seen.items()
    )
    return make_table(shown, "draft ladder", text=("method", "output positions"), wrap=True, caption=caption)


def _place(row: Mapping[str, Any]) -> str:
    """`10.0.0.1 pid 123 cores 0,1 H100 0`; GPUs of a kind that Ray does not know are `GPU 0`."""
    cores, gpus = (",".join(map(str, row.get(name) or ())) for name in ("cores", "gpus"))
    kind = row.get("accelerator") or "GPU"
    parts = (("", row.get("node")), ("pid ", row.get("pid")), ("cores ", cores), (f"{kind} ", gpus))
    return " ".join(f"{name}{value}" for name, value in parts if value not in (None, ""))


def _work(row: Mapping[str, Any]) -> str:
    """Present and past work of an actor, in a few words."""
    counters = row.get("counters") or {}
    if row.get("kind") == "verifier":
        rows, tokens = counters.get("row_steps", 0), counters.get("committed_tokens", 0)
        length = tokens / rows if rows else 0.0
        return f"{counters.get('running', 0)} requests run or wait, {tokens:,} tokens, acceptance length {length:.2f}"
    return f"{counters.get('open_requests', 0)} open, {counters.get('tails', 0):,} tails"


def _drafts(drafter: Mapping[str, Any]) -> str:
    """`eagle 61.2% of 1,234, weights 3 (1a2b3c4d)`; an alarm in capitals."""
    tried = drafter["tried"]
    share = f"{drafter['right'] / tried:.1%} of {tried:,}" if tried else "-"
    if drafter["alarm"]:
        share = f"NONE RIGHT, last {drafter['missed']:,}"
    weights = f", weights {drafter['version']} ({drafter['checksum']})" if drafter["checksum"] else ""
    return f"{drafter['method']} {share}{weights}"


def _by_position(metrics: Mapping[str, Any], most: int = 8) -> str:
    """Share of the 1st, 2nd, ... verified draft tokens that were right."""
    pairs = list(zip(metrics["accepted_by_position"], metrics["drafted_by_position"], strict=True))[:most]
    return " ".join(f"{accepted / drafted:.0%}" if drafted else "-" for accepted, drafted in pairs) or "-"


def _difference(difference: Mapping[str, Any]) -> str:
    where = f"prompt {difference['prompt_index']}, sample {difference['sample_index']}"
    if difference["position"] is None:
        return f"{where}: {difference['note']}"
    tokens = f"token {difference['token']} in place of {difference['reference_token']}"
    margin = "not recorded" if difference["margin"] is None else f"{difference['margin']:.6g}"
    return f"{where}, position {difference['position']}: {tokens}, margin of the reference {margin}"


def _share(value: float, of: int) -> str:
    return f"{value:.1%}" if of else "-"


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "value", value))

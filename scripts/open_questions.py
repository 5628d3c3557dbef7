#!/usr/bin/env python3
"""Open questions of decoupled speculation, answered on this machine (docs/open-questions.md).

    python scripts/open_questions.py acceptance --output out/questions --head drafters/head
    python scripts/open_questions.py oracle --output out/questions --head drafters/head
    python scripts/open_questions.py memory --output out/questions --head drafters/head

`acceptance` and `oracle` share recordings in the folder: outputs of the target for the first prompts of each file, and
the draft of each method at every position. Those that are there are not made again; `recipe.json` has the options they
were made with, and others are refused. Each question writes its figures, QUESTION.json, and its plot, QUESTION.png.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from drafting_costs import cpu_points, gpu_points, memory_panels
from points import Point, points_table, run_script
from recorded_drafts import TEMPERATURES, WINDOW, Prices, Recipe, Recorded, by_entropy, decode, line, record, shorten
from specactor_ray.config.load import from_mapping
from specactor_ray.core.console import make_console, say
from specactor_ray.core.errors import InputError, UserError
from specactor_ray.core.files import make_folder, parse_json, write_json
from specactor_ray.core.plot import Panel, write_plot
from specactor_ray.plan.hardware import load_hardware
from specactor_ray.rollout.prompts import read_prompts
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import resolve

CONF = Path(__file__).parents[1] / "conf" / "prompts"
KINDS = tuple(CONF / f"{name}.jsonl" for name in ("arithmetic", "code_renames", "chat", "tools", "reasoning"))
CONTEXT = 512
"""Tokens of a request of the simulated target."""
ROWS = (1, 12)
"""Requests at a time; the last number is that of the tables of acceptance."""
Cells = Mapping[tuple[str, float], Recorded]
"""Workload and temperature → what was recorded."""


class Question(str, Enum):
    """Questions that this script answers."""

    acceptance = "acceptance"
    memory = "memory"
    oracle = "oracle"


def h100_prices(rows: int) -> Prices:
    """Seconds of Qwen2.5-32B on four H100s, and of an EAGLE-3 head or a 0.5B model that take turns with it on one."""
    hardware, context = load_hardware("h100"), rows * CONTEXT
    target = hardware.cost("qwen2.5-32b", 4)
    verify = [target.seconds(rows, positions, context, 0) for positions in range(rows * (1 + WINDOW) + 1)]
    models = {"eagle": "qwen2.5-32b-eagle3", "draft_model": "qwen2.5-0.5b"}
    draft = {name: hardware.cost(model).seconds(rows, rows, context, 0) for name, model in models.items()}
    return Prices(np.array(verify), {"ngram": 0.0, "suffix": 0.0, **draft})


# ---- acceptance ----


def acceptance_points(cells: Cells, methods: Sequence[str], prices: Prices, rows: int) -> Iterator[Point]:
    """A point per workload and temperature: of each method the share of draft tokens that are right behind right ones,
    in whole windows, and acceptance length and speed, x plain, with the windows of the policy."""
    for (kind, temperature), one in cells.items():
        point: dict[str, Any] = {"workload": kind, "T": temperature, "entropy": float(one.entropy.mean())}
        plain = decode(one, (), prices, rows).speed
        for method in methods:
            whole, chosen = decode(one, [method], None, rows), decode(one, [method], prices, rows)
            point |= {f"{method} right": whole.chance, f"{method} supply": whole.drafted / whole.steps}
            point |= {f"{method} length": chosen.length, f"{method} x plain": chosen.speed / plain}
        yield point


def relation_points(cells: Cells, points: Sequence[Point], methods: Sequence[str]) -> Iterator[Point]:
    """The straight line of acceptance over entropy: over ten parts of the positions of each temperature, and over
    workloads and temperatures."""
    for method in methods:
        for temperature in TEMPERATURES:
            mine = [one for (_, at), one in cells.items() if at == temperature]
            intercept, slope, r2 = line(*by_entropy(mine, method).T[:2])
            yield {"method": method, "over": f"T={temperature:g}", "at 0 nats": intercept, "a nat": slope, "r2": r2}
        x, y = (np.array([point[name] for point in points]) for name in ("entropy", f"{method} right"))
        intercept, slope, r2 = line(x, y)
        yield {"method": method, "over": "workloads", "at 0 nats": intercept, "a nat": slope, "r2": r2}


def entropy_panels(cells: Cells, methods: Sequence[str]) -> list[Panel]:
    """A panel per method: share of first draft tokens that are right over entropy, a line per temperature."""

    def panel(method: str) -> Panel:
        def draw(axes: Any) -> None:
            for number, temperature in enumerate(TEMPERATURES):
                x, y, _ = by_entropy([one for (_, at), one in cells.items() if at == temperature], method).T
                intercept, slope, r2 = line(x, y)
                axes.plot(x, y, "o", color=f"C{number}", label=f"T={temperature:g}: {slope:.2f} a nat, r²={r2:.2f}")
                axes.plot(x, intercept + slope * x, color=f"C{number}", linewidth=1)
            axes.set(title=method, xlabel="entropy of the policy, nats", ylabel="first draft token right", ylim=(0, 1))

        return draw

    return [panel(method) for method in methods]


# ---- oracle ----


def oracle_points(cells: Cells, methods: Sequence[str]) -> Iterator[Point]:
    """A point per workload and temperature: acceptance lengths with whole windows, and speeds, x plain, at the prices
    of the simulated target: the best single method, all methods by the product's policy, and by the oracle."""
    for (kind, temperature), one in cells.items():
        lengths = {method: decode(one, [method], None, ROWS[-1]).length for method in methods}
        best = max(lengths, key=lambda method: lengths[method])
        point: dict[str, Any] = {"workload": kind, "T": temperature, "best": best, "single": lengths[best]}
        point["race"] = decode(one, methods, None, ROWS[-1]).length
        point["oracle"] = decode(one, methods, None, ROWS[-1], oracle=True).length
        for rows in ROWS:
            prices = h100_prices(rows)
            plain = decode(one, (), prices, rows).speed
            speeds = {method: decode(one, [method], prices, rows).speed / plain for method in methods}
            fastest = max(speeds, key=lambda method: speeds[method])
            point |= {f"fastest, {rows} rows": fastest, f"single x, {rows} rows": speeds[fastest]}
            point[f"race x, {rows} rows"] = decode(one, methods, prices, rows).speed / plain
            point[f"oracle x, {rows} rows"] = decode(one, methods, prices, rows, oracle=True).speed / plain
        yield point


def oracle_panels(points: Sequence[Point]) -> list[Panel]:
    """A panel per temperature: acceptance lengths by workload."""

    def panel(temperature: float) -> Panel:
        def draw(axes: Any) -> None:
            mine = [point for point in points if point["T"] == temperature]
            places, names = np.arange(len(mine)), ("single", "race", "oracle")
            for number, (name, label) in enumerate(zip(names, ("best single", "race", "oracle"), strict=True)):
                axes.bar(places + 0.27 * (number - 1), [point[name] for point in mine], 0.25, label=label)
            axes.set_xticks(places, [point["workload"] for point in mine])
            most = 1.25 * max(point["oracle"] for point in mine)
            axes.set(title=f"T={temperature:g}", ylabel="acceptance length", ylim=(1, most))

        return draw

    return [panel(temperature) for temperature in TEMPERATURES]


# ---- command ----


def require_models(recipe: Recipe) -> None:
    """Refuse models that are missing or do not go together, and an unknown type, before anything is loaded."""
    drafters = [{"method": method, "model": model} for method, model in recipe.drafters.items()]
    settings = {"mode": "coupled", "target": {"model": recipe.target, "dtype": recipe.dtype}, "drafters": drafters}
    try:
        resolve(from_mapping(settings), Machine.here(), sampled=False)
    except UserError as error:
        raise InputError(f"--target, --head, --draft-model or --dtype: {error}") from None


def keep_recipe(folder: Path, recipe: Recipe, draft_model: str | None, prompts: Sequence[Path]) -> None:
    """Keep with what a folder is recorded. InputError: that was something else."""
    models = (("--target", recipe.target), ("--head", recipe.head), ("--draft-model", draft_model))
    options = [(option, str(Path(name).resolve()) if name and Path(name).exists() else name) for option, name in models]
    options += [("--dtype", recipe.dtype), ("--max-tokens", str(recipe.max_tokens))]
    options += [(f"--prompts, {one.stem}", f"sha256 {sha256(one.read_bytes()).hexdigest()}") for one in prompts]
    if len({one.stem for one in prompts}) < len(prompts):
        raise InputError("--prompts: two files have one name, which their recordings would have. Fix: rename one")
    file = folder / "recipe.json"
    if not file.is_file() and any(folder.glob("*.npz")):
        raise InputError(f"--output: {folder} has recordings of an unknown recipe. Fix: name another folder")
    kept = parse_json(file.read_text()) if file.is_file() else {}
    for option, value in options:
        if kept.setdefault(option, value) != value:
            raise InputError(f"{option}: {folder} is recorded with {kept[option]}, not {value}; name another --output")
    write_json(file, kept)


def _recorded(recipe: Recipe, prompts: Sequence[Path], folder: Path) -> Cells:
    console, cells = make_console(), dict[tuple[str, float], Recorded]()
    for file in prompts:
        say(console, f"{file.stem}: recorded in {folder}")
        cells |= {(file.stem, temperature): one for temperature, one in record(recipe, file, folder).items()}
    return cells


def _tables(question: Question, recipe: Recipe, cells: Cells) -> tuple[dict[str, list[Point]], list[Panel]]:
    """Tables by name, and panels of the plot."""
    methods = list(recipe.drafters)
    if question is Question.oracle:
        found = list(oracle_points(cells, methods))
        return {"best single method, race and oracle": found}, oracle_panels(found)
    found = list(acceptance_points(cells, methods, h100_prices(ROWS[-1]), ROWS[-1]))
    relation = list(relation_points(cells, found, methods))
    return {"acceptance": found, "acceptance over entropy": relation}, entropy_panels(cells, methods)


def main(
    question: Annotated[Question, typer.Argument(help="The question to answer.")],
    output: Annotated[Path, typer.Option(help="Folder of recordings, figures and plots.")],
    head: Annotated[Path | None, typer.Option(help="EAGLE head of the target, of `specactor drafter train`.")] = None,
    target: Annotated[str, typer.Option(help="The target; its outputs are recorded.")] = "smollm2-135m",
    draft_model: Annotated[
        str | None, typer.Option(help="Default: the target without two layers in the middle.", show_default=False)
    ] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="Files of prompts, one for each workload.")] = None,
    dtype: Annotated[str, typer.Option(help="Arithmetic of all models.")] = "bfloat16",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.", min=2)] = 160,
) -> None:
    """Measure, print tables, and write QUESTION.json and QUESTION.png into the folder."""
    files = prompts or KINDS
    for file in files:
        read_prompts(str(file), key="--prompts")
    drafters: dict[str, str | None] = {"ngram": None, "suffix": None}
    drafters |= {"eagle": str(head)} if head else {}
    drafters |= {"draft_model": draft_model} if draft_model else {}
    recipe = Recipe(target, drafters, dtype, max_tokens=max_tokens)
    require_models(recipe)
    make_folder(output, "--output")
    keep_recipe(output, recipe, draft_model, files)
    if draft_model is None:
        recipe = replace(recipe, drafters=drafters | {"draft_model": str(shorten(target, output / "draft_model"))})
    if question is Question.memory:
        tables: dict[str, list[Point]] = {
            "this CPU": cpu_points(recipe, files[0]),
            "H100": (on_gpus := list(gpu_points())),
        }
        panels = memory_panels(on_gpus)
    else:
        tables, panels = _tables(question, recipe, _recorded(recipe, files, output))
    console = make_console()
    for title, points in tables.items():
        console.print(points_table(points, title))
    write_json(output / f"{question.value}.json", tables)
    columns = 2 if len(panels) in (2, 4) else 1
    say(console, write_plot(output / f"{question.value}.png", *panels, columns=columns))


if __name__ == "__main__":
    run_script(main)

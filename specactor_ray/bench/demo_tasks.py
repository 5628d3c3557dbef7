"""Tasks of `specactor demo`, made from a seed."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator

from specactor_ray.trainer.rewards import RewardSample

_NAMES = ("count", "total", "index", "value", "score", "width", "limit", "price", "speed", "level")
_GOODS = ("coffee", "tea", "sugar", "milk", "flour", "rice", "salt", "butter", "honey", "olive oil")
_LINES = (
    "{name} = {number}",
    "return {name} * {number}",
    "if {name} > {number}:",
    "print({name}, {number})",
    "x = {name} + {number}",
    "assert {name} < {number}",
)


def edit_prompts(seed: int) -> Iterator[str]:
    """Edits of code, of a table and of settings by turns. Most of an output repeats its prompt, so drafts pay."""
    rng = random.Random(seed)
    while True:
        yield _function(rng)
        yield _table(rng)
        yield _settings(rng)


def rename_tasks(seed: int) -> Iterator[dict[str, str]]:
    """Rows with `prompt` and `answer`: after one example, repeat a line of code with another name in it."""
    rng = random.Random(seed)
    while True:
        old, new = rng.sample(_NAMES, 2)
        shown, asked = (line.replace("{number}", str(rng.randint(2, 9))) for line in rng.sample(_LINES, 2))
        before, after = ([line.replace("{name}", name) for line in (shown, asked)] for name in (old, new))
        yield {"prompt": f"{before[0]} -> {after[0]}\n{before[1]} ->", "answer": after[1]}


def similarity(sample: RewardSample) -> float:
    """Similarity of the first line of an output to the answer, by characters: 1.0 where they are equal."""
    line = sample.text.strip().partition("\n")[0]
    return difflib.SequenceMatcher(None, line, sample.answer or "", autojunk=False).ratio()


def _function(rng: random.Random) -> str:
    old, new, other = rng.sample(_NAMES, 3)
    return (
        f"Return the same function with `{old}` renamed to `{new}`. Change nothing else.\n\n"
        f"```python\ndef sum_of_{other}(lines):\n    {old} = {rng.randint(0, 9)}\n    for line in lines:\n"
        f"        words = line.split()\n        {old} = {old} + len(words)\n    if {old} == {rng.randint(10, 99)}:\n"
        f"        return None\n    return {old}\n```"
    )


def _table(rng: random.Random) -> str:
    goods = rng.sample(_GOODS, 5)
    rows = "".join(f"| {one} | {rng.randint(1, 9)}.{rng.randint(10, 99)} | {rng.randint(10, 99)} |\n" for one in goods)
    return (
        f"Return this table again with the price of {goods[2]} changed to {rng.randint(1, 9)}.50. Keep everything else."
        f"\n\n| item | price | stock |\n|---|---|---|\n{rows}"
    )


def _settings(rng: random.Random) -> str:
    names = rng.sample(_NAMES, 6)
    rows = "".join(f"    '{name}': {rng.randint(10, 999)},\n" for name in names)
    return (
        f"Return this dictionary with the key `{names[3]}` set to {rng.randint(1000, 9999)}. Keep the other lines.\n\n"
        f"```python\nsettings = {{\n{rows}}}\n```"
    )

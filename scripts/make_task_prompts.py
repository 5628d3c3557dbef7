"""Prompts of three kinds of task, for training drafters and for benchmarks: JSONL, one `{"prompt": ...}` a line.

    python scripts/make_task_prompts.py --kind arithmetic,editing,chat --count 600 --seed 1 > prompts.jsonl

| kind | what | made from |
|---|---|---|
| arithmetic | word problems, sums, equations, with the steps asked for | tasks of reasoning-gym (in the extra `rl`) |
| editing | code edits, tables, quoting with one change, sorting | templates filled with varied content |
| chat | questions and writing requests | topics x forms |

The same arguments give the same prompts. A prompt's own text decides which split it belongs to, so `train` and
`heldout` share no prompt whatever their seeds are. The files `conf/prompts/<kind>.jsonl` are
`--kind <kind> --split heldout --count 16 --seed 0`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

HELDOUT_ONE_IN = 5
_GIVE_UP_AFTER = 5_000
"""Prompts in a row that are known already or belong to the other split."""

# ---- arithmetic ----

GYM_TASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gsm_symbolic", {}),
    ("chain_sum", {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 2}),
    ("basic_arithmetic", {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2}),
    ("leg_counting", {"min_animals": 2, "max_animals": 4}),
    ("simple_equations", {}),
    ("number_sequence", {}),
    ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 3}),
    ("lcm", {}),
)
ANSWER_ALONE = {
    "State the final answer to the following arithmetic problem": "Work out",
    "Give only the result as your final answer.": "",
    "Give the result as your final answer.": "",
    "Do not include units.": "",
}
"""What the tasks say against steps, and what stands there instead."""
STEPS = (
    "Show the steps.",
    "Explain your reasoning, then give the answer.",
    "Think step by step.",
    "Write down each intermediate result.",
    "Solve it one step at a time.",
)


def arithmetic(seed: int) -> Iterator[str]:
    """Problems of several reasoning-gym tasks in turn, each with a request for the steps, always the same for the same
    problem: so a problem belongs to one split."""
    try:
        import reasoning_gym
    except ImportError:
        raise SystemExit("error: the kind arithmetic needs reasoning-gym: pip install reasoning-gym") from None
    size = 100_000
    tasks = [reasoning_gym.create_dataset(name, seed=seed, size=size, **options) for name, options in GYM_TASKS]
    for index in range(size):
        for task in tasks:
            question = task[index]["question"]
            for without_steps, instead in ANSWER_ALONE.items():
                question = question.replace(without_steps, instead).strip()
            yield f"{question}\n\n{random.Random(question).choice(STEPS)}"


# ---- editing ----

NOUNS = (
    "order",
    "ticket",
    "user",
    "page",
    "sensor",
    "invoice",
    "parcel",
    "lesson",
    "player",
    "recipe",
    "route",
    "shift",
)
FIELDS = ("price", "weight", "score", "length", "count", "level", "amount", "age", "rank", "speed")
VERBS = ("collect", "filter", "update", "measure", "find", "merge", "sort", "check", "count", "group")
NAMES = ("Amara", "Boris", "Chloe", "Daniel", "Elena", "Farid", "Greta", "Hugo", "Irene", "Jonas", "Keiko", "Luis")
CITIES = ("Oslo", "Porto", "Kyoto", "Lima", "Cairo", "Ghent", "Turin", "Perth", "Quito", "Riga", "Seoul", "Tunis")
ADJECTIVES = ("quiet", "narrow", "old", "bright", "crowded", "cold", "famous", "small", "wooden", "steep")
PLACES = ("harbour", "market", "library", "bridge", "station", "garden", "museum", "valley", "square", "lighthouse")
ACTIONS = ("opens early", "is closed on Mondays", "was rebuilt last year", "attracts many visitors", "smells of rain")
GROCERIES = (
    "apples", "bread", "cheese", "dates", "eggs", "flour", "grapes", "honey", "lemons", "milk", "nuts", "olives",
    "pasta", "rice", "salt", "tea",
)  # fmt: skip


def _function(rng: random.Random) -> tuple[str, str, str]:
    """(code, a local name in it, its own name)."""
    noun, field, verb = rng.choice(NOUNS), rng.choice(FIELDS), rng.choice(VERBS)
    local, name = rng.choice(("total", "result", "found", "best", "chosen")), f"{verb}_{noun}s"
    limit = rng.randint(2, 99)
    bodies = (
        f"    {local} = 0\n    for {noun} in {noun}s:\n        if {noun}.{field} > {limit}:\n"
        f"            {local} += {noun}.{field}\n    return {local}",
        f"    {local} = []\n    for {noun} in {noun}s:\n        if {noun}['{field}'] is None:\n            continue\n"
        f"        {local}.append({noun}['{field}'] * {limit})\n    return {local}",
        f"    {local} = None\n    for {noun} in {noun}s:\n"
        f"        if {local} is None or {noun}.{field} < {local}.{field}:\n"
        f"            {local} = {noun}\n    return {local}",
        f"    {local} = {{}}\n    for {noun} in {noun}s:\n        key = {noun}.{field} // {limit}\n"
        f"        {local}.setdefault(key, []).append({noun})\n    return {local}",
    )
    return f"def {name}({noun}s):\n{rng.choice(bodies)}", local, name


def _code_edit(rng: random.Random) -> str:
    code, local, name = _function(rng)
    noun = name.partition("_")[2]
    edits = (
        f"Return the same function with `{local}` renamed to `{rng.choice(('answer', 'output', 'value', 'kept'))}`.",
        f"Rename the function `{name}` to `{rng.choice(VERBS)}_all_{noun}` and return it.",
        "Return this function with a one-line docstring added under its first line.",
        f"Return this function with a first statement that returns None when `{noun}` is empty.",
        f"Return this function with type hints added to the parameter `{noun}` and to the return value.",
        "Return this function with a comment above the loop.",
    )
    return f"{rng.choice(edits)} Change nothing else.\n\n```python\n{code}\n```"


def _table(rng: random.Random) -> str:
    names, rows = rng.sample(NAMES, rng.randint(3, 6)), []
    fields = rng.sample(FIELDS, 2)
    for name in names:
        rows.append((name, rng.choice(CITIES), str(rng.randint(1, 99)), str(rng.randint(100, 999))))
    header = ("name", "city", *fields)
    as_csv = "\n".join(",".join(row) for row in (header, *rows))
    as_markdown = "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * 4, *rows))
    changed = rng.choice(rows)
    requests = (
        f"Turn this CSV into a Markdown table. Keep the order of the rows.\n\n{as_csv}",
        f"Turn this Markdown table into CSV.\n\n{as_markdown}",
        f"Return this table with the city of {changed[0]} changed to {rng.choice(CITIES)}.\n\n{as_markdown}",
        f"Return this table without the column `{fields[0]}`.\n\n{as_markdown}",
        f"Write each row of this CSV as a JSON object.\n\n{as_csv}",
        f"Return this CSV with a row added at the end: {rng.choice(NAMES)}, {rng.choice(CITIES)}, 7, 250.\n\n{as_csv}",
    )
    return rng.choice(requests)


def _sentence(rng: random.Random) -> str:
    return f"The {rng.choice(ADJECTIVES)} {rng.choice(PLACES)} in {rng.choice(CITIES)} {rng.choice(ACTIONS)}."


def _quote(rng: random.Random) -> str:
    sentences = [_sentence(rng) for _ in range(rng.randint(3, 6))]
    text, first = " ".join(sentences), sentences[0].split()[1]
    number = rng.randint(1, len(sentences))
    requests = (
        f'Repeat this text with "{first}" replaced by "{rng.choice(ADJECTIVES)}". Change nothing else.',
        f"Copy this text word for word, but leave out sentence {number}.",
        "Write the sentences of this text as a numbered list. Change no word.",
        f'Copy this text and put "{rng.choice(NAMES)} says:" in front of it.',
        "Copy this text with the first sentence moved to the end.",
        "Repeat this text in capital letters.",
    )
    return f"{rng.choice(requests)}\n\n{text}"


def _list(rng: random.Random) -> str:
    words = rng.sample(GROCERIES, rng.randint(5, 9))
    numbers = [str(number) for number in rng.sample(range(1, 200), rng.randint(5, 9))]
    bullets = "\n".join(f"- {word}" for word in words)
    requests = (
        f"Sort this list alphabetically, one item per line.\n\n{', '.join(words)}",
        f"Sort these numbers from the smallest to the largest: {', '.join(numbers)}",
        f"Sort these numbers from the largest to the smallest, one per line: {', '.join(numbers)}",
        f"Return this list with the items numbered instead of bulleted.\n\n{bullets}",
        f"Return this list with {rng.choice(GROCERIES)} added at the end.\n\n{bullets}",
        f"Write this list backwards, the last item first.\n\n{bullets}",
    )
    return rng.choice(requests)


def _settings(rng: random.Random) -> str:
    keys = rng.sample(FIELDS, rng.randint(3, 5))
    values = {"name": rng.choice(NOUNS), **{key: rng.randint(1, 500) for key in keys}, "city": rng.choice(CITIES)}
    text, key = json.dumps(values, indent=2), rng.choice(keys)
    requests = (
        f"Return this JSON with `{key}` set to {rng.randint(501, 999)}.",
        f"Return this JSON without the key `{key}`.",
        f"Return this JSON with the key `{key}` renamed to `{key}_max`.",
        "Return the same settings as YAML.",
    )
    return f"{rng.choice(requests)}\n\n```json\n{text}\n```"


def editing(seed: int) -> Iterator[str]:
    """Edits in turn: code, tables, quotes, lists, settings."""
    rng = random.Random(f"editing {seed}")
    makers: tuple[Callable[[random.Random], str], ...] = (_code_edit, _table, _quote, _list, _settings)
    while True:
        for make in makers:
            yield make(rng)


# ---- chat ----

TOPICS = (
    "sleep", "tea", "bicycles", "thunderstorms", "chess", "honey bees", "public libraries", "solar power", "volcanoes",
    "gardening", "the Roman Empire", "jazz", "recycling", "coral reefs", "time zones", "photography", "bread baking",
    "the Moon", "antibiotics", "mountain hiking", "electric cars", "the printing press", "whales", "saving money",
    "learning a language", "road safety", "glaciers", "memory", "coffee", "board games", "the internet", "sharks",
    "vaccines", "meditation", "trains", "earthquakes", "chocolate", "the Olympic Games", "deserts", "dreams",
    "job interviews", "rivers", "robots", "fairy tales", "cats", "wind turbines", "inflation", "the human heart",
    "origami", "rainforests", "podcasts", "lighthouses", "algebra", "migrating birds", "cooking for a family",
    "working from home", "black holes", "running a marathon", "old maps", "online privacy",
)  # fmt: skip
FORMS = (
    "Explain {} to a ten-year-old.",
    "What are three surprising facts about {}?",
    "Write a short poem about {}.",
    "Why do people care about {}?",
    "Give me five tips for someone who is new to {}.",
    "Write the opening paragraph of a story about {}.",
    "What is the most common misunderstanding about {}?",
    "Summarise the history of {} in a few sentences.",
    "Write a friendly email to a friend who asked about {}.",
    "How would you teach a class about {}?",
    "What questions should I ask an expert on {}?",
    "Compare {} today with a hundred years ago.",
    "Write a dialogue between two people who disagree about {}.",
    "Suggest a title and an outline for an article about {}.",
    "What could change about {} in the next twenty years?",
    "List the advantages and disadvantages of {}.",
    "Describe {} without using its name.",
    "I am bored. Tell me something interesting about {}.",
    "Write a product description for a book about {}.",
    "What is the best way to learn more about {}?",
)


def chat(seed: int) -> Iterator[str]:
    """All forms of all topics, in an order of the seed's."""
    prompts = [form.format(topic) for topic in TOPICS for form in FORMS]
    random.Random(f"chat {seed}").shuffle(prompts)
    return iter(prompts)


# ---- putting them together ----

KINDS: dict[str, Callable[[int], Iterator[str]]] = {"arithmetic": arithmetic, "editing": editing, "chat": chat}


def split_of(prompt: str) -> str:
    """`train` or `heldout`, decided by the text itself."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") % HELDOUT_ONE_IN == 0 else "train"


def make_prompts(kind: str, count: int, seed: int, split: str) -> list[str]:
    """`count` different prompts of one kind and split.

    Raises:
        SystemExit: There are not so many.
    """
    found: dict[str, None] = {}
    in_vain = 0
    for prompt in KINDS[kind](seed):
        if len(found) == count or in_vain == _GIVE_UP_AFTER:
            break
        new = prompt not in found and split_of(prompt) == split
        in_vain = 0 if new else in_vain + 1
        if new:
            found[prompt] = None
    if len(found) < count:
        raise SystemExit(f"error: {kind}: there are only {len(found)} {split} prompts, not {count}; lower --count")
    return list(found)


def interleave(lists: list[list[str]]) -> list[str]:
    """The first of each, the second of each, ...; so that the beginning of a file holds every kind."""
    longest = max(map(len, lists), default=0)
    return [prompts[index] for index in range(longest) for prompts in lists if index < len(prompts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--kind", default="arithmetic,editing,chat", help="one kind or several: arithmetic,editing,chat"
    )
    parser.add_argument("--count", type=int, default=300, help="prompts in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    arguments = parser.parse_args()
    kinds = [kind.strip() for kind in arguments.kind.split(",")]
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or len(set(kinds)) < len(kinds):
        parser.error(f"--kind: {arguments.kind!r} must be different kinds out of {', '.join(KINDS)}")
    if arguments.count < 1:
        parser.error(f"--count: {arguments.count} is too small; use 1 or more")
    shares = [arguments.count // len(kinds) + (i < arguments.count % len(kinds)) for i in range(len(kinds))]
    lists = [make_prompts(*pair, arguments.seed, arguments.split) for pair in zip(kinds, shares, strict=True)]
    for prompt in interleave(lists):
        sys.stdout.write(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

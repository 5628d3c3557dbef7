"""Tasks: sources, order, what fits, and what is said about bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import DataConfig, MixtureConfig
from specactor_ray.core.errors import InputError
from specactor_ray.trainer.data import Task, TaskStream, open_source
from tests.refused import refused

MESSAGES = [{"role": "user", "content": "hi"}]


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbers(size: int, seed: int, shuffle: bool = True, position: int = 0) -> TaskStream:
    stream = TaskStream([Task(index, "prompt") for index in range(size)], seed, len, 100, shuffle)
    stream.position = position
    return stream


def taken(stream: TaskStream, count: int) -> list[int]:
    return [task.index for task in stream.take(count)]


@given(st.integers(1, 50), st.integers(0, 2**63), st.integers(0, 200), st.integers(1, 60))
def test_order_goes_on_where_it_was_saved(size: int, seed: int, first: int, second: int) -> None:
    begin = numbers(size, seed)
    begin.take(first)
    expected = taken(numbers(size, seed), first + second)
    assert taken(numbers(size, seed, position=begin.position), second) == expected[first:]


def test_every_epoch_holds_every_task_in_an_order_of_its_own() -> None:
    stream = numbers(40, 7)
    epochs = [taken(stream, 40) for _ in range(3)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [taken(numbers(40, 7, False, position), 1) for position in (0, 1, 40)] == [[0], [1], [0]]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "JSON"])
def test_prompts_answers_and_metadata_of_a_file(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": "1+1?", "solution": 2, "level": "easy"}, {"messages": MESSAGES}]
    path = write(tmp_path / f"t.{suffix}", rows)
    config = DataConfig(path=path, prompt_key="question", answer_key="solution")
    first, second = open_source(config, 0)[0], open_source(config, 0)[1]
    assert (first.prompt, first.answer, dict(first.metadata)) == ("1+1?", "2", {"solution": 2, "level": "easy"})
    assert second.prompt == MESSAGES and second.answer is None
    config.system_prompt = "Be brief."
    system = {"role": "system", "content": "Be brief."}
    assert open_source(config, 0)[0].prompt == [system, {"role": "user", "content": "1+1?"}]
    config.chat = False
    assert open_source(config, 0)[0].prompt == "Be brief.\n1+1?"


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one\n\ntwo\nthree\n")
    source = open_source(DataConfig(path=str(tmp_path / "t.txt"), limit=2), 0)
    assert [source[i].prompt for i in range(len(source))] == ["one", "two"]


def test_generated_tasks_are_a_function_of_seed_and_index() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    config = DataConfig(path="reasoning_gym:chain_sum", options={"min_terms": 2, "max_terms": 2}, limit=50)
    first, again, other = (open_source(config, seed) for seed in (3, 3, 4))
    assert [first[i].prompt for i in (0, 7)] == [again[i].prompt for i in (0, 7)]
    assert [first[i].prompt for i in range(5)] != [other[i].prompt for i in range(5)]
    assert first[7].answer is not None and first[7].metadata["entry"]["answer"] == first[7].answer


@pytest.mark.parametrize(
    ("config", "key", "named"),
    [
        (DataConfig(), "data.path", ""),
        (DataConfig(path="reasoning_gym:no_such_task"), "data.path", "chain_sum"),
        (DataConfig(path="reasoning_gym:chain_sum", options={"min_terms": "x"}), "data.options", ""),
        (DataConfig(path="reasoning_gym:chain_sum", options={"terms": 2}), "data.options", "min_terms, max_terms"),
    ],
)
def test_refused_sources(config: DataConfig, key: str, named: str) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    with refused(key, named):
        open_source(config, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.jsonl"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"question": "a"}\n', "data.prompt_key"),
        ('\n{"prompt": ""}\n', "line 2"),
        ("[1]\n", "line 1"),
        ('{"prompt": "a"}\n{"prompt": "a", "messages": []}\n', "line 2.*'prompt' and 'messages'"),
        *(
            (f'{{"prompt": "a", "answer": "1"}}\n{{"prompt": "a", "answer": {answer}}}\n', "line 2")
            for answer in ("NaN", "-Infinity", "true", "1e999", "[1]")
        ),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        open_source(DataConfig(path=str(tmp_path / "t.jsonl")), 0)


def test_prompts_that_do_not_fit_are_passed_over() -> None:
    def stream(*prompts: str) -> TaskStream:
        tasks = [Task(i, prompt, place=f"t.jsonl, line {i + 1}") for i, prompt in enumerate(prompts)]
        return TaskStream(tasks, 0, count_tokens, 3, shuffle=False)

    def count_tokens(prompt: str) -> int:
        if prompt == "bad":
            raise InputError("message 1 has no role")
        return len(prompt)

    tasks = stream("aa", "bbbbbb", "c", "bad")
    assert [task.prompt for task in tasks.take(3)] == ["aa", "c", "aa"]
    assert tasks.skipped == 2 and tasks.position == 5
    assert tasks.first_skip == "t.jsonl, line 2, has 6 tokens, and 3 is the limit"
    with pytest.raises(InputError, match=r"line \d, (has|.* no role).*Fix: .*target.max_model_len"):
        stream("aaaaaa", "bad").take(1)


def test_a_source_with_one_task_that_fits_is_never_refused() -> None:
    """For all orders of two epochs (the task may be first and then last), and from every position of a resumed run."""
    for seed in range(40):
        prompts = [Task(index, "a" if index == 3 else "aaaaaa") for index in range(20)]
        stream = TaskStream(prompts, seed, len, 3)
        stream.position = seed
        assert taken(stream, 30) == [3] * 30
        assert stream.position - 30 == seed + stream.skipped


ROWS = [{"q": f"q{number}", "a": number} for number in range(5)]


def as_task(row: dict) -> dict | None:
    """For `data.map`."""
    if row["a"] == 1:
        return None
    return row["q"] if row["a"] == 3 else {"prompt": row["q"] + "?", "answer": 10 / row["a"], "level": row["a"]}  # type: ignore[return-value]


def mapped(path: str, **more: object) -> DataConfig:
    return DataConfig(path=path, map="tests.unit.trainer.test_data:as_task", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_mapped_or_left_out_and_named_by_their_place(tmp_path: Path, kind: str) -> None:
    def saved(rows: list[dict]) -> str:
        path, columns = tmp_path / f"t.{kind}", {key: [row[key] for row in rows] for key in rows[0]}
        return table(path, columns) if kind == "parquet" else write(path, rows)

    place, first = ("row", 0) if kind == "parquet" else ("line", 1)
    source = open_source(mapped(saved(ROWS[1:3] + ROWS[4:])), 0)
    tasks = [source[index] for index in range(len(source))]
    assert [(task.prompt, task.answer, task.metadata["level"]) for task in tasks] == [
        ("q2?", "5", 2),
        ("q4?", "2.5", 4),
    ]
    assert source[1].place.endswith(f"{place} {2 + first}"), "of the row in the file"
    assert len(open_source(mapped(saved(ROWS[4:] + ROWS[3:4]), limit=1), 0)) == 1, "others are not mapped"
    where = r":as_task \(test_data.py, line \d+\)"
    for rows, problem in (
        (ROWS[1:2], "leaves out all 1 rows"),
        (ROWS[2:4], rf"{place} {1 + first}: .*{where} .* returned 'q3'.*Fix: return a dict"),
        (ROWS[:1], rf"{place} {first}: .*:as_task .*ZeroDivisionError: .* \(test_data.py, line \d+\)"),
    ):
        with pytest.raises(InputError, match=problem):
            open_source(mapped(saved(rows)), 0)
    with refused("data.map", "no_such"):
        open_source(DataConfig(path=saved(ROWS), map="tests.unit.trainer.test_data:no_such"), 0)


def mixture(folder: Path, *parts: tuple[float, int], **more: object) -> DataConfig:
    """Sources with these weights and numbers of tasks; those of source i are `i-0`, `i-1`, ..."""
    for part, (_, size) in enumerate(parts):
        write(folder / f"{part}.jsonl", [{"prompt": f"{part}-{number}"} for number in range(size)])
    sections = [MixtureConfig(str(folder / f"{part}.jsonl"), weight) for part, (weight, _) in enumerate(parts)]
    return DataConfig(mixture=sections, **more)  # type: ignore[arg-type]


def prompts_of(config: DataConfig, count: int, position: int = 0, most: int = 99) -> list[str]:
    stream = TaskStream(open_source(config, 3), 3, len, most)
    stream.position = position
    return [str(task.prompt) for task in stream.take(count)]


@given(
    parts=st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, 0.5, 0.3, 7.0, 0.25]), st.integers(1, 9)), min_size=1, max_size=4
    ),
    position=st.integers(0, 150),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_weights_of_a_mixture_are_met_and_its_order_goes_on_anywhere(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[float, int]], position: int
) -> None:
    config = mixture(tmp_path_factory.mktemp("mixture"), *parts)
    found = prompts_of(config, 160)
    assert prompts_of(config, 160 - position, position) == found[position:]
    total = sum(weight for weight, _ in parts)
    for part, (weight, size) in enumerate(parts):
        taken = [place for place, prompt in enumerate(found) if prompt.startswith(f"{part}-")]
        counts = np.searchsorted(taken, np.arange(1, 161))
        assert np.abs(counts - np.arange(1, 161) * weight / total).max() < 1.0
        own = [found[place] for place in taken]
        epochs = [own[begin : begin + size] for begin in range(0, len(own) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)


def test_tasks_of_a_mixture_and_those_that_do_not_fit(tmp_path: Path) -> None:
    """Each has the keys of its own source, or those of all; one that is skipped counts for its source."""
    write(tmp_path / "own.jsonl", [{"question": "a", "answer": "1"}, {"question": "b", "data_source": "named"}])
    config = mixture(tmp_path, (3, 2), (1, 12), system_prompt="Be brief.", chat=False)
    config.mixture[0] = MixtureConfig(str(tmp_path / "own.jsonl"), 3, prompt_key="question", system_prompt="Hm.")
    source = open_source(config, 0)
    tasks = [source[index] for index in range(len(source))]
    assert [task.prompt for task in tasks[:3]] == ["Hm.\na", "Hm.\nb", "Be brief.\n1-0"] and len(tasks) == 14
    names = [str(tmp_path / "own.jsonl"), "named", *[str(tmp_path / "1.jsonl")] * 12]
    assert [task.metadata["data_source"] for task in tasks] == names
    assert [task.index for task in tasks] == list(range(14))
    assert source.without_answer.endswith("own.jsonl, line 2")
    config.mixture[0].name = "mine"
    assert {open_source(config, 0)[index].metadata["data_source"] for index in range(2)} == {"mine"}
    config = mixture(tmp_path, (1, 2), (1, 12))  # 1-10 and 1-11 are too long
    assert not {"1-10", "1-11"} & set(prompts_of(config, 60, most=3))
    write(tmp_path / "0.jsonl", [{"prompt": "too long"}] * 2)
    with pytest.raises(InputError, match="none of the 2 prompts"):
        prompts_of(config, 60, most=3)


@pytest.mark.parametrize(
    ("weights", "more", "named"),
    [((1.0, 1 / 3), {}, "weights such as"), ((1.0,), {"path": "x.jsonl"}, "data.path")],
)
def test_refused_mixtures(weights: tuple[float, ...], more: dict, named: str, tmp_path: Path) -> None:
    with refused("data.mixture", named):
        open_source(mixture(tmp_path, *((weight, 1) for weight in weights), **more), 0)
    with refused("data.mixture", "path of each source"):
        open_source(DataConfig(mixture=[MixtureConfig()]), 0)
    (tmp_path / "good.jsonl").write_text('{"prompt": "a"}\n')
    good = str(tmp_path / "good.jsonl")
    for key, wrong in (
        ("data.path", MixtureConfig(path=str(tmp_path / "none.jsonl"))),
        ("data.map", MixtureConfig(path=good, map="nope:f")),
    ):
        with refused("data.mixture.1", key):
            open_source(DataConfig(mixture=[MixtureConfig(path=good), wrong]), 0)
    for weight in (0.0, -1.0, math.nan, math.inf):
        with refused("data.mixture.0.weight"):
            from_mapping({"mode": "plain", "data": {"mixture": [{"path": "x", "weight": weight}]}})


def table(path: Path, columns: dict) -> str:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict(columns).to_parquet(path)
    return str(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["a", "b", None]}, "row 2: 'prompt'"),
        ({"prompt": ["a", "", "b"], "image": [b"x"] * 3}, "row 1: 'prompt'"),
        ({"messages": [MESSAGES, MESSAGES, []]}, "row 2: 'messages'"),
        ({"prompt": ["a", "b"], "answer": [1.0, float("inf")]}, "row 1: 'answer' .*inf"),
        ({"prompt": ["a", "b"], "answer": [True, False]}, "row 0: 'answer' .*True"),
        ({"question": ["a"], "level": [1]}, "data.prompt_key.*level, question"),
    ],
)
def test_every_row_of_a_table_is_checked_at_once(columns: dict, message: str, tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet", columns)
    with pytest.raises(InputError, match=message):
        open_source(DataConfig(path=path), 0)


def test_rows_beyond_the_limit_are_not_checked_and_missing_answers_are_found(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet", {"prompt": ["a", "b", "c", None], "answer": ["1", "2", None, "3"]})
    found = [open_source(DataConfig(path=path, limit=limit), 0).without_answer for limit in (2, 3)]
    assert found == ["", f"{path}, row 2"]


NUMBERS = [
    (3.0, "3"),
    (-0.0, "0"),
    (-2.0, "-2"),
    (0.1, "0.1"),
    (2.5, "2.5"),
    (1e20, "100000000000000000000"),
    (1e-7, "0.0000001"),
]


def test_a_number_is_the_text_of_its_digits_in_every_format(tmp_path: Path) -> None:
    whole = [(7, "7"), (2**63 + 1, "9223372036854775809"), (10**400, "1" + "0" * 400)]
    rows = [{"prompt": "a", "answer": value} for value, _ in NUMBERS + whole]
    source = open_source(DataConfig(path=write(tmp_path / "t.jsonl", rows)), 0)
    assert [source[i].answer for i in range(len(source))] == [text for _, text in NUMBERS + whole]
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    for kind in ("float64", "float32"):
        rows = datasets.Dataset.from_list([{"prompt": "a", "answer": value} for value, _ in NUMBERS])
        rows.cast_column("answer", datasets.Value(kind)).to_parquet(tmp_path / f"{kind}.parquet")
        source = open_source(DataConfig(path=str(tmp_path / f"{kind}.parquet")), 0)
        assert [source[i].answer for i in range(len(source))] == [text for _, text in NUMBERS]

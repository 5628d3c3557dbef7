"""Tasks: sources, order, what fits, and what is said about bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.config.schema import DataConfig
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


def test_prompts_answers_and_metadata_of_a_file(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "solution": 2, "level": "easy"}, {"messages": MESSAGES}]
    path = write(tmp_path / "t.jsonl", rows)
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

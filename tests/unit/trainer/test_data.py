"""Tasks: sources, order, what fits, and what is said about bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.config.schema import DataConfig
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.trainer.data import Task, TaskStream, open_source


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


def test_jsonl_with_answers_and_metadata(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "answer": 2, "level": "easy"}, {"messages": [{"role": "user", "content": "hi"}]}]
    source = open_source(DataConfig(path=write(tmp_path / "t.jsonl", rows)), 0)
    assert len(source) == 2
    assert (source[0].prompt, source[0].answer, dict(source[0].metadata)) == ("1+1?", "2", {"level": "easy"})
    assert source[1].prompt == [{"role": "user", "content": "hi"}] and source[1].answer is None


def test_keys_and_system_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"question": "1+1?", "solution": "2"}])
    config = DataConfig(path=path, prompt_key="question", answer_key="solution", system_prompt="Be brief.")
    task = open_source(config, 0)[0]
    assert task.answer == "2"
    assert task.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    config.chat = False
    assert open_source(config, 0)[0].prompt == "Be brief.\n1+1?"


def test_text_files_and_tables(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one\n\ntwo\nthree\n")
    source = open_source(DataConfig(path=str(tmp_path / "t.txt"), limit=2), 0)
    assert [source[i].prompt for i in range(len(source))] == ["one", "two"]
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    path = tmp_path / "t.parquet"
    datasets.Dataset.from_list([{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}]).to_parquet(path)
    source = open_source(DataConfig(path=str(path)), 0)
    assert [(source[i].prompt, source[i].answer) for i in range(2)] == [("a", "b"), ("c", "d")]


def test_generated_tasks_are_a_function_of_seed_and_index() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    config = DataConfig(path="reasoning_gym:chain_sum", options={"min_terms": 2, "max_terms": 2}, limit=50)
    first, again, other = (open_source(config, seed) for seed in (3, 3, 4))
    assert [first[i].prompt for i in (0, 7)] == [again[i].prompt for i in (0, 7)]
    assert [first[i].prompt for i in range(5)] != [other[i].prompt for i in range(5)]
    assert first[7].answer is not None and first[7].metadata["entry"]["answer"] == first[7].answer


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(), "data.path"),
        (DataConfig(path="reasoning_gym:no_such_task"), "chain_sum"),
        (DataConfig(path="reasoning_gym:chain_sum", options={"min_terms": "x"}), "data.options"),
        (DataConfig(path="reasoning_gym:chain_sum", options={"terms": 2}), "data.options: .*min_terms, max_terms"),
    ],
)
def test_refused_sources(config: DataConfig, message: str) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    with pytest.raises(ConfigError, match=message):
        open_source(config, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tasks"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"question": "a"}\n', "data.prompt_key"),
        ('\n{"prompt": ""}\n', "line 2"),
        ("[1]\n", "line 1"),
        ('{"prompt": "a"}\n{"prompt": "a", "messages": []}\n', "line 2: the line has 'prompt' and 'messages'"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        open_source(DataConfig(path=str(tmp_path / "t.jsonl")), 0)


def test_prompts_that_are_too_long_are_passed_over() -> None:
    def stream(*prompts: str) -> TaskStream:
        return TaskStream([Task(i, prompt) for i, prompt in enumerate(prompts)], 0, len, 3, shuffle=False)

    tasks = stream("aa", "bbbbbb", "c")
    assert [task.prompt for task in tasks.take(3)] == ["aa", "c", "aa"]
    assert tasks.skipped == 1 and tasks.position == 4
    with pytest.raises(InputError, match=r"none of the 2 prompts.* 6 tokens, and 3 is the limit"):
        stream("aaaaaa", "bbbbbb").take(1)

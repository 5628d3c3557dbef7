"""`echo` of `/v1/completions`: the prompt's text, log-probabilities and places before the output's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.scripted_queue import ScriptedQueue, events, post

PATH = "/v1/completions"


class ScoringQueue(ScriptedQueue):
    """Its prompts have log-probabilities -1, -2, ... if they are requested; token 20 has half of these."""

    def submit(self, prompt: Any, sampling: Any = None, **options: Any) -> Any:
        handle = super().submit(prompt, sampling, **options)
        if sampling.prompt_logprobs:
            scores = tuple(-1.0 - at for at in range(len(prompt) - 1))
            best = tuple((20, score / 2) for score in scores)  # the id of one of the prompts' tokens
            end = handle.end
            handle.end = lambda ended: end(replace(ended, prompt_logprobs=scores, prompt_best=best))
        return handle


def ask(**body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = post(PATH, body, ScoringQueue()).json()
    return answer


def test_a_choice_begins_with_its_prompt() -> None:
    ids = ScriptedQueue().tokenizer("the red fox 🦊")["input_ids"]
    for prompt in ("the red fox 🦊", ids):
        (choice,) = ask(prompt=prompt, echo=True, max_tokens=3, logprobs=1, seed=1)["choices"]
        report, output = choice["logprobs"], ask(prompt=ids, max_tokens=3, logprobs=1, seed=1)["choices"][0]
        assert choice["text"] == "the red fox 🦊" + output["text"] and "prompt_logprobs" not in choice
        assert report["token_logprobs"] == [None, *(-1.0 - at for at in range(len(ids) - 1)), -0.5, -0.5, -0.5]
        assert report["top_logprobs"][0] is None and set(map(len, (*report.values(),))) == {len(ids) + 3}
        assert report["tokens"][len(ids) :] == output["logprobs"]["tokens"]
        for name, place in zip(report["tokens"], report["text_offset"], strict=True):
            assert name.startswith("bytes:") or choice["text"].startswith(name, place)
        assert [place for place in report["text_offset"] if place == 12] == [12] * 4, "four bytes of one character"


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_the_most_probable_token_is_beside_the_prompts(logprobs: int) -> None:
    """As lm-eval asks: a continuation is greedy if each of its values is the largest."""
    body = {"prompt": [[11, 12, 20, 13]], "echo": True, "max_tokens": 1, "logprobs": logprobs, "temperature": 0}
    (choice,) = ask(**body)["choices"]
    report, name = choice["logprobs"], ScriptedQueue().tokenizer.decode
    first, *tops = report["top_logprobs"][:4]
    assert first is None and [next(iter(top)) for top in tops] == [name([12]), name([20]), name([13])]
    assert [next(iter(top.values())) for top in tops] == report["token_logprobs"][1:4] == [-1.0, -2.0, -3.0]
    more = [{name([20]): -0.5}, {}, {name([20]): -1.5}] if logprobs else [{}] * 3
    assert tops == [{name([12]): -1.0} | more[0], {name([20]): -2.0}, {name([13]): -3.0} | more[2]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone(stream: bool) -> None:
    body = {"prompt": ["the red", [11, 12, 13]], "echo": True, "max_tokens": 0, "logprobs": 1, "n": 2, "stream": stream}
    answer = post(PATH, body, ScoringQueue())
    choices = [event["choices"][0] for event in events(answer)] if stream else answer.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 4
    tokenizer = ScriptedQueue().tokenizer
    texts = {"the red": tokenizer("the red")["input_ids"], tokenizer.decode([11, 12, 13]): [11, 12, 13]}
    for choice in choices:
        report, (text, ids) = choice["logprobs"], list(texts.items())[choice["index"] // 2]
        assert choice["text"] == text and len(report["tokens"]) == len(report["text_offset"]) == len(ids)
        assert report["token_logprobs"] == [None, *(-1.0 - at for at in range(len(ids) - 1))]
    assert stream or answer.json()["usage"]["completion_tokens"] == 0


def test_a_stop_text_cuts_the_output_and_not_the_prompt() -> None:
    engine = ScoringQueue()
    engine.script = lambda _prompt, _sampling: engine.tokenizer("one, two, three")["input_ids"]
    body = {"prompt": "two, two", "echo": True, "stop": ", t", "logprobs": 0, "max_tokens": 50}
    for stream in (False, True):
        answer = post(PATH, body | {"stream": stream}, engine)
        choice = (events(answer) if stream else [answer.json()])[0]["choices"][0]
        assert choice["text"] == "two, twoone" and choice["stop_reason"] == ", t"


def test_special_tokens_of_a_text_have_their_place() -> None:
    (choice,) = ask(prompt="<|user|>hi", echo=True, max_tokens=0, logprobs=0)["choices"]
    assert choice["text"] == "<|user|>hi" and "".join(choice["logprobs"]["tokens"]) == "<|user|>hi"
    assert choice["logprobs"]["text_offset"][:2] == [0, 8]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/inference/v1/generate"])
def test_log_probabilities_of_a_prompt_have_vllms_form(path: str) -> None:
    options = {"max_tokens": 1, "prompt_logprobs": 0}
    body = {PATH: {"prompt": [11, 12, 13]}, "/inference/v1/generate": {"token_ids": [11, 12, 13]}}.get(path)
    body = body or {"messages": [{"role": "user", "content": "a"}]}
    answer = post(
        path, body | ({"sampling_params": options} if "token_ids" in body else options), ScoringQueue()
    ).json()
    first, *others = (answer["choices"][0] if path == PATH else answer)["prompt_logprobs"]
    values = [one["logprob"] for found in others for one in found.values()]
    assert first is None and values == [-1.0 - at for at in range(len(values))] and len(values) >= 2
    assert path != PATH or [[*found] for found in others] == [["12"], ["13"]]

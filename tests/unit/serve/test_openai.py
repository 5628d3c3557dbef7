"""OpenAI's endpoints on a scripted engine: forms, errors, streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from specactor_ray.core.errors import ActorLostError
from tests.fakes.scripted_queue import ScriptedQueue, events, make_service, on, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Count."}]


def saying(text: str, part: int = 3) -> ScriptedQueue:
    """An engine whose outputs are this text."""
    engine = ScriptedQueue(part=part)
    tokens = engine.tokenizer(text)["input_ids"]
    engine.script = lambda _prompt, _sampling: tokens
    return engine


class TestErrors:
    def test_other_models_paths_and_methods(self) -> None:
        async def work(client: httpx.AsyncClient) -> None:
            answer = await client.post(COMPLETIONS, json={"prompt": "a", "model": "other"})
            assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
            assert (await client.get("/nowhere")).json()["error"]["code"] == 404
            answer = await client.get(COMPLETIONS)
            assert answer.status_code == 405 and answer.headers["allow"] == "POST" and "error" in answer.json()

        on(make_service(ScriptedQueue()), work)

    def test_a_run_that_is_lost_is_unavailable(self) -> None:
        engine = ScriptedQueue()
        engine.failure = ActorLostError("all verifiers are gone")
        answer = post(COMPLETIONS, {"prompt": "a"}, engine)
        assert answer.status_code == 503 and "gone" in answer.json()["error"]["message"]
        (event,) = events(post(COMPLETIONS, {"prompt": "a", "stream": True}, engine))[-1:]
        assert event["error"]["code"] == 503

    def test_requests_that_fail_and_overload_are_refused_as_a_whole(self) -> None:
        for engine, status in ((ScriptedQueue(), 400), (ScriptedQueue(max_waiting=2), 429)):
            engine.error, engine.held = "the prompt cannot run", status == 429
            answer = post(COMPLETIONS, {"prompt": "a", "n": 3}, engine)
            assert answer.status_code == status and not engine.open
            assert ("cannot run" in answer.json()["error"]["message"]) == (status == 400)

    def test_a_defect_is_an_error_without_its_text(self) -> None:
        service = make_service(ScriptedQueue())
        service.require_model = lambda name: 1 // 0  # type: ignore[method-assign]
        answer = on(service, lambda client: client.post(COMPLETIONS, json={"prompt": "a"}))
        assert answer.status_code == 500 and "division" not in answer.text and answer.json()["error"]["code"] == 500

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate"])
    def test_any_defect_of_a_stream_ends_it_with_an_event(self, path: str) -> None:
        service = make_service(ScriptedQueue())

        def checked(output: Any) -> Any:
            raise ZeroDivisionError("defect")

        service.checked = checked  # type: ignore[method-assign]
        body = {COMPLETIONS: {"prompt": [1]}, CHAT: {"messages": MESSAGES}}.get(path, {"input_ids": [1]})
        answer = on(service, lambda client: client.post(path, json={**body, "stream": True}))
        assert events(answer)[-1]["error"]["code"] == 500 and "defect" not in answer.text


class TestAnswers:
    def test_logprobs_and_ids(self) -> None:
        body = {"prompt": [5, 6], "max_tokens": 2, "logprobs": 0, "seed": 1, "return_token_ids": True}
        choice = post(COMPLETIONS, body).json()["choices"][0]
        assert choice["token_ids"] == [11, 12] and choice["prompt_token_ids"] == [5, 6]
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 2}] and choice["seed"] == 1
        names = choice["logprobs"]["tokens"]
        assert "".join(names) == choice["text"] and choice["logprobs"]["token_logprobs"] == [-0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"] == [{name: -0.5} for name in names]
        named = post(COMPLETIONS, {**body, "return_tokens_as_token_ids": True}).json()["choices"][0]["logprobs"]
        assert named["tokens"] == ["token_id:11", "token_id:12"]
        assert post(COMPLETIONS, {"prompt": [5, 6]}).json()["choices"][0]["logprobs"] is None

    def test_sampling_session_and_priority_reach_the_engine(self) -> None:
        engine = ScriptedQueue()
        named = {"request_id": "r", "session": "s", "priority": -2}
        post(COMPLETIONS, {"prompt": [5], "temperature": 0.5, "top_k": 7, **named}, engine)
        post(CHAT, {"messages": MESSAGES, "max_completion_tokens": 4}, engine)
        post(CHAT, {"messages": MESSAGES}, engine)
        (_, first, options), (_, second, _), (prompt, third, _) = engine.submitted
        assert (first.temperature, first.top_k) == (0.5, 7) and options == named
        assert second.max_tokens == 4 and third.max_tokens == 512 - len(prompt), "the rest of the context"

    @pytest.mark.parametrize("part", [1, 3, 50])
    def test_a_stream_of_characters_of_several_bytes(self, part: int) -> None:
        text = "näïve 🦊 狐狸."
        body = {"messages": MESSAGES, "stream": True, "logprobs": True, "return_token_ids": True, "max_tokens": 100}
        got = events(post(CHAT, body, saying(text, part)))
        choices = [event["choices"][0] for event in got]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        pieces = [choice["delta"].get("content", "") for choice in choices]
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
        tokens = [token for choice in choices[1:] for token in choice["token_ids"]]
        assert tokens == saying(text).tokenizer(text)["input_ids"]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"

    @pytest.mark.parametrize("part", [1, 4, 50])
    @pytest.mark.parametrize("text", ["one, two, three", "one, tw"])
    def test_a_stop_text_is_never_sent(self, text: str, part: int) -> None:
        body = {"messages": MESSAGES, "stop": [", two", "zzz"], "max_tokens": 100}
        whole = post(CHAT, body, saying(text, part)).json()["choices"][0]
        choices = [event["choices"][0] for event in events(post(CHAT, {**body, "stream": True}, saying(text, part)))]
        sent = "".join(choice["delta"].get("content", "") for choice in choices)
        assert sent == whole["message"]["content"] == text.partition(", two")[0]
        ended = ("stop", ", two") if ", two" in text else ("length", None)
        for choice in (whole, choices[-1]):
            assert (choice["finish_reason"], choice["stop_reason"]) == ended

    @pytest.mark.parametrize("part", [1, 2, 50])
    @pytest.mark.parametrize(
        ("options", "stop", "expected"),
        [
            ({}, None, "ab"),
            ({"skip_special_tokens": False}, None, "a<|user|>b"),
            ({"skip_special_tokens": False, "include_stop_str_in_output": True}, None, "a<|user|>b<|eos|>"),
            ({"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 3}, None, "a<|user|>b"),
            ({"skip_special_tokens": False, "stop": "b"}, "b", "a<|user|>"),
            ({"skip_special_tokens": False, "stop": "b", "include_stop_str_in_output": True}, "b", "a<|user|>b"),
        ],
    )
    def test_special_tokens_are_in_the_text_on_request(
        self, options: dict[str, Any], stop: str | None, expected: str, part: int
    ) -> None:
        engine = saying("a<|user|>b<|eos|>", part)
        engine.finish_reason = "length" if "max_tokens" in options else "stop"
        whole = post(COMPLETIONS, {"prompt": [5], **options}, engine).json()["choices"][0]
        assert whole["text"] == expected and whole["stop_reason"] == stop
        streamed = events(post(COMPLETIONS, {"prompt": [5], "stream": True, **options}, engine))
        assert "".join(event["choices"][0]["text"] for event in streamed) == expected
        chat = post(CHAT, {"messages": MESSAGES, **options}, engine).json()["choices"][0]
        assert chat["message"]["content"] == expected

    @pytest.mark.parametrize("stop", [["e"], ["ee"], ["l", "e"], ["e", "le"], ["a", "sl", "ee"]])
    @pytest.mark.parametrize("included", [False, True])
    def test_one_token_with_several_stop_texts_ends_all_forms_of_the_output_alike(
        self, stop: list[str], included: bool
    ) -> None:
        options = {"prompt": [5], "stop": stop, "include_stop_str_in_output": included}
        texts = set[str]()
        for special in (False, True):
            body = {**options, "skip_special_tokens": not special}
            texts.add(post(COMPLETIONS, body, saying("sleeps")).json()["choices"][0]["text"])
            streamed = events(post(COMPLETIONS, {**body, "stream": True}, saying("sleeps", part=1)))
            texts.add("".join(event["choices"][0]["text"] for event in streamed))
        assert len(texts) == 1, texts

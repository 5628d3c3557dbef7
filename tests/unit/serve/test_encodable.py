"""Nothing that a client sends makes an answer that cannot be encoded, or ends a stream without an event."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_queue import ScriptedQueue, events, make_service, on, post

HALF = "\\ud83d"
JSON = {"Content-Type": "application/json"}
CHAT = '"messages": [{"role": "user", "content": "a"}]'


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/finish_weight_update", '{"weight_version": "HALF"}', "weight_version"),
        ("/update_weight_version", '{"new_version": "HALF"}', "new_version"),
        ("/update_weights", '{"weight_dir": "/tmp/HALF"}', "weight_dir"),
        ("/update_weights", '{"update_info": {"weight_dir": "HALF"}}', "update_info.weight_dir"),
        ("/update_weights_from_disk", '{"model_path": "a/HALF", "weight_version": "1"}', "model_path"),
        ("/abort_request", '{"rid": "HALF"}', "rid"),
        ("/workers", '{"url": "HALF"}', "url"),
        ("/tokenize", '{"prompt": "aHALF"}', "prompt"),
        ("/v1/completions", '{"prompt": "a", "stop": ["b", "\\ud83d\\ude00HALF"]}', "stop.1"),
        ("/v1/completions", '{"prompt": ["a", "\\udc00\\ud83d"]}', "prompt.1"),
        ("/v1/completions", '{"prompt": "a", "metadata": {"HALF": 1}}', "metadata"),
        ("/v1/chat/completions", '{CHAT, "model": "HALF"}', "model"),
        ("/v1/chat/completions", '{CHAT, "tools": [{"name": "HALF"}]}', "tools.0.name"),
        ("/generate", '{"text": "a", "rid": "HALF"}', "rid"),
        ("/inference/v1/generate", '{"token_ids": [1], "sampling_params": {"stop": "HALF"}}', "sampling_params.stop"),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_name(path: str, body: str, param: str) -> None:
    answer = post(path, body.replace("CHAT", CHAT).replace("HALF", HALF).encode(), headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and param in error["message"]


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\xed\xa0\x80"}', '{"prompt": "a"}'.encode("utf-16"), b'{"prompt": "\xff"}']
)
def test_a_body_is_utf_8(body: bytes) -> None:
    answer = post("/v1/completions", body, headers=JSON)
    assert answer.status_code == 400 and "UTF-8" in answer.json()["error"]["message"]


def test_whole_pairs_and_escaped_backslashes_are_text() -> None:
    for text in ("\\ud83d\\ude00", "\\\\ud83d", "\ufeff"):
        body = f'\ufeff{{"prompt": "a{text}"}}'.encode()
        assert post("/v1/completions", body, headers=JSON).status_code == 200


def test_a_refused_label_leaves_the_server_as_it_was() -> None:
    async def work(client: httpx.AsyncClient) -> list[int]:
        statuses = []
        for path, name in (("/finish_weight_update", "weight_version"), ("/update_weight_version", "new_version")):
            answer = await client.post(path, content=f'{{"{name}": "{HALF}"}}'.encode(), headers=JSON)
            statuses.append(answer.status_code)
        answers = [await client.get("/get_weight_version"), await client.post("/generate", json={"input_ids": [1]})]
        return statuses + [answer.status_code for answer in answers]

    assert on(make_service(ScriptedQueue()), work) == [400, 400, 200, 200]


@pytest.mark.parametrize("path", ["/generate", "/inference/v1/generate", "/get_weight_version"])
def test_a_label_that_a_program_set_is_sent_escaped(path: str) -> None:
    service = make_service(ScriptedQueue())
    service.control.relabel("a\ud800")
    body = {"input_ids": [1], "token_ids": [1], "sampling_params": {}}

    async def work(client: httpx.AsyncClient) -> Any:
        sent = {key: body[key] for key in (["input_ids"] if path == "/generate" else ["token_ids", "sampling_params"])}
        return await (client.get(path) if "version" in path else client.post(path, json=sent))

    answer = on(service, work)
    assert answer.status_code == 200 and "a\\ud800" in answer.text and json.loads(answer.text)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_any_defect_of_a_stream_ends_it_with_an_event(path: str) -> None:
    service = make_service(ScriptedQueue())
    calls = iter(range(1000))

    def checked(output: Any) -> Any:
        raise ZeroDivisionError(f"defect {next(calls)}")

    service.checked = checked  # type: ignore[method-assign]
    sent = {"prompt": [1], "input_ids": [1], "messages": [{"role": "user", "content": "a"}]}
    name = {"/v1/completions": "prompt", "/generate": "input_ids"}.get(path, "messages")
    answer = on(service, lambda client: client.post(path, json={name: sent[name], "stream": True}))
    last = events(answer)[-1]
    assert last["error"]["code"] == 500 and "defect" not in answer.text


@pytest.mark.parametrize(
    "name", ["tokenizer", "conversation", "messages", "self", "template", "kwargs", "chat_template", "tokenize", "a b"]
)
def test_no_name_in_chat_template_kwargs_is_a_defect(name: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: 1}}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = post(path, body)
        assert answer.status_code in (200, 400), answer.text
        assert answer.is_success or "error" in answer.json()


def test_options_of_the_template_come_in_either_place() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def ids(**more: Any) -> list[int]:
        tokens: list[int] = post("/tokenize", {"messages": messages, **more}).json()["tokens"]
        return tokens

    for option in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        assert ids(**option) == ids(chat_template_kwargs=option) != ids()

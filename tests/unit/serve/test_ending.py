"""The end of the server while requests are open."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest

from specactor_ray.serve.run import listening_socket, server_of
from specactor_ray.serve.service import Limits
from tests.fakes.scripted_engine import ScriptedEngine, make_service

BODIES = {
    "/v1/completions": {"prompt": "a", "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/generate": {"text": "a"},
}


def test_requests_that_are_cut_off_are_answered_in_their_form(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    engine.held = True
    service = make_service(engine, Limits(drain_s=0.0))
    lines: list[str] = []
    server, listener = server_of(service, report=lines.append), listening_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def work() -> list[httpx.Response]:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0)
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            asked = [
                client.post(path, json={**body, "stream": s}) for s in (False, True) for path, body in BODIES.items()
            ]
            answers = asyncio.gather(*asked)
            while len(engine.running) < 10:
                await asyncio.sleep(0)
            server.should_exit = True
            await serving
            return await answers

    with caplog.at_level(logging.ERROR):
        answers = asyncio.run(work())
    assert lines == ["waiting up to 0 s for 8 requests; Ctrl-C cuts them off"] and server.cut_off == 8
    assert not engine.running and not service.running() and not caplog.records
    for number, answer in enumerate(answers):
        is_stream = number >= len(BODIES)
        assert answer.status_code == (200 if is_stream else 503)
        text = answer.text
        if is_stream:
            *_, text, last, end = text.split("\n\n")
            assert last == "data: [DONE]" and not end
        body = json.loads(text.removeprefix("data: "))
        assert "the server ends" in body["error"]["message"]
        assert body["success"] is False

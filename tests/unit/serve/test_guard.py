"""What stands before the endpoints: tokens, hosts, sizes, numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from specactor_ray.core.errors import InputError
from specactor_ray.serve.run import read_key
from specactor_ray.serve.service import Limits
from tests.fakes.scripted_engine import ScriptedEngine, client_of, make_service, post

TOKEN = "a-token-of-some-length"


def get(path: str, token: str | None = None, **options: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        async with client_of(make_service(ScriptedEngine()), token) as client:
            return await client.get(path, **options)

    return asyncio.run(work())


class TestToken:
    @pytest.mark.parametrize(
        ("header", "status"),
        [
            (f"Bearer {TOKEN}", 200),
            (f"bearer {TOKEN}", 200),
            ("Bearer wrong", 401),
            (TOKEN, 401),
            ("Bearer ", 401),
            (None, 401),
        ],
    )
    def test_is_asked_for(self, header: str | None, status: int) -> None:
        answer = get("/v1/models", TOKEN, headers={"Authorization": header} if header else {})
        assert answer.status_code == status
        if status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"

    @pytest.mark.parametrize("path", ["/metrics", "/openapi.json", "/nowhere", "/tokenize"])
    def test_is_asked_for_by_everything_but_probes(self, path: str) -> None:
        assert get(path, TOKEN).status_code == 401
        assert get("/health", TOKEN).status_code == 200

    @pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example:80", "file://"])
    def test_without_one_no_web_page_of_others_is_served(self, origin: str) -> None:
        """A browser sends it with a POST without a body, which needs no permission of the server."""

        async def work() -> list[int]:
            async with client_of(make_service(ScriptedEngine())) as client:
                headers = [{"Origin": one} for one in (origin, "http://localhost:3000")]
                return [(await client.post("/resume", headers=one)).status_code for one in headers]

        assert asyncio.run(work()) == [403, 200]

    @pytest.mark.parametrize("path", ["/v1/completions", "/pause_generation", "/resume"])
    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
    def test_no_body_of_another_type_is_read(self, path: str, kind: str) -> None:
        """Not ignored, either: the default of a field that was not read may end requests."""
        answer = post(path, b'{"mode": "in_place"}', headers={"Content-Type": kind})
        assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]

    def test_without_one_only_names_of_this_machine_are_served(self) -> None:
        for host in ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]:80", "127.5.5.5"):
            assert get("/v1/models", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "10.0.0.1:8000", "localhost.evil.example", "0.0.0.0", ""):
            assert get("/v1/models", headers={"Host": host}).status_code == 403
        assert get("/v1/models", TOKEN, headers={"Host": "a.example", "Authorization": f"Bearer {TOKEN}"}).is_success


class TestKey:
    def test_only_loopback_needs_none(self) -> None:
        assert read_key("127.0.0.1", {}) is None and read_key("localhost", {}) is None and read_key("::1", {}) is None
        for host in ("0.0.0.0", "::", "10.0.0.1", "a.example", ""):
            with pytest.raises(InputError, match="SPECACTOR_API_KEY"):
                read_key(host, {})

    def test_leaves_the_environment(self) -> None:
        environment = {"SPECACTOR_API_KEY": TOKEN}
        assert read_key("0.0.0.0", environment) == TOKEN and not environment

    def test_is_read_from_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "key"
        path.write_text(f"{TOKEN}\n")
        assert read_key("0.0.0.0", {"SPECACTOR_API_KEY_PATH": str(path)}) == TOKEN

    @pytest.mark.parametrize("content", ["", "short", "with a space in the middle", "ünïcödé-ünïcödé-ünïcödé", None])
    def test_one_that_cannot_be_used_is_refused(self, content: str | None, tmp_path: Path) -> None:
        path = tmp_path / "key"
        if content is not None:
            path.write_text(content)
        with pytest.raises(InputError, match="SPECACTOR_API_KEY"):
            read_key("127.0.0.1", {"SPECACTOR_API_KEY_PATH": str(path)})


class TestLimits:
    def test_a_large_body_is_refused_with_and_without_its_length(self) -> None:
        body = json.dumps({"prompt": "a" * 2000}).encode()

        async def in_pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 100):
                yield body[at : at + 100]

        async def work() -> list[httpx.Response]:
            service = make_service(ScriptedEngine(), Limits(max_body_bytes=1000))
            headers = {"Content-Type": "application/json"}
            async with client_of(service) as client:
                one = await client.post("/v1/completions", content=body, headers=headers)
                return [one, await client.post("/v1/completions", content=in_pieces(), headers=headers)]

        for answer in asyncio.run(work()):
            assert answer.status_code == 413 and "at most 1000 bytes" in answer.json()["error"]["message"]

    @pytest.mark.parametrize("token", [None, TOKEN])
    def test_a_large_head_is_refused(self, token: str | None) -> None:
        assert get("/health", headers={"X-Large": "a" * 32_000}).status_code == 200
        answer = get("/v1/models", token, headers={"X-Large": "a" * 33_000})
        error = answer.json()["error"]
        assert answer.status_code == 431 and "at most 32768 bytes" in error["message"]
        assert get(f"/health?{'a' * 33_000}").status_code == 431

    def test_too_many_requests_are_refused(self) -> None:
        async def work() -> list[int]:
            engine = ScriptedEngine()
            engine.held = True
            service = make_service(engine, Limits(max_requests=2))
            async with client_of(service) as client:
                post = partial(client.post, "/v1/completions", json={"prompt": "a"})
                waiting = [asyncio.ensure_future(post()) for _ in range(2)]
                while len(engine.running) < 2:
                    await asyncio.sleep(0)
                refused = await post()
                assert refused.headers["retry-after"] == "1"
                engine.held = False
                return [refused.status_code, *[(await one).status_code for one in waiting]]

        assert asyncio.run(work()) == [429, 200, 200]

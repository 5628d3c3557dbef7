"""What stands before the endpoints: tokens, hosts, sizes, types."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from specactor_ray.core.errors import InputError
from specactor_ray.serve.run import read_key
from specactor_ray.serve.service import Limits
from tests.fakes.scripted_queue import ScriptedQueue, make_service, on, post

TOKEN = "a-token-of-some-length"


def get(path: str, token: str | None = None, **headers: str) -> httpx.Response:
    answer: httpx.Response = on(make_service(ScriptedQueue()), lambda client: client.get(path, headers=headers), token)
    return answer


@pytest.mark.parametrize(
    ("header", "status"),
    [(f"Bearer {TOKEN}", 200), (f"bearer {TOKEN}", 200), ("Bearer wrong", 401), (TOKEN, 401), ("", 401)],
)
def test_a_token_is_asked_for(header: str, status: int) -> None:
    answer = get("/v1/models", TOKEN, Authorization=header)
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "authentication_error"


def test_everything_but_probes_asks_for_the_token() -> None:
    statuses = [get(path, TOKEN).status_code for path in ("/metrics", "/openapi.json", "/nowhere", "/tokenize")]
    assert statuses == [401] * 4 and get("/health", TOKEN).is_success


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example:80", "file://"])
def test_without_a_token_no_web_page_of_others_is_served(origin: str) -> None:
    """A browser sends it with a POST without a body, which needs no permission of the server."""
    statuses = [post("/resume", b"", headers={"Origin": one}).status_code for one in (origin, "http://localhost:3000")]
    assert statuses == [403, 200]


def test_without_a_token_only_names_of_this_machine_are_served() -> None:
    for host in ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]:80", "127.5.5.5"):
        assert get("/v1/models", Host=host).status_code == 200
    for host in ("evil.example", "10.0.0.1:8000", "localhost.evil.example", "0.0.0.0", ""):
        assert get("/v1/models", Host=host).status_code == 403
    assert get("/v1/models", TOKEN, Host="a.example", Authorization=f"Bearer {TOKEN}").is_success


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_no_body_of_another_type_is_read(kind: str) -> None:
    """Not ignored, either: the default of a field that was not read may end requests."""
    answer = post("/pause_generation", b'{"mode": "in_place"}', headers={"Content-Type": kind})
    assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]


class TestKey:
    def test_only_loopback_needs_none(self) -> None:
        assert [read_key(host, {}) for host in ("127.0.0.1", "localhost", "::1")] == [None] * 3
        for host in ("0.0.0.0", "::", "10.0.0.1", "a.example", ""):
            with pytest.raises(InputError, match="SPECACTOR_API_KEY"):
                read_key(host, {})

    def test_leaves_the_environment(self) -> None:
        environment = {"SPECACTOR_API_KEY": TOKEN}
        assert read_key("0.0.0.0", environment) == TOKEN and not environment

    @pytest.mark.parametrize("content", [f"{TOKEN}\n", "", "short", "a space in the middle", "ünïcödé-ünïcödé", None])
    def test_is_read_from_a_file(self, content: str | None, tmp_path: Path) -> None:
        path = tmp_path / "key"
        if content is not None:
            path.write_text(content)
        environment = {"SPECACTOR_API_KEY_PATH": str(path)}
        if content == f"{TOKEN}\n":
            assert read_key("0.0.0.0", environment) == TOKEN
        else:
            with pytest.raises(InputError, match="SPECACTOR_API_KEY"):
                read_key("127.0.0.1", environment)


def test_a_large_body_is_refused_with_and_without_its_length() -> None:
    body = json.dumps({"prompt": "a" * 2000}).encode()

    async def in_pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        headers = {"Content-Type": "application/json"}
        return [
            await client.post("/v1/completions", content=content, headers=headers) for content in (body, in_pieces())
        ]

    for answer in on(make_service(ScriptedQueue(), Limits(max_body_bytes=1000)), work):
        assert answer.status_code == 413 and "at most 1000 bytes" in answer.json()["error"]["message"]

"""`specactor serve`: a run with an HTTP server in front, from a configuration to the end of all processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from rich.console import Console

from specactor_ray.config import Config
from specactor_ray.core.console import say
from specactor_ray.core.errors import InputError
from specactor_ray.core.files import read_foreign
from specactor_ray.core.progress import start_phase
from specactor_ray.core.signals import (
    announce_interruption,
    ignore_signals,
    interruption,
    signals_deferred,
    sigterm_interrupts,
)
from specactor_ray.models.checkpoint_files import require_tokenizer
from specactor_ray.serve.app import is_loopback, make_app
from specactor_ray.serve.connections import KEEP_ALIVE_S, http_protocol
from specactor_ray.serve.service import Service
from specactor_ray.startup.machine import Machine
from specactor_ray.startup.resolve import resolve

if TYPE_CHECKING:
    from specactor_ray.rollout.rollout import Rollout

_LEAST_BACKLOG = 1024
_REPORT_TICKS = 100
"""Ticks of uvicorn, a tenth of a second each, between two reports of the traffic."""
_CUT_OFF_S = 5
"""Seconds for the answers of requests that are cut off at the end."""
_KEY, _KEY_PATH = "SPECACTOR_API_KEY", "SPECACTOR_API_KEY_PATH"
_SHORTEST_KEY = 16


class Server(uvicorn.Server):
    """uvicorn server that answers all requests at its end, including those that are cut off. `report` is called with
    lines for the user: every ten seconds while requests run, and when the end begins while some are open."""

    def __init__(self, config: uvicorn.Config, service: Service, report: Callable[[str], None]) -> None:
        super().__init__(config)
        self._service, self._report = service, report
        self._at, self._tokens, self._counted = time.monotonic(), 0, service.rollout.metrics()
        self.cut_off = 0
        """Number of requests that were open at the time limit."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        announce_interruption()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            connection.check(now)  # type: ignore[union-attr]
        is_due = counter % _REPORT_TICKS == _REPORT_TICKS - 1
        if is_due and (line := await asyncio.to_thread(self._traffic)):
            self._report(line)
        return await super().on_tick(counter)

    def _traffic(self) -> str:
        """The server's work since the previous report, in one line; empty if no request ran."""
        rollout, (running, waiting) = self._service.rollout, self._service.load
        since, self._at = self._at, time.monotonic()
        before, self._tokens = self._tokens, rollout.committed_tokens
        if not running + waiting and self._tokens == before:
            return ""
        counted, self._counted = self._counted, rollout.metrics()
        figures = self._counted.since(counted)
        steps = f"; {figures.acceptance_length:.2f} tokens a request and step" if figures.row_steps else ""
        drafts = f", {figures.acceptance_rate:.0%} of draft tokens right" if figures.drafted_tokens else ""
        speed = (self._tokens - before) / (self._at - since)
        return f"{running} running, {waiting} waiting; {speed:.1f} tokens/s{steps}{drafts}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain_s = self._service.limits.drain_s
        if count := len(self.server_state.tasks):
            self._report(f"waiting up to {drain_s:g} s for {count} request{'s' * (count > 1)}; Ctrl-C cuts them off")
        cutting = asyncio.get_running_loop().call_later(drain_s, self._cut_off)
        await super().shutdown(sockets)
        cutting.cancel()
        if self.force_exit and self.server_state.tasks:
            self._cut_off()
            await asyncio.wait(self.server_state.tasks, timeout=_CUT_OFF_S)

    def _cut_off(self) -> None:
        self.cut_off = max(self.cut_off, len(self.server_state.tasks))
        self._service.cut_off()


def serve(config: Config, host: str, port: int, model: str | None, console: Console) -> None:
    """Start a run and serve it until Ctrl-C or SIGTERM; running requests then get `Limits.drain_s` to end.

    `model` is the name under which the model is served, by default `target.model`; port 0 selects a free port.

    Raises:
        UserError: The name is empty, the server would be open without a token, the port is taken, or the configuration
            cannot be served.
        KeyboardInterrupt: Interrupted before the server was ready.
    """
    if model is not None and not model.strip():
        raise InputError("--model-name is empty; leave it out, or name the model")
    token = read_key(host)
    with listening_socket(host, port) as listener, sigterm_interrupts():
        name = config.target.model
        require_tokenizer(name)
        resolved = resolve(config, Machine.here())
        for line in (*resolved.choices, *resolved.notes):
            say(console, line)
        try:
            with start_phase("loading torch and Ray"), signals_deferred():
                from specactor_ray.rollout.rollout import Rollout  # takes seconds
            rollout = Rollout(resolved)
            try:
                _serve(rollout, listener, token, name if model is None else model, console)
            finally:
                with start_phase("ending the run", interval_s=2.0):
                    rollout.close()
        except KeyboardInterrupt as interrupt:
            say(console, f"{interruption(interrupt)}: ended before it was ready")
            raise


def server_of(service: Service, token: str | None = None, report: Callable[[str], None] = lambda line: None) -> Server:
    """Server of the application over HTTP. Its `run` takes the sockets; `report` as in `Server`."""
    limits = service.limits
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    options = uvicorn.Config(
        make_app(service, token),
        http=http_protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=max(limits.max_connections, _LEAST_BACKLOG),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(limits.drain_s) + _CUT_OFF_S,
    )
    return Server(options, service, report)


@contextlib.contextmanager
def serving(service: Service, token: str | None = None, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve in another thread of this process; gives the URL. The arguments are as in `server_of` and `serve`."""
    with listening_socket(host, port) as listener:
        server = server_of(service, token)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise InputError(f"the server on {host} cannot start; its reason is in the log")
            time.sleep(0.01)
        try:
            yield url_of(*listener.getsockname()[:2])
        finally:
            server.should_exit = True
            thread.join()


def _serve(rollout: Rollout, listener: socket.socket, token: str | None, model: str, console: Console) -> None:
    say(console, f"run {rollout.run_name}: Ray cluster at {rollout.address}")
    server = server_of(Service(rollout, model), token, functools.partial(say, console))
    url = url_of(*listener.getsockname()[:2])
    try:
        say(console, f"serving {model} at {url}; OpenAI clients: base_url={url}/v1")
        server.run(sockets=[listener])
    except KeyboardInterrupt as interrupt:  # raised after an orderly end
        ignore_signals()
        cut = server.cut_off
        requests = f"{cut} request{'s were' if cut > 1 else ' was'} cut off" if cut else "no request is open"
        say(console, f"{interruption(interrupt)}: {requests}")


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that takes the port before anything starts. Clients that connect wait until a server runs on it.
    InputError: the address does not exist on this machine, or the port is taken."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host}: {getattr(error, 'strerror', None) or error}") from None
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # "::" takes connections of IPv4, too
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else error
        raise InputError(f"--host {host} --port {port}: {problem}; choose another") from None


def url_of(host: str, port: int) -> str:
    """URL of a server at this address; a server on all addresses is reached by the machine's name."""
    if not host or host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def read_key(host: str, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """The required bearer token; None if there is none and only this machine can reach `host`.

    It comes from the environment or a file: other users of the machine can read a command line. It is removed from the
    environment, so that processes started later do not inherit it. InputError: the server would be open to other
    machines, or the token cannot be used."""
    path, key = environment.get(_KEY_PATH), environment.pop(_KEY, "").strip()
    if not key and path:
        try:
            key = read_foreign(path).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{_KEY_PATH} names {path}, which cannot be read: {error}") from None
        if not key:
            raise InputError(f"{_KEY_PATH} names {path}, which is empty")
    if not key:
        if is_loopback(host):
            return None
        raise InputError(
            f"--host {host}: other machines would reach the server, and it has no token. Fix: set {_KEY}, or "
            f"{_KEY_PATH} to a file with it; --host 127.0.0.1 needs none"
        )
    if len(key) < _SHORTEST_KEY or not key.isascii() or any(one.isspace() or not one.isprintable() for one in key):
        raise InputError(f"the token of {_KEY} or {_KEY_PATH} must be {_SHORTEST_KEY} or more visible ASCII characters")
    return key

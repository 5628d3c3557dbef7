"""`specactor status --watch` of a run in another process, in a terminal and without one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specactor_ray import Rollout, SamplingParams
from specactor_ray.config.load import from_mapping
from tests.tiny import tiny_draft, tiny_prompts, tiny_target
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 240.0
CLEAR_LINE = "\x1b[2K"
"""What rich redraws with."""


class Watcher:
    """The command, and what it has written so far. It is given the address and the token of the run's cluster: other
    clusters come and go beside these tests."""

    def __init__(self, in_terminal: bool, address: str) -> None:
        command = [sys.executable, "-m", "specactor_ray", "status", "--watch", "--every", "0.2", "--address", address]
        master, slave = os.openpty() if in_terminal else os.pipe()
        size = {"COLUMNS": "200", "LINES": "50", "TERM": "xterm"} if in_terminal else {}
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        repository = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=slave, env={**environment, **size, "PYTHONPATH": repository}
        )
        os.close(slave)
        self.text = ""
        self._reader = threading.Thread(target=self._read, args=(master,), daemon=True)
        self._reader.start()

    def _read(self, file: int) -> None:
        with contextlib.suppress(OSError):  # a terminal ends by an error
            while data := os.read(file, 65536):
                self.text += data.decode(errors="replace")
        os.close(file)

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.process.poll() is not None or self.text.count(text) >= times, text, LIMIT_S)
        assert self.process.poll() is None, self.text

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code


def test_the_status_is_redrawn_or_printed_again_until_the_run_ends() -> None:
    settings = {
        "mode": "decoupled",
        "run": {"name": "watched"},
        "target": {"model": str(tiny_target()), "max_batch": 4, "kv_cache_gb": 0.05},
        "drafters": [{"method": "draft_model", "model": str(tiny_draft()), "kv_cache_gb": 0.05}],
        "cluster": {"pin_cores": False, "num_cpus": 4, "health_interval_s": 600.0, "health_timeout_s": 1200.0},
    }
    watchers: list[Watcher] = []
    try:
        with Rollout(from_mapping(settings)) as rollout:
            watchers += [Watcher(shown, rollout.address) for shown in (True, False)]
            for watcher in watchers:
                watcher.wait_for("draft_model-0#", times=3)
            done = rollout.generate(tiny_prompts(4), SamplingParams(max_tokens=24))
            tokens = sum(len(one.token_ids) for one in done)
            for watcher in watchers:  # the controller asks for counters every ten minutes; the command asks the actors
                watcher.wait_for(f"{tokens:,} tokens")
            watchers[1].process.send_signal(signal.SIGINT)
            assert watchers[1].end() == 0
        assert watchers[0].end() == 0
    finally:
        for watcher in watchers:
            if watcher.process.poll() is None:
                watcher.process.kill()
    terminal, pipe = (watcher.text for watcher in watchers)
    assert "run watched has ended" in terminal
    assert CLEAR_LINE in terminal and "\x1b" not in pipe

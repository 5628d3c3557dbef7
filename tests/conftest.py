"""Fixtures for all tests. Tests never use the network: models come from the cache or are made here."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import pytest

from tests import tiny

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure, and a failure must come back: no deadline, and the same examples each run.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
hypothesis.settings.load_profile("project")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked workers would warn about it
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let actors starve beside other tests
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from threads that fight for two cores


@pytest.fixture(autouse=True)
def no_other_clusters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's Ray clusters, which other tests start and kill at any time, from tests without a cluster."""
    if "ray" not in request.keywords:
        monkeypatch.setenv("RAY_TMPDIR", "/tmp/specactor-without-clusters")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    """A trained Llama of 4 layers with tokenizer, chat template and end-of-sequence; see `tests/tiny.py`."""
    return tiny.tiny_target()


@pytest.fixture(scope="session")
def tiny_draft_model_dir() -> Path:
    """A smaller trained Llama with the same tokenizer, often right about what the other one says."""
    return tiny.tiny_draft()

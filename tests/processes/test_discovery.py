"""Which clusters of this machine `auto` may join, and where runs are looked for."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specactor_ray.cluster.connection import connect
from specactor_ray.cluster.discovery import PRIVATE_FOLDER, clusters_to_look_into, note_address, started_clusters
from specactor_ray.config.schema import ClusterConfig
from specactor_ray.core.errors import ClusterError
from specactor_ray.core.leftovers import make_owned_folder

OTHER_USER = 54321


@pytest.fixture
def raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Starts processes that look like Ray's, and returns their addresses."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started: list[subprocess.Popen] = []

    def start(port: int, note: bool = True, **options: Any) -> str:
        folder, address = tmp_path / str(port), f"127.0.0.1:{port}"
        folder.mkdir()
        if note:
            (folder / "ray_current_cluster").write_text(address)
        words = ["/ray/raylet", "-c", "echo up; read end", f"--temp_dir={folder}", f"--gcs-address={address}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(words, executable="/bin/sh", **pipes, **options))
        assert started[-1].stdout is not None and started[-1].stdout.readline() == b"up\n"
        return address

    yield start
    for process in started:
        process.communicate(b"\n")


def test_auto_joins_what_ray_start_made_and_nothing_else(raylet: Callable[..., str]) -> None:
    ours = raylet(11001)
    alone = raylet(11002, note=False)
    found = started_clusters()
    assert ours in found and alone not in found


def test_of_several_clusters_none_is_joined(raylet: Callable[..., str]) -> None:
    first, second = raylet(11001), raylet(11002)
    with pytest.raises(ClusterError, match=r"clusters run on this machine: .*Fix: give the address") as caught:
        connect(ClusterConfig(address="auto"))
    assert first in str(caught.value) and second in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of another user")
def test_what_another_user_offers_is_not_joined(raylet: Callable[..., str]) -> None:
    assert raylet(11003, user=OTHER_USER) not in started_clusters()


def test_private_clusters_are_looked_into_and_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = make_owned_folder(PRIVATE_FOLDER, tmp_path)
    note_address(folder, "127.0.0.1:11004")
    assert "127.0.0.1:11004" in clusters_to_look_into()
    assert "127.0.0.1:11004" not in started_clusters()

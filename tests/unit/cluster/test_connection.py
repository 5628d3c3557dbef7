"""Where the files of a private cluster are."""

from __future__ import annotations

import tempfile

import pytest

from specactor_ray.cluster.connection import _base_folder


@pytest.mark.parametrize(
    ("folder", "base"),
    [
        ("/mnt/t", "/mnt/t"),
        ("/tmp/\u00e9t\u00e9", "/tmp"),
        ("/tmp/a b", "/tmp"),
        ("/mnt/caf\udce9", "/tmp"),
        ("/" + "t" * 60, "/tmp"),
    ],
)
def test_folders_that_ray_cannot_use_are_avoided(folder: str, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", folder)
    assert _base_folder() == base

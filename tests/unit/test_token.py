"""The user's saved Ray token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specactor_ray.cluster.token import send_saved_token


@pytest.mark.parametrize(
    ("saved", "chosen", "expected"), [(True, None, "token"), (False, None, None), (True, "disabled", "disabled")]
)
def test_a_saved_token_is_used_unless_the_user_chose_a_mode(
    saved: bool, chosen: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "x")  # so that it is restored in any case
    monkeypatch.delenv("RAY_AUTH_MODE")
    if chosen:
        monkeypatch.setenv("RAY_AUTH_MODE", chosen)
    if saved:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    send_saved_token()
    assert os.environ.get("RAY_AUTH_MODE") == expected

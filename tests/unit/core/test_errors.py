"""Errors: what their messages show, and what they hold back."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor_ray.core.errors import ClusterError, ConfigError, InputError, ModelLoadError, clipped, redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ray://user:secret@host:10001", "ray://***@host:10001"),
        ("https://secret@host/x and http://a:secret@b", "https://***@host/x and http://***@b"),
        (str(Path("http://u:secret@host/x.jsonl")), "http:/***@host/x.jsonl"),
        ("http://host/org/model@main", "http://host/org/model@main"),
        ("org/model@9f2c1a7: not there", "org/model@9f2c1a7: not there"),
    ],
)
def test_names_and_passwords_in_urls_are_not_shown(text: str, shown: str) -> None:
    assert redacted(text) == shown and clipped(text) == repr(shown)
    for error in (ClusterError(text), InputError(text), ModelLoadError(text), ConfigError("key", text)):
        assert shown in str(error) and "secret" not in str(error)


def test_a_password_is_replaced_before_a_value_is_cut() -> None:
    assert clipped(f"http://user:{'secret' * 100}@host") == "'http://***@host'"

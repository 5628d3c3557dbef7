"""What is uploaded with a job, and what is not."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ray._private.runtime_env.packaging import create_package
from rich.console import Console

from specactor_ray.cluster.submission import read_runtime_env, submit
from specactor_ray.core.errors import InputError

SECRETS = (
    *(".env", ".env.local", "prod.env", ".netrc", ".pypirc", ".git-credentials", "server.pem", "deploy.key"),
    *("id_rsa", "id_ed25519", ".ssh/config", ".aws/credentials", ".huggingface/token", ".cache/huggingface/token"),
    *("app/.env", "app/certificates/ca.pem", ".kube/config", ".docker/config.json", ".ray/auth_token"),
)
WANTED = ("rewards.py", "conf/train.yaml", "environment.yaml", "keys.py", "data/tasks.jsonl")


def uploaded(folder: Path, environment: dict) -> set[str]:
    package = folder.with_suffix(".zip")
    create_package(str(folder), package, excludes=environment["excludes"], include_gitignore=False)
    with zipfile.ZipFile(package) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in (*SECRETS, *WANTED):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return folder


@pytest.mark.parametrize(
    ("given", "cluster", "variable", "expected"),
    [
        ("http://127.0.0.1:1", "10.0.0.5:6379", "http://10.0.0.6:8265", "http://127.0.0.1:1"),
        (None, "10.0.0.5:6379", "http://10.0.0.6:8265", "http://10.0.0.6:8265"),
        (None, "http://10.0.0.5:1", "", "http://10.0.0.5:1"),
        (None, "10.0.0.5:6379", "", "http://10.0.0.5:8265"),
        (None, "auto", "", "http://127.0.0.1:8265"),
    ],
)
def test_the_given_address_takes_precedence(
    given: str | None, cluster: str, variable: str, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's client prefers its own variable to the address that it is given."""
    used: list[tuple[str, str]] = []

    def client(address: str) -> Any:
        used.append((address, os.environ["RAY_API_SERVER_ADDRESS"]))
        return Mock(submit_job=lambda **_: "job1")

    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", variable)
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", client)
    console = Console(file=io.StringIO(), width=200)
    assert submit("train", [], given, None, False, console) == 0
    assert used == [(expected, expected)]
    assert f"RAY_API_SERVER_ADDRESS={expected} ray job stop job1" in console.file.getvalue()  # type: ignore[attr-defined]


def test_secrets_are_not_uploaded(folder: Path) -> None:
    assert uploaded(folder, read_runtime_env(None)) == set(WANTED)


def test_own_excludes_come_on_top(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "env.yaml"
    own.write_text("excludes: [data, '!app/certificates/ca.pem']\n")
    wanted = {*WANTED, "app/certificates/ca.pem"} - {"data/tasks.jsonl"}
    assert uploaded(folder, read_runtime_env(own)) == wanted


@pytest.mark.parametrize(
    "text", ["excludes: data", "env_vars: [A]", "a: [b\nc: : d", "a: " + "[" * 500 + "]" * 500, "- a"]
)
def test_malformed_environments(tmp_path: Path, text: str) -> None:
    path = tmp_path / "env.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"--runtime-env: .*\Z"):
        read_runtime_env(path)
    with pytest.raises(InputError, match=r"none.yaml cannot be read \(No such file or directory\); name a YAML file"):
        read_runtime_env(tmp_path / "none.yaml")

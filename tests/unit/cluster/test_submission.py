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

from specactor_ray.cluster.submission import read_runtime_env, submit, upload_line
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    folder = tmp_path / "project"
    for name in (*SECRETS, *WANTED):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    monkeypatch.chdir(folder)
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


def test_an_upload_is_counted_and_refused_before_it_begins(folder: Path, tmp_path: Path) -> None:
    """Of the files that Ray packs; weights are left out, but for those that are named."""
    for name, size in (("trl-run/checkpoint-3/optimizer.pt", 5 << 20), ("model/model.safetensors", 3 << 20)):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x" * size)
    (folder / "data" / "log.txt").write_bytes(b"x" * (2 << 20))
    environment = read_runtime_env(None)
    assert uploaded(folder, environment) == {*WANTED, "data/log.txt"}
    line = upload_line(environment)
    assert f"uploading 6 files of {folder} with 2.0 MiB (most: data 2.0 MiB, " in line
    assert "; 2 files of weights with 8.0 MiB are left out" in line
    own = tmp_path / "env.yaml"
    own.write_text("excludes: ['!model/model.safetensors']\n")
    assert "uploading 7 files of" in upload_line(read_runtime_env(own))
    with (folder / "data" / "log.txt").open("ab") as file:
        file.truncate(100 << 20)  # holds no blocks
    with pytest.raises(InputError, match=r"with 100\.0 MiB .*Ray accepts 100\.0 MiB\. Fix: `excludes: \[data\]` in"):
        upload_line(environment)


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

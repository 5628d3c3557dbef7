"""What is uploaded with a job, and what is not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import create_package

from specactor_ray.errors import InputError
from specactor_ray.submission import read_runtime_env

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


def test_secrets_are_not_uploaded(folder: Path) -> None:
    assert uploaded(folder, read_runtime_env(None)) == set(WANTED)


def test_own_excludes_come_on_top(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "env.yaml"
    own.write_text("excludes: [data, '!app/certificates/ca.pem']\n")
    wanted = {*WANTED, "app/certificates/ca.pem"} - {"data/tasks.jsonl"}
    assert uploaded(folder, read_runtime_env(own)) == wanted


@pytest.mark.parametrize("text", ["excludes: data", "env_vars: [A]", "pip: " + "[" * 3000 + "]" * 3000, "- a"])
def test_malformed_environments(tmp_path: Path, text: str) -> None:
    path = tmp_path / "env.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match="--runtime-env"):
        read_runtime_env(path)

"""What `ray job submit` uploads of a folder with `conf/runtime_env.yaml`, and what not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import yaml
from ray._private.runtime_env.packaging import create_package

REPOSITORY = Path(__file__).parents[3]
EXCLUDES = yaml.safe_load((REPOSITORY / "conf" / "runtime_env.yaml").read_text())["excludes"]
LEFT_OUT = (
    *(".env", ".env.local", "prod.env", ".netrc", ".pypirc", ".git-credentials", "server.pem", "deploy.key"),
    *("id_rsa", "id_ed25519", ".ssh/config", ".aws/credentials", ".huggingface/token", ".cache/huggingface/token"),
    *("app/.env", "app/certificates/ca.pem", ".kube/config", ".docker/config.json", ".ray/auth_token"),
    *(".git/HEAD", ".venv/bin/python", "runs/a/trajectories.jsonl", "mine/trajectories.jsonl.partial"),
    *("mine/checkpoints/step-1/manifest.json", "trl/checkpoint-3/optimizer.pt", "model/model.safetensors"),
)
WANTED = ("rewards.py", "conf/train.yaml", "environment.yaml", "keys.py", "data/tasks.jsonl", "mine/runs/train.py")


def test_checkpoints_runs_and_secrets_stay_here(tmp_path: Path) -> None:
    folder, package = tmp_path / "project", tmp_path / "project.zip"
    for name in (*LEFT_OUT, *WANTED):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    for more, wanted in (([], {*WANTED}), (["!model/model.safetensors"], {*WANTED, "model/model.safetensors"})):
        create_package(str(folder), package, excludes=[*EXCLUDES, *more], include_gitignore=True)
        with zipfile.ZipFile(package) as archive:
            assert {name for name in archive.namelist() if not name.endswith("/")} == wanted
        package.unlink()


def test_all_modules_of_a_checkout_are_uploaded(tmp_path: Path) -> None:
    package = tmp_path / "package.zip"
    create_package(str(REPOSITORY), package, excludes=EXCLUDES, include_gitignore=True)
    with zipfile.ZipFile(package) as archive:
        uploaded = {name for name in archive.namelist() if name.endswith(".py")}
    modules = (path for folder in ("specactor_ray", "jobs", "tests") for path in (REPOSITORY / folder).rglob("*.py"))
    assert {str(path.relative_to(REPOSITORY)) for path in modules} <= uploaded

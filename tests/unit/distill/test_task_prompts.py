"""Task prompts: the same for the same arguments, all different, and never in both splits."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specactor_ray.rollout.prompts import read_prompts

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "scripts" / "make_task_prompts.py"
KINDS = ("arithmetic", "editing", "chat")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_many_different_and_the_same_again(script: dict[str, Any], kind: str) -> None:
    if kind == "arithmetic":
        pytest.importorskip("reasoning_gym")
    make = script["make_prompts"]
    prompts = make(kind, 600, 3, "train")
    assert len(set(prompts)) == 600
    assert make(kind, 600, 3, "train") == prompts
    assert make(kind, 600, 4, "train") != prompts


@pytest.mark.parametrize("kind", KINDS)
def test_no_prompt_is_in_both_splits_whatever_the_seeds(script: dict[str, Any], kind: str) -> None:
    if kind == "arithmetic":
        pytest.importorskip("reasoning_gym")
    make = script["make_prompts"]
    train = {prompt for seed in (0, 1) for prompt in make(kind, 500, seed, "train")}
    heldout = {prompt for seed in (0, 1, 2) for prompt in make(kind, 100, seed, "heldout")}
    assert train and heldout and not train & heldout
    if kind == "arithmetic":  # nor the same problem with another request behind it
        problems = [{prompt.rpartition("\n\n")[0] for prompt in split} for split in (train, heldout)]
        assert not problems[0] & problems[1]


@pytest.mark.parametrize("kind", KINDS)
def test_committed_files_are_what_the_script_makes(script: dict[str, Any], kind: str) -> None:
    if kind == "arithmetic":
        pytest.importorskip("reasoning_gym")
    found = read_prompts(REPOSITORY / "conf" / "prompts" / f"{kind}.jsonl")
    assert found == script["make_prompts"](kind, 16, 0, "heldout")


def test_the_command_mixes_kinds_and_names_mistakes() -> None:
    def run(*arguments: str) -> Any:
        return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)

    done = run("--kind", "chat,editing", "--count", "5")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 5
    for arguments, problem in (
        (("--kind", "poetry"), "'poetry' must be different kinds"),
        (("--count", "0"), "0 is too small"),
        (("--kind", "chat", "--count", "5000"), "there are only"),
    ):
        done = run(*arguments)
        assert done.returncode != 0 and problem in done.stderr and not done.stdout

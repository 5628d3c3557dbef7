"""Every Python block of docs/api.md and README.md runs as printed, all in one process, with the tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tiny import tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).parents[2]
BEFORE = """import ray
ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="specactor", log_to_driver=False)
"""


def test_the_blocks_run(tmp_path: Path) -> None:
    pages = [(REPOSITORY / name).read_text(encoding="utf-8") for name in ("docs/api.md", "README.md")]
    blocks = re.findall(r"```python\n(.*?)```", "".join(pages), re.DOTALL)
    scripts = [block for block in blocks if not block.startswith("# my_")]
    assert len(scripts) >= 7
    for block in blocks:
        if block.startswith("# my_"):  # a module of the reader's, named in its first line
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    settings = yaml.safe_load((REPOSITORY / "conf" / "local_cpu.yaml").read_text(encoding="utf-8"))
    settings["target"] |= {"model": str(tiny_target()), "kv_cache_gb": 0.05, "max_model_len": 256}
    settings["cluster"] = {"pin_cores": False}
    settings["speculation"]["verify"] = "all"  # drafts are verified at any cost
    (tmp_path / "local_cpu").write_text(yaml.safe_dump(settings))  # what is there comes before what is shipped
    (tmp_path / "page.py").write_text("\n".join([BEFORE, *scripts]))
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    drafted = [int(line) for line in done.stdout.splitlines() if line.isdecimal()]
    assert drafted and drafted[0] > 0, done.stdout

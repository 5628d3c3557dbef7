"""Every Python block of docs/api.md, README.md and docs/trainers.md runs as printed, all in one process, with the tiny
model, where only what `.[rl,trl,serve]` brings can be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.extras import HIDES, hidden_beside
from tests.tiny import tiny_target

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).parents[2]
BEFORE = """import contextlib, ray
from specactor_ray import Rollout
ray.init(address="local", num_cpus=6, include_dashboard=False, namespace="specactor", log_to_driver=False)
start, one = Rollout.from_config, Rollout.from_config("local_cpu")
Rollout.from_config = lambda *given: contextlib.nullcontext(one) if given == ("local_cpu",) else start(*given)
"""
"""Blocks that start the same rollout use one."""
SERVES = """from specactor_ray.serve.run import serving
from specactor_ray.serve.service import Service
with Rollout.from_config("local_cpu") as served, serving(Service(served, "tiny")) as url:
"""
URL = '"http://127.0.0.1:8000"'


def test_the_blocks_run(tmp_path: Path) -> None:
    pages = [
        (REPOSITORY / name).read_text(encoding="utf-8") for name in ("docs/api.md", "README.md", "docs/trainers.md")
    ]
    blocks = re.findall(r"```python\n(.*?)```", "".join(pages), re.DOTALL)
    scripts = [block for block in blocks if not block.startswith("# my_") and URL not in block]
    asking = "".join(block for block in blocks if URL in block)
    for printed, here in (
        ('builtin_dir("smollm2-135m")', f'"{tiny_target()}"'),
        ("/shared/step-7", str(tiny_target())),
        (URL, "url"),
    ):
        assert printed in asking
        asking = asking.replace(printed, here)
    assert len(scripts) >= 7
    for block in blocks:
        if block.startswith("# my_"):  # a module of the reader's, named in its first line
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    settings = yaml.safe_load((REPOSITORY / "conf" / "local_cpu.yaml").read_text(encoding="utf-8"))
    settings["target"] |= {"model": str(tiny_target()), "kv_cache_gb": 0.05, "max_model_len": 256}
    settings["cluster"] = {"pin_cores": False}
    settings["speculation"]["verify"] = "all"  # drafts are verified at any cost
    (tmp_path / "local_cpu").write_text(yaml.safe_dump(settings))  # what is there comes before what is shipped
    page = [BEFORE, *scripts, SERVES, textwrap.indent(asking, "    "), "one.close()"]
    (tmp_path / "page.py").write_text("\n".join(page))
    (tmp_path / "hides").mkdir()
    hidden = hidden_beside("rl", "trl", "serve")
    assert {"openai", "pytest"} <= hidden
    (tmp_path / "hides" / "sitecustomize.py").write_text(HIDES.replace("{names}", repr(hidden)))
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'hides'}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    drafted = [int(line) for line in done.stdout.splitlines() if line.isdecimal()]
    assert drafted and drafted[0] > 0, done.stdout

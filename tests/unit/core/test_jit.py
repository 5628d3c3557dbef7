"""Several processes that compile kernels at the same time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specactor_ray.core import jit

REPO = Path(__file__).parents[3]
KERNEL = """
from specactor_ray.core.jit import kernel

@kernel()
def kind(value):
    return value / 4
"""
COMPILE = """
import sys, time
import numpy as np
from numba.core.caching import IndexDataCacheFile
save = IndexDataCacheFile._save_index
def slowly(*arguments):  # as on a slow disk
    time.sleep(0.5)
    save(*arguments)
IndexDataCacheFile._save_index = slowly
import one_kernel
print("ready", flush=True)
sys.stdin.readline()
one_kernel.kind(np.dtype(sys.argv[1]).type(10))
print(sum(one_kernel.kind.stats.cache_misses.values()))
"""
CALL = """
import numpy as np, one_kernel
print([float(one_kernel.kind(np.dtype(kind).type(10))) for kind in ("int64", "float64")])
print(sum(one_kernel.kind.stats.cache_hits.values()))
"""


def python(source: str, folder: Path, *arguments: str, **env: str) -> subprocess.Popen:
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), **env, "PYTHONPATH": f"{folder}:{REPO}"}
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)


def output_of(source: str, folder: Path, **env: str) -> str:
    return python(source, folder, **env).communicate(timeout=240)[0]


def test_processes_that_compile_at_once_share_one_cache_and_compile_each_code_once(tmp_path: Path) -> None:
    (tmp_path / "one_kernel.py").write_text(KERNEL)
    compiling = [python(COMPILE, tmp_path, kind) for kind in ("int64", "int64", "float64")]
    for process in compiling:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in compiling:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=240)[0] for process in compiling]
    assert sum(map(int, outputs)) == 2
    assert output_of(CALL, tmp_path) == "[2.5, 2.5]\n2\n"


def test_code_is_stale_where_a_source_has_changed(tmp_path: Path) -> None:
    (tmp_path / "one_kernel.py").write_text(
        "import parts\nfrom specactor_ray.core.jit import kernel\n"
        "@kernel(sources=[parts])\ndef value():\n    return parts.VALUE\n"
    )
    for value in ("1", "2.5"):
        (tmp_path / "parts.py").write_text(f"VALUE = {value}\n")
        assert output_of("import one_kernel; print(one_kernel.value())", tmp_path) == f"{value}\n"


def test_another_copy_of_the_source_finds_what_was_compiled(tmp_path: Path) -> None:
    """As a clone has it, or what a Ray job uploads: other files, of another time."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one_kernel.py").write_text(KERNEL)
        os.utime(tmp_path / name / "one_kernel.py", (hash(name) % 10**9, 0))
    command = "import one_kernel; one_kernel.kind(1.0); print(sum(one_kernel.kind.stats.cache_hits.values()))"
    shared = {"NUMBA_CACHE_DIR": "", "SPECACTOR_CACHE": str(tmp_path / "cache")}
    assert [output_of(command, tmp_path / name, **shared) for name in ("first", "second")] == ["0\n", "1\n"]


def test_a_machine_is_cold_until_a_kernel_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_caches", set[Path]())
    monkeypatch.setattr(jit, "_root", lambda: tmp_path)

    @jit.kernel()
    def one(number: int) -> int:
        return number + 1

    assert jit.is_cold() and one(1) == 2 and not jit.is_cold()


def test_a_cache_that_cannot_be_written_is_in_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("SPECACTOR_CACHE", f"{tmp_path / 'file'}/cache")
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path))
    assert tmp_path in jit._root.__wrapped__().parents

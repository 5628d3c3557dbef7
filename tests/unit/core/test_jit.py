"""Several processes that compile kernels at the same time."""

import os
import subprocess
import sys
from pathlib import Path

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
kinds = ("int64", "float64", "float32", "complex128")
print([complex(one_kernel.kind(np.dtype(kind).type(10))) for kind in kinds])
print(sum(one_kernel.kind.stats.cache_hits.values()))
"""


def python(source: str, folder: Path, *arguments: str) -> subprocess.Popen:
    variables = {**os.environ, "PYTHONPATH": f"{folder}:{REPO}", "NUMBA_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)


def compile_at_once(folder: Path, *kinds: str) -> int:
    """Let a process for each kind call the kernel at the same time. Returns how many of them have compiled it."""
    (folder / "one_kernel.py").write_text(KERNEL)
    compiling = [python(COMPILE, folder, kind) for kind in kinds]
    for process in compiling:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in compiling:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=200)[0] for process in compiling]
    assert not any(process.returncode for process in compiling)
    return sum(map(int, outputs))


def test_processes_that_compile_at_once_share_one_cache(tmp_path: Path) -> None:
    assert compile_at_once(tmp_path, "int64", "float64", "float32", "complex128") == 4
    output = python(CALL, tmp_path).communicate(timeout=200)[0]
    assert output == f"{[2.5 + 0j] * 4}\n4\n"


def test_one_of_the_processes_that_need_the_same_code_compiles_it(tmp_path: Path) -> None:
    assert compile_at_once(tmp_path, "int64", "int64", "int64") == 1


def test_code_is_stale_where_a_source_has_changed(tmp_path: Path) -> None:
    (tmp_path / "one_kernel.py").write_text(
        "import parts\nfrom specactor_ray.core.jit import kernel\n"
        "@kernel(sources=[parts])\ndef value():\n    return parts.VALUE\n"
    )
    for value in ("1", "2.5"):
        (tmp_path / "parts.py").write_text(f"VALUE = {value}\n")
        process = python("import one_kernel; print(one_kernel.value())", tmp_path)
        assert process.communicate(timeout=200)[0] == f"{value}\n"


def test_another_copy_of_the_source_finds_what_was_compiled(tmp_path: Path) -> None:
    """As a clone has it, or what a Ray job uploads: other files, of another time."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one_kernel.py").write_text(KERNEL)
        os.utime(tmp_path / name / "one_kernel.py", (hash(name) % 10**9, 0))
    command = "import one_kernel; one_kernel.kind(1.0); print(sum(one_kernel.kind.stats.cache_hits.values()))"
    hits = []
    for name in ("first", "second"):
        variables = {"PYTHONPATH": f"{tmp_path / name}:{REPO}", "SPECACTOR_CACHE": str(tmp_path / "cache")}
        environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"} | variables
        hits.append(subprocess.check_output([sys.executable, "-c", command], env=environment, text=True))
    assert hits == ["0\n", "1\n"]


def test_a_cache_that_cannot_be_written_is_in_the_folder_for_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "one_kernel.py").write_text(KERNEL)
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    variables = {"PYTHONPATH": f"{tmp_path}:{REPO}", "SPECACTOR_CACHE": f"{tmp_path / 'file'}/cache"}
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"} | variables
    environment["TMPDIR"] = str(tmp_path / "temporary")
    command = "import one_kernel; print(one_kernel.kind(1.0))"
    assert subprocess.check_output([sys.executable, "-c", command], env=environment, text=True) == "0.25\n"
    assert list((tmp_path / "temporary").rglob("*.nbi"))

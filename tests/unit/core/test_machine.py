"""GPUs of this machine, by one question to the driver; their kind is named without Ray as Ray names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from specactor_ray.core import machine
from specactor_ray.core.machine import accelerator_type

NAMES = """NVIDIA H100 80GB HBM3;NVIDIA H200;NVIDIA B200;NVIDIA GH200 480GB;NVIDIA A100-SXM4-40GB;NVIDIA A100 80GB PCIe;
Tesla V100-SXM2-16GB;Tesla T4;NVIDIA L4;NVIDIA L40S;NVIDIA A10G;NVIDIA H20;NVIDIA RTX A6000;Quadro RTX 6000;
NVIDIA RTX PRO 6000 Blackwell Server Edition;NVIDIA GeForce RTX 5090;NVIDIA TITAN V;Tesla K80;Tesla P100-PCIE-16GB"""


@pytest.mark.parametrize("name", [name.strip() for name in NAMES.split(";")])
def test_a_kind_has_the_name_that_ray_gives_to_its_nodes(name: str) -> None:
    assert accelerator_type(name) == NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(name)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes a driver that answers with these lines."""

    def make(lines: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho asked >> {tmp_path}/log\nprintf '{lines}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        machine._gpus.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    yield make
    machine._gpus.cache_clear()


def test_the_driver_is_asked_once(driver: Callable[[str], None], tmp_path: Path) -> None:
    driver(r"81559, NVIDIA H100 80GB HBM3\n")
    assert machine.gpu_memories() == [81559 << 20] and machine.gpu_kind() == "H100"
    assert (tmp_path / "log").read_text() == "asked\n"


def test_a_gpu_without_memory_of_its_own_counts(driver: Callable[[str], None]) -> None:
    driver(r"Unable to determine the device handle for GPU0000:0A:00.0: Unknown Error\n[N/A], NVIDIA GB10\n")
    assert machine.count_gpus() == 1 and machine.gpu_memories()[0] > 1 << 30 and machine.gpu_kind() == "GB10"


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("0,1", 2), ("1", 1), ("", 0), ("-1", 0), ("0,-1", 1), ("-1,0", 0), ("NoDevFiles", 0), ("GPU-8a", 1)],
)
def test_hidden_gpus_do_not_count(
    driver: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    driver(r"81559, NVIDIA H100\n81559, NVIDIA H100\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.count_gpus() == count


@pytest.mark.parametrize(("limit", "expected"), [("64", (64.0, 2.0)), ("max", (float("inf"), 0.0))])
def test_cached_files_of_a_container_are_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: tuple[float, float]
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    files = {"memory.max": limit, "memory.current": "62", "memory.stat": "anon 2\nactive_file 20\ninactive_file 40"}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert machine.memory_limit() == expected

"""GPUs of this machine, by one question to the driver; their kind is named without Ray as Ray names it."""

from __future__ import annotations

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


def test_the_driver_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/log\necho '81559, NVIDIA H100 80GB HBM3'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    machine._gpus.cache_clear()
    try:
        assert machine.gpu_memories() == [81559 << 20] and machine.gpu_kind() == "H100"
        assert (tmp_path / "log").read_text() == "asked\n"
    finally:
        machine._gpus.cache_clear()

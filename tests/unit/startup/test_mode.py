"""`mode: auto`: what it comes to on which devices, and that every command resolves it before anything starts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from specactor_ray.config import Config, load_config
from specactor_ray.config.rules import validate
from specactor_ray.config.schema import ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.simulation.scenario import load_scenario
from specactor_ray.startup import machine
from specactor_ray.startup.machine import Devices, Machine
from specactor_ray.startup.mode import settle

LOOKUP = "drafters=[{method: ngram, dtype: float32}]"
MODEL = "{method: draft_model, model: m, gpus: 1}"
ON_A_CORE = "drafters=[{method: draft_model, model: m}]"
TWO_RANKS = ("target.backend=vllm", "target.tensor_parallel=2")
UNLIKE = Devices(64, 3, {"H100": 2, "L4": 1})
ON_H100 = ("target.gpus=1", "target.replicas=2", "target.accelerator=H100")


HERE = Machine(2)


def resolved(devices: Devices | None, *overrides: str) -> tuple[Config, str]:
    """What `auto` comes to, and the line of the mode; the configuration it came from is not changed."""
    config = load_config(None, [*overrides, *([] if devices else ["cluster.address=auto"])])
    before = copy.deepcopy(config)
    result, lines = settle(config, HERE, devices)
    assert config == before and lines[1:] == [f"target.dtype: {result.target.dtype}"] and "\n" not in lines[0]
    validate(result)
    assert settle(result, HERE, devices) == (result, [])
    return result, lines[0]


@pytest.mark.parametrize(
    ("devices", "overrides", "mode", "reason"),
    [
        (Devices(2, 0), [], "coupled", "on CPUs"),
        (None, [], "coupled", "on CPUs"),
        (Devices(2, 0), ["drafters=[{method: 'mine:Proposer'}, {method: ngram, replicas: 0}]"], "coupled", "on CPUs"),
        (Devices(2, 0), ["drafters=[{method: ngram, replicas: 0}]"], "coupled", "on CPUs"),
        (Devices(2, 0), [ON_A_CORE, "drafters.0.replicas=0"], "decoupled", "specactor scale"),
        (Devices(2, 0), [LOOKUP, "drafters.0.hosted=false"], "decoupled", "drafters.0.hosted is false"),
        (Devices(8, 1), [f"drafters=[{{method: ngram}}, {MODEL}]"], "decoupled", "drafters.1.gpus"),
        (Devices(8, 2), ["target.gpus=1", f"drafters=[{MODEL}]"], "decoupled", "there is room"),
        (Devices(8, 1), ["target.gpus=1", f"drafters=[{MODEL}]"], "coupled", "2 GPU(s) and 6 core(s) in all"),
        (None, ["target.gpus=1", f"drafters=[{MODEL}]"], "decoupled", "devices of their own"),
        (Devices(8, 2), ["target.gpus=1", ON_A_CORE], "decoupled", "the verifiers), drafters.0.gpus=1"),
        (Devices(8, 1), ["target.gpus=1", ON_A_CORE], "coupled", "no GPU for drafters.0"),
        (Devices(8, 2), ["target.gpus=1", "trainer.gpus=1", ON_A_CORE], "coupled", "no GPU for drafters.0"),
        (None, ["target.gpus=1", ON_A_CORE], "coupled", "no GPU for drafters.0"),
        (Devices(8, 0), [ON_A_CORE], "coupled", "on CPUs"),
        (Devices(64, 8), ["target.gpus=1"], "coupled", "verifiers host all drafters"),
        (Devices(2, 2), ["target.gpus=1", "trainer.gpus=1", f"drafters=[{MODEL}]"], "coupled", "3 GPU(s)"),
        (UNLIKE, [*ON_H100, f"drafters=[{MODEL}]", "drafters.0.accelerator=L4"], "decoupled", "there is room"),
        (UNLIKE, [*ON_H100, f"drafters=[{MODEL}]"], "decoupled", "there is room"),
        (
            UNLIKE,
            [*ON_H100, f"drafters=[{MODEL}]", "drafters.0.accelerator='!L4'"],
            "coupled",
            "3 GPU(s) of H100 and !L4",
        ),
        (UNLIKE, [*ON_H100, f"drafters=[{MODEL}]", "drafters.0.accelerator=T4"], "coupled", "and there are 0"),
        (
            UNLIKE,
            [*ON_H100, "trainer.gpus=1", "trainer.accelerator=L4", f"drafters=[{MODEL}]", "drafters.0.accelerator=L4"],
            "coupled",
            "2 GPU(s) of L4 in all, and there are 1",
        ),
        (
            Devices(3, 2),
            ["target.gpus=1", "trainer.ranks=2", "trainer.cores=1", f"drafters=[{MODEL}]"],
            "coupled",
            "4 co",
        ),
    ],
)
def test_the_mode_and_its_reason(devices: Devices | None, overrides: list[str], mode: str, reason: str) -> None:
    config, line = resolved(devices, *overrides)
    assert config.mode is ModeName(mode)
    assert line.startswith(f"mode: {mode} (") and reason in line


@pytest.mark.parametrize(
    ("cores", "overrides", "each"),
    [
        (2, [], 2),
        (1, [], 1),
        (None, [], 1),
        (8, ["drafters=[{method: ngram, replicas: 3}, {method: suffix, cores: 2}]"], 6),
        (4, ["drafters=[{method: ngram, replicas: 3}, {method: suffix, cores: 2}]"], 4),
        (8, ["drafters=[{method: ngram, cores: 0.5}, {method: suffix, cores: 0.5}]"], 2),
        (8, ["target.replicas=2", "drafters=[{method: ngram, replicas: 5}]"], 3),
        (5, ["target.replicas=2", "drafters=[{method: ngram, replicas: 4}]"], 2),
        (3, ["trainer.cores=1", "drafters=[{method: ngram, replicas: 2}]"], 2),
        (8, ["target.cores=2", *TWO_RANKS, "drafters=[{method: ngram, replicas: 3}]"], 4),
        (8, ["target.cores=2", *TWO_RANKS, "drafters=[{method: ngram}]"], 2),
    ],
)
def test_verifiers_on_cpus_get_the_cores_of_the_draft_actors(
    cores: int | None, overrides: list[str], each: int
) -> None:
    before = load_config(None, overrides).target.cores
    config, line = resolved(None if cores is None else Devices(cores, 0), *overrides)
    assert config.target.cores == each
    assert (f", target.cores={each}" in line) is (each != before)


@pytest.mark.parametrize("mode", ["plain", "coupled", "decoupled"])
def test_an_explicit_mode_stays_what_it_is(mode: str) -> None:
    for overrides in ([LOOKUP], [LOOKUP, "target.gpus=1"]):
        config = load_config(None, [f"mode={mode}", "target.dtype=float32", "target.cores=2", *overrides])
        for devices in (None, Devices(1, 0), Devices(64, 8)):
            settled, lines = settle(config, HERE, devices)
            assert not lines and (settled.mode, settled.target) == (config.mode, config.target)
        assert settle(settled, HERE, mode=ModeName.decoupled) == (settled, [])


def test_a_draft_model_in_half_precision_goes_where_a_gpu_is_and_is_refused_elsewhere() -> None:
    half = "drafters=[{method: draft_model, model: m, dtype: float16}]"
    assert resolved(Devices(1, 1), "target.gpus=1", half)[0].mode is ModeName.coupled
    config, _ = resolved(Devices(8, 8), "target.gpus=1", half)
    assert config.mode is ModeName.decoupled and config.drafters[0].gpus == 1
    with pytest.raises(ConfigError) as caught:
        resolved(Devices(8, 8), "target.gpus=1", half, "drafters.0.replicas=0")
    assert caught.value.key == "drafters.0.dtype" and "drafters.0.gpus=1" in caught.value.fix


@pytest.mark.parametrize(
    ("overrides", "kind", "target", "drafter"),
    [
        (["target.accelerator=H100", "drafters.0.accelerator=T4"], "", "bfloat16", "float16"),
        (["target.accelerator='in(A100, V100)'", "drafters.0.accelerator='!T4'"], "", "float16", "bfloat16"),
        (["target.accelerator='T4, market=spot'", "drafters.0.dtype=bfloat16"], "A100", "float16", "bfloat16"),
        ([], "T4", "float16", "float16"),
        (["target.accelerator='!V100'", "drafters.0.accelerator=market=spot"], "T4", "float16", "float16"),
        (["target.accelerator=H100"], "T4", "bfloat16", "float16"),
        (["cluster.address=auto", "target.accelerator=market=spot"], "T4", "bfloat16", "bfloat16"),
    ],
)
def test_gpus_without_bfloat16_compute_in_float16(overrides: list[str], kind: str, target: str, drafter: str) -> None:
    """On the GPUs that are named, else on those of this machine, unless the cluster is another one."""
    given = ["mode=decoupled", "target.gpus=1", f"drafters=[{MODEL}]", *overrides]
    config, _ = settle(load_config(None, given), Machine(8, 8, kind=kind))
    assert (config.target.dtype, config.drafters[0].dtype) == (target, drafter)


def test_the_devices_that_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(machine, "count_gpus", lambda: 5)
    here = Machine.here()
    assert here.devices(load_config().cluster) == Devices(3, 5)
    assert Machine(3, 5, kind="L4").devices(load_config().cluster) == Devices(3, 5, {"L4": 5})
    assert here.devices(load_config(None, ["cluster.num_cpus=7", "cluster.num_gpus=2"]).cluster) == Devices(7, 2)
    elsewhere = load_config(None, ["cluster.address=auto"]).cluster
    assert here.devices(elsewhere) is None and not here.hosts(elsewhere)
    config, lines = settle(load_config(None, ["cluster.num_cpus=2"]), here)
    assert lines[0].endswith("drafters: suffix, as none is configured")
    assert (config.mode, config.target.cores, len(lines)) == (ModeName.coupled, 2, 2)


def test_modes_are_compared_from_the_layout_as_it_is_written() -> None:
    written = load_config(None, ["target.cores=3", "drafters=[{method: ngram, cores: 2}]"])
    config, lines = settle(written, HERE, mode=ModeName.decoupled)
    assert (config.mode, config.target.cores, config.drafters[0].cores) == (ModeName.decoupled, 3, 2)
    assert lines == [f"target.dtype: {config.target.dtype}"]


def test_a_simulated_run_is_resolved_by_its_own_machines(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        "hardware: h100\nmachines: [{gpus: 2.0, cpus: 8.0}]\nskills: [{method: draft_model}]\n"
        "workload: {requests: 2}\n"
        "config:\n  cluster: {address: auto}\n"
        "  target: {model: qwen3-8b, gpus: 1, dtype: bfloat16}\n"
        f"  drafters: [{MODEL.replace(' m,', ' qwen2.5-0.5b,')}]\n"
    )
    assert load_scenario(path).config.mode is ModeName.decoupled
    assert load_scenario(path, ["machines.0.gpus=1"]).config.mode is ModeName.coupled
    assert load_scenario(path, ["config.mode=plain"]).config.mode is ModeName.plain

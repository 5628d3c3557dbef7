"""Shipped configurations and prompts are found by name where the current folder has nothing of that name."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor_ray.config import load_config
from specactor_ray.config.load import SHIPPED, find_file, shipped_names
from specactor_ray.config.methods import import_named, is_named
from specactor_ray.rollout.prompts import read_prompts
from specactor_ray.simulation.scenario import load_scenario
from tests.refused import refused


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_shipped_configuration_loads_by_its_name() -> None:
    assert "local_cpu" in shipped_names()
    for name in shipped_names():
        assert load_config(name) == load_config(f"conf/{name}.yaml") == load_config(SHIPPED / f"{name}.yaml")
    assert load_config("local_cpu", ["data.n=3"]).data.n == 3


def test_prompts_that_shipped_configurations_name_are_there() -> None:
    paths = [load_config(name).data.path for name in shipped_names()]
    files = [path for path in paths if path is not None and ":" not in path]
    assert files and all(read_prompts(path) for path in files)


def test_functions_that_shipped_configurations_name_are_there() -> None:
    configs = [load_config(name) for name in shipped_names()]
    names = [one.name for config in configs for one in config.reward.functions] + [one.data.map for one in configs]
    named = [name for name in names if name is not None and is_named(name)]
    assert named and all(callable(import_named(name, "reward.functions")) for name in named)


def test_what_is_there_comes_first(empty_folder: Path) -> None:
    (empty_folder / "local_cpu").write_text("mode: plain\n")
    assert load_config("local_cpu").mode == "plain"


@pytest.mark.parametrize("name", ["demo.jsonl", "prompts/demo.jsonl", "../conf/local_cpu.yaml", "/conf/local_cpu.yaml"])
def test_other_paths_mean_themselves(name: str) -> None:
    assert find_file(name) == Path(name)


def test_an_unknown_name_lists_what_is_shipped() -> None:
    with refused("local_gpu", ", ".join(shipped_names())):
        load_config("local_gpu")


def test_a_scenario_is_found_by_its_name_and_an_unknown_one_lists_scenarios() -> None:
    assert load_scenario(Path("two_cores")) == load_scenario(Path("conf/simulation/two_cores.yaml"))
    with refused("three_cores", ", ".join(shipped_names("simulation"))):
        load_scenario(Path("three_cores"))
    with refused("mode", "Did you mean config.mode?"):
        load_scenario(Path("two_cores"), ["mode=plain"])

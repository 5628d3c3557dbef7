"""Scenario files: what is read, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from specactor_ray.config.schema import ModeName
from specactor_ray.core.errors import ConfigError
from specactor_ray.simulation.scenario import ScenarioConfig, load_scenario, variant_of
from tests.unit.simulation.scenarios import SMALL, write_scenario


def test_a_scenario_is_read_with_defaults_and_overrides(tmp_path: Path) -> None:
    path = write_scenario(tmp_path)
    scenario = load_scenario(path, ["seed=9", "workload.sigma=0", "config.target.max_batch=2"])
    assert (scenario.seed, scenario.workload.sigma, scenario.config.target.max_batch) == (9, 0.0, 2)
    assert scenario.workload.requests == 16
    assert scenario.network == ScenarioConfig().network
    assert list(scenario.variants) == ["plain", "coupled", "decoupled"]


def test_overrides_count_for_more_than_what_a_variant_changes(tmp_path: Path) -> None:
    path = write_scenario(tmp_path)
    plain = variant_of(path, ["seed=9"], "plain")
    assert (plain.config.mode, plain.config.target.replicas, plain.seed) == (ModeName.plain, 3, 9)
    assert variant_of(path, ["config.target.replicas=4"], "plain").config.target.replicas == 4


def test_a_variant_may_change_nothing(tmp_path: Path) -> None:
    path = write_scenario(tmp_path, SMALL + "  same:\n")
    assert variant_of(path, [], "same") == load_scenario(path)


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("workload.requsts=3", "workload.requsts", "Did you mean workload.requests?"),
        ("machine.gpus=3", "machine", "Did you mean machines?"),
        ("config.target.max_bach=3", "config.target.max_bach", "Did you mean config.target.max_batch?"),
        ("workload.arrival=someday", "workload.arrival", "at_once"),
        ("seed=many", "seed", "wrong type"),
        ("workload.requests=0", "workload.requests", "use 1 or more"),
        ("workload.sigma=.nan", "workload.sigma", "out of range"),
        ("workload.sigma=11", "workload.sigma", "at most 10."),
        ("seed=-1", "seed", "use 0 or more"),
        ("skills.0.method=sufix", "skills.0.method", "use one of ngram, suffix"),
        ("config.target.replicas=400", "machines.gpus", "lower config.target.replicas"),
        ("network.bandwidth_gb_s=0", "network.bandwidth_gb_s", "out of range"),
        ("cache_share=1.1", "cache_share", "above 0 and at most 1"),
        ("skills.0.mean=1.2", "skills.0.mean", "at most 1."),
        ("skills=[{method: ngram}, {method: ngram}]", "skills", "named twice"),
        ("skills=[]", "config.drafters.0", "skills: {method: draft_model}"),
        ("config.target.max_batch=0", "config.target.max_batch", "0"),
    ],
)
def test_what_is_wrong_is_refused_with_key_and_fix(tmp_path: Path, override: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_scenario(write_scenario(tmp_path), [override])
    assert caught.value.key == key
    assert message in str(caught.value)


def test_plain_needs_no_skills(tmp_path: Path) -> None:
    load_scenario(write_scenario(tmp_path), ["skills=[]", "config.mode=plain"])


@pytest.mark.parametrize(
    ("variants", "name", "message"),
    [
        ("{}", "plain", "no variant 'plain'. Fix: use some of: none."),
        ("{fast: [config.mode=plain]}", "plain", "use some of: fast."),
        ("{fast: config.mode=plain}", "fast", "write fast: [config.mode=plain]."),
        ("{fast: [config.mood=plain]}", "fast", "Did you mean config.mode?"),
        ("{fast: [workload.requests=-1]}", "fast", "workload.requests: -1 is out of range"),
    ],
)
def test_bad_variants_are_refused(tmp_path: Path, variants: str, name: str, message: str) -> None:
    path = write_scenario(tmp_path, f"{SMALL.partition('variants:')[0]}variants: {variants}\n")
    with pytest.raises(ConfigError) as caught:
        variant_of(path, [], name)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_scenario(tmp_path)
    with pytest.raises(ConfigError, match=r"no such file.*holds scenario\.yaml"):
        load_scenario(tmp_path / "scenrio.yaml")

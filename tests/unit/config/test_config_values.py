"""Extreme, secret and broken values of a configuration: they are accepted, or refused by name."""

from __future__ import annotations

import copy
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.fields import KeyDoc, describe
from specactor_ray.config.load import load_config, save_config, to_yaml
from specactor_ray.config.rules import validate_training
from specactor_ray.config.schema import Config
from specactor_ray.core.errors import ConfigError

DRAFTER = "drafters=[{method: suffix}]"
KEYS = [doc.key.replace(".N.", ".0.") for doc in describe(Config)]
BASE = ("data.n=2", DRAFTER, "reward.functions=[{name: length}]")
POWERS = st.builds(
    lambda power, shift: 2**power + shift, st.sampled_from([7, 15, 31, 32, 53, 63, 64]), st.integers(-1, 1)
)
NUMBERS = st.one_of(
    POWERS,
    POWERS.map(lambda number: -number),
    st.integers(-2, 2),
    st.just(10**30),
    st.floats(),
).map(lambda number: str(number).replace("inf", ".inf").replace("nan", ".nan"))
ODD = st.sampled_from(
    ["", "null", "true", "[]", "{}", "[1]", "{a: 1}", "'", "${", "???", "x" * 100_000, "1" * 5000, "0x" + "f" * 5000,
     "!!timestamp x", "!!bool x", "!!binary x", "2001-99-99", "&a [*a]", "${target}",
     "${run.name}", "${oc.env:NOT_THERE_AT_ALL}", "1:2:3", "1e999", "-0.0", "🙂"]
)  # fmt: skip


def reload(text: str, folder: Path) -> Config:
    path = folder / "again.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def is_same(first: Config, second: Config) -> bool:
    """Equal, where not-a-number equals itself."""
    return first == second or (to_yaml(first) == to_yaml(second) and ".nan" in to_yaml(first))


@settings(max_examples=100)
@given(st.sampled_from(KEYS), NUMBERS | ODD | st.text(max_size=5))
def test_a_value_is_accepted_or_refused_by_name(tmp_path_factory: Any, key: str, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        config = load_config(None, [*BASE, f"{key}={text}"])
        validate_training(config)
    except ConfigError as error:
        message = str(error)
        assert key.rpartition(".")[2] in message and len(message) < 2000 and message.isprintable()
    else:
        assert is_same(reload(to_yaml(config), folder), config)


NUMBERS_WITHOUT_A_RANGE = {"reward.failure_value", "reward.pass_threshold"}


@pytest.mark.parametrize("doc", [doc for doc in describe(Config) if doc.type.startswith(("an integer", "a number"))])
def test_every_other_number_has_a_range(doc: KeyDoc) -> None:
    key = doc.key.replace(".N.", ".0.")

    def load() -> None:
        value = ".nan" if key == "reward.functions.0.weight" else "-1"
        validate_training(load_config(None, ["mode=decoupled", *BASE, f"{key}={value}"]))

    if doc.key in NUMBERS_WITHOUT_A_RANGE:
        load()
    else:
        with pytest.raises(ConfigError) as caught:
            load()
        assert caught.value.key == key


class TestReferences:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECRET", "hunter2")
        monkeypatch.setenv("BATCH", "3")

    def test_a_value_from_the_environment_is_not_written(self, tmp_path: Path) -> None:
        items = [
            "data.options={a: [{token: 'Bearer ${oc.env:SECRET}'}], 'b.c': '${oc.env:NOT_THERE, x}', d: '${a}'}",
            "drafters=[{method: draft_model, model: '${oc.env:SECRET}'}]",
            "target.max_batch=${oc.env:BATCH}",
        ]
        config = copy.deepcopy(load_config(None, items))
        assert config.data.options == {"a": [{"token": "Bearer hunter2"}], "b.c": "x", "d": "${a}"}
        assert (config.drafters[0].model, config.target.max_batch) == ("hunter2", 3)
        path = tmp_path / "config.yaml"
        save_config(config, path)
        assert "hunter2" not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert load_config(path) == config
        config.target.max_batch = 4  # what was changed later is written
        assert reload(to_yaml(config), tmp_path).target.max_batch == 4

    @pytest.mark.parametrize(
        ("item", "key"),
        [
            ("target.max_batch=${oc.env:SECRET}", "target.max_batch"),
            ("target.dtype=${oc.env:SECRET}", "target.dtype"),
            ("run.name=${oc.env:SECRET}/x", "run.name"),
            ("sampling.seed=${oc.env:SECRET}", "sampling.seed"),
            ("drafters=[{method: '${oc.env:SECRET}'}]", "drafters.0.method"),
            ("cluster.address=${oc.env:SECRET}", "cluster.address"),
            ("run.name=${oc.env:NOT_THERE_AT_ALL}", "run.name"),
        ],
    )
    def test_errors_name_them_without_their_values(self, item: str, key: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(None, ["mode=plain", item])
        assert caught.value.key == key
        assert "hunter2" not in str(caught.value) and "${oc.env:" in str(caught.value)


class TestOverridesOfASection:
    @pytest.mark.parametrize("item", ["target=", "target=null", "drafters.0.online="])
    def test_nothing_in_its_place_is_refused(self, tmp_path: Path, item: str) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("target: {cores: 2}\ndrafters: [{method: suffix, online: {passes: 2}}]\n")
        with pytest.raises(ConfigError, match="would drop all that is set in this section") as caught:
            load_config(path, [item])
        assert f"{caught.value.key}.KEY=VALUE" in caught.value.fix

    def test_a_key_of_the_users_own_may_be_unset(self) -> None:
        config = load_config(None, ["mode=plain", "data.options.a={b: 1}", "data.options.a="])
        assert config.data.options == {"a": None}

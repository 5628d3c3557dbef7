"""Extreme, secret and broken values of a configuration: they are accepted, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.config.fields import KeyDoc, describe
from specactor_ray.config.load import load_config, save_config, to_yaml
from specactor_ray.config.rules import unused_by_rollouts, validate_training
from specactor_ray.config.schema import Config, ModeName
from specactor_ray.core.errors import ConfigError

DRAFTER = "drafters=[{method: suffix}]"
KEYS = [doc.key.replace(".N.", ".0.") for doc in describe(Config)]
BASE = ("data.n=2", DRAFTER, "reward.functions=[{name: length}]", "data.mixture=[{path: tasks.jsonl}]")
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


NUMBERS_WITHOUT_A_RANGE = {"reward.functions.N.weight", "reward.failure_value", "reward.pass_threshold"}


@pytest.mark.parametrize("doc", [doc for doc in describe(Config) if doc.type.startswith(("an integer", "a number"))])
def test_every_other_number_has_a_range(doc: KeyDoc) -> None:
    key = doc.key.replace(".N.", ".0.")

    def load() -> None:
        validate_training(load_config(None, ["mode=decoupled", *BASE, f"{key}=-1"]))

    if doc.key in NUMBERS_WITHOUT_A_RANGE:
        load()
    else:
        with pytest.raises(ConfigError) as caught:
            load()
        assert caught.value.key == key


@pytest.mark.parametrize("doc", [doc for doc in describe(Config) if "number" in doc.type])
def test_no_number_is_infinite(doc: KeyDoc) -> None:
    key = doc.key.replace(".N.", ".0.")
    for value in (".nan", ".inf", "-.inf"):
        with pytest.raises(ConfigError) as caught:
            validate_training(load_config(None, ["mode=decoupled", *BASE, f"{key}={value}"]))
        assert caught.value.key == key


class TestReferences:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECRET", "hunter2")

    @pytest.mark.parametrize(
        "options",
        [
            '{a: [{x: "${oc.env:SECRET}"}], b: "${data.options.a[0]}", c: "${.b.x}", d: "<${.c}>"}',
            '{a: {x: "${oc.env:SECRET}"}, b: "${oc.select:data.options.a.x}", c: "${oc.dict.values:data.options.a}"}',
            '{a: SECRET, b: "${oc.env:${.a}}", c: {d: "${data.options.b}"}}',
        ],
    )
    def test_what_they_lead_to_in_the_environment_is_not_written(self, tmp_path: Path, options: str) -> None:
        config = load_config(None, ["mode=plain", f"data.options={options}"])
        assert "hunter2" in str(config.data.options)
        path = tmp_path / "config.yaml"
        save_config(config, path)
        assert "hunter2" not in path.read_text()
        assert load_config(path) == config

    @pytest.mark.parametrize(
        ("items", "key"),
        [
            (["target.max_batch=${oc.env:SECRET}"], "target.max_batch"),
            (["sampling.seed=${oc.env:SECRET}"], "sampling.seed"),
            (["run.name=${data.${oc.env:SECRET}}"], "run.name"),
            (['run.name=${oc.decode:"[${oc.env:SECRET}"}'], "run.name"),
            (["data.options.a=${oc.env:SECRET}", "target.dtype=${data.options.a}"], "target.dtype"),
            (["drafters=[{method: '${oc.env:SECRET}'}]"], "drafters.0.method"),
            (["reward.functions=[{weight: '${oc.env:SECRET}'}]"], "reward.functions.0.weight"),
        ],
    )
    def test_errors_name_them_without_their_values(self, items: list[str], key: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(None, ["mode=plain", *items])
        assert caught.value.key == key
        assert "hunter2" not in str(caught.value)
        assert "${" in str(caught.value)

    @pytest.mark.parametrize("target", ["target", "sampling", "mode", "drafters", "speculation.race"])
    def test_a_section_that_is_referred_to_loads_back_equal(self, tmp_path: Path, target: str) -> None:
        config = load_config(None, [DRAFTER, f"data.options.x=${{{target}}}", "sampling.stop_token_ids=[3]"])
        assert reload(to_yaml(config), tmp_path) == config

    @pytest.mark.parametrize("text", ["${a}", "${", r"\${a}", r"\\${run.dir}", "a\\", r"c:\x ${y} \ ${z"])
    def test_texts_that_look_like_one_load_back_equal(self, tmp_path: Path, text: str) -> None:
        config = Config(mode=ModeName.plain)
        config.run.dir, config.data.options = text, {"x": [text]}
        again = reload(to_yaml(config), tmp_path)
        assert (again.run.dir, again.data.options) == (text, {"x": [text]})


def test_a_key_of_the_users_own_may_be_unset() -> None:
    config = load_config(None, ["mode=plain", "data.options.a={b: 1}", "data.options.a="])
    assert config.data.options == {"a": None}


def test_sections_that_a_rollout_does_not_use_are_named() -> None:
    assert unused_by_rollouts(load_config(None, ["sampling.seed=3"])) == []
    (line,) = unused_by_rollouts(load_config(None, ["reward.functions=[{name: length}]", "trainer.steps=3"]))
    assert line.startswith("without effect on a rollout: reward, trainer (")


LIMITS = ("data.limit", "data.mixture.0.limit", "evaluation.limit", "tracking.completions")


@pytest.mark.parametrize("key", ["trainer.lora.rank", *LIMITS])
def test_the_word_auto_is_refused_where_null_has_a_meaning_of_its_own(key: str) -> None:
    refusal = f"{key}: 'auto' is of the wrong type or not allowed. Fix: {key} is an integer, or null."
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        load_config(None, [*BASE, f"{key}=auto"])
    load_config(None, [*BASE, f"{key}=null"])
    (words,) = {doc.type for doc in describe(Config) if doc.key.replace(".N.", ".0.") == key}
    assert "auto" not in words and load_config(None, ["target.max_model_len=auto"]).target.max_model_len is None


@pytest.mark.parametrize("item", ["trainer.lora.alpha=64", "trainer.lora.targets=[q_proj]"])
def test_an_adapters_keys_need_its_rank(item: str) -> None:
    with pytest.raises(ConfigError, match=f"{item.partition('=')[0]}: has no effect without trainer.lora.rank"):
        validate_training(load_config(None, [*BASE, item]))

"""Configuration: merging, typed values, and errors that name the key, the value and the fix."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from specactor_ray.config.fields import describe
from specactor_ray.config.load import from_mapping, load_config, save_config, to_yaml
from specactor_ray.config.rules import validate_training
from specactor_ray.config.schema import (
    Config,
    DrafterConfig,
    ModeName,
    RaceName,
    TargetConfig,
)
from specactor_ray.core.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
NGRAM = "drafters=[{method: ngram}]"
EAGLE = "drafters=[{method: eagle, model: m, online: {where: trainer}}]"
SUFFIX = "drafters=[{method: suffix}]"
VLLM = ("target.backend=vllm",)
GPU = ("target.gpus=1",)
DRAFTS_ON_GPU = "drafters=[{method: draft_model, model: m, gpus: 1, accelerator: L4}]"
SPLIT = ("target.backend=vllm", "target.tensor_parallel=2", "target.gpus=2")


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(*overrides: str, path: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


def test_overrides_beat_the_file_and_the_file_beats_defaults(tmp_path: Path) -> None:
    assert load_config() == Config() == load_config(write(tmp_path, "")) == load_config(write(tmp_path, "target:\n"))
    path = write(tmp_path, "mode: coupled\ntarget: {max_batch: 4, cores: 2}\ndrafters: [{method: ngram}]\n")
    config = load_config(path, ["target.max_batch=8", "target={max_batch: 9, replicas: 3}"])
    assert (config.mode, config.target) == (ModeName.coupled, TargetConfig(max_batch=9, replicas=3, cores=2))


def test_lists_are_replaced_and_their_elements_overridden(tmp_path: Path) -> None:
    path = write(tmp_path, "drafters: [{method: ngram}, {method: draft_model, model: m}]\n")
    config = load_config(path, ["drafters.1.replicas=3", "drafters[0].window=5", "target.hidden_layers=[1,2]"])
    assert config.drafters == [DrafterConfig(window=5), DrafterConfig("draft_model", model="m", replicas=3)]
    assert config.target.hidden_layers == [1, 2]
    assert load_config(path, [NGRAM, "drafters.0.max_match=5"]).drafters == [DrafterConfig(max_match=5)]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("target.model=5", "5"),
        ("target.model=a=b", "a=b"),
        ("target.trust_remote_code=yes", True),
        ("target.kv_cache_gb=2", 2.0),
        ("target.max_model_len=null", None),
        ("target.max_batch='12'", 12),
        ("run.name=", None),
        ("run.dir=${run.log_level}", "WARNING"),
        ("run.name=7", "7"),
        ("run.name=0123", "0123"),
        ("run.name=2024_01_02", "2024_01_02"),
        ("data.answer_key=yes", "yes"),
        ("data.answer_key=it's", "it's"),
        ("data.answer_key=!!str 5", "5"),
        ("reward.answer_pattern=#### (.*)", "#### (.*)"),
        ("data.system_prompt=a # b", "a # b"),
        ("data.system_prompt='a # b'", "a # b"),
        ("sampling.stop=[No, 1.10, 0x10, 010, 12:30, 'a']", ("No", "1.10", "0x10", "010", "12:30", "a")),
    ],
)
def test_values_are_converted(item: str, expected: object) -> None:
    section, name = item.partition("=")[0].split(".")
    value = getattr(getattr(load_config(None, ["mode=plain", item]), section), name)
    assert value == expected
    assert type(value) is type(expected)


def test_texts_of_a_file_are_as_they_are_written(tmp_path: Path) -> None:
    text = "mode: plain # b\nrun: {name: 0123}\ndata:\n  answer_key: No  # a\nsampling:\n  stop:\n  - 1.10\n  - 'no'\n"
    config = load_config(write(tmp_path, text + "reward:\n  answer_pattern: # none\n"))
    assert (config.run.name, config.data.answer_key, config.sampling.stop) == ("0123", "No", ("1.10", "no"))
    assert config.reward.answer_pattern is None and load_config(write(tmp_path, to_yaml(config))) == config
    error = error_of(path=write(tmp_path, "reward:\n  answer_pattern: #### (.*)\n"))
    assert error.key == "reward.answer_pattern" and "# begins a comment" in error.problem


def test_the_mapping_is_not_changed() -> None:
    settings = {"mode": "plain", "target": {"cores": 2}, "run": None}
    assert from_mapping(settings, ["target.cores=3"]).target.cores == 3
    assert settings == {"mode": "plain", "target": {"cores": 2}, "run": None}


REFUSED: list[tuple[list[str], str, str]] = [
    # unknown keys
    (["target.max_bacth=8"], "target.max_bacth", "Did you mean target.max_batch?"),
    (["tarhet.max_batch=8"], "tarhet", "Did you mean target?"),
    (["trainer.step=3"], "trainer.step", "Did you mean trainer.steps?"),
    (["max_batch=3"], "max_batch", "Did you mean target.max_batch"),
    (["drafters=[{online: {depth: 2}}]"], "drafters.0.online.depth", "Did you mean drafters.0.online.depths?"),
    # wrong types
    (
        ["target.replicas=two"],
        "target.replicas",
        "'two' is of the wrong type or not allowed. Fix: target.replicas is an ",
    ),
    (["target.replicas=true"], "target.replicas", "an integer"),
    (["target.gpus=auto"], "target.gpus", "an integer"),
    (["target.max_model_len=x"], "target.max_model_len", "an integer, auto or null"),
    (["target.max_batch=aut"], "target.max_batch", "an integer, auto or null"),
    (["target.kv_cache_gb=lots"], "target.kv_cache_gb", "a number"),
    (["target.model=[1]"], "target.model", "a text"),
    (["target.trust_remote_code=2"], "target.trust_remote_code", "true or false"),
    (["target.hidden_layers=[a]"], "target.hidden_layers", "['a']"),
    (["mode=fast"], "mode", "one of auto, plain, coupled, decoupled"),
    (["speculation.verify=off"], "speculation.verify", "one of auto, all"),
    (["speculation.race=on"], "speculation.race", "one of off, tail, always"),
    (["target=3"], "target", "a section with the keys model, backend"),
    (["drafters={method: ngram}"], "drafters", "drafters: [{method: ...}]"),
    (["drafters=[ngram]"], "drafters.0", "a section with the keys method"),
    (["drafters=[{replicas: a}]"], "drafters.0.replicas", "an integer"),
    (["run.name=${run.name}"], "run.name", "${run.name}"),
    # malformed overrides
    (["target.max_batch"], "target.max_batch", "KEY=VALUE"),
    (["data.system_prompt='a' # b"], "data.system_prompt", "quote the value: # begins a comment"),
    (["target.replicas=2 # b"], "target.replicas", "quote the value: # begins a comment"),
    (["data.options={a: 1} # b"], "data.options", "quote the value: # begins a comment"),
    (["data.answer_key=" + "[" * 5000], "data.answer_key", "not valid YAML"),
    (["data.answer_key=${data.shuffle}"], "data.answer_key", "a text"),
    (["target.=3"], "target.=3", ""),
    ([".=1"], ".=1", ""),
    (["drafters=[{method: ngram}"], "drafters", "not valid YAML"),
    (["drafters.0.replicas=2"], "drafters.0", "give the whole list"),
    ([NGRAM, "drafters.-1.replicas=2"], "drafters.-1", "elements 0 to 0"),
    (["mode=plain", "mode.x=1"], "mode.x", "which has no keys"),
    (["target.cores=2", "target="], "target", "target.KEY=VALUE"),
    (["drafters=[{online: {passes: 2}}]", "drafters.0.online=null"], "drafters.0.online", "KEY=VALUE"),
    # ranges and contradictions
    (["mode=decoupled"], "mode", "mode=plain"),
    (["mode=coupled"], "mode", "drafters=[{method: ngram}]"),
    (["target.gpus=2"], "target.gpus", "target.replicas"),
    (["target.gpus=2", *VLLM], "target.gpus", "target.tensor_parallel=2"),
    (["target.tensor_parallel=2"], "target.tensor_parallel", "target.backend=vllm"),
    ([*VLLM, "target.tensor_parallel=2", "target.cores=3"], "target.cores", "multiple of 2"),
    (["target.max_batch=64", "target.max_step_tokens=32"], "target.max_step_tokens", "64"),
    (["target.kv_cache_gb=.nan"], "target.kv_cache_gb", "at most 1e+09"),
    (["speculation.draft_wait_s=.inf"], "speculation.draft_wait_s", "0 or more"),
    (["target.dtype=int8"], "target.dtype", "float32, bfloat16, float16"),
    (["target.dtype=float16"], "target.dtype", "target.gpus=1"),
    (["drafters=[{method: draft_model, model: m, dtype: float16}]"], "drafters.0.dtype", "drafters.0.gpus=1"),
    (
        ["mode=coupled", "drafters=[{method: draft_model, model: m, gpus: 1, dtype: float16}]"],
        "drafters.0.dtype",
        "target.gpus=1",
    ),
    (["target.accelerator=H100"], "target.accelerator", "target.gpus=1"),
    ([*GPU, "target.accelerator='H 100'"], "target.accelerator", "in(L4, A10G)"),
    ([*GPU, "target.accelerator='in(L4,'"], "target.accelerator", "such as H100"),
    ([*GPU, "target.accelerator='-x/zone=a'"], "target.accelerator", "'!T4' (YAML needs the quotes)"),
    ([*GPU, "target.accelerator='x_/zone=a'"], "target.accelerator", "'in(L4, A10G)'"),
    ([*GPU, "target.accelerator=!T4"], "target.accelerator", "\"target.accelerator='...'\""),
    ([*GPU, "target.accelerator='=spot'"], "target.accelerator", "market-type=spot"),
    ([*GPU, "target.accelerator='H100,A100'"], "target.accelerator", "two conditions on one label"),
    ([DRAFTS_ON_GPU, "drafters.0.gpus=0"], "drafters.0.accelerator", "drafters.0.gpus=1"),
    (["mode=coupled", DRAFTS_ON_GPU, "drafters.0.hosted=true"], "drafters.0.accelerator", "drafters.0.hosted"),
    (["target.compiled=false"], "target.compiled", "target.backend=vllm"),
    (["target.engine_arguments={block_size: 32}"], "target.engine_arguments", "target.backend=vllm"),
    ([*VLLM, "target.engine_arguments={max_num_seqs: 3}"], "target.engine_arguments.max_num_seqs", "max_batch"),
    ([*VLLM, "target.engine_arguments={block_size: 7}"], "target.engine_arguments.block_size", "multiple of 16"),
    ([*VLLM, "target.engine_arguments={worker_cls: x}"], "target.engine_arguments.worker_cls", "leave it out"),
    (
        [*VLLM, "target.batch_invariant=true", "target.gpus=1", "target.engine_arguments={attention_backend: x}"],
        "target.engine_arguments.attention_backend",
        "FLASH_ATTN, TRITON_ATTN",
    ),
    (["target.model="], "target.model", "a text"),
    (["target.model=' '"], "target.model", "name it"),
    (["cluster.num_cpus=4", "cluster.address=auto"], "cluster.num_cpus", "cluster.address=local"),
    (["cluster.health_timeout_s=1"], "cluster.health_timeout_s", "health_interval_s"),
    (["speculation.window=129"], "speculation.window", "1 to 128"),
    (["drafters=[" + ",".join(f"{{method: 'm:C{i}'}}" for i in range(9)) + "]"], "drafters", "take some out"),
    (["speculation.race=always", "speculation.race_below=4"], "speculation.race_below", "race=tail"),
    (["sampling.stop_token_ids=[-1]"], "sampling.stop_token_ids", "token ids, each from 0"),
    (["run.log_level=LOUD"], "run.log_level", "DEBUG, INFO, WARNING, ERROR"),
    (["run.name=a/b"], "run.name", "letters"),
    (["drafters=[{method: draftmodel}]"], "drafters.0.method", "Did you mean draft_model?"),
    ([NGRAM, "drafters.0.cores=0"], "drafters.0.cores", "0.01 up to below 1"),
    ([NGRAM, "drafters.0.min_match=9"], "drafters.0.min_match", "max_match"),
    ([NGRAM, "drafters.0.gpus=1"], "drafters.0.gpus", "0"),
    ([NGRAM, "drafters.0.model=m"], "drafters.0.model", "draft_model"),
    ([EAGLE, "drafters.0.min_match=3"], "drafters.0.min_match", "method=ngram"),
    (["drafters=[{method: draft_model}]"], "drafters.0.model", "directory"),
    ([NGRAM, "drafters.0.online.where=trainer"], "drafters.0.online.where", "off"),
    ([EAGLE, "drafters.0.online.batch_tokens=9999"], "drafters.0.online.batch_tokens", "buffer_tokens"),
    ([EAGLE, "drafters.0.online.depths=17"], "drafters.0.online.depths", "1 to 16"),
    ([f"{NGRAM[:-1]}, {{method: ngram}}]"], "drafters.1.method", "drafters.0.replicas"),
    (["reward.functions=[{name: length}, {weight: .nan}]"], "reward.functions.1.weight", "nan"),
]


@pytest.mark.parametrize(("items", "key", "words"), REFUSED)
def test_mistakes_are_named_with_key_and_fix(items: list[str], key: str, words: str) -> None:
    drafts = any(item.startswith(("mode", "drafters")) for item in items)
    error = error_of(*([] if drafts else ["mode=plain"]), *items)
    assert error.key == key and words in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.key, again.fix) == (str(error), error.key, error.fix)


def test_nothing_close_suggests_nothing() -> None:
    assert "Did you mean" not in str(error_of("xyzzy=1"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"mode: plain\ntarget: [1, 2\n", "line "),
        (b"mode: plain\n\tx: 1\n", "line "),
        (b"a: 1\na: 2\n", "line "),
        (b"- 1\n- 2\n", "key: value"),
        (b"5\n", "key: value"),
        (b"\xff\xfe\x00\x81", "not valid YAML"),
        (None, "cannot be read"),
    ],
)
def test_files_without_keys_or_of_bad_yaml(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "run.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    error = error_of(path=path)
    assert error.key == str(path) and problem in error.problem and "\n" not in str(error)


def test_a_missing_file_is_named() -> None:
    assert error_of(path=Path("/none/runn.yaml")).key == "/none/runn.yaml"


@pytest.mark.parametrize(
    "items",
    [
        [NGRAM, "drafters.0.replicas=0"],
        [NGRAM, "speculation.window=128", "speculation.draft_wait_s=1e3"],
        [NGRAM, "speculation.branches=16"],
        [NGRAM, "speculation.branches=auto"],
        [NGRAM, "drafters.0.cores=0.25"],
        [SUFFIX, "drafters.0.history_tokens=0"],
        ["drafters=[{method: ngram}, {method: suffix}]"],
        [EAGLE],
        [EAGLE, "mode=plain"],
        [EAGLE, "mode=coupled"],
        ["mode=coupled", "target.gpus=1", "drafters=[{method: draft_model, model: m, dtype: float16}]"],
        ["mode=coupled", "drafters=[{method: 'mine:Proposer'}, {method: ngram, replicas: 0}]"],
        ["mode=plain", "target.gpus=1", "target.dtype=float16"],
        ["mode=plain", *SPLIT],
        ["mode=plain", *GPU, "target.accelerator='in(H100, H200), market-type=!spot'"],
        ["mode=coupled", *GPU, "target.accelerator=H100", DRAFTS_ON_GPU],
        ["mode=plain", *GPU, "target.accelerator='a-b.c/zone=in(x, y)'"],
        ["mode=coupled", *SPLIT, "drafters=[{method: draft_model, model: m, gpus: 1}]"],
        ["mode=plain", "target.backend=vllm", "target.compiled=false"],
        ["drafters=[{method: ngram}, {method: draft_model, model: m, gpus: 1, dtype: bfloat16}]"],
        ["mode=plain", "sampling.temperature=0", "sampling.seed=18446744073709551615"],
    ],
)
def test_allowed(items: list[str]) -> None:
    load_config(None, items)


@pytest.mark.parametrize("text", ["off", "'off'", "tail", "always"])
def test_a_race_that_is_off_needs_no_quotes(tmp_path: Path, text: str) -> None:
    """YAML takes an unquoted `off` for a truth value."""
    expected = RaceName(text.strip("'"))
    from_item = load_config(None, ["mode=plain", f"speculation.race={text}"])
    from_file = load_config(write(tmp_path, f"mode: plain\nspeculation:\n  race: {text}\n"))
    assert from_item.speculation.race is from_file.speculation.race is expected
    assert load_config(write(tmp_path, to_yaml(from_item))) == from_item


@pytest.mark.parametrize("kind", ["in(H100)", "ray.io/accelerator-type=H100", "in(A100, H100)"])
def test_a_colocated_trainer_may_name_the_kind_of_the_verifiers(kind: str) -> None:
    given = ["target.accelerator='H100, a=b'", "data.n=2", "trainer.gpus=1", f"trainer.accelerator='{kind}'"]
    validate_training(load_config(None, ["mode=plain", *GPU, *given, "trainer.colocate=true"]))


class TestWriting:
    def test_save_then_load(self, tmp_path: Path) -> None:
        config = load_config(REPOSITORY / "conf" / "local_cpu.yaml", ["run.name=first"])
        path = tmp_path / "new" / "config.yaml"
        save_config(config, path)
        save_config(config, path)
        assert load_config(path) == config
        assert [file.name for file in path.parent.iterdir()] == ["config.yaml"]

    def test_what_came_from_the_environment_is_not_written_down(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HUB_TOKEN", "hunter2")
        monkeypatch.setenv("BATCH", "3")
        items = [
            "data.options={token: '${oc.env:HUB_TOKEN}', 'a.b': [{items: 'Bearer ${oc.env:HUB_TOKEN}'}], plain: 1}",
            "run.dir=${data.options.token}",
            "target.max_batch=${oc.env:BATCH}",
            "drafters=[{method: draft_model, model: '${oc.env:HUB_TOKEN}'}]",
            "run.log_level=INFO",
            "run.name=${run.log_level}",
        ]
        config = copy.deepcopy(load_config(None, items))
        assert config.run.dir == "hunter2" and config.target.max_batch == 3
        path = tmp_path / "config.yaml"
        save_config(config, path)
        assert "hunter2" not in path.read_text() and "name: INFO" in path.read_text()
        assert load_config(path) == config
        config.target.max_batch = 4  # what was changed later is written
        assert load_config(write(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize(
    ("config", "overrides", "named"),
    [
        (None, "mode=plain", "'mode=plain'"),
        (None, {"mode": "plain"}, "{'mode': 'plain'}"),
        (None, [3], "[3]"),
        ({"mode": "plain"}, [], "{'mode': 'plain'}"),
        (5, [], "5"),
    ],
)
def test_arguments_of_another_type_are_named(config: Any, overrides: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        load_config(config, overrides)


class TestDescriptions:
    def test_all_keys_are_described(self) -> None:
        docs = {doc.key: doc for doc in describe(Config)}
        assert docs["mode"].type == "one of auto, plain, coupled, decoupled"
        assert docs["target.max_model_len"].type == "an integer, auto or null"
        assert docs["drafters.N.max_match"].default == 8
        assert docs["drafters.N.online.where"].doc
        assert docs["drafters"].default == []
        assert all(doc.doc for doc in docs.values())
        assert "target" not in docs

    def test_described_keys_are_the_keys_that_load(self) -> None:
        for doc in describe(Config):
            if ".N." not in doc.key and doc.default is not None and doc.key != "drafters":
                value = doc.default.value if hasattr(doc.default, "value") else doc.default
                load_config(None, [f"{doc.key}={value}"])

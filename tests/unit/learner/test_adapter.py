"""LoRA: a new adapter is the identity, the weights that are sent are the policy's, the base stays as it is to the last
bit, and everything can be restored."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import Config
from specactor_ray.config.training_schema import LoraConfig
from specactor_ray.core.errors import ConfigError
from specactor_ray.learner.batching import Sample, collate
from specactor_ray.learner.deepspeed_engine import Rendezvous
from specactor_ray.learner.engine import PolicyModel
from specactor_ray.learner.trainer import ADAPTER, WEIGHTS, Trainer
from specactor_ray.models.adapter import Adapter, adapted_layers, policy_weights
from specactor_ray.models.loading import load_model, load_tokenizer, named_weights, tied
from specactor_ray.models.weight_buckets import unpack
from specactor_ray.runs.checkpoint import CheckpointStore, TrainState, find_damage
from tests.families import FAMILIES, make_model, save_model
from tests.tiny import tiny_draft, tiny_target
from tests.unit.learner.test_forward import samples
from tests.unit.learner.test_update import make_samples

torch.set_num_threads(1)


def config(model: str, algorithm: str = "grpo", **lora: Any) -> Config:
    """A cut into micro-batches and two optimizer steps, with a reference."""
    trainer = {"learning_rate": 0.01, "weight_decay": 0.1, "micro_batch_tokens": 60, "mini_batches": 2}
    return from_mapping(
        {
            "target": {"model": model, "dtype": "float32"},
            "algorithm": {"name": algorithm, "kl_coef": 0.1},
            "trainer": {**trainer, "lora": {"rank": 4, **lora}},
        }
    )


def begin(settings: Config, checkpoint: Path | None = None) -> Trainer:
    return Trainer(settings, checkpoint, Rendezvous(0, 1, "", 0), lambda: None)


def score(policy: PolicyModel, some: list[Sample]) -> torch.Tensor:
    with torch.no_grad():
        return policy(collate(some, range(len(some)))).logprobs


def moved(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("kind", [*FAMILIES, "phimoe", "gemma2", "opt"])
def test_new_adapters_change_nothing_and_trained_ones_what_is_sent(kind: str) -> None:
    base = PolicyModel(make_model(kind))
    policy = PolicyModel(make_model(kind).requires_grad_(False))
    before, names = score(base, samples()), [name for name, _ in named_weights(base.model)]
    adapter = Adapter(policy.model, LoraConfig(rank=4), None, seed=0)
    assert torch.equal(score(policy, samples()), before)
    moved(policy.model)
    changed = score(policy, samples())
    with adapter.off():
        assert torch.equal(score(policy, samples()), before)
    assert torch.equal(score(policy, samples()), changed) and (changed - before).abs().max() > 0.1
    kept = {one.name: one.weight.clone() for one in policy_weights(policy.model)}
    assert list(kept) == names
    merged = {one.name: one.merged() for one in policy_weights(policy.model)}
    assert all(torch.equal(kept[one.name], one.weight) for one in policy_weights(policy.model))
    missing, unexpected = base.model.load_state_dict(merged, strict=False)
    assert set(missing) <= tied(base.model).keys() and not unexpected
    torch.testing.assert_close(score(base, samples()), changed, atol=2e-4, rtol=0)


@functools.cache
def on_disk(kind: str, folder: Path) -> str:
    if kind in ("target", "draft"):
        return str({"target": tiny_target, "draft": tiny_draft}[kind]())
    load_tokenizer(str(tiny_target())).save_pretrained(folder / kind)
    return save_model(kind, folder / kind)


CASES = [("target", "grpo"), ("draft", "ppo"), ("gpt2-tied", "dapo"), ("mixtral", "rloo"), ("glm4-moe", "grpo")]


@pytest.mark.parametrize(("kind", "algorithm"), CASES)
def test_only_the_adapter_is_trained_and_a_checkpoint_restores_it(
    kind: str, algorithm: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Of models with and without ties, with transposed layers, and with experts that share a parameter."""
    name = on_disk(kind, tmp_path)
    settings, words = config(name, algorithm), load_model(name).config.vocab_size
    trainer = begin(settings)
    policy, steps = trainer.engine.policy, [within(words, make_samples(seed=step)) for step in range(4)]
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    metrics = [trainer.update(steps[step], step, step) for step in range(2)]
    assert metrics[0]["kl"] < metrics[1]["kl"], "the reference stays where it was"
    trained = {name for name, weight in policy.named_parameters() if not torch.equal(weight, before[name])}
    heads = {"value_head.weight", "value_head.bias"} if algorithm == "ppo" else set()
    assert trained == {name for name in before if ".lora_" in name} | heads
    moments = trainer.engine._optimizer.state
    assert {id(weight) for weight in moments} == {id(policy.get_parameter(name)) for name in trained}

    path = CheckpointStore(tmp_path / "saved", 1, False).save(TrainState(step=2), written(trainer))
    resumed = begin(settings, path)
    for step in (2, 3):
        assert resumed.update(steps[step], step, step) == trainer.update(steps[step], step, step)
    for (name, one), (other, two) in zip(
        policy.named_parameters(), resumed.engine.policy.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(one, two)
    assert not [one.message for one in recwarn if "peft" in str(one.filename)]


def within(words: int, some: list[Sample]) -> list[Sample]:
    return [replace(one, prompt=one.prompt % words, output=one.output % words) for one in some]


def written(trainer: Trainer) -> Any:
    def write(folder: Path) -> None:
        assert not trainer.save(folder).problem

    return write


@pytest.mark.parametrize("kind", ["target", "draft", "gpt2-tied", "mixtral", "glm4-moe"])
def test_what_is_sent_and_saved_is_the_policy(kind: str, tmp_path: Path) -> None:
    name = on_disk(kind, tmp_path)
    trainer = begin(config(name))
    moved(trainer.engine.policy.model)
    some = within(trainer.engine.policy.model.config.vocab_size, make_samples())
    expected = score(trainer.engine.policy, some)
    path = CheckpointStore(tmp_path / "saved", 1, False).save(TrainState(step=1), written(trainer))
    sent = {name: tensor for bucket in trainer.buckets() if bucket for name, tensor in unpack(bucket)}
    whole = load_model(str(path / WEIGHTS))
    assert all(torch.equal(sent[name], weight) for name, weight in named_weights(whole))
    torch.testing.assert_close(score(PolicyModel(whole), some), expected, atol=2e-4, rtol=0)
    plain = load_model(name)
    wrapped = peft.PeftModel.from_pretrained(plain, str(path / ADAPTER))
    assert wrapped.peft_config["default"].base_model_name_or_path == plain.config._name_or_path
    plain.set_attn_implementation(trainer.engine.policy.model.config._attn_implementation)
    assert torch.equal(score(PolicyModel(plain), some), expected)


def test_layers_that_are_computed_again_train_the_same_adapter() -> None:
    found = list[dict[str, torch.Tensor]]()
    for recomputed in (False, True):
        settings = config(str(tiny_target()))
        settings.trainer.gradient_checkpointing = recomputed
        trainer = begin(settings)
        trainer.update(make_samples(), 0, 0)
        found.append({one.name: one.merged() for one in policy_weights(trainer.engine.policy.model)})
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, atol=1e-5, rtol=0)


def test_damaged_checkpoints_and_other_bases_are_refused(tmp_path: Path) -> None:
    settings = config(str(tiny_target()))
    trainer = begin(settings)
    path = CheckpointStore(tmp_path / "saved", 1, False).save(TrainState(step=1), written(trainer))
    settings.target.model = str(tmp_path / "other")
    other = load_model(str(tiny_target()))
    with torch.no_grad():
        other.model.norm.weight.add_(1e-3)
    other.save_pretrained(settings.target.model)
    with pytest.raises(ConfigError, match=r"^target.model: .*step-000001.* Fix: "):
        begin(settings, path)
    (path / ADAPTER / "adapter_model.safetensors").unlink()
    assert find_damage(path) == "adapter/adapter_model.safetensors is missing"


@pytest.mark.parametrize(
    ("kind", "target", "what"),
    [
        ("llama", "qproj", r"matches nothing in LlamaForCausalLM.* Fix: use some of down_proj, gate_proj, k_proj"),
        ("llama", "embed_tokens", "no layer that"),
        ("llama", "lm_head", "no layer that"),
        ("mixtral", "gate_up_proj", "no layer that .*: use some of k_proj, o_proj, q_proj, v_proj,"),
        ("qwen2-moe", "gate_proj", "no layer that"),
        ("llama", "proj", "matches nothing"),
    ],
)
def test_targets_that_are_refused(kind: str, target: str, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"^trainer.lora.targets: '{target}' .*{what}"):
        adapted_layers(make_model(kind), LoraConfig(rank=4, targets=["q_proj", target]))


def test_layers_that_peft_refuses_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^trainer.lora.targets: peft cannot adapt Mamba.*out_proj.* Fix: "):
        Adapter(make_model("mamba").requires_grad_(False), LoraConfig(rank=4), None, seed=0)


@pytest.mark.parametrize(("kind", "layer"), [("jamba", "dt_proj"), ("llama", "down_proj"), ("mixtral", "k_proj")])
def test_layers_whose_weights_are_read_without_a_call_are_refused(
    kind: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of recurrent layers does so in transformers; here also code of one's own."""
    model = make_model(kind).requires_grad_(False)
    for parent in {type(one) for one in model.modules() if hasattr(one, layer) and kind != "jamba"}:
        monkeypatch.setattr(parent, "forward", reading(parent.forward, layer))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(ConfigError, match=rf"^trainer.lora.targets: .* adapter of {layer} than .* Fix: use") as refused:
        Adapter(model, LoraConfig(rank=4), None, seed=0)
    targets = str(refused.value).split("trainer.lora.targets=[")[1].rstrip("].").split(", ")
    model = make_model(kind).requires_grad_(False)
    assert layer not in targets and len(adapted_layers(model, LoraConfig(rank=4, targets=targets))) > 1
    Adapter(model, LoraConfig(rank=4, targets=targets), None, seed=0)
    after = {one.name: one.weight for one in policy_weights(model)}
    assert list(after) == [name for name, _ in named_weights(make_model(kind))], "in their order"
    assert all(torch.equal(after[name], weight) for name, weight in before.items() if name in after)


def reading(forward: Any, layer: str) -> Any:
    """A forward in which a layer is not called: its weight is read."""

    def changed(module: Any, *args: Any, **kwargs: Any) -> Any:
        linear = module._modules[layer]
        module._modules[layer] = Read(linear)
        try:
            return forward(module, *args, **kwargs)
        finally:
            module._modules[layer] = linear

    return changed


class Read(torch.nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = [linear]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.linear[0].weight, self.linear[0].bias)


def test_targets_are_the_last_parts_of_names() -> None:
    for targets, named in (
        (["q_proj", "mlp.down_proj"], {"layers.0.self_attn.q_proj", "layers.0.mlp.down_proj"}),
        (["layers.0.self_attn.v_proj", "v_proj"], {"layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj"}),
    ):
        found = adapted_layers(make_model("llama"), LoraConfig(rank=4, targets=targets))
        assert len(found) == len(set(found))
        assert named <= {name.removeprefix("model.") for name in found}
        assert {name.rpartition(".")[2] for name in found} == {target.rpartition(".")[2] for target in targets}


def test_a_head_is_taught_by_the_states_of_the_policy() -> None:
    trainer = begin(config(str(tiny_target())))
    moved(trainer.engine.policy.model)
    some = make_samples(3)
    states = trainer.engine.hidden_states(some, (0, 2))
    trainer.engine.policy.model.set_attn_implementation("sdpa")
    for sample, found in zip(some, states, strict=True):
        ids = torch.tensor(np.concatenate([sample.prompt, sample.output]))[None]
        with torch.no_grad():
            whole = trainer.engine.policy.model(input_ids=ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(found, torch.cat([whole[1][0, :-1], whole[3][0, :-1]], -1), atol=1e-4, rtol=1e-5)

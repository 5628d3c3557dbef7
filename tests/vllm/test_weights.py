"""New weights in a vLLM engine: every tensor, one at a time and all at once, is what transformers computes with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specactor_ray.core.errors import WeightsError
from specactor_ray.models.builtin import quiet_transformers
from specactor_ray.models.loading import tied
from specactor_ray.models.probe import eager_logprobs, probe_tokens
from specactor_ray.target import vllm as target_vllm
from specactor_ray.target.vllm import VllmEngine
from tests import families
from tests.families import VOCAB_SIZE, one_of_each
from tests.tiny import tiny_vllm_target
from tests.unit.target.test_hf_engine import load
from tests.vllm import needs_vllm
from tests.vllm.test_vllm_engine import raw

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.timeout(600)]

TOKENS = probe_tokens(VOCAB_SIZE)
FAMILIES = (
    *("llama-biases", "llama-tied", "gpt2-tied", "gpt_neox", "mixtral", "qwen3-moe", "qwen2-moe", "phi3"),
    *("gemma3-tied", "glm4-moe"),
)
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's CPU build has no smaller heads."""


OWN: dict[str, dict[str, Any]] = {"qwen2-moe": {"use_sliding_window": False}, "glm4-moe": {"head_dim": 32}}
"""vLLM ignores the former's windows, and reads the latter's dimension, which is no key of transformers."""


def make_model(family: str, seed: int, **settings: Any) -> Any:
    return families.make_model(family, seed, HEADS, **{**OWN.get(family, {}), **settings})


@pytest.fixture(autouse=True)
def no_groups() -> Iterator[None]:
    """vLLM makes groups of ranks once in a process, and those of experts only for a model that has some."""
    yield
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def weights_of(family: str, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in make_model(family, seed).state_dict().items()}


def make(family: str, folder: Path, seed: int = 0, **limits: Any) -> tuple[VllmEngine, np.ndarray, np.ndarray]:
    """An engine with the weights of `seed`, and what transformers computes with those of 0 and 1."""
    truths = [eager_logprobs(make_model(family, other), TOKENS) for other in (0, 1)]
    with quiet_transformers():
        make_model(family, seed).save_pretrained(folder)
    return raw(model=str(folder), max_model_len=120, max_batch=4, kv_cache_gb=1 / 64, **limits), *truths


def require_close(engine: VllmEngine, expected: np.ndarray, what: str, tolerance: float = 1e-3) -> None:
    assert np.abs(engine.prompt_logprobs(TOKENS) - expected).mean() < tolerance, what


@pytest.mark.parametrize("family", FAMILIES)
def test_one_tensor_at_a_time_and_all_at_once(family: str, tmp_path: Path) -> None:
    old, new, ties = weights_of(family, 0), weights_of(family, 1), tied(make_model(family, 0))
    moved = {"all": new}
    for name in one_of_each(name for name in old if name not in ties):
        moved[name] = {**old, name: new[name], **{tie: new[name] for tie, owner in ties.items() if owner == name}}
    model = make_model(family, 1)
    expected = {}  # before the engine: vLLM decorates the classes of some models
    for name, weights in moved.items():
        model.load_state_dict(weights)
        expected[name] = eager_logprobs(model, TOKENS)
    engine, truth, _ = make(family, tmp_path)
    at_start = engine.prompt_logprobs(TOKENS)
    require_close(engine, truth, "at the start")
    engine.load_weights(1, old)
    np.testing.assert_array_equal(engine.prompt_logprobs(TOKENS), at_start, "the same weights again")
    for version, (name, weights) in enumerate(moved.items(), start=2):
        engine.load_weights(version, weights)
        require_close(engine, expected[name], name)
    engine.sleep()
    engine.load_weights(999, old)
    engine.wake()
    np.testing.assert_array_equal(engine.prompt_logprobs(TOKENS), at_start, "back, two in a row, around a sleep")
    engine.close()


@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
def test_every_rank_takes_its_part_of_new_weights(family: str, tmp_path: Path) -> None:
    engine, first, second = make(family, tmp_path, tensor_parallel=2, cores=2)
    require_close(engine, first, "at the start")
    engine.load_weights(1, weights_of(family, 1))
    require_close(engine, second, "all at once")
    engine.load_weights(2, weights_of(family, 0))
    require_close(engine, first, "back")
    engine.close()


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's experts need AVX512_BF16 in bfloat16")
@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe"])
def test_bfloat16_is_that_of_a_fresh_engine(family: str, tmp_path: Path) -> None:
    engine, *_ = make(family, tmp_path / "first", dtype="bfloat16")
    at_start = engine.prompt_logprobs(TOKENS)
    engine.load_weights(1, weights_of(family, 1, torch.bfloat16))
    updated = engine.prompt_logprobs(TOKENS)
    engine.load_weights(2, weights_of(family, 0, torch.bfloat16))
    np.testing.assert_array_equal(engine.prompt_logprobs(TOKENS), at_start)
    engine.close()
    fresh, *_ = make(family, tmp_path / "second", seed=1, dtype="bfloat16")
    np.testing.assert_array_equal(fresh.prompt_logprobs(TOKENS), updated)
    fresh.close()


def test_a_parameter_without_weights_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, *_ = make("llama-biases", tmp_path)
    whole = target_vllm.as_in_files

    def without_norm(*given: Any) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in whole(*given).items() if name != "model.norm.weight"}

    monkeypatch.setattr(target_vllm, "as_in_files", without_norm)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        engine.load_weights(1, weights_of("llama-biases", 1))
    assert engine.weight_version == 0
    engine.close()


def test_weights_that_come_in_a_sleep_wake_their_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a sleeping engine has no memory for them; that of the cache is still free for a trainer."""
    engine, calls = raw(), list[tuple[str, Any]]()
    executor = engine._core.model_executor
    rpc = executor.collective_rpc

    def called(method: Any, *args: Any, **options: Any) -> Any:
        given = options.get("kwargs") or {}
        calls.append((method, given.get("tags", given.get("level"))))
        return rpc(method, *args, **options)

    monkeypatch.setattr(executor, "collective_rpc", called)
    engine.sleep(keep_weights=False)
    with pytest.raises(WeightsError, match="no new ones"):
        engine.wake()
    engine.load_weights(1, load(tiny_vllm_target()).state_dict())
    engine.load_weights(2, load(tiny_vllm_target()).state_dict())
    engine.wake()
    engine.sleep()
    engine.wake()
    seen = [call for call in calls if call[0] in ("sleep", "wake_up", "replace_weights")]
    replaced, woken = ("replace_weights", None), ("wake_up", None)
    assert seen == [("sleep", 2), ("wake_up", ["weights"]), replaced, replaced, woken, ("sleep", 1), woken]
    assert executor.is_sleeping is False

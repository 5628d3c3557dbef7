"""Models and requests of the check, without a checkpoint or a tokenizer: random weights, random prompts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_check.stage import Settings
from gpu_check.vllm_watch import Watch
from specactor_ray.config.schema import TargetConfig
from specactor_ray.models.ragged_model import RaggedModel
from specactor_ray.models.shapes import GIB, token_bytes
from specactor_ray.target.vllm_settings import WEIGHTS_FILE

STEP_TOKENS = 8192
"""Most positions of a step."""
_PAGE = 128
"""Most tokens of a page of vLLM's cache."""


def random_config(shape: Mapping[str, int]) -> Any:
    """The configuration of a Qwen2 decoder of this shape."""
    from transformers import Qwen2Config

    rope = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen2Config(**shape, rope_parameters=rope, tie_word_embeddings=False)


def random_weights(shape: Mapping[str, int], dtype: str, device: str, seed: int = 0) -> Any:
    """A model of transformers with its initial weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(random_config(shape), dtype=getattr(torch, dtype))
    return model.eval().requires_grad_(False)


def random_model(shape: Mapping[str, int], dtype: str, device: str, tokens: int) -> RaggedModel:
    """A model as `hf` and drafters run it, with a cache of `tokens` tokens."""
    model = random_weights(shape, dtype, device)
    return RaggedModel(model, tokens * token_bytes(model.config, model.dtype.itemsize))


def random_prompts(settings: Settings, rows: int) -> list[list[int]]:
    """A prompt for the target in each row; the same for the same number of rows."""
    shape = rows, settings.target_prompt
    drawn: list[list[int]] = np.random.default_rng(7).integers(0, settings.target["vocab_size"], shape).tolist()
    return drawn


@contextlib.contextmanager
def model_folder(settings: Settings) -> Iterator[str]:
    """A folder with the target's configuration, and a file of weights that is not read."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="specactor-check-") as folder:
        config = random_config(settings.target)
        config.update({"architectures": ["Qwen2ForCausalLM"], "torch_dtype": settings.dtype})
        config.save_pretrained(folder)
        save_file({"none": torch.zeros(1)}, Path(folder, WEIGHTS_FILE))
        yield folder


def vllm_target(settings: Settings, model: str) -> TargetConfig:
    """Settings of the product's vLLM engine with dummy weights, of which stock vLLM gets what is no choice of ours."""
    cuda, rows = settings.device == "cuda", max(settings.rows)
    length = settings.target_prompt + 2 * settings.target_tokens + settings.window + 16
    itemsize = getattr(torch, settings.dtype).itemsize
    cache = (rows + 1) * (length + 2 * _PAGE) * token_bytes(random_config(settings.target), itemsize)
    watch = f"{Watch.__module__}.{Watch.__qualname__}"
    return TargetConfig(
        model=model,
        backend="vllm",
        dtype=settings.dtype,
        max_model_len=length,
        max_batch=rows,
        max_step_tokens=max(STEP_TOKENS, rows * (1 + settings.window)),
        kv_cache_gb=cache / GIB,
        gpus=int(cuda),
        cores=1,
        compiled=cuda,
        engine_arguments={"load_format": "dummy", "enable_prefix_caching": False, "worker_extension_cls": watch},
    )

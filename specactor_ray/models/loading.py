"""Models and tokenizers by name: a local directory, a Hugging Face id, or a built-in name.

Every failure is a `ModelLoadError` that names the missing part and the fix.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specactor_ray.core.errors import ModelLoadError, first_of
from specactor_ray.core.files import expanded
from specactor_ray.core.signals import signals_deferred
from specactor_ray.models.builtin import BUILTIN_MODELS, builtin_dir, is_builtin, quiet_transformers, require_builtin
from specactor_ray.models.checkpoint_files import (
    describes_head,
    read_config,
    require_head,
    require_tokenizer,
    weight_files,
)

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
DTYPE_NAMES = ("float32", "bfloat16", "float16")
HUB_TIMEOUT_S = 4.0
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?(@[\w][\w./-]*)?")
"""Hugging Face id, with a commit, tag or branch after the `@`."""


def require_model(name: str) -> Path | None:
    """Refuse a missing model; nothing is loaded, converted or downloaded. Returns the folder with its `config.json`;
    None if it must be converted or downloaded first."""
    if is_builtin(name):
        return require_builtin(name)
    source = _find_model(name)
    if isinstance(source, Path):
        return source
    repo, _, revision = source.partition("@")
    if (folder := _folder_of(repo, revision or None)) is not None:
        return folder
    if not hub_reachable():
        raise ModelLoadError(_unreachable(name))
    return None


def require_named_model(key: str, name: str, is_head: bool = False) -> Path | None:
    """Folder of the `config.json` of a model that a key or option names, if it is on this machine. A ModelLoadError if
    it cannot be found, or is a head, or the head is a model."""
    try:
        folder = require_head(expanded(name)) if is_head else require_model(name)
        if folder is not None and not is_head and describes_head(folder):
            fix = "name the directory of a model; for a head of a drafter, use method: eagle."
            raise ModelLoadError(f"{name!r} holds an EAGLE head, which is no model. Fix: {fix}")
        return folder
    except ModelLoadError as error:
        raise ModelLoadError(f"{key}: {error}") from None


def _folder_of(source: Path | str, revision: str | None) -> Path | None:
    """Folder of a model's files; None for a Hugging Face id that is not in the cache."""
    if isinstance(source, Path):
        return source
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _find_model(name: str) -> Path | str:
    """`locate_model` for names that are not built in, with their revision."""
    path = expanded(name)
    try:
        is_dir, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ModelLoadError(f"{name!r} cannot be read ({error.strerror}). Fix: check the path.") from None
    if is_dir:
        read_config(path)
        weight_files(path)
        return path
    if exists:
        raise ModelLoadError(f"{name!r} is a file. Fix: name the directory that holds config.json and the weights.")
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"There is no directory {name!r}. Fix: check the path, or give {_NAMES_IN_WORDS}.")
    return name


def locate_model(name: str) -> tuple[Path | str, str | None]:
    """A directory (a built-in model is converted first) or a Hugging Face id, and the revision of the id: of
    `org/model@9f2c1a7` `("org/model", "9f2c1a7")`, else None."""
    source = builtin_dir(name) if is_builtin(name) else _find_model(name)
    if isinstance(source, Path):
        return source, None
    plain, _, revision = source.partition("@")
    return plain, revision or None


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
) -> PreTrainedModel:
    """A decoder-only model, ready for inference: evaluation mode, no gradients.

    Args:
        dtype: `float32`, `bfloat16` or `float16`.
        trust_remote_code: Run model code of the checkpoint.
        max_model_len: Most tokens of a sequence, by which some models choose their positions (`models/rotary.py`);
            None: the model's whole context.
    """
    with _open(name, trust_remote_code) as (source, access):
        from transformers import AutoModelForCausalLM

        from specactor_ray.models.rotary import fix_positions

        auto: Any = AutoModelForCausalLM  # its stated return type ignores output_loading_info
        kind = parse_dtype(dtype)
        options = {**access, "dtype": kind, "ignore_mismatched_sizes": True}  # refused below, with its name
        model, info = auto.from_pretrained(source, **options, output_loading_info=True)
    _require_own_weights(name, model, info)
    _require_plain_weights(name, model, _folder_of(source, access["revision"]))
    model.config.return_dict = True
    fix_positions(model, max_model_len)
    model.to(device).eval().requires_grad_(False)
    return model


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model."""
    require_tokenizer(name)
    with _open(name, trust_remote_code) as (source, access):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source, **access)


def load_model_config(name: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's configuration alone (vocabulary size, context, layers); reads no weights."""
    with _open(name, trust_remote_code) as (source, access):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(source, **access)


def _import_compiled_modules() -> None:
    """Import modules that transformers imports during a load and whose import must not be interrupted. In other
    threads, such as those of actors, no signal raises anything, so these modules are imported on demand there."""
    if threading.current_thread() is not threading.main_thread():
        return
    with signals_deferred():
        import torch._dynamo  # noqa: F401
        import transformers.generation
        import transformers.modeling_utils  # noqa: F401


def load_empty_model(
    name: str, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model on the `meta` device, without weights, in `dtype` (None: that of its configuration)."""
    with _open(name, trust_remote_code) as (source, access):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(source, **access)
        with torch.device("meta"):
            options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return model


def weight_shapes(model: PreTrainedModel) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Hugging Face names and shapes of all weights of a model, which may be on `meta`, and the `tied` ones."""
    model.tie_weights()
    return {name: tuple(weight.shape) for name, weight in named_weights(model, every_name=True)}, tied(model)


def named_weights(model: torch.nn.Module, every_name: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face name and tensor of a model's whole persistent state: parameters and persistent buffers. What
    is sent, saved and loaded is this. A tied one comes once, or with `every_name` under each of its names."""
    import torch

    seen = set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and (every_name or id(tensor) not in seen):
            seen.add(id(tensor))
            yield name, tensor


def tied(model: torch.nn.Module) -> dict[str, str]:
    """Name of a weight that shares its values with an earlier one → name of the earlier one."""
    first: dict[int, str] = {}
    weights = named_weights(model, every_name=True)
    return {name: own for name, weight in weights if (own := first.setdefault(id(weight), name)) != name}


def weight_dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Name → data type that loses nothing for an engine which loads the model in the data type of this one, which may
    be on `meta`: that of the weight, but float32 for buffers and for parameters that transformers keeps in float32."""
    import torch

    plan = model._get_dtype_plan(model.dtype)
    kept = re.compile("|".join(pattern.replace("*", r"\d+") for pattern in plan) or r"(?!)")
    found = {}
    for name, tensor in named_weights(model, every_name=True):
        precise = not isinstance(tensor, torch.nn.Parameter) or kept.search(name)
        found[name] = torch.float32 if precise and tensor.is_floating_point() else tensor.dtype
    return found


def load_eos_token_ids(name: str, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """End-of-sequence ids of a model, without a load of its weights."""
    from transformers import GenerationConfig

    config = load_model_config(name, trust_remote_code=trust_remote_code)
    with _open(name, trust_remote_code) as (source, access):
        try:
            generation = GenerationConfig.from_pretrained(source, **access)
        except OSError:  # many models have none
            generation = None
    return eos_token_ids(generation, config)


def eos_token_ids(generation: GenerationConfig | None, config: PretrainedConfig) -> tuple[int, ...]:
    """End-of-sequence ids of the generation configuration, else of the model's."""
    for source in (generation, config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def parse_dtype(name: str) -> torch.dtype:
    """`torch.float32` for `float32` and so on; `auto` must be settled before."""
    import torch

    if name not in DTYPE_NAMES:
        raise ModelLoadError(f"{name!r} is no data type for weights. Fix: use one of {', '.join(DTYPE_NAMES)}.")
    return getattr(torch, name)


def recompute_layers(model: Any) -> None:
    """Keep only the inputs of decoder layers for the backward pass (gradient checkpointing).

    The model stays in evaluation mode: transformers' own switch needs training mode, which turns dropout and the noise
    of routers on, so that the update is not that of the policy that the rollout ran.

    Raises:
        ModelLoadError: The model has no layers that can be computed again.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelLoadError(
            f"{type(model).__name__} does not support gradient checkpointing. Fix: trainer.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    import torch
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _require_own_weights(name: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Refuse what transformers only warns of: weights that are missing, which it fills with random numbers, and tied
    ones that differ, which it then does not tie, so that no update fits. Weights without a place are logged."""
    if missing := info.get("missing_keys"):
        raise ModelLoadError(f"The weights of {name!r} lack {first_of(sorted(missing))}. Fix: get the complete model.")
    if wrong := {key: (tuple(found), tuple(own)) for key, found, own in info.get("mismatched_keys", ())}:
        found, own = wrong[min(wrong)]
        raise ModelLoadError(
            f"The weights of {name!r} do not fit its config.json: {first_of(sorted(wrong))}; the first has shape "
            f"{found} in the weight files, and {own} by config.json. Fix: get both files of the same model."
        )
    untied = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
    if untied:
        raise ModelLoadError(
            f"The config.json of {name!r} ties {first_of(sorted(untied))} to the embedding, and its weight files hold "
            "other values for it. Fix: set tie_word_embeddings=false in config.json, or remove that weight from the "
            "files."
        )
    if unexpected := info.get("unexpected_keys"):
        logger.warning("the model of %r has no place for these of its weights: %s", name, first_of(sorted(unexpected)))


def _require_plain_weights(name: str, model: PreTrainedModel, folder: Path | None) -> None:
    """Refuse files with integers or 8-bit numbers for a weight unless transformers restores its values."""
    from safetensors import safe_open
    from transformers.quantizers.auto import AutoHfQuantizer

    stated = read_config(folder).get("quantization_config") if folder else None
    if folder is None or (stated and AutoHfQuantizer.supports_quant_method(stated)):
        return
    own = {key for key, weight in named_weights(model, every_name=True) if weight.is_floating_point()}
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, "pt") as tensors:
            kinds = {key: tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118 - no mapping
        for key, kind in kinds.items():
            if kind not in _PLAIN and (key in own or key.endswith(".weight")):
                raise ModelLoadError(
                    f"The weights of {name!r} are quantized ({key} is {kind}), and its config.json does not say how. "
                    "Fix: complete its quantization_config, or get the model in float32 or bfloat16."
                )


_PLAIN = ("F64", "F32", "F16", "BF16")
"""Kinds of numbers in safetensors files that are the values of weights."""


_NAMES_IN_WORDS = (
    f"a local directory, a Hugging Face id (org/name or org/name@commit), or the built-in {', '.join(BUILTIN_MODELS)}"
)


@contextlib.contextmanager
def _open(name: str, trust_remote_code: bool) -> Iterator[tuple[Path | str, dict[str, Any]]]:
    """The source and the access options for `name`; errors in the body become a ModelLoadError."""
    _import_compiled_modules()
    from safetensors import SafetensorError

    damaged = (SafetensorError, pickle.UnpicklingError)
    known: tuple[type[Exception], ...] = (OSError, *wrong_value_errors(), *damaged)
    source, revision = locate_model(name)
    offline = isinstance(source, str) and not hub_reachable()
    access: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    access |= {"local_files_only": offline or isinstance(source, Path), "revision": revision}
    try:
        with quiet_transformers():
            yield source, access
    except ModelLoadError:
        raise
    except known as error:
        raise ModelLoadError(_explain(name, source, offline, error)) from error


def wrong_value_errors() -> tuple[type[Exception], ...]:
    """Exceptions of the model code of transformers and vLLM, for example for a configuration with values of a wrong
    type."""
    from huggingface_hub.errors import StrictDataclassError

    plain = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError)
    return *plain, NameError, AssertionError, ImportError, StrictDataclassError


def _explain(name: str, source: Path | str, offline: bool, error: Exception) -> str:
    reason = f"its code has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
    if "trust_remote_code" in reason:
        return (
            f"The model {name!r} brings its own code, which is not run unless asked. Fix: read that code, then set "
            "trust_remote_code=true beside the model's name."
        )
    if offline:
        return _unreachable(name)
    where = (
        "Fix: check the id, and log in if it is private or gated" if isinstance(source, str) else "Fix: copy it again"
    )
    return f"The model {name!r} cannot be loaded: {reason[:400]} {where}, or give {_NAMES_IN_WORDS}."


def _unreachable(name: str) -> str:
    return (
        f"The model {name!r} is neither a local directory nor in the local Hugging Face cache, and the Hugging Face "
        "Hub cannot be reached. Fix: connect this machine to the network, or name a local directory or the built-in "
        f"{', '.join(BUILTIN_MODELS)}."
    )


def hub_reachable(timeout_s: float = HUB_TIMEOUT_S) -> bool:
    """Whether the Hugging Face Hub answers within the time. Its own client would retry for minutes."""
    offline = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if not {"1", "TRUE", "YES", "ON"}.isdisjoint(offline):
        return False
    answered = threading.Event()
    # A thread, because the look-up of a host name has no time limit.
    threading.Thread(target=_ask_hub, args=(answered, timeout_s), daemon=True, name="ask-hub").start()
    return answered.wait(timeout_s)


def _ask_hub(answered: threading.Event, timeout_s: float) -> None:
    from huggingface_hub import constants

    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):
            answered.set()
    except urllib.error.HTTPError:  # an error status is an answer, too
        answered.set()
    except (OSError, ValueError):
        return

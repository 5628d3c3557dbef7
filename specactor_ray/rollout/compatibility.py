"""Checks made before any actor starts: is there a model, and do the drafters speak its vocabulary?"""

from __future__ import annotations

import logging
from typing import Any

from specactor_ray.config.schema import Config, ModeName
from specactor_ray.errors import ConfigError, ModelLoadError
from specactor_ray.modeling.loading import load_model_config, load_tokenizer

logger = logging.getLogger(__name__)


def check_drafters_fit_target(config: Config) -> Any:
    """Refuse drafters whose vocabulary differs from the target's.

    Returns:
        The target's tokenizer, or None where the model directory has none (prompts are token ids then).

    Raises:
        ConfigError: A drafter's vocabulary has another size; both sizes are named.
        ModelLoadError: A model cannot be found.
    """
    target = load_model_config(config.target.model, trust_remote_code=config.target.trust_remote_code)
    if config.mode is not ModeName.plain:
        for index, drafter in enumerate(config.drafters):
            if drafter.model is None:
                continue
            draft = load_model_config(drafter.model, trust_remote_code=drafter.trust_remote_code)
            if draft.vocab_size != target.vocab_size:
                raise ConfigError(
                    f"drafters.{index}.model",
                    f"{drafter.model} has a vocabulary of {draft.vocab_size} tokens, "
                    f"the target {config.target.model} one of {target.vocab_size}.",
                    "use a draft model that was trained with the target's tokenizer",
                )
    try:
        return load_tokenizer(config.target.model, trust_remote_code=config.target.trust_remote_code)
    except ModelLoadError as error:
        logger.warning("%s Prompts must be lists of token ids.", error)
        return None

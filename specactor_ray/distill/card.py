"""Settings of a drafter's training. `drafter.json`, beside a trained drafter, has them with target and acceptance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specactor_ray.config.fields import at_least, limited, one_of, positive
from specactor_ray.config.schema import DTYPES

CARD_FILE = "drafter.json"
_CHANGES_ROLLOUTS = ("temperature", "samples", "max_tokens", "seed", "chat")
_CHANGES_NOTHING = ("window", "device", "max_batch", "kv_cache_gb", "trust_remote_code")


@dataclass
class DrafterRecipe:
    """Settings of the recorded rollouts, of training and of the measurement."""

    target: str = ""
    """A local directory, a Hugging Face id or a built-in name."""
    temperature: float = at_least(0, default=1.0)
    """Temperature of the rollouts and of the loss; 0 is greedy, with a loss at temperature 1."""
    samples: int = at_least(1, default=4)
    """Most rollouts of every prompt."""
    max_tokens: int = at_least(1, default=192)
    """Most output tokens of one rollout."""
    seed: int = limited(lambda value: 0 <= value < 2**64, "use 0 to 2**64 - 1.", default=0)
    """Seed of the rollouts' noise and of the order of training."""
    chat: bool = True
    """Wrap prompts in the target's chat template."""
    tokens: int = at_least(1, default=40_000)
    """Number of output tokens to train on."""
    epochs: float = positive(6.0)
    """Passes over these tokens."""
    draft_vocab: int = at_least(2, default=8192)
    """Size of the head's vocabulary, the most frequent token ids; at most the target's."""
    depths: int = limited(lambda value: 1 <= value <= 16, "use 1 to 16.", default=4)
    """Tokens ahead that the head is trained on its own predictions (training-time test)."""
    learning_rate: float = positive(3e-3)
    """Peak learning rate."""
    batch_tokens: int = at_least(1, default=512)
    """Most positions of one batch, including prompts and padding."""
    dtype: str = one_of(DTYPES, "float32")
    """Arithmetic of training; weights are float32."""
    window: int = at_least(1, default=5)
    """Draft tokens per step in the measurement."""
    device: str = one_of(("cpu", "cuda"), "cpu")
    max_batch: int = at_least(1, default=64)
    """Most rollouts at once."""
    kv_cache_gb: float = positive(1.0)
    """Memory of the target's cache, and of the drafter's in the measurement, in 2**30 bytes."""
    trust_remote_code: bool = False

    def rollout_facts(self) -> dict[str, Any]:
        """The settings that determine the rollouts."""
        return {name: getattr(self, name) for name in _CHANGES_ROLLOUTS}

    def training_facts(self) -> dict[str, Any]:
        """The settings that determine the drafter."""
        return {name: value for name, value in asdict(self).items() if name not in _CHANGES_NOTHING}

"""Whether a run's tokens are those of plain decoding one by one, or up to near-ties (docs/design/keyed-sampling.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
"""Keys of a model's configuration that only mixtures of experts have."""
_INVARIANT_WEIGHTS = {"hf": (), "vllm": ("awq", "fp8")}
"""Backend → kinds of quantized weights with kernels that do not depend on the batch."""


class TokenIdentity(NamedTuple):
    """Whether kernels compute a row alike whatever shares its batch; if so, every mode gives the same tokens."""

    holds: bool
    reason: str

    @property
    def line(self) -> str:
        """The claim for the log."""
        if self.holds:
            return f"tokens are those of plain decoding, one by one: {self.reason}"
        return f"samples have the distribution of plain decoding, and its tokens up to near-ties: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """The claim for the summary."""
        return {"tokens_identical": self.holds, "reason": self.reason}


def is_mixture(facts: Mapping[str, Any]) -> bool:
    """Whether a model with this configuration is a mixture of experts."""
    nested = facts.get("text_config")
    text = nested if isinstance(nested, Mapping) else facts
    return any(isinstance(count := text.get(key), int) and count > 0 for key in _EXPERTS)


def uncovered(backend: str, facts: Mapping[str, Any]) -> str:
    """Problem of `target.batch_invariant` with a model of this configuration on GPUs; empty if there is none."""
    packed = facts.get("quantization_config") or {}
    kind = str(packed.get("quant_method", "of an unknown kind"))
    if not packed or kind in _INVARIANT_WEIGHTS[backend]:
        return ""
    return (
        f"the weights are quantized ({kind}), and target.backend={backend} has no kernels for them that do not "
        "depend on the batch."
    )


def token_identity(
    device: str, dtype: str, mixture: bool, batch_invariant: bool = False, backend: str = "hf"
) -> TokenIdentity:
    """Claim of a run of the target on `cpu` or `cuda`, in a data type other than `auto`. `mixture`: whether it is a
    mixture of experts; `batch_invariant`, `backend`: the keys of `target`."""
    if device != "cpu":
        if batch_invariant:
            return TokenIdentity(True, "target.batch_invariant is set, so kernels do not depend on the batch")
        hint = "target.batch_invariant=true selects others"
        return TokenIdentity(False, f"the GPU's kernels depend on the number of rows; {hint}")
    if backend != "hf":
        return TokenIdentity(False, f"{backend}'s kernels on CPUs depend on the number of rows; those of hf do not")
    if mixture:
        return TokenIdentity(False, f"a mixture of experts in {dtype} on CPUs is rounded by the rows of each expert")
    if dtype == "float32":
        return TokenIdentity(True, "float32 on CPUs")
    if dtype == "bfloat16":
        return TokenIdentity(True, "bfloat16 on CPUs: products do not depend on the number of rows")
    return TokenIdentity(False, f"a product in {dtype} on CPUs is rounded by the number of rows; float32 is not")

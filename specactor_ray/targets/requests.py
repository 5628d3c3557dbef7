"""What every engine does with requests in the same way: refuse those that can never run, and end outputs."""

from __future__ import annotations

from collections.abc import Collection

from specactor_ray.errors import InputError
from specactor_ray.messages import SamplingParams
from specactor_ray.targets.base import RowOutput, TargetRequest


def refuse_impossible(request: TargetRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise InputError for a request that can never run."""
    prompt, committed = request.prompt_token_ids, request.committed_token_ids
    if not prompt:
        raise InputError("the prompt has no tokens")
    for position, token in enumerate((*prompt, *committed)):
        if not 0 <= token < vocab_size:
            raise InputError(
                f"token id {token} at position {position} is outside the vocabulary (0 to {vocab_size - 1})"
            )
    if len(prompt) >= max_model_len:
        raise InputError(
            f"the prompt has {len(prompt)} tokens; with at least one output token it must stay within "
            f"{max_model_len} (the smallest of target.max_model_len, the model's context and the cache budget)"
        )


def stop_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Token ids that end an output of a request."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | frozenset(eos_token_ids)


def cut_at_stop(
    output: RowOutput, stops: Collection[int], sampling: SamplingParams, context: int, max_model_len: int
) -> None:
    """End the output at its first stop token, at max_tokens or where the context is full.

    Args:
        output: What a step committed; shortened where it stops.
        stops: Token ids that end it.
        sampling: Of the request.
        context: Prompt and output tokens before this step.
        max_model_len: Most prompt and output tokens.
    """
    for i, token in enumerate(output.token_ids):
        if token in stops:
            _keep_first(output, i + 1)
            output.finish_reason = "stop"
            return
    made = len(output.token_ids)
    if output.start + made >= sampling.max_tokens or context + made >= max_model_len:
        output.finish_reason = "length"


def _keep_first(output: RowOutput, count: int) -> None:
    output.token_ids, output.logprobs = output.token_ids[:count], output.logprobs[:count]
    if output.num_accepted >= count:  # what was drafted behind the end is neither right nor wrong
        output.num_drafted = output.num_accepted = count
    if output.margins is not None:
        output.margins = output.margins[:count]

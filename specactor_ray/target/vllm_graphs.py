"""Proof at the start that vLLM's steps in CUDA graphs compute what they compute without. Graphs of whole steps with
prompt tokens gave wrong tokens on an H100; those with mixed numbers of drafts are proved on each device."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from specactor_ray.core.types import SamplingParams
from specactor_ray.target.base import Drafts, TargetEngine, TargetRequest

_PROMPTS, _TOKENS = (5, 17, 33, 64), 24
_FEWEST = 1 / 4
"""Least share of the tokens that must be equal: near-ties end a comparison, and wrong steps at the first token."""


def check_graphs(engine: TargetEngine, use_graphs: Callable[[bool], None], max_drafts: int, tolerance: float) -> str:
    """Decode some requests without graphs and without drafts, then in graphs with right drafts of mixed numbers.

    Args:
        engine: An engine without requests.
        use_graphs: Switches graphs on or off.
        max_drafts: Most draft tokens of a request in one step.
        tolerance: Largest mean difference of log-probabilities, in nats, that rounding explains.

    Returns:
        What differs; empty if nothing does.
    """
    use_graphs(False)
    plain = _decode(engine, 0, [[] for _ in _PROMPTS])
    use_graphs(True)
    drafted = _decode(engine, max_drafts, [tokens for tokens, _ in plain])
    gaps, total = list[float](), 0
    for (tokens, logprobs), (others, theirs) in zip(plain, drafted, strict=True):
        total += len(tokens)
        for token, other, one, two in itertools.zip_longest(tokens, others, logprobs, theirs):
            if token != other:
                break
            gaps.append(abs(one - two))
    if len(gaps) < _FEWEST * total:
        return f"{len(gaps)} of {total} tokens are equal before the first other one of each request"
    gap = float(np.mean(gaps))
    if gap <= tolerance:  # false for NaN
        return ""
    return f"log-probabilities differ by {gap:.3g} nats on average, and rounding explains {tolerance:.3g}"


def _decode(engine: TargetEngine, window: int, truth: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of the requests; `truth`: tokens that are drafted, 0 to `window` of them."""
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in _PROMPTS]
    engine.reset_prefix_cache()
    for row, long in enumerate(_PROMPTS):
        length = min(long, engine.max_model_len // 2)
        prompt = tuple(np.random.default_rng(row).integers(0, engine.vocab_size, length).tolist())
        tokens = min(_TOKENS, engine.max_model_len - length)
        engine.add(
            row,
            TargetRequest(f"check-{row}", prompt, SamplingParams(1.0, max_tokens=tokens, seed=row, ignore_eos=True)),
        )
    step = 0
    while engine.has_work():
        step += 1
        tails = {}
        for row in engine.decoding().tolist() if window else ():
            begin, count = len(found[row][0]), (step + row) % (window + 1)
            tails[row] = truth[row][begin : begin + count]
        result = engine.step(Drafts.of(tails), window)
        logprobs = iter(result.logprobs.tolist())
        for row, output, _ in result.outputs():
            found[row][0].extend(output)
            found[row][1].extend(itertools.islice(logprobs, len(output)))
    return found

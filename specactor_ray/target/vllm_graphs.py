"""Proof at the start that vLLM's steps in CUDA graphs compute what they compute without. Graphs of whole steps with
prompt tokens gave wrong tokens on an H100; those with mixed numbers of drafts are proved on each device."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from specactor_ray.core.types import SamplingParams
from specactor_ray.table.requests import TargetRequest
from specactor_ray.target.base import Drafts, TargetEngine

_PROMPTS, _TOKENS = (5, 17, 33, 64), 24
_FEWEST = 1 / 4
"""Least share of the tokens that must be equal: near-ties end a comparison, and wrong steps at the first token."""


_Decoded = list[tuple[list[int], list[float]]]
"""Tokens and log-probabilities of the requests."""


def check_graphs(
    engine: TargetEngine, use_graphs: Callable[[bool], None], max_drafts: int, tolerance: float, exact: bool = False
) -> str:
    """Decode some requests without graphs and without drafts, then in graphs: without drafts, with right drafts of
    mixed numbers, and with the most drafts of each request.

    Args:
        engine: An engine without requests.
        use_graphs: Switches graphs on or off.
        max_drafts: Most draft tokens of a request in one step.
        tolerance: Largest mean difference of log-probabilities, in nats, that rounding explains.
        exact: Whether all tokens must be equal, near-ties included.

    Returns:
        What differs; empty if nothing does.
    """
    tokens = max(_TOKENS, 2 * max_drafts + 3)  # two whole turns of drafts behind the first token
    use_graphs(False)
    plain = _decode(engine, tokens, [[] for _ in _PROMPTS], 0)
    use_graphs(True)
    truth = [output for output, _ in plain]
    cases = (
        ("without drafts", 0, False),
        ("with mixed drafts", max_drafts, True),
        ("with all drafts", max_drafts, False),
    )
    for name, window, mixed in cases:
        if problem := _difference(plain, _decode(engine, tokens, truth, window, mixed), tolerance, exact):
            return f"{name} {problem}"
    return ""


def _difference(plain: _Decoded, others: _Decoded, tolerance: float, exact: bool) -> str:
    gaps, total = list[float](), 0
    for (tokens, logprobs), (found, theirs) in zip(plain, others, strict=True):
        total += len(tokens)
        for token, other, one, two in itertools.zip_longest(tokens, found, logprobs, theirs):
            if token != other:
                break
            gaps.append(abs(one - two))
    if len(gaps) < (1 if exact else _FEWEST) * total:
        return f"{len(gaps)} of {total} tokens are equal before the first other one of each request"
    gap = float(np.mean(gaps))
    if gap <= tolerance:  # false for NaN
        return ""
    return f"log-probabilities differ by {gap:.3g} nats on average, and rounding explains {tolerance:.3g}"


def _decode(engine: TargetEngine, most: int, truth: list[list[int]], window: int, mixed: bool = False) -> _Decoded:
    """Decode `most` tokens of each request; `truth`: tokens that are drafted, `window` of them or, `mixed`, 0 to
    `window`."""
    found: _Decoded = [([], []) for _ in _PROMPTS]
    engine.reset_prefix_cache()
    for row, long in enumerate(_PROMPTS):
        length = min(long, engine.max_model_len // 2)
        prompt = tuple(np.random.default_rng(row).integers(0, engine.vocab_size, length).tolist())
        tokens = min(most, engine.max_model_len - length)
        sampling = SamplingParams(1.0, max_tokens=tokens, seed=row, ignore_eos=True)
        engine.add(engine.table.open(TargetRequest(f"check-{row}", prompt, sampling)))
    step = 0
    while engine.has_work():
        step += 1
        tails = {}
        for row in engine.decoding().tolist() if window else ():
            begin, count = len(found[row][0]), (step + row) % (window + 1) if mixed else window
            tails[row] = truth[row][begin : begin + count]
        result = engine.step(Drafts.of(tails), window)
        logprobs = iter(result.logprobs.tolist())
        for row, output, _ in result.outputs():
            found[row][0].extend(output)
            found[row][1].extend(itertools.islice(logprobs, len(output)))
    engine.table.clear()
    return found

"""Mathematical equality of an answer and the reference answer; the reward `math`.

`math-verify` parses and compares. This module selects the parsed part, and refuses expressions that would take long to
evaluate: no output may cost more than about a second.

The reference is parsed as the content of one `\\boxed{}`: bare LaTeX such as `2\\sqrt{3}` is read whole. So is the
answer: the last `\\boxed{}`, else the whole output or the text after the last "is", ":" or "=", if that is mathematics
without prose. Else math-verify searches delimited LaTeX or a number in the text. LaTeX without delimiters in prose is
no answer: a part of it, the 2 of `2\\sqrt{3}`, would be mistaken for the whole.
"""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.concrete.expr_with_limits import ExprWithLimits

_MAX_CHARS = 600
_MAX_DEPTH = 30
"""Limits of one expression: its length, and the nesting depth of its brackets; parsing time grows with both."""
_MAX_EXPONENT, _MAX_DEGREE = 5_000, 60
"""Largest exponent, and largest sum of the exponents of polynomials, in an evaluated expression."""
_MAX_ARGUMENT, _MAX_ELEMENTARY = 10_000, 10**200
"""Largest argument of factorials, binomials and similar functions, and of elementary ones."""
_PROSE_CHARS = 2_000
"""Number of last characters searched in a text without `\\boxed{}`."""

_UNEVALUATED = (ExprWithLimits, sympy.Limit, sympy.Derivative)
"""Sums, products, integrals: exercises, not answers."""
_ELEMENTARY = (
    sympy.functions.elementary.trigonometric.TrigonometricFunction,
    sympy.functions.elementary.trigonometric.InverseTrigonometricFunction,
    sympy.functions.elementary.hyperbolic.HyperbolicFunction,
    sympy.functions.elementary.integers.RoundFunction,
    sympy.Abs,
    sympy.log,
    sympy.Max,
    sympy.Min,
    sympy.Mod,
    sympy.core.function.AppliedUndef,
)
_LATEX, _TEXT = (LatexExtractionConfig(),), (LatexExtractionConfig(), ExprExtractionConfig())
_LEAD = re.compile(r"\b(?:is|are|equals)\b:?|:|=|####")
_DELIMITER = re.compile(r"\$|\\\(|\\\[")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_LAST_WORD = re.compile(r"(?<=[\s\d}])[A-Za-z]+$")  # a unit

# The reward process has a time limit; the warning that math-verify's own ones are off is muted.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


_Read = tuple[Any, str]
"""A parsed expression, and its text as normalised by math-verify."""


def equal_answers(reference: str, output: str) -> bool:
    """Whether the answer in `output` equals `reference`. False for an output without an answer. Raises ValueError if
    the reference cannot be parsed, or is too large to evaluate."""
    gold = _read(_last_boxed(reference) or reference)
    if gold is None:
        raise ValueError(f"the reference answer {reference:.80} cannot be parsed as mathematics")
    given = _read_answer(output)
    if given is None:
        return False
    if given[1] == gold[1] or (type(given[0]) is type(gold[0]) and bool(given[0] == gold[0])):  # evaluates nothing
        return True
    if _is_too_large(gold[0]):
        raise ValueError(f"the reference answer {reference:.80} is too large to evaluate, or left unevaluated")
    return not _is_too_large(given[0]) and verify(gold[0], given[0], timeout_seconds=None)


def _read(content: str) -> _Read | None:
    """Parse the whole content of a `\\boxed{}`."""
    if not content.strip() or len(content) > _MAX_CHARS or _depth(content) > _MAX_DEPTH:
        return None
    return _parsed(f"\\boxed{{{content}}}", _LATEX)


def _read_answer(output: str) -> _Read | None:
    if "\\boxed" in output:
        boxed = _last_boxed(output)
        return None if boxed is None else _read(boxed)
    text = output.strip()
    short = _undecorated(text)
    if _is_bare(short):
        return _read(_undecorated(short.rpartition(": ")[2]))
    lines = text[-_PROSE_CHARS:].splitlines() or [""]
    last = _undecorated(_LEAD.split(_undecorated(lines[-1]))[-1])
    if _is_bare(last):
        return _read(last)
    if not _DELIMITER.search(text) and _COMMAND.search(text):
        return None
    # The first line may be cut, and an unpaired `$` in it would swap the inside and outside of all others.
    tail = "\n".join(lines[1:] if len(text) > _PROSE_CHARS and len(lines) > 1 else lines)
    return _parsed(tail, _TEXT) if _depth(tail) <= _MAX_DEPTH else None


def _parsed(text: str, targets: tuple[Any, ...]) -> _Read | None:
    found = parse(text, targets, parsing_timeout=None)
    expressions = [item for item in found if not isinstance(item, str)]
    return (expressions[0], str(found[-1])) if expressions else None


def _last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{}`; None if there is none or it is not closed."""
    begin = text.rfind("\\boxed")
    if begin < 0:
        return None
    begin = text.find("{", begin)
    depth = 0
    for place in range(begin, len(text)) if begin >= 0 else ():
        escaped = text[place - 1] == "\\" and text[place - 2] != "\\"
        depth += 0 if escaped else (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin + 1 : place]
    return None


def _undecorated(text: str) -> str:
    """The text without Markdown's marks and signs of a lead around it, and without punctuation behind it."""
    return text.lstrip(" *#=:").rstrip(" *.,;:=")


def _is_bare(text: str) -> bool:
    """Whether the text is mathematics without delimiters and without prose, with at most a unit behind it."""
    rest = _LAST_WORD.sub("", _COMMAND.sub("#", text)).strip()
    return bool(rest) and not _DELIMITER.search(text) and not re.search(r"[A-Za-z]{2,}|[?!;\n]", rest)


def _depth(text: str) -> int:
    """Nesting depth of brackets."""
    steps = ((character in "([{") - (character in ")]}") for character in text)
    return max(itertools.accumulate(steps), default=0)


def _is_too_large(expression: Any) -> bool:
    """Whether evaluation may take long. Reads the tree from its leaves on, and evaluates bounded numbers only."""
    degree = 0
    for node in sympy.postorder_traversal(expression):
        if isinstance(node, _UNEVALUATED):
            return True
        if isinstance(node, sympy.Pow) and not node.base.is_Symbol:
            is_root = node.exp.is_Rational and not node.exp.is_Integer  # its base is factored
            if not _is_at_most(*((node.base, _MAX_ELEMENTARY) if is_root else (node.exp, _MAX_EXPONENT))):
                return True
            degree += abs(node.exp) if node.base.free_symbols and node.exp.is_Integer else 0
        elif isinstance(node, sympy.Function):
            limit = _MAX_ELEMENTARY if isinstance(node, _ELEMENTARY) else _MAX_ARGUMENT
            if not all(_is_at_most(argument, limit) for argument in node.args):
                return True
    return bool(degree > _MAX_DEGREE)


def _is_at_most(expression: Any, limit: int) -> bool:
    """Whether the absolute value of a number is within the limit; true for expressions with symbols."""
    try:
        return bool(expression.free_symbols) or bool(abs(expression.evalf(10)) <= limit)
    except (TypeError, ValueError, OverflowError):
        return True

"""Mathematical equality of an answer and the reference answer; the reward `math`.

`math-verify` parses and compares. This module selects the parsed part, and refuses expressions that would take long to
evaluate: no output may cost more than about a second.

- The reference is parsed as the content of one `\\boxed{}`: bare LaTeX such as `2\\sqrt{3}` is read whole.
- The answer is parsed the same way: the last `\\boxed{}`, else the whole output or the text after the last "is", ":" or
  "=", if that is mathematics without prose. Else math-verify searches delimited LaTeX or a number in the text. LaTeX
  without delimiters in prose is no answer: a part of it, the 2 of `2\\sqrt{3}`, would be mistaken for the whole.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.concrete.expr_with_limits import ExprWithLimits

_MAX_CHARS = 600
_MAX_DEPTH = 30
"""Limits of one expression: its length, and the nesting depth of its brackets; parsing time grows with both."""
_MAX_DIGITS = 100_000
"""Most digits of the numbers in an evaluated expression."""
_MAX_FACTORED_DIGITS = 200
"""Most digits of a number under a root or a logarithm, which is factored."""
_MAX_TERMS = 500
"""Most terms of an expanded polynomial."""
_MAX_ARGUMENT = 10_000
"""Largest argument of factorials, binomials and similar functions."""
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

# math-verify's own time limits would replace the alarm of the reward process; its warning that they are off is muted.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class UnusableReferenceError(ValueError):
    """The reference answer of a task cannot be compared with an answer."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A parsed text."""

    expression: Any
    text: str
    """Text as normalised by math-verify."""


def equal_answers(reference: str, output: str) -> bool:
    """Whether the answer in `output` equals `reference`. False for an output without an answer.

    Raises:
        UnusableReferenceError: The reference cannot be parsed, or is too large to evaluate.
    """
    gold = _read(_last_boxed(reference) or reference)
    if gold is None:
        raise UnusableReferenceError(f"the reference answer {reference:.80} cannot be parsed as mathematics")
    given = _read_answer(output)
    if given is None:
        return False
    if given.text == gold.text or _identical(given.expression, gold.expression):
        return True
    if _is_too_large(gold.expression):
        raise UnusableReferenceError(
            f"the reference answer {reference:.80} is too large to evaluate, or left unevaluated"
        )
    return not _is_too_large(given.expression) and verify(gold.expression, given.expression, timeout_seconds=None)


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
    if _is_bare(text):
        return _read(text)
    lines = text[-_PROSE_CHARS:].splitlines() or [""]
    last = _LEAD.split(lines[-1])[-1].strip(" *.")
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
    return _Read(expressions[0], str(found[-1])) if expressions else None


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


def _is_bare(text: str) -> bool:
    """Whether the text is mathematics without delimiters and without prose, with at most a unit behind it."""
    rest = _LAST_WORD.sub("", _COMMAND.sub("#", text)).strip()
    return bool(rest) and not _DELIMITER.search(text) and not re.search(r"[A-Za-z]{2,}|[?!;\n]", rest)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _identical(first: Any, second: Any) -> bool:
    """Whether both are the same tree; evaluates nothing."""
    return type(first) is type(second) and bool(first == second)


def _is_too_large(expression: Any) -> bool:
    """Whether evaluation may take long. Reads the tree and evaluates small exponents only."""
    children = expression.flat() if isinstance(expression, sympy.MatrixBase) else expression.args
    if isinstance(expression, _UNEVALUATED) or any(_is_too_large(child) for child in children):
        return True
    if _terms(expression) > _MAX_TERMS:
        return True
    if isinstance(expression, sympy.Function) and not isinstance(expression, sympy.exp):
        if any(_digits(argument) > _MAX_FACTORED_DIGITS for argument in children):
            return True
        if not isinstance(expression, _ELEMENTARY):
            return any(_size(argument) > _MAX_ARGUMENT for argument in children)
    root = isinstance(expression, sympy.Pow) and _size(expression.exp) % 1 != 0 and _size(expression.exp) < math.inf
    return _digits(expression.base if root else expression) > (_MAX_FACTORED_DIGITS if root else _MAX_DIGITS)


def _terms(expression: Any) -> float:
    """Number of terms of the expanded expression."""
    if not getattr(expression, "free_symbols", None):
        return 1
    if isinstance(expression, sympy.Mul):
        return math.prod(_terms(factor) for factor in expression.args)
    if isinstance(expression, sympy.Pow):
        terms, power = _terms(expression.base), _size(expression.exp)
        if terms == 1:
            return 1
        if max(terms, power) > _MAX_TERMS:
            return math.inf
        return math.comb(math.ceil(power) + int(terms) - 1, int(terms) - 1)
    return sum(_terms(child) for child in expression.args) if isinstance(expression, sympy.Add) else 1


def _size(expression: Any) -> float:
    """Absolute value of a small number; 0 for expressions with symbols, infinity for possibly large ones."""
    if getattr(expression, "free_symbols", None):
        return 0.0
    if _digits(expression) > 30:
        return math.inf
    try:
        return abs(complex(expression.evalf(10)))
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _digits(expression: Any) -> float:
    """Upper bound of the number of digits of the evaluated expression."""
    if isinstance(expression, sympy.Rational):
        return 0.302 * (expression.p.bit_length() + (expression.q - 1).bit_length())
    if isinstance(expression, sympy.exp):
        return 1.0 + 0.5 * _size(expression.args[0])
    if isinstance(expression, sympy.Pow):
        return 1.0 + _digits(expression.base) * _size(expression.exp)
    if isinstance(expression, (sympy.Number, sympy.MatrixBase)) or not expression.args:
        return 20.0
    return sum(_digits(child) for child in expression.args)

"""Whether an answer is mathematically equal to the reference answer; the reward `math`.

Parsing and comparing are those of `math-verify`. This module decides what is parsed, and refuses what would take
long to evaluate: nothing of an output may cost more than a second or so.

- The reference is parsed as the content of one `\\boxed{}`: bare LaTeX such as `2\\sqrt{3}` is read whole.
- So is the answer: the last `\\boxed{}`, else the whole output or what follows the last "is", ":" or "=", if that is
  mathematics without prose. Else math-verify looks for delimited LaTeX or a number in the text. LaTeX without
  delimiters amid prose is no answer: a part of it, the 2 of `2\\sqrt{3}`, would be taken for the whole.
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
"""Of one expression: its length, and how deep its brackets nest; parsing takes time that grows with both."""
_MAX_DIGITS = 100_000
"""Of the numbers in an expression once it is evaluated."""
_MAX_FACTORED_DIGITS = 200
"""Of a number under a root or a logarithm, which is factored."""
_MAX_TERMS = 500
"""Of a polynomial once it is expanded."""
_MAX_ARGUMENT = 10_000
"""Of factorials, binomials and the like."""
_PROSE_CHARS = 2_000
"""End of a text without `\\boxed{}` that is searched."""

_UNEVALUATED = (ExprWithLimits, sympy.Limit, sympy.Derivative)
"""Sums, products, integrals: an exercise, not its answer."""
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

# math-verify's own time limits would replace the alarm of the reward process; it warns that they are off.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class UnusableReferenceError(ValueError):
    """The reference answer of a task is nothing that an answer could be compared with."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A text that was parsed."""

    expression: Any
    text: str
    """As normalised by math-verify."""


def equal_answers(reference: str, output: str) -> bool:
    """Whether the answer in `output` is equal to `reference`. An output without an answer is not.

    Raises:
        UnusableReferenceError: The reference cannot be parsed, or is too large to evaluate.
    """
    gold = _read(_last_boxed(reference) or reference)
    if gold is None:
        raise UnusableReferenceError("the reference answer cannot be parsed as mathematics")
    given = _read_answer(output)
    if given is None:
        return False
    if given.text == gold.text or _identical(given.expression, gold.expression):
        return True
    if _is_too_large(gold.expression):
        raise UnusableReferenceError("the reference answer is too large to evaluate, or left unevaluated")
    return not _is_too_large(given.expression) and verify(gold.expression, given.expression, timeout_seconds=None)


def _read(content: str) -> _Read | None:
    """The content of a `\\boxed{}`, whole."""
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
    # The first line may have been cut, and a half of a pair of `$` would turn the others inside out.
    tail = "\n".join(lines[1:] if len(text) > _PROSE_CHARS and len(lines) > 1 else lines)
    return _parsed(tail, _TEXT) if _depth(tail) <= _MAX_DEPTH else None


def _parsed(text: str, targets: tuple[Any, ...]) -> _Read | None:
    found = parse(text, targets, parsing_timeout=None)
    expressions = [item for item in found if not isinstance(item, str)]
    return _Read(expressions[0], str(found[-1])) if expressions else None


def _last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{}`; None without one, or if it does not end."""
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
    """Mathematics without delimiters and without prose, at most with a unit behind it."""
    rest = _LAST_WORD.sub("", _COMMAND.sub("#", text)).strip()
    return bool(rest) and not _DELIMITER.search(text) and not re.search(r"[A-Za-z]{2,}|[?!;\n]", rest)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _identical(first: Any, second: Any) -> bool:
    """The same tree; evaluates nothing."""
    return type(first) is type(second) and bool(first == second)


def _is_too_large(expression: Any) -> bool:
    """Evaluating it may take long. Reads the tree and evaluates small exponents only."""
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
    """Terms of the expanded expression."""
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
    """Absolute value of a small number; 0 for what has symbols, infinity for what may be large."""
    if getattr(expression, "free_symbols", None):
        return 0.0
    if _digits(expression) > 30:
        return math.inf
    try:
        return abs(complex(expression.evalf(10)))
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _digits(expression: Any) -> float:
    """Upper bound of the digits it takes to write down the evaluated expression."""
    if isinstance(expression, sympy.Rational):
        return 0.302 * (expression.p.bit_length() + (expression.q - 1).bit_length())
    if isinstance(expression, sympy.exp):
        return 1.0 + 0.5 * _size(expression.args[0])
    if isinstance(expression, sympy.Pow):
        return 1.0 + _digits(expression.base) * _size(expression.exp)
    if isinstance(expression, (sympy.Number, sympy.MatrixBase)) or not expression.args:
        return 20.0
    return sum(_digits(child) for child in expression.args)

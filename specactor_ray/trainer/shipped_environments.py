"""Shipped environments: a calculator as a tool, and answers that may be corrected."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable

from specactor_ray.rollout.prompts import Message
from specactor_ray.trainer.environment import Environment, Reply, Turn

_CALLS = {"calc": r"<calc>(.*?)</calc>", "tool_call": r"<tool_call>\s*(\{.*?\})\s*</tool_call>"}
"""Format → pattern of a call; its group is the expression, or the JSON object with it."""
_LONGEST = 200
"""Longest expression, in characters."""
_LARGEST = 10.0**30
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Calculator(Environment):
    """Evaluates arithmetic expressions in calls of the model. A turn without a call is the answer, which
    `reward.functions` score.

    Args:
        call: `calc`, `<calc>2 * (3 + 4)</calc>`; or `tool_call`, the format of many chat templates:
            `<tool_call>{"name": "calculator", "arguments": {"expression": "2 * 3"}}</tool_call>`.
        role: Role of the messages with results: `tool` if the chat template has it.
        max_calls: Most calls in one turn.
    """

    def __init__(self, call: str = "calc", role: str = "user", max_calls: int = 4) -> None:
        if call not in _CALLS:
            raise ValueError(f"call is {call!r}; use one of {', '.join(_CALLS)}")
        self.call, self.role, self.max_calls = call, role, max_calls

    async def step(self, turn: Turn) -> Reply:
        calls = re.findall(_CALLS[self.call], turn.text, re.DOTALL)
        if not calls or turn.is_last:
            return Reply(reward=turn.score(), done=True)
        results = [self._result(text) for text in calls[: self.max_calls]]
        return Reply([self._message(result) for result in results] if self.role == "tool" else [self._joined(results)])

    def _message(self, text: str) -> Message:
        return {"role": self.role, "content": text}

    def _joined(self, results: list[str]) -> Message:
        return self._message("\n".join(results))

    def _result(self, text: str) -> str:
        try:
            if self.call == "tool_call":
                request = json.loads(text)
                if request["name"] != "calculator":
                    return f"error: there is no tool {request['name']}"
                text = request["arguments"]["expression"]
            return evaluate(text)
        except ZeroDivisionError:
            return "error: division by zero"
        except (ValueError, KeyError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
            return "error: not an arithmetic expression"


def evaluate(expression: str) -> str:
    """The value of an arithmetic expression.

    Raises:
        ValueError, SyntaxError: It is not an expression, it is too long, or its value is too large.
        ZeroDivisionError: It divides by zero.
    """
    if len(expression) > _LONGEST:
        raise ValueError("too long")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 100:
            raise ValueError("too large")
        return _bounded(_OPERATORS[type(node.op)](left, right))
    raise ValueError("not arithmetic")


def _bounded(value: float) -> float:
    if isinstance(value, complex) or not abs(value) <= _LARGEST:
        raise ValueError("too large")
    return value


class Retry(Environment):
    """Scores each turn by `reward.functions`; after a wrong answer its message has the number of tries left.

    Args:
        tries: Most answers of the model.
        discount: Factor of the reward for each previous wrong answer.
        threshold: Least reward of a right answer.
        message: Message after a wrong answer; `{left}` is the number of tries left.
    """

    def __init__(
        self,
        tries: int = 3,
        discount: float = 1.0,
        threshold: float = 1.0,
        message: str = "That is not right. Tries left: {left}. Give another answer.",
    ) -> None:
        if tries < 1:
            raise ValueError("tries must be 1 or more")
        message.format(left=1)
        self.tries, self.discount, self.threshold, self.message = tries, discount, threshold, message

    async def step(self, turn: Turn) -> Reply:
        reward, left = turn.score(), self.tries - turn.number - 1
        if reward >= self.threshold or left <= 0 or turn.is_last:
            return Reply(reward=reward * self.discount**turn.number, done=True)
        return Reply([{"role": self.role, "content": self.message.format(left=left)}])

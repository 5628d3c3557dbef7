"""No class holds an object that its instances would share and change."""

from __future__ import annotations

import ast
from pathlib import Path

import specactor_ray
from tests.fakes.own_proposers import Learner

SHARED = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {"list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"}
MAKERS |= {"zeros", "ones", "empty", "full", "array", "arange", "asarray", "tensor", "zeros_like"}


def is_mutable(value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call):
        return isinstance(value, SHARED)
    made = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return getattr(made, "attr", getattr(made, "id", "")) in MAKERS


def test_class_attributes_are_immutable() -> None:
    root = Path(specactor_ray.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line.lineno}"
        for path in root.rglob("*.py")
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(one, ast.ClassDef)
        for line in one.body
        if isinstance(line, ast.Assign | ast.AnnAssign) and is_mutable(line.value)
    ]
    assert not found


class Forgetful(Learner):
    def __init__(self) -> None:
        """A class of a user's own may not call that of its base."""


def test_proposers_share_no_counters() -> None:
    first, second = Forgetful(), Forgetful()
    assert first.forward_s is not second.forward_s

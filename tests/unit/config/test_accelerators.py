"""Kinds of accelerators: which nodes a value allows, and its form for Ray."""

from __future__ import annotations

import pytest
from ray._private.label_utils import validate_label_selector  # what Ray applies to a placement group

from specactor_ray.config.accelerators import KIND_LABEL, allows, label_selector, within

L4_SPOT = {KIND_LABEL: "L4", "market-type": "spot"}


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (None, True),
        ("L4", True),
        ("H100", False),
        ("l4", False),
        ("in(H100, L4)", True),
        ("in(H100,A10G)", False),
        ("!L4", False),
        ("!in(H100,A10G)", True),
        ("market-type=spot", True),
        ("market-type=!spot", False),
        ("in(L4,A10G), market-type=in(spot,reserved)", True),
        ("in(L4,A10G), market-type=reserved", False),
        ("ray.io/region=west", False),
        ("ray.io/region=!west", True),
        ("a-b.c/d.e_f=!x", True),
    ],
)
def test_nodes_that_a_value_allows(value: str | None, allowed: bool) -> None:
    assert allows(value, L4_SPOT) is allowed
    assert validate_label_selector(label_selector(value)) is None


@pytest.mark.parametrize(
    ("value", "other", "is_within"),
    [
        ("H100, a=b", "a=b,H100", True),
        ("H100", "in(H100)", True),
        ("L4, a=b", "in(H100,T4)", False),
        ("L4, market=spot", "!in(T4,H100)", True),
        ("in(L4, T4)", "L4", False),
        ("!T4", "!T4", True),
        ("!T4", "L4", False),
        (None, "L4", False),
        ("L4", None, True),
    ],
)
def test_values_that_other_ones_include(value: str | None, other: str | None, is_within: bool) -> None:
    assert within(value, other) is is_within


def test_the_form_for_ray() -> None:
    assert label_selector(None) == {}
    assert label_selector("H100, a.b/c=!x") == {KIND_LABEL: "in(H100)", "a.b/c": "!x"}

"""Kinds of accelerators: which nodes a value allows, and its form for Ray."""

from __future__ import annotations

import pytest
from ray._private.label_utils import validate_label_selector  # what Ray applies to a placement group

from specactor_ray.config.accelerators import KIND_LABEL, allows, label_selector

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
    ],
)
def test_nodes_that_a_value_allows(value: str | None, allowed: bool) -> None:
    assert allows(value, L4_SPOT) is allowed
    assert validate_label_selector(label_selector(value)) is None


def test_the_form_for_ray() -> None:
    assert label_selector(None) == {}
    assert label_selector("H100, a.b/c=!x") == {KIND_LABEL: "in(H100)", "a.b/c": "!x"}

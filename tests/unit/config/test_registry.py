"""Draft methods by name: what is wrong about one of the user's own is said with the fix."""

from __future__ import annotations

import pytest

from specactor_ray.config.schema import DrafterConfig, TargetConfig
from specactor_ray.core.errors import ConfigError
from specactor_ray.draft.registry import build_proposer


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("magic", "unknown method 'magic'; known: ngram"),
        ("no.such.module:Drafter", "cannot be imported"),
        ("tests.fakes.misbehaving:NoSuchDrafter", "cannot be imported"),
        ("tests.leaves_at_import:Drafter", r"cannot be imported \(SystemExit: no use\)"),
        ("collections:OrderedDict", "is no proposer: .*derive it from .*RowProposer"),
    ],
)
def test_no_proposer(method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_proposer(DrafterConfig(method=method), TargetConfig(), "cpu")

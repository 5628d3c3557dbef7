"""What is held together before any actor starts: heads and their targets, modes and drafters."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import ConfigError, ModelLoadError
from specactor_ray.distill.card import identify, write_card
from specactor_ray.draft.eagle.checkpoint import load_head, save_head
from specactor_ray.rollout.preflight import export_what_drafters_read, require_named, warn_without_drafters
from tests.tiny import tiny_draft, tiny_eagle, tiny_target


def config(head: Path) -> Config:
    return from_mapping(
        {
            "mode": "decoupled",
            "target": {"model": str(tiny_target())},
            "drafters": [{"method": "ngram"}, {"method": "eagle", "model": str(head)}],
        }
    )


@pytest.fixture
def head(tmp_path: Path) -> Path:
    save_head(load_head(str(tiny_eagle()), str(tiny_target())), tmp_path)
    return tmp_path


def test_a_head_whose_card_names_another_target_is_refused(head: Path) -> None:
    target = identify(str(tiny_target()))
    write_card(head, "eagle", replace(target, name="llama-x", num_layers=16), {}, [])
    with pytest.raises(ConfigError, match=r"drafters\.1\.model.*llama-x with num_layers=16.*num_layers=4"):
        export_what_drafters_read(config(head))


def test_a_head_of_a_target_of_the_same_shape_is_warned_of(head: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = identify(str(tiny_target()))
    write_card(head, "eagle", target, {}, [])
    with caplog.at_level(logging.WARNING):
        assert export_what_drafters_read(config(head)).target.hidden_layers
        assert not caplog.records
        write_card(head, "eagle", replace(target, name="llama-x", config_hash="0" * 16), {}, [])
        export_what_drafters_read(config(head))
    assert "drafters.1.model" in caplog.text and "llama-x" in caplog.text


def test_a_head_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"drafters\.1\.model: There is no EAGLE head"):
        export_what_drafters_read(config(tmp_path / "missing"))


def test_a_head_and_a_model_are_not_taken_for_each_other(head: Path) -> None:
    model = r"drafters\.1\.model: .*no draft_vocab_size.* Fix: .*method: draft_model"
    for check in (require_named, export_what_drafters_read):
        with pytest.raises(ModelLoadError, match=model):
            check(config(tiny_draft()))
    settings = config(head)
    settings.drafters[1].method = "draft_model"
    with pytest.raises(ModelLoadError, match=r"drafters\.1\.model: .* holds an EAGLE head.* method: eagle"):
        require_named(settings)
    settings.target.model = str(head)
    with pytest.raises(ModelLoadError, match=r"target\.model: .* holds an EAGLE head"):
        require_named(settings)


@pytest.mark.parametrize(
    ("mode", "replicas", "warning"),
    [
        ("decoupled", 0, "decodes without drafts until `specactor scale draft_model=1`. Fix: drafters.0.replicas=1"),
        ("coupled", 0, "the run decodes without drafts. Fix: drafters.0.replicas=1"),
        ("decoupled", 1, ""),
        ("plain", 0, ""),
    ],
)
def test_a_run_without_drafters_is_warned_of(
    mode: str, replicas: int, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafters: list[dict[str, Any]] = [{"method": "ngram", "replicas": replicas, "cores": 0.5}]
    drafters.append({"method": "draft_model", "model": "m", "replicas": 0})
    warn_without_drafters(from_mapping({"mode": mode, "target": {"replicas": 2}, "drafters": drafters}))
    assert warning in caplog.text and bool(warning) == bool(caplog.records)

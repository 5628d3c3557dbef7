"""The arithmetic of `scripts/open_questions.py`, and the script on tiny models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafting_costs import head_of, memory, message_bytes
from open_questions import Question, keep_recipe, main
from recorded_drafts import (
    NONE,
    TEMPERATURES,
    WINDOW,
    WRONG,
    Prices,
    Recipe,
    Recorded,
    by_entropy,
    chained,
    decode,
    line,
    proposer_of,
    shorten,
    tails_of,
)
from specactor_ray.config.methods import DrafterSpec
from specactor_ray.config.schema import TargetConfig
from specactor_ray.core.errors import InputError
from specactor_ray.distill.evaluation import facts_of, replay
from specactor_ray.draft.eagle.checkpoint import read_head_config
from specactor_ray.draft.proposer import footprint
from specactor_ray.models.loading import load_model
from specactor_ray.models.shapes import GIB, count_parameters
from specactor_ray.plan.hardware import ModelSpec, find_model
from tests import tiny
from tests.unit.distill.recorded import recorded

LOOKUP, MODEL = "ngram", "draft_model"


def text(right: Mapping[str, list[int]], entropy: list[float] | None = None) -> Recorded:
    """One output; method → number of right draft tokens at each position, behind which a wrong one comes."""
    size = len(next(iter(right.values())))
    tokens, tails = np.arange(100, 100 + size, dtype=np.int32), dict[str, np.ndarray]()
    for method, counts in right.items():
        tails[method] = np.full((size, WINDOW), NONE, np.int32)
        for at, count in enumerate(counts):
            tails[method][at, : count + 1] = [*tokens[at : at + count], 7]
    values = np.array(entropy or [0.0] * size, np.float32)
    return Recorded(size, np.array([size]), tokens, values, tails)


FIRST_HALF = [0, 3, 2, 1, 0, 0, 0, 0, 0]
SECOND_HALF = [0, 0, 0, 0, 0, 3, 2, 1, 0]


def test_the_oracle_takes_the_longest_draft_of_each_position() -> None:
    one = text({LOOKUP: FIRST_HALF, MODEL: SECOND_HALF})
    for method, steps in ((LOOKUP, 5), (MODEL, 5)):  # a step of four tokens, and four steps of one
        found = decode(one, [method])
        assert (found.tokens, found.steps, found.right) == (8, steps, 3)
    best = decode(one, [LOOKUP, MODEL], oracle=True)
    assert (best.tokens, best.steps, best.right, best.drafted) == (8, 2, 6, 6)
    assert best.length == 4.0
    race = decode(one, [LOOKUP, MODEL])
    assert race.tokens == 8 and best.steps <= race.steps <= 5


def test_the_first_token_and_tokens_behind_the_end_count_as_neither_right_nor_tested() -> None:
    one = text({MODEL: [0, 1, 0, 0]})
    one.tails[MODEL][3] = [one.tokens[3], *[9] * (WINDOW - 1)]
    assert one.right(MODEL).tolist() == [0, 1, 0, 1] and one.drafted(MODEL).tolist() == [1, 2, 1, WINDOW]
    for most, right in ((4, 1), (20, 2)):  # the last token of a full output has no room for a draft
        found = decode(replace(one, most=most), [MODEL])
        assert (found.tokens, found.steps, found.right, found.tested) == (3, 2, right, right + 1)


def test_drafts_of_a_model_are_chains_of_its_first_tokens() -> None:
    found = chained(np.array([NONE, 11, 12, 9, 14], np.int32), [10, 11, 12, 13, 14])
    one = Recorded(20, np.array([5]), np.arange(10, 15, dtype=np.int32), np.zeros(5), {MODEL: found})
    assert one.right(MODEL).tolist() == [0, 2, 1, 0, 1] and one.drafted(MODEL).tolist() == [0, *[WINDOW] * 4]
    assert found[1].tolist() == [11, 12, 9, *[WRONG] * (WINDOW - 3)]


def test_prices_are_those_of_steps_and_drafts() -> None:
    one = text({LOOKUP: FIRST_HALF, MODEL: SECOND_HALF})
    flat = Prices(np.ones(2 + WINDOW), {LOOKUP: 0.0, MODEL: 0.25})
    assert decode(one, [], flat).seconds == 8.0
    assert decode(one, [LOOKUP], flat).speed == 8 / 5
    assert decode(one, [LOOKUP, MODEL], flat, oracle=True).seconds == 2.0 + 3 * 0.25
    dear = Prices(1.0 + 100.0 * np.arange(2 + WINDOW), {LOOKUP: 0.0, MODEL: 0.0})
    assert decode(one, [LOOKUP], dear).drafted == 0


@pytest.mark.parametrize("method", ["ngram", "eagle", "draft_model"])
def test_recorded_drafts_give_the_figures_of_a_replay_step_by_step(method: str, tmp_path: Path) -> None:
    models = {"ngram": None, "eagle": str(tiny.tiny_eagle()), "draft_model": str(tiny.tiny_draft())}
    recipe, records = Recipe(str(tiny.tiny_target()), models, "float32"), recorded("heldout")[:8]
    width = read_head_config(models["eagle"], recipe.target).feature_size  # type: ignore[arg-type]
    facts = facts_of(replay(proposer_of(recipe, method), records, WINDOW, 64, width=width), WINDOW)
    outputs = [np.array(one.output_token_ids, np.int32) for one in records]
    tails = tails_of(recipe, method, records, tmp_path / "tails.npy")
    lengths = np.array([len(one) for one in outputs])
    found = decode(Recorded(40, lengths, np.concatenate(outputs), lengths, {method: tails}), [method], rows=64)
    assert found.length == facts["acceptance_length"] and found.tokens == facts["tokens"]


def test_parts_of_the_same_size_over_entropy_and_their_line() -> None:
    one = text({MODEL: [1, 1, 1, 0, 1, 0, 0, 0]}, entropy=[0.0, 0.1, 0.2, 0.3, 1.0, 1.1, 1.2, 1.3])
    parts = by_entropy([one], MODEL, 2)
    assert parts == pytest.approx(np.array([(0.15, 0.75, 4), (1.15, 0.25, 4)]))
    one.tails[MODEL][0] = NONE
    assert by_entropy([one, one], MODEL, 2)[:, 2].tolist() == [7, 7]
    assert line(np.array([0.0, 1.0, 2.0]), np.array([0.9, 0.7, 0.5])) == pytest.approx((0.9, -0.2, 1.0))
    assert line(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.0]))[2] == pytest.approx(0.0)


def test_memory_of_a_draft_model_is_that_of_the_memory_plan() -> None:
    name = str(tiny.tiny_draft())
    size, read = count_parameters(name)
    shape = ModelSpec(2, 32, 2, 1, 16, 96, read.vocab_size, "tests", tied_embeddings=True)
    found = memory("draft_model", shape, shape, 4)
    spec = DrafterSpec(method="draft_model", model=name, dtype="bfloat16", max_batch=4)
    spec.kv_cache_gb = found["cache GiB"]
    _, planned = footprint(spec, TargetConfig(model=name), 80e9)
    assert found["weights GiB"] * GIB == 2 * size and found["total GiB"] * GIB == pytest.approx(planned)


def test_messages_carry_tokens_and_the_hidden_states_that_a_head_reads() -> None:
    head = head_of(find_model("qwen2.5-7b"))
    width = head.features * head.hidden
    assert message_bytes(64, width) - message_bytes(64, 0) == pytest.approx(2 * 2 * width, rel=0.01)
    assert 4 * (WINDOW + 2) < message_bytes(1024, 0) < 100


def test_a_shortened_target_is_made_once(tmp_path: Path) -> None:
    made = shorten(str(tiny.tiny_target()), tmp_path / "draft")
    assert len(load_model(str(made)).model.layers) == 2
    before = (made / "config.json").stat().st_mtime_ns
    assert shorten("no model", made) == made and (made / "config.json").stat().st_mtime_ns == before


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Options of the script with tiny models, and two files of one name with other prompts."""
    for folder, seed in ((tmp_path, 3), (tmp_path / "other", 4)):
        folder.mkdir(exist_ok=True)
        lines = [json.dumps({"prompt": one}) + "\n" for one in tiny.tiny_prompts(4, seed)]
        (folder / "kind.jsonl").write_text("".join(lines))
    models = {"target": str(tiny.tiny_target()), "draft_model": str(tiny.tiny_draft()), "head": tiny.tiny_eagle()}
    return {
        "output": tmp_path / "out",
        "prompts": [tmp_path / "kind.jsonl"],
        "max_tokens": 24,
        "dtype": "float32",
        **models,
    }


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"target": "nosuch"}, "--target.*nosuch"),
        ({"head": Path("nosuch")}, "--head.*nosuch"),
        ({"draft_model": "nosuch"}, "--draft-model.*nosuch"),
        ({"dtype": "float31"}, "--dtype.*float31"),
        ({"prompts": ["kind.jsonl", "none.jsonl"]}, "--prompts.*none.jsonl"),
        ({"prompts": ["other"]}, "--prompts.*other"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_loaded_or_written(
    changed: dict[str, Any], words: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorded_drafts.load_model", lambda *_, **__: pytest.fail("a model is loaded"))
    options |= changed
    options["prompts"] = [tmp_path / name for name in options["prompts"]]
    with pytest.raises(InputError, match=words):
        main(Question.acceptance, **options)
    assert not options["output"].exists()


def test_a_folder_has_recordings_of_one_recipe(options: dict[str, Any], tmp_path: Path) -> None:
    def keep(**changed: Any) -> None:
        given = options | changed
        recipe = Recipe(given["target"], {"eagle": given["head"]}, given["dtype"], max_tokens=given["max_tokens"])
        keep_recipe(tmp_path, recipe, given["draft_model"], given["prompts"])

    keep()
    (tmp_path / "new.jsonl").write_text("")
    keep(prompts=[tmp_path / "new.jsonl", *options["prompts"]])
    same = tmp_path / "other" / "kind.jsonl"
    for changed, option in (
        ({"target": options["draft_model"]}, "--target"),
        ({"head": None}, "--head"),
        ({"draft_model": None}, "--draft-model"),
        ({"dtype": "bfloat16"}, "--dtype"),
        ({"max_tokens": 25}, "--max-tokens"),
        ({"prompts": [same]}, "--prompts, kind"),
    ):
        with pytest.raises(InputError, match=f"^{option}: .*another --output"):
            keep(**changed)
    with pytest.raises(InputError, match=r"--prompts: two files have one name"):
        keep(prompts=[*options["prompts"], same])
    (tmp_path / "recipe.json").unlink()
    (tmp_path / "kind-0.npz").write_bytes(b"")
    with pytest.raises(InputError, match="recordings of an unknown recipe"):
        keep()


def test_the_script_on_tiny_models(options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = options["output"]
    main(Question.acceptance, **options)
    recordings = {file: file.stat().st_mtime_ns for file in output.glob("*.npz")}
    assert len(recordings) == len(TEMPERATURES) and not list(output.glob("*-outputs"))
    figures = json.loads((output / "acceptance.json").read_text())
    assert [point["T"] for point in figures["acceptance"]] == list(TEMPERATURES)
    assert all(0.0 < point["draft_model right"] <= 1.0 for point in figures["acceptance"])
    main(Question.oracle, **options)
    assert {file: file.stat().st_mtime_ns for file in recordings} == recordings
    (points,) = json.loads((output / "oracle.json").read_text()).values()
    assert all(1.0 <= point["single"] <= point["oracle"] for point in points)
    main(Question.memory, **options)
    measured, planned = json.loads((output / "memory.json").read_text()).values()
    assert [point["method"] for point in measured] == ["ngram", "suffix", "eagle", "draft_model"]
    assert {point["target"] for point in planned} >= {"smollm2-135m", "llama-3.3-70b"}
    assert "acceptance over entropy" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"^--head: "):
        main(Question.oracle, **options | {"head": None})

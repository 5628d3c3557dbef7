"""Costs of a run: merged from the reports of its actors, read again, refused with the reason; lines between points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.files import write_json
from specactor_ray.plan.costs import StepTimes, load_costs, measured_costs
from tests.refused import refused

# ---- between points ----


def test_lines_between_points_flat_before_and_on_beyond_them() -> None:
    times = StepTimes([(40, 0.6), (4, 0.1), (8, 0.1), (16, 0.2)])
    assert [times.seconds(n) for n in (1, 4, 6, 12, 28)] == pytest.approx([0.1, 0.1, 0.1, 0.15, 0.4])
    assert times.seconds(76) == pytest.approx(0.6 + 0.5) and times.range == (4.0, 40.0)


def test_without_points_no_time_and_with_one_always_the_same() -> None:
    assert StepTimes().seconds(100) == 0.0
    assert StepTimes([(2, 0.3)]).seconds(1) == StepTimes([(2, 0.3)]).seconds(90) == 0.3


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.floats(1e-4, 10.0)), min_size=1, max_size=8, unique_by=lambda one: one[0]
    ),
    st.floats(1.0, 2000.0),
    st.floats(0.0, 2000.0),
)
def test_more_work_never_costs_less(points: list[tuple[int, float]], low: float, more: float) -> None:
    times = StepTimes(points)
    assert 0.0 < times.seconds(low) <= times.seconds(low + more) * (1 + 1e-12)


# ---- the section of a summary ----


def standing(method: str, drafted: float, acceptance: float, positions: str = "0-63") -> dict[str, Any]:
    figures = {"drafted": drafted, "acceptance": acceptance, "tgs": 10.0 * acceptance, "token_s": 0.002}
    return {"method": method, "positions": positions, **figures}


def verifier(cost: list[tuple[float, float]], ladder: list[dict[str, Any]], **inline: list[Any]) -> dict[str, Any]:
    """One with 100 steps of two requests, half of them suspended and a quarter with a tail."""
    hosted = {f"{name}-0": {"health": {"method": name}, "cost": points} for name, points in inline.items()}
    counts = {"steps": 100, "suspended_steps": 50, "row_steps": 200, "supplied_row_steps": 50}
    return {"kind": "verifier", "counters": {"cost": cost, "ladder": ladder, "hosted": hosted, **counts}}


def drafter(method: str, cost: list[tuple[float, float]]) -> dict[str, Any]:
    return {"kind": "drafter", "method": method, "counters": {"cost": cost, "health": {"method": method}}}


MODEL = {"method": "draft_model", "model": "small"}
LOOKUP = {"method": "ngram"}


def config(mode: str, *drafters: dict[str, Any], **target: Any) -> Any:
    target = {"model": "big", "dtype": "float32", "cores": 2, **target}
    return from_mapping({"mode": mode, "target": target, "drafters": list(drafters)})


def test_reports_of_all_actors_are_merged() -> None:
    first = verifier([(4.0, 0.1), (7.0, 0.2)], [standing("ngram", 30.0, 0.2), standing("draft_model", 10.0, 0.5)])
    second = verifier([(8.0, 0.4)], [standing("ngram", 10.0, 0.6)])
    actors = [first, second, drafter("draft_model", [(2.0, 0.004)]), {"kind": "drafter", "counters": None}]
    found = measured_costs(config("decoupled", LOOKUP, {**MODEL, "cores": 0.5}), actors)
    assert found["verify"] == {"2": [[4.0, 0.1], [7.5, pytest.approx(0.3)]]}, "7 and 8 are one range"
    assert found["drafters"] == {
        "ngram": {"model": None, "seconds": {}},
        "draft_model": {"model": "small", "seconds": {"1": [[2.0, 0.004]]}},
    }
    assert [(one["method"], one["drafted"]) for one in found["ladder"]] == [("ngram", 40.0), ("draft_model", 10.0)]
    assert found["ladder"][0]["acceptance"] == pytest.approx(0.3) and found["supply"] == 0.5
    assert found["target"] == {"model": "big", "dtype": "float32", "backend": "hf", "gpus": 0, "tensor_parallel": 1}


def test_hosted_drafters_are_on_the_devices_of_their_verifier() -> None:
    actors = [verifier([(4.0, 0.1)], [], draft_model=[(4.0, 0.01)], ngram=[])]
    found = measured_costs(config("coupled", LOOKUP, MODEL), actors)
    assert found["drafters"]["draft_model"]["seconds"] == {"2": [[4.0, 0.01]]} and not found["ladder"]
    assert measured_costs(config("coupled", LOOKUP), [])["verify"] == {"2": []}


def test_drafts_on_cores_beside_a_target_on_gpus_have_no_device() -> None:
    actors = [verifier([(4.0, 0.1)], []), drafter("draft_model", [(2.0, 0.1)])]
    settings = config("decoupled", MODEL, gpus=1, cores=None)
    assert measured_costs(settings, actors)["drafters"]["draft_model"]["seconds"] == {}


def test_costs_of_paced_devices_are_no_costs_of_this_machine(tmp_path: Path) -> None:
    paced = config("coupled", LOOKUP)
    paced.paced.device = "h100"
    found = measured_costs(paced, [verifier([(4.0, 0.1), (8.0, 0.2)], [])])
    write_json(tmp_path / "summary.json", {"costs": found})
    with refused("profile", "paced devices"):
        load_costs(tmp_path / "summary.json")


def on(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row of an actor on GPUs of this kind."""
    return {**row, "accelerator": kind}


UNLIKE = [
    on("H100", verifier([(1.0, 0.1), (8.0, 0.2)], [standing("draft_model", 10.0, 0.5)])),
    on("H100", verifier([(1.0, 0.3)], [])),
    on("A100", verifier([(1.0, 0.4), (8.0, 0.8)], [])),
    on("L4", drafter("draft_model", [(2.0, 0.004)])),
    on("A10G", drafter("draft_model", [(2.0, 0.002)])),
]
"""Rows of a run with verifiers and draft actors of two kinds each."""


def test_times_of_unlike_gpus_are_not_merged(tmp_path: Path) -> None:
    found = measured_costs(config("decoupled", {**MODEL, "gpus": 1}, gpus=1, cores=None), UNLIKE)
    assert found["verify"] == {
        "1 H100": [[1.0, pytest.approx(0.2)], [8.0, 0.2]],
        "1 A100": [[1.0, 0.4], [8.0, 0.8]],
    }
    assert found["drafters"]["draft_model"]["seconds"] == {"1 L4": [[2.0, 0.004]], "1 A10G": [[2.0, 0.002]]}
    file = written(tmp_path, found)
    for kind, seconds in (("H100", 0.2), ("in(A100, T4)", 0.4), ("A100, market=spot", 0.4)):
        costs = load_costs(file, accelerator=kind)
        assert costs.kind in kind and costs.verify[1].seconds(1) == pytest.approx(seconds)
    drafts = costs.drafters["draft_model"]
    assert drafts.kinds.keys() == {"L4", "A10G"}
    with refused("profile", "on H100, A100", "and here it is on H200"):
        load_costs(file, accelerator="H200")
    with refused("profile", "target.accelerator=H100"):
        load_costs(file)
    with refused("profile", "target.accelerator=H100, market=spot"):
        load_costs(file, accelerator="market=spot")
    assert load_costs(file, accelerator="market=spot", kind="A100").kind == "A100"
    for accelerator in (None, "market=spot", "!T4"):
        with refused("profile", "here it is on L4"):
            load_costs(file, accelerator=accelerator, kind="L4")
    file = written(tmp_path, found | {"verify": {"4": [[1, 0.1], [2, 0.2]]}})
    assert {load_costs(file, accelerator=one, kind="L4").kind for one in (None, "L4")} == {""}, "of any kind"


def test_hosted_drafts_are_on_the_kind_of_their_verifier() -> None:
    rows = [on("H100", verifier([(4.0, 0.1)], [], draft_model=[(4.0, 0.01)]))]
    found = measured_costs(config("coupled", MODEL, gpus=1, cores=None), rows)
    assert found["drafters"]["draft_model"]["seconds"] == {"1 H100": [[4.0, 0.01]]}


@pytest.fixture
def section() -> dict[str, Any]:
    actors = [verifier([(1.0, 0.1), (8.0, 0.2)], [standing("ngram", 10.0, 0.2), standing("ngram", 30.0, 0.6, "64-")])]
    return measured_costs(config("decoupled", LOOKUP, MODEL), [*actors, drafter("draft_model", [(2.0, 0.004)])])


def written(folder: Path, section: Any) -> Path:
    write_json(folder / "summary.json", {"run": "evening", "costs": section})
    return folder / "summary.json"


def test_a_section_is_read_as_it_was_written(tmp_path: Path, section: dict[str, Any]) -> None:
    costs = load_costs(written(tmp_path, section))
    assert costs.target == section["target"] and costs.supply == 0.5
    assert costs.acceptance == {"ngram": pytest.approx(0.5)}
    assert costs.verify.keys() == {2} and costs.verify[2].seconds(8) == pytest.approx(0.2)
    assert costs.drafters["draft_model"].model == "small" and not costs.drafters["ngram"].kinds
    assert costs.drafters["draft_model"].kinds[""][1].seconds(2) == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"costs": {"verify"', "is truncated or damaged"),
        ("[]", "is not sound: TypeError"),
        ('{"run": "evening"}', "is not sound: KeyError: 'costs'"),
        ('{"costs": {}}', "is not sound: KeyError: 'drafters'"),
        (None, "there is no file"),
    ],
)
def test_files_without_costs(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_costs(tmp_path / "summary.json", "hardware x")
    assert refused.value.key == "hardware x" and problem in str(refused.value)
    assert "Fix: name the summary.json of a run" in str(refused.value)


@pytest.mark.parametrize(
    "damage",
    [
        {"supply": None},
        {"supply": 2.0},
        {"verify": {"2": [[1.0, 0.0], [8.0, 0.1]]}},
        {"verify": {"2": [[1.0, None], [8.0, 0.1]]}},
        {"ladder": [standing("ngram", 10.0, 2.0)]},
        {"ladder": [standing("ngram", -1.0, 0.5)]},
    ],
    ids=str,
)
def test_damaged_numbers_are_no_costs(tmp_path: Path, section: dict[str, Any], damage: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"profile: the section `costs` of .* is not sound"):
        load_costs(written(tmp_path, {**section, **damage}))
    nothing = {**section, "ladder": [standing("ngram", 0.0, 0.0)]}
    assert not load_costs(written(tmp_path, nothing)).acceptance


@pytest.mark.parametrize("points", [[], [[4.0, 0.1]]])
def test_a_run_that_was_too_short(tmp_path: Path, section: dict[str, Any], points: list[Any]) -> None:
    section["verify"] = {"2": points}
    with pytest.raises(ConfigError, match=r"profile: .* the cost of less than 2 sizes of verify steps"):
        load_costs(written(tmp_path, section))

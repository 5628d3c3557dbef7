"""Pairs of steps of a training: whose seconds count for which side, and figures of parts of the run."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from history_plot import main as history_plot
from specactor_ray.bench.pairs import DRAFTED, PLAIN, DraftCounts, StepPair, figures_of, parts_of, thirds
from specactor_ray.bench.train import PairedMaker, PairedRollout, judged_between, run_bench, supplied_of
from specactor_ray.cli.bench import parse_also
from specactor_ray.cli.bench_train_report import history_table, training_pairs_table, write_plot
from specactor_ray.config import Config
from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import InputError, SpecActorError, UserError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
from specactor_ray.trainer.experience import Experience
from specactor_ray.transport.messages import RequestStats
from tests.refused import refused
from tests.tiny import tiny_eagle, tiny_target


def drafts(accepted: int, method: str = "suffix", best: float = 2.5) -> DraftCounts:
    stats = RequestStats(100 - accepted, 60, accepted, 0, {method: (60, accepted)})
    return DraftCounts(stats, {method: [80, accepted]}, [30.0, 40.0], best)


def pair(step: int, plain_s: float | None, drafted_s: float, accepted: int = 50, **changed: Any) -> StepPair:
    values = {"sync_s": {PLAIN: 1.0, DRAFTED: 2.0}, "drafts": {DRAFTED: drafts(accepted)}, **changed}
    seconds = {DRAFTED: drafted_s} if plain_s is None else {PLAIN: plain_s, DRAFTED: drafted_s}
    return StepPair(step, (step - 1) / 2, 100, seconds | values.pop("more_s", {}), **values)


def record(step: int, **seconds: float) -> dict[str, Any]:
    return {
        "step": step,
        "train": {"reward_mean": 0.5},
        "seconds": {"update": 10.0, "sync": 4.0, "drafter": 3.0, **seconds},
    }


def test_both_sides_have_the_update_and_the_drafted_one_the_training_of_its_drafter() -> None:
    (step,) = figures_of([pair(1, 8.0, 4.0)], [record(1)])
    assert step["shared_s"] == 10.0 + (4.0 - 1.0 - 2.0)  # the update, and the export of weights
    assert step["plain_step_s"] == 8.0 + 1.0 + 11.0
    assert step["drafted_step_s"] == 4.0 + 2.0 + 11.0 + 3.0
    assert step["acceptance_length"] == 2.0


def test_steps_without_an_update_or_without_new_weights_are_no_pairs() -> None:
    torn = [pair(1, 8.0, 4.0), pair(2, 8.0, 4.0, sync_s={PLAIN: 1.0}), pair(3, 8.0, 4.0)]
    assert [one["step"] for one in figures_of(torn, [record(1), record(2)])] == [1]


def test_parts_add_up_and_compare_step_by_step() -> None:
    pairs = [pair(step, 9.0, 9.0 if step < 3 else 4.5, 50 + step) for step in range(1, 7)]
    steps = figures_of(pairs, [record(step) for step in range(1, 7)])
    assert thirds(6) == [0, 0, 1, 1, 2, 2] and thirds(1) == [0] and thirds(4) == [0, 0, 1, 2]
    parts = parts_of(steps, thirds(6))
    assert [one["steps"] for one in parts] == [[1, 2], [3, 4], [5, 6]]
    assert [one["rollout"]["ratio"] for one in parts] == pytest.approx([1.0, 2.0, 2.0])
    assert parts[2]["step"]["ratio"] == pytest.approx((9 + 12) / (4.5 + 13 + 3), abs=1e-4)
    assert parts[0]["by_method"] == {"suffix": [120, 103]}
    assert parts[0]["judged"] == {"suffix": [160, 103]} and parts[0]["supplied"] == [60.0, 80.0]
    assert parts_of([], []) == []
    empty = StepPair(7, 3.0, 0, {DRAFTED: 1.0}, {DRAFTED: 1.0}, {DRAFTED: DraftCounts()})
    none, some = (parts_of(figures_of([*pairs[:n], empty], map(record, range(1, 8))), [0] * (n + 1))[0] for n in (0, 1))
    assert (none["tokens"], none["acceptance_length"]) == (0, 0.0), "all outputs failed"
    assert (some["tokens"], some["acceptance_length"]) == (100, steps[0]["acceptance_length"])
    assert "2.00 (2.00 to 2.00)" in shown(training_pairs_table(parts, "by third"))


def shown(table: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text, "all columns have room"
    return text


def three_rollouts() -> list[dict[str, Any]]:
    """Four steps in two epochs, of which the first step of each has a plain rollout; another rollout drafts less."""
    pairs = [
        pair(
            step,
            9.0 if step % 2 else None,
            4.5,
            40 + 10 * step,
            sync_s={PLAIN: 1.0, DRAFTED: 1.0, "frozen": 1.0},
            drafts={DRAFTED: drafts(40 + 10 * step, "eagle"), "frozen": drafts(20, "eagle", 1.25)},
            more_s={"frozen": 6.0},
        )
        for step in (1, 2, 3, 4)
    ]
    return figures_of(pairs, [record(step) for step in (1, 2, 3, 4)])


def test_each_rollout_has_its_acceptance_by_epoch_also_in_steps_without_plain_decoding(tmp_path: Path) -> None:
    steps = three_rollouts()
    assert [one["plain_s"] for one in steps] == [9.0, None, 9.0, None]
    assert steps[1]["plain_step_s"] is None and steps[1]["shared_s"] == 10.0 + (4.0 - 3.0)
    epochs = parts_of(steps, [int(one["epoch"]) for one in steps])
    assert [one["pairs"] for one in epochs] == [1, 1]
    assert [one["judged"] for one in epochs] == [{"eagle": [160, 110]}, {"eagle": [160, 150]}]
    assert [one["also"]["frozen"]["judged"] for one in epochs] == [{"eagle": [160, 40]}] * 2
    assert epochs[0]["also"]["frozen"]["acceptance_length"] == 100 / 80
    assert epochs[0]["rollout"]["ratio"] == 2.0 and epochs[0]["plain_tokens_per_s"] == 100 / 9.0
    slow = parts_of([steps[0], {**steps[1], "drafted_s": 90.0}], [0, 0])[0]
    assert slow["drafted_tokens_per_s"] == 100 / 4.5, "of the step with a plain rollout, as the ratio"
    assert epochs[0]["also"]["frozen"]["rollout"]["ratio"] == 1.25, (
        "9 / 6, of which the acceptance length of the best output explains 1.25"
    )
    text = shown(history_table(epochs, "eagle taught"))
    assert "69% / 75% / 2.22" in text and "25% / 75% / 1.25" in text and "0.500" in text
    (unpaired,) = parts_of(steps[1:2], [0])
    assert unpaired["rollout"] is unpaired["step"] is unpaired["rollout_share"] is None
    assert unpaired["also"]["frozen"]["rollout"] is None
    assert "- to 22" in shown(training_pairs_table([unpaired], "by epoch"))
    report = {"steps": steps, "epochs": epochs, "drafted": "eagle taught", "output": str(tmp_path / "bench.json")}
    assert write_plot(report) == f"plot: {tmp_path / 'bench.png'}"


@pytest.mark.parametrize("lacking", ["judged", "acceptance_length", "reward", "part"])
def test_a_figure_of_several_trainings_is_of_whole_reports(lacking: str, tmp_path: Path) -> None:
    epochs, file, figure = parts_of(three_rollouts(), [0, 0, 1, 1]), tmp_path / "bench.json", tmp_path / "x.png"
    file.write_text(json.dumps({"drafted": "eagle taught", "epochs": epochs}))
    history_plot([f"sums={file}"], figure)
    assert figure.is_file()
    with pytest.raises(InputError, match="--output: no plot"):
        history_plot([f"sums={file}"], file / "x.png")
    del epochs[1][lacking]
    file.write_text(json.dumps({"drafted": "eagle taught", "epochs": epochs}))
    with pytest.raises(InputError, match="no report of bench train"):
        history_plot([f"sums={file}"], figure)


class CountedRollout:
    """Outputs of a rollout, and the calls that it gets."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name, self.tokens, self.loaded = name, tokens, list[Any]()

    def update_weights(self, weights: Any, policy: str | None = None) -> int:
        self.loaded.append(weights)
        return len(self.loaded)

    def drafters(self) -> list[dict[str, Any]]:
        return [{"id": self.name, "method": "eagle", "version": 0, "tried": 4, "right": 2}]

    def metrics(self) -> RolloutMetrics:
        return RolloutMetrics()


class Made:
    """A maker of experience that returns the tokens of the rollout, and notes its name. Only the drafted one finds
    enough in two tasks."""

    def __init__(self) -> None:
        self.stream, self.order = SimpleNamespace(position=0, skipped=0, size=4), list[tuple[str, int, int]]()

    def collect(self, rollout: Any, sampling: SamplingParams, step: int) -> Experience:
        self.order.append((rollout.name, step, self.stream.position))
        self.stream.position += 2 if rollout.name == DRAFTED else 3
        return Experience(trajectories=[trajectory(rollout.tokens)], position=(self.stream.position, 0))


def trajectory(tokens: list[int]) -> Trajectory:
    stats, none = RequestStats(1, 2, 1), (0.0,) * len(tokens)
    return Trajectory("0", 0, 0, (1,), tuple(tokens), none, "", "stop", SamplingParams(), stats)


def test_all_rollouts_have_every_step_of_the_same_tasks_by_turns_and_plain_decoding_some() -> None:
    rollouts = {name: CountedRollout(name, [1, 2, 3]) for name in (PLAIN, DRAFTED, "frozen")}
    paired, made = PairedRollout(rollouts, plain_every=2), Made()  # type: ignore[arg-type]
    maker = PairedMaker(made, paired)  # type: ignore[arg-type]
    for step in range(4):
        if step == 3:
            rollouts["frozen"].tokens = [1, 5, 3]
        assert maker.collect(None, SamplingParams(), step).trajectories[0].token_ids == tuple(rollouts[DRAFTED].tokens)
        paired.update_weights(f"weights {step}")  # type: ignore[arg-type]
    by_step = [[name for name, at, _ in made.order if at == step] for step in range(4)]
    turns = [[PLAIN, DRAFTED, "frozen"], [DRAFTED, "frozen"], [DRAFTED, "frozen", PLAIN], ["frozen", DRAFTED]]
    assert by_step == turns
    assert all(position == 2 * step for _, step, position in made.order)
    assert all(len(one.loaded) == 4 for one in rollouts.values()), "weights go to the plain rollout in every step"
    assert [sorted(one.rollout_s) for one in paired.pairs[:2]] == [
        ["drafted", "frozen", "plain"],
        ["drafted", "frozen"],
    ]
    assert all(list(one.drafts) == [DRAFTED, "frozen"] for one in paired.pairs), "columns stay in their order"
    assert not any(one.differences for one in paired.pairs[:3])
    (difference,) = paired.pairs[3].differences
    assert (difference["rollout"], difference["position"], difference["token"]) == ("frozen", 1, 5)


@pytest.mark.parametrize(("others", "plain_every", "steps"), [(0, 1, 4), (1, 1, 6), (2, 1, 8), (1, 2, 12), (2, 0, 6)])
def test_each_rollout_is_as_often_before_as_behind_another(others: int, plain_every: int, steps: int) -> None:
    names = [*([PLAIN] if plain_every else []), DRAFTED, *map(str, range(others))]
    paired = PairedRollout(dict.fromkeys(names), plain_every)  # type: ignore[arg-type]
    before = Counter(pair for step in range(steps) for pair in combinations([name for name, _ in paired.ways(step)], 2))
    assert before and all(before[one, other] == before[other, one] for one, other in before)


def test_further_rollouts_have_names_and_overrides() -> None:
    items = ["suffix:drafters=[{method: suffix}]", "frozen: drafters.0.online.where=off", "frozen:drafters.0.window=4"]
    assert parse_also(items) == {
        "suffix": ["drafters=[{method: suffix}]"],
        "frozen": ["drafters.0.online.where=off", "drafters.0.window=4"],
    }
    for wrong in ("drafters.0.window=4", "frozen:drafters", ":a=b", "frozen"):
        with pytest.raises(InputError, match="NAME:KEY=VALUE"):
            parse_also([wrong])


def test_without_plain_decoding_the_other_rollouts_are_compared_with_the_drafted_one() -> None:
    rollouts = {DRAFTED: CountedRollout(DRAFTED, [1, 2]), "frozen": CountedRollout("frozen", [1, 3])}
    paired, made = PairedRollout(rollouts, plain_every=0), Made()  # type: ignore[arg-type]
    for step in range(2):
        PairedMaker(made, paired).collect(None, SamplingParams(), step)  # type: ignore[arg-type]
        paired.update_weights("weights")  # type: ignore[arg-type]
    assert [name for name, _, _ in made.order] == [DRAFTED, "frozen", "frozen", DRAFTED]
    steps = figures_of(paired.pairs, [record(1), record(2)])
    assert [one["plain_s"] for one in steps] == [None, None]
    assert [[one["rollout"] for one in step["differences"]] for step in steps] == [["frozen"], ["frozen"]]


FROZEN = "drafters.0.online.where=off"
CHANGED = {"sampling.temperature": 0, "trainer.steps": 1, "target.model": "other", "paced.stretch": 2, "run.name": "x"}


def taught(tmp_path: Path, *overrides: str) -> Config:
    """A training on two cores, with a head that it teaches."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "Count from 1 to 5.", "answer": "5"}) + "\n")
    head = {"method": "eagle", "model": str(tiny_eagle()), "online": {"where": "trainer"}}
    target = {"model": str(tiny_target()), "kv_cache_gb": 0.05, "cores": 1}
    sizes = {"sampling": {"max_tokens": 8}, "trainer": {"steps": 2}, "data": {"path": str(tasks), "n": 2}}
    settings = {"mode": "coupled", "target": target, "drafters": [head], "run": {"dir": str(tmp_path)}, **sizes}
    return from_mapping(settings, overrides)


def test_a_run_that_fails_leaves_the_report_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()

    def fail(config: Any, console: Any, beside: Any, ready: Any) -> None:
        rollout = SimpleNamespace(config=config, run_name="mine", update_weights=lambda *_: 1)
        with beside(rollout, None) as (paired, _):
            paired.pairs.append(pair(1, None, 4.0))
            (folder / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
            raise SpecActorError("the controller is gone")

    monkeypatch.setattr("specactor_ray.bench.train.train", fail)
    monkeypatch.setattr("specactor_ray.cluster.connection.connect", lambda _: contextlib.nullcontext())
    with pytest.raises(SpecActorError, match="controller is gone"):
        run_bench(taught(tmp_path), None, Console(file=io.StringIO()), plain_every=0)
    report = json.loads((folder / "bench.json").read_text())
    assert (report["status"], [one["step"] for one in report["steps"]]) == ("failed", [1])


def also(*items: str, name: str = "other") -> dict[str, Any]:
    return {"also": {name: items}}


COMMON = "the rollouts of a step have it in common"


@pytest.mark.parametrize(
    ("given", "start", "words"),
    [
        (also(), "--also other: drafters.0.online.where: ", f"Fix: --also 'other:{FROZEN}'"),
        (also("mode=plain"), "--also other: mode: ", "no drafts"),
        (also("drafters=[]"), "--also other: ", "drafters"),
        (also("drafters.0.windows=8"), "--also other: drafters.0.windows: ", ""),
        (also("drafters=[{method: draft_model, model: /nonexistent}]"), "--also other: ", "/nonexistent"),
        (also(FROZEN, "target.cores=4096"), "--also other: target.cores: ", ""),
        *[(also(FROZEN, f"{key}={value}"), f"--also other: {key}: ", COMMON) for key, value in CHANGED.items()],
        (also(FROZEN, name=PLAIN), "--also: 'plain' is the name", ""),
        (also(FROZEN, name="eagle taught"), "--also: 'eagle taught' is the name", ""),
        ({"plain": ["mode=coupled"]}, "--plain: mode: ", "plain decoding has no drafts"),
        ({"plain": ["drafters.0.window=2"]}, "--plain: drafters: ", "plain decoding has no drafts"),
        ({"plain": ["target.model=/nonexistent"]}, "--plain: target.model: ", COMMON),
        ({"plain": ["target.replicas=4096"]}, "--plain: target.cores: ", ""),
        ({"plain": ["nosuch=2"]}, "--plain: nosuch: ", ""),
        ({"plain": ["target.replicas=2"], "plain_every": 0}, "--plain: ", "--plain-every 0"),
        ({"overrides": ["data.path=/nonexistent"]}, "data.path: ", ""),
        ({"overrides": ["reward.functions=[{name: nosuch}]"]}, "reward.functions", "nosuch"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    given: dict[str, Any], start: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specactor_ray.cluster.connection.connect", lambda _: pytest.fail("Ray starts"))
    given = dict(given)
    with pytest.raises(UserError) as caught:
        run_bench(taught(tmp_path, *given.pop("overrides", ())), None, Console(), **given)
    assert str(caught.value).startswith(start) and words in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("plain", "layout"), [([], (1, 2)), (["target.replicas=2"], (2, 1)), (["target.cores=1"], (1, 1))]
)
def test_the_rollouts_beside_a_training_have_its_cores(
    plain: list[str], layout: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: Config, console: Console, beside: Any, ready: Any) -> None:
        others.update(beside.args[0])
        assert ready[0].config.target.cores == 1 and ready[1].size, "checked once"
        raise SpecActorError("enough")

    others = dict[str, Config]()
    monkeypatch.setattr("specactor_ray.bench.train.train", train)
    monkeypatch.setattr("specactor_ray.cluster.connection.connect", lambda _: contextlib.nullcontext())
    items = {"suffix": ["mode=coupled", "drafters=[{method: suffix}]"], "frozen": [FROZEN]}
    with pytest.raises(SpecActorError, match="enough"):
        run_bench(taught(tmp_path, "mode=decoupled"), None, Console(), plain, items)
    assert list(others) == [PLAIN, "suffix", "frozen"] and all(one.target.updates for one in others.values())
    assert [(one.target.replicas, one.target.cores) for one in others.values()] == [layout, (1, 2), (1, 1)]
    assert [bool(one.target.hidden_layers) for one in others.values()] == [False, False, True]


def test_what_drafters_judged_is_counted_by_method_and_from_new_weights_on_anew() -> None:
    """Draft tokens after right ones: of two tails of 3, `right, wrong, -` and `right, right, right`, 5, and 4 right."""

    def drafter(name: str, method: str, version: int, tried: int, right: int) -> dict[str, Any]:
        return {"id": name, "method": method, "version": version, "tried": tried, "right": right}

    before = [drafter("a", "suffix", 0, 10, 3), drafter("b", "eagle", 1, 50, 20)]
    after = [drafter("a", "suffix", 0, 15, 7), drafter("c", "suffix", 0, 2, 1), drafter("b", "eagle", 2, 6, 3)]
    assert judged_between(before, after) == {"suffix": [7, 5], "eagle": [6, 3]}
    counters = RolloutMetrics(steps=20, suspended_steps=5, row_steps=80, supplied_row_steps=45)
    assert supplied_of(counters) == [45.0, 60.0]


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"mode": "plain"}, "mode"),
        ({"drafters": []}, "mode"),
        ({"resume": "auto"}, "resume"),
        ({"trainer": {"max_staleness": 1}}, "trainer.max_staleness"),
    ],
)
def test_what_gives_no_pairs_is_refused(changed: dict[str, Any], key: str) -> None:
    config = from_mapping({"drafters": [{"method": "suffix"}], "data": {"path": "tasks.jsonl", "n": 2}, **changed})
    with refused(key):
        run_bench(config, None, Console())

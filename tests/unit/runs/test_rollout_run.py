"""A rollout run: its files when it ends, is interrupted, fails, and is resumed."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import os
import shutil
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from specactor_ray.config.load import from_mapping
from specactor_ray.core.errors import ClusterError, InputError, ModelLoadError, SpecActorError, UserError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.prompts import split_row
from specactor_ray.rollout.trajectory import RolloutMetrics, Trajectory
from specactor_ray.runs.folder import RunOutcome
from specactor_ray.runs.rollout import Scores, drafts_in_words, pass_at_k, run_rollout
from specactor_ray.runs.trajectories import TrajectoryWriter
from specactor_ray.sampling.seeds import derive_seed
from specactor_ray.startup.resolve import Resolved
from specactor_ray.trainer.rewards import row_scorer
from specactor_ray.transport.messages import RequestStats
from tests.refused import refused
from tests.tiny import tiny_draft, tiny_target

REWARD = {"functions": [{"name": "length"}], "workers": 1}


class FakeRollout:
    """Stands in for `Rollout`: yields what the test scripted, or raises it."""

    script: ClassVar[list[Any]] = []
    skipped: ClassVar[set[tuple[int, int]]] = set()
    encoded: ClassVar[Any] = None
    address = "127.0.0.1:6379"

    def __init__(self, resolved: Resolved) -> None:
        self.resolved, config = resolved, resolved.config
        self.config, self.run_name, self.closed = config, config.run.name, False
        self.committed_tokens = self.reissued_requests = self.discarded_tokens = 0
        first = self.script[0] if self.script else None
        if isinstance(first, ClusterError):
            raise first

    def __enter__(self) -> FakeRollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def metrics(self) -> RolloutMetrics:
        return RolloutMetrics(steps=5, row_steps=10, committed_tokens=self.committed_tokens)

    def fallbacks(self) -> list[str]:
        return []

    def status(self) -> list[dict[str, Any]]:
        health = {"cost": [], "health": {"method": "eagle", "alarm": True}}
        return [{"id": "verifier-0#1a2b", "kind": "verifier", "counters": {"hosted": {"eagle-0#1a2b": health}}}]

    def stream(self, prompts: list[Any], skip: Collection[tuple[int, int]], encoded: Any) -> Iterator[Trajectory]:
        type(self).skipped = set(skip)
        type(self).encoded = encoded
        for item in self.script:
            if isinstance(item, BaseException):
                raise item
            if callable(item):
                item()
                continue
            self.committed_tokens += len(item.token_ids)
            yield replace(item, columns=split_row(prompts[item.prompt_index])[1])


def trajectory(index: int, error: str = "") -> Trajectory:
    tokens = () if error else (4, 5, 6)
    sampling, reason = SamplingParams(seed=derive_seed(0, index, 0)), "error" if error else "length"
    fields = (f"1-{index}-0", index, 0, (1, 2), tokens, tuple(-1.0 for _ in tokens), "text", reason, sampling)
    return Trajectory(*fields, RequestStats(), error, prompt="abc"[index])


def sample(index: int, number: int) -> Trajectory:
    sampling = SamplingParams(seed=derive_seed(0, index, number))
    return replace(trajectory(index), sample_index=number, sampling=sampling)


class TestRun:
    @pytest.fixture(autouse=True)
    def _fake_rollout(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("specactor_ray.rollout.rollout.Rollout", FakeRollout)
        monkeypatch.setattr("specactor_ray.runs.rollout._cluster_resources", dict)
        monkeypatch.chdir(tmp_path)

    def run(
        self,
        *script: Any,
        name: str | None = "r",
        resume: str = "never",
        shown: io.StringIO | None = None,
        lines: Sequence[str] = "abc",
        **more: Any,
    ) -> RunOutcome:
        FakeRollout.script = list(script)
        Path("prompts.txt").write_text("".join(f"{line}\n" for line in lines))
        sections = {"target": {"model": str(tiny_target())}}
        sections |= {section: more.pop(section) for section in ("sampling", "target") if section in more}
        reward = more.pop("reward", {})
        data = {"path": "prompts.txt", **more}
        run = {"mode": "plain", "run": {"name": name}, "resume": resume, "data": data, "reward": reward}
        config = from_mapping({**run, **sections})
        with row_scorer(config) as scorer:
            return run_rollout(config, Console(file=shown or io.StringIO(), width=400), scorer)

    def test_files_of_a_complete_run(self) -> None:
        outcome = self.run(trajectory(2), trajectory(0), trajectory(1, error="longer than the context"))
        assert outcome.exit_code == 0 and outcome.folder == Path("runs/r")
        rows = [json.loads(line) for line in Path("runs/r/trajectories.jsonl").read_text().splitlines()]
        assert [row["prompt_index"] for row in rows] == [2, 0, 1]
        assert [row.get("error") for row in rows] == [None, None, "longer than the context"]
        summary = json.loads(Path("runs/r/summary.json").read_text())
        assert summary == outcome.summary
        assert summary["status"] == "complete" and summary["tokens"] == 6
        assert summary["drafts"] == "none, mode is plain"
        assert summary["costs"]["target"]["model"] == str(tiny_target()) and summary["costs"]["ladder"] == []
        assert summary["trajectories"]["finish_reasons"] == {"length": 2, "error": 1}
        assert summary["trajectories"]["failures"] == {"longer than the context": 1}
        (drafter,) = summary["drafters"]
        assert drafter.items() >= {"id": "eagle-0#1a2b", "method": "eagle", "alarm": True, "failures": 0}.items()
        assert {"ray", "torch", "transformers"} <= summary["versions"].keys() and summary["hardware"]["cores"] >= 1
        saved = yaml.safe_load(Path("runs/r/config.yaml").read_text())
        assert saved == summary["config"] and saved["data"]["path"] == "prompts.txt"
        with pytest.raises(InputError, match="runs/r"):
            self.run(trajectory(0))
        files = {path.name for path in Path("runs/r").iterdir()}
        assert files == {"config.yaml", "summary.json", "trajectories.jsonl"}
        assert json.loads(Path("runs/r/summary.json").read_text()) == summary

    def test_columns_of_prompts_are_in_the_trajectories_of_a_continued_run_too(self) -> None:
        odd = {"difficulty": [math.nan, {"most": -math.inf}]}
        rows = [{"prompt": text, "id": text * 2, "answer": number, **odd} for number, text in enumerate("abc")]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        Path("rows.jsonl").write_text(text)
        self.run(trajectory(2), KeyboardInterrupt(), path="rows.jsonl")
        Path("rows.jsonl").write_text(text.replace("cc", "other"))
        with pytest.raises(InputError, match="line 1"):
            self.run(trajectory(0), path="rows.jsonl", resume="auto")
        Path("rows.jsonl").write_text(text)
        outcome = self.run(trajectory(1), trajectory(0), path="rows.jsonl", resume="auto")
        found = [json.loads(line) for line in Path(outcome.summary["output"]).read_text().splitlines()]
        assert [row["prompt_index"] for row in found] == [2, 1, 0]
        odd = {"difficulty": [None, {"most": None}]}
        assert [row["columns"] for row in found] == [
            {"id": one * 2, "answer": "abc".index(one), **odd} for one in "cba"
        ]
        assert "rewards" not in outcome.summary

    def test_rewards_of_outputs_and_pass_at_k(self) -> None:
        rows = [{"prompt": text, "answer": answer} for text, answer in zip("abc", ("text", "no", 7), strict=True)]
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        reward = {"functions": [{"name": "exact_match", "weight": 2.0}], "pass_threshold": 2.0, "workers": 1}
        script = trajectory(0), trajectory(1, error="too long"), trajectory(2)
        outcome = self.run(*script, path="rows.jsonl", reward=reward)
        found = [json.loads(line) for line in Path(outcome.summary["output"]).read_text().splitlines()]
        rewards = {row["prompt_index"]: (row.get("reward"), row.get("rewards")) for row in found}
        assert rewards == {0: (2.0, {"exact_match": 1.0}), 1: (None, None), 2: (0.0, {"exact_match": 0.0})}
        assert outcome.summary["rewards"] == {"scored": 2, "failures": {}, "mean": 1.0, "pass@1": 0.5}
        Path("rows.jsonl").write_text('{"prompt": "a"}\n')
        with pytest.raises(InputError, match=r"prompt 1 .*'answer' .*exact_match"):
            self.run(trajectory(0), path="rows.jsonl", reward=reward, name="s")
        with refused("reward.functions", "'exact'"):
            self.run(trajectory(0), path="rows.jsonl", reward={"functions": [{"name": "exact"}]}, name="s")
        assert not Path("runs/s").exists()

    def test_functions_of_a_batch_see_the_outputs_of_an_interrupted_run_too(self) -> None:
        """By number of outputs and place; that of a failed request is not there."""
        reward = {"functions": [{"name": "tests.fakes.reward_forms:rank"}], "workers": 1}
        first = self.run(trajectory(0), trajectory(1, error="too long"), reward=reward)
        (first.folder / "trajectories.jsonl").rename(first.folder / "trajectories.jsonl.partial")
        more = [replace(trajectory(index), sample_index=1) for index in (1, 0)]
        outcome = self.run(*more, reward=reward, n=2, resume="auto")
        found = [json.loads(line) for line in Path(outcome.summary["output"]).read_text().splitlines()]
        rewards = [(row["prompt_index"], row["sample_index"], row.get("reward")) for row in found]
        assert sorted(rewards[:2]) == [(0, 0, 1004.0), (1, 0, None)], (
            "those of the interrupted run are there once, as they were"
        )
        assert sorted(rewards[2:]) == [(0, 1, 2104.0), (1, 1, 1004.0)]

    @pytest.mark.parametrize("function", ["reward_forms:rank", "reward_functions:slow_on_text"])
    def test_outputs_without_a_reward_yet_are_in_an_interrupted_run(self, function: str) -> None:
        """The group has not ended, or the function is slow. Ctrl-C and kill -9 interrupt the run, the latter with the
        files as they are at that time; twice."""
        reward = {"functions": [{"name": f"tests.fakes.{function}"}], "workers": 1}
        first, others = (
            [sample(*one) for one in some] for some in (((0, 1), (1, 0), (2, 1)), ((0, 0), (1, 1), (2, 0)))
        )
        killed = functools.partial(shutil.copytree, "runs/r", "runs/killed")
        shown = io.StringIO()
        self.run(*first[:2], killed, first[2], KeyboardInterrupt(), reward=reward, n=2, shown=shown)
        assert "3 finished trajectories are saved" in shown.getvalue()
        found = dict[str, list[dict[str, Any]]]()
        for name, there in (("r", 3), ("killed", 2)):
            with (Path("runs") / name / "unscored.jsonl.partial").open("a") as file:
                file.write('{"half')
            given = {"name": name, "n": 2, "resume": "auto", "reward": reward}
            assert self.run(others[0], KeyboardInterrupt(), **given).summary["resumed"] == there
            outcome = self.run(*others[1:], *first[there:], **given)
            assert len(FakeRollout.skipped) == outcome.summary["resumed"] == there + 1
            assert {path.name for path in outcome.folder.iterdir()} == {
                "config.yaml", "summary.json", "trajectories.jsonl",
            }  # fmt: skip
            rows = [json.loads(line) for line in (outcome.folder / "trajectories.jsonl").read_text().splitlines()]
            found[name] = sorted(rows, key=lambda row: (row["prompt_index"], row["sample_index"]))
            assert outcome.summary["trajectories"]["finished"] == len(rows) == 6
        assert found["r"] == found["killed"]
        ranked = function.endswith("rank")
        expected = [2004.0, 2104.0] * 3 if ranked else [4.0] * 6
        assert [row["reward"] for row in found["r"]] == expected

    def test_outputs_that_the_context_cuts_are_announced(self) -> None:
        shown = io.StringIO()
        lines = ["a", *(" ".join(["the red fox sleeps on the mat."] * times) for times in (4, 9))]
        sections = {"target": {"model": str(tiny_target()), "max_model_len": 40}, "sampling": {"max_tokens": 25}}
        self.run(trajectory(0), shown=shown, lines=lines, **sections)
        assert [len(token_ids) > 15 for token_ids, _ in FakeRollout.encoded] == [False, True, True]
        assert "warning: 1 of 3 prompts cannot run and fail; the first is prompt 3: it has" in shown.getvalue()
        assert "tokens, and the context has 40 (target.max_model_len)" in shown.getvalue()
        assert "warning: 1 of 3 prompts have more than 15 tokens" in shown.getvalue()
        assert "sampling.max_tokens=25 of the context of 40" in shown.getvalue()

    def test_a_model_without_a_tokenizer_takes_token_ids(self, tmp_path: Path) -> None:
        bare = tmp_path / "bare"
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            (bare / name).symlink_to(tiny_target() / name)
        Path("ids.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n')
        target = {"model": str(bare)}
        assert self.run(trajectory(0), target=target, path="ids.jsonl").summary["status"] == "complete"
        Path("ids.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n{"prompt": "a"}\n')
        with pytest.raises(ModelLoadError, match=r"prompt 2 .*prompt_token_ids"):
            self.run(trajectory(0), target=target, path="ids.jsonl", name="s")

    def test_messages_without_a_template_are_refused_if_nothing_can_run_and_texts_have_a_notice(self) -> None:
        bare, shown = Path("no_template"), io.StringIO()
        shutil.copytree(tiny_target(), bare)
        facts = json.loads((bare / "tokenizer_config.json").read_text())
        facts.pop("chat_template", None)
        (bare / "tokenizer_config.json").write_text(json.dumps(facts))
        (bare / "chat_template.jinja").unlink(missing_ok=True)
        chat, target = json.dumps({"messages": [{"role": "user", "content": "a"}]}), {"model": str(bare)}
        Path("chat.jsonl").write_text(f"{chat}\n{chat}\n")
        with pytest.raises(InputError, match=r"^data\.path: "):
            self.run(trajectory(0), path="chat.jsonl", target=target)
        assert not Path("runs").exists()
        Path("chat.jsonl").write_text(f'{{"prompt": "a"}}\n{chat}\n')
        self.run(trajectory(0), path="chat.jsonl", target=target, shown=shown)
        assert "no_template has no chat template, so prompts are sent as they are" in shown.getvalue()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_an_interruption_keeps_what_had_finished(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        outcome = self.run(trajectory(0), trajectory(1), lambda: os.kill(os.getpid(), number), trajectory(2))
        assert outcome.exit_code == 130 and outcome.summary["status"] == "interrupted"
        assert signal.getsignal(number) is before
        partial = Path("runs/r/trajectories.jsonl.partial").resolve()
        assert outcome.summary["output"] == str(partial) and len(partial.read_text().splitlines()) == 2
        assert not Path("runs/r/trajectories.jsonl").exists()
        assert json.loads(Path("runs/r/summary.json").read_text())["status"] == "interrupted"

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_an_interruption_after_the_last_trajectory_changes_nothing(
        self, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete = TrajectoryWriter.complete

        def interrupted(writer: TrajectoryWriter) -> None:
            os.kill(os.getpid(), number)
            complete(writer)

        monkeypatch.setattr(TrajectoryWriter, "complete", interrupted)
        monkeypatch.setattr(FakeRollout, "__exit__", lambda *_: os.kill(os.getpid(), number))
        outcome = self.run(trajectory(0), trajectory(1), trajectory(2))
        assert outcome.exit_code == 0 and outcome.summary["status"] == "complete"
        assert {path.name for path in Path("runs/r").iterdir()} >= {"config.yaml", "summary.json", "trajectories.jsonl"}

    def test_a_run_that_ends_before_its_file_has_its_name_is_continued(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as context:
            context.setattr(TrajectoryWriter, "complete", Mock(side_effect=OSError("killed here")))
            with pytest.raises(SpecActorError, match="killed here"):
                self.run(trajectory(0), trajectory(1), trajectory(2))
        outcome = self.run(resume="auto")
        assert outcome.summary["status"] == "complete" and outcome.summary["resumed"] == 3
        assert len(Path(outcome.summary["output"]).read_text().splitlines()) == 3

    def test_a_run_whose_prompts_all_fail_has_exit_code_1(self) -> None:
        outcome = self.run(*(trajectory(index, error="no") for index in range(3)))
        assert outcome.exit_code == 1 and outcome.summary["error"] == "every trajectory failed"
        assert Path(outcome.summary["output"]).name == "trajectories.jsonl"

    def test_a_crash_is_written_down_and_raised_and_a_start_that_fails_leaves_nothing(self) -> None:
        with pytest.raises(ClusterError):
            self.run(ClusterError("no Ray cluster answers"))
        assert [path.name for path in Path().iterdir()] == ["prompts.txt"]
        with pytest.raises(RuntimeError, match="broken"):
            self.run(trajectory(0), RuntimeError("broken"))
        summary = json.loads(Path("runs/r/summary.json").read_text())
        assert (summary["status"], summary["error"]) == ("failed", "RuntimeError: broken")
        assert len(Path("runs/r/trajectories.jsonl.partial").read_text().splitlines()) == 1

    def test_a_folder_that_is_removed_ends_the_run_in_one_line(self) -> None:
        removal = functools.partial(shutil.rmtree, "runs/r")
        for script in ([trajectory(0), removal, trajectory(1)], [*map(trajectory, range(3)), removal]):
            with pytest.raises(SpecActorError, match=r"^run\.dir: runs/r.*\(No such file"):
                self.run(*script)
            assert not Path("runs/r").exists()

    def test_an_interrupted_run_is_continued(self) -> None:
        self.run(trajectory(2), trajectory(0, error="no"), KeyboardInterrupt(), name=None)
        (folder,) = Path("runs").iterdir()
        with (folder / "trajectories.jsonl.partial").open("a") as partial:
            partial.write('{"prompt_index": 1, "sam')  # the process was killed in the middle of a line
        outcome = self.run(trajectory(1), name=None, resume="auto")
        assert FakeRollout.skipped == {(2, 0), (0, 0)}
        assert outcome.exit_code == 0 and outcome.folder == folder
        rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
        assert [row["prompt_index"] for row in rows] == [2, 0, 1]
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["resumed"]) == ("complete", 2)
        counts = summary["trajectories"]
        assert (counts["total"], counts["finished"], counts["failed"], counts["tokens"]) == (3, 2, 1, 6)
        shown = io.StringIO()
        summary = self.run(trajectory(0), name=None, resume="auto", shown=shown).summary
        assert not summary["resumed"] and "there is no earlier run to resume" in shown.getvalue()

    @pytest.mark.parametrize(
        ("changed", "expected"),
        [
            ({"sampling": {"temperature": 0.5}}, r"^sampling.temperature: .*0.5.*1.0"),
            ({"target": {"model": str(tiny_draft())}}, "^target.model: "),
            ({"split_special_tokens": True}, "^data.split_special_tokens: .*true.*false"),
            ({"add_special_tokens": False}, "^data.add_special_tokens: .*false.*true"),
            ({"limit": 1}, "line 1"),
            ({"path": "others.txt"}, "line 1"),
            ({"resume": "somewhere"}, r"^resume: .*auto or never"),
            ({"reward": {}}, r"^reward.functions: "),
            ({"reward": {"functions": [{"name": "length", "weight": 2.0}]}}, r"^reward.functions: .*2\.0.*1\.0"),
            ({"reward": REWARD | {"answer_pattern": "a"}}, r"^reward.answer_pattern: .*\"a\".*null"),
            ({"reward": REWARD | {"failure_value": 0.0}}, r"^reward.failure_value: .*0\.0.*null"),
            ({"answer_key": "solution"}, r"^data.answer_key: .*solution.*answer"),
        ],
    )
    def test_other_settings_are_refused_and_nothing_is_lost(self, changed: dict[str, Any], expected: str) -> None:
        self.run(trajectory(2), KeyboardInterrupt(), reward=REWARD)
        before = {path: path.read_bytes() for path in Path("runs/r").iterdir()}
        Path("others.txt").write_text("x\ny\nz\n")
        with pytest.raises(UserError, match=expected):
            self.run(trajectory(1), **{"resume": "auto", "reward": REWARD, **changed})
        assert {path: path.read_bytes() for path in Path("runs/r").iterdir()} == before

    @pytest.mark.parametrize(
        "damage",
        [
            '{"prompt_index": 1}\n',
            '{"prompt_index": 1, "sample_index": 0, "finish_reason": [], "token_ids": []}\n',
            '{"prompt_index": 1.0, "sample_index": 0, "finish_reason": "stop", "token_ids": [], "seed": 1}\n',
            '{"prompt_index": 1, "sample_index": false, "finish_reason": "stop", "token_ids": [], "seed": 1}\n',
            '{"prompt_index": 1, "sample_index": 0, "finish_reason": "gone", "token_ids": [], "seed": 1}\n',
            "my notes\nwithout an end",
            "[]\n",
            "\0" * 100 + "\n",
            "",
        ],
    )
    def test_what_is_no_trajectory_is_named_and_stays(self, damage: str) -> None:
        self.run(trajectory(2), KeyboardInterrupt())
        partial = Path("runs/r/trajectories.jsonl.partial")
        partial.write_text(partial.read_text() + (damage or partial.read_text()))
        before = {path: path.read_bytes() for path in Path("runs/r").iterdir()}
        with pytest.raises(InputError, match=r"partial, line 2.* Fix: "):
            self.run(trajectory(1), resume="auto")
        assert {path: path.read_bytes() for path in Path("runs/r").iterdir()} == before

    def test_a_run_without_a_finished_trajectory_is_continued_too(self) -> None:
        self.run(KeyboardInterrupt())
        partial = Path("runs/r/trajectories.jsonl.partial")
        assert partial.read_bytes() == b""
        partial.write_text("half a line")
        with pytest.raises(ClusterError):
            self.run(ClusterError("no Ray cluster answers"), resume="auto")
        assert partial.read_text() == "half a line"
        outcome = self.run(*map(trajectory, range(3)), resume="auto")
        assert outcome.summary["resumed"] == 0
        assert len(Path("runs/r/trajectories.jsonl").read_text().splitlines()) == 3
        with pytest.raises(InputError, match="runs/r"):
            self.run(trajectory(0), resume="auto")


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples(passed: list[bool], k: int) -> None:
    k = min(k, len(passed))
    chosen = [any(some) for some in itertools.combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(chosen) / len(chosen))


def test_samples_without_a_reward_count_in_no_group() -> None:
    scores = Scores(1.0)
    for index, reward in ((0, 1.0), (0, 0.0), (0, 0.0), (1, 1.0), (2, None)):
        scores.add({"prompt_index": index, "reward": reward, **({"reward_error": "slow"} if reward is None else {})})
    figures = scores.figures()
    assert (figures["scored"], figures["mean"], figures["failures"]) == (4, 0.5, {"slow": 1})
    assert figures["pass@1"] == pytest.approx((1 / 3 + 1.0) / 2) and figures["pass@2"] == pytest.approx(2 / 3)
    assert Scores(1.0).figures() == {"scored": 0, "failures": {}, "mean": None}


@pytest.mark.parametrize(
    ("mode", "counters", "expected"),
    [
        ("coupled", {"plain_s": 2.62}, "about 1.31x of plain decoding (acceptance length 1.7)"),
        (
            "decoupled",
            {"plain_s": 2.0, "suspended_steps": 3},
            "about 1.00x of plain decoding (acceptance length 1.7); drafting was suspended in 12% of the steps; "
            "the devices of draft actors are not counted",
        ),
        ("coupled", {"row_steps": 0}, "none, nothing was generated"),
        ("plain", {}, "none, mode is plain"),
    ],
)
def test_whether_drafts_helped(mode: str, counters: dict[str, float], expected: str) -> None:
    steps = {"steps": 25, "row_steps": 100, "committed_tokens": 170, "forward_s": 1.5, "waiting_s": 0.5}
    config = from_mapping({"mode": mode, "drafters": [{"method": "ngram", "hosted": mode != "decoupled"}]})
    assert drafts_in_words(config, RolloutMetrics(**(steps | counters))) == expected  # type: ignore[arg-type]

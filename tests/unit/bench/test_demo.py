"""What `specactor demo` measures and says."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specactor_ray.bench.by_turns import Round, TurnTaker, play_round
from specactor_ray.bench.comparison import ratio_with_error
from specactor_ray.bench.demo import DEMO_COLUMNS, speed_figures, training_figures
from specactor_ray.bench.demo_tasks import edit_prompts, rename_tasks, similarity
from specactor_ray.cli.demo import demo_table, verdict_lines
from specactor_ray.config.schema import DrafterConfig, SpeculationConfig, TargetConfig, VerifyPolicy
from specactor_ray.core.types import SamplingParams
from specactor_ray.target.base import TargetRequest
from specactor_ray.trainer.display import TrainingDisplay
from specactor_ray.trainer.rewards import RewardSample
from tests.tiny import tiny_prompt_ids


def record(step: int, reward: float, spread: float = 0.2) -> dict[str, Any]:
    return {
        "step": step,
        "train": {"reward_mean": reward, "reward_std": spread, "sampled": 16},
        "speed": {"tokens": 100, "tokens_per_s": 50.0, "acceptance_length": 1.0 + step / 10},
        "seconds": {"step": 10.0, "rollout": 4.0, "update": 5.0},
    }


def report(rounds: list[Round], records: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": "m", "seconds": 1.0, "speed": speed_figures(rounds), "training": training_figures(records)}


class TestRatio:
    def test_is_that_of_the_time_of_all_turns(self) -> None:
        ratio, error = ratio_with_error([2.0, 4.0], [1.0, 2.0])
        assert (ratio, error) == (2.0, 0.0)

    def test_its_error_grows_with_what_turns_differ(self) -> None:
        calm = ratio_with_error([2.0, 2.1, 1.9], [1.0, 1.0, 1.0])[1]
        wild = ratio_with_error([2.0, 3.0, 1.0], [1.0, 1.0, 1.0])[1]
        assert 0.0 < calm < wild
        assert wild == pytest.approx(1.0 / math.sqrt(3))

    def test_a_single_pair_has_no_error(self) -> None:
        assert ratio_with_error([3.0], [2.0]) == (1.5, math.inf)


class TestFigures:
    ROUNDS = (Round(3, 3, 300, 6.0, 3.0, 150), Round(3, 2, 100, 2.0, 1.0, 50))

    def test_of_rounds(self) -> None:
        found = speed_figures(self.ROUNDS)
        assert found is not None
        assert (found["plain_tokens_per_s"], found["auto_tokens_per_s"], found["ratio"]) == (50.0, 100.0, 2.0)
        assert (found["identical"], found["requests"], found["acceptance_length"]) == (5, 6, 2.0)

    def test_of_nothing(self) -> None:
        assert speed_figures([]) is None and training_figures([]) is None

    def test_of_training_steps(self) -> None:
        found = training_figures([record(1, 0.25), record(2, 0.5)])
        assert found is not None
        assert found["rewards"][0] == {"mean": 0.25, "error": 0.05, "samples": 16}
        assert (found["rewards"][1]["mean"], found["rollout_share"], found["update_share"]) == (0.5, 0.4, 0.5)


class TestVerdict:
    def test_names_outputs_that_differ(self) -> None:
        assert "1 outputs differ" in next(verdict_lines(report(list(TestFigures.ROUNDS), [])))

    def test_claims_no_speed_within_the_error(self) -> None:
        rounds = [Round(1, 1, 100, 1.0, 2.0, 60), Round(1, 1, 100, 2.0, 1.1, 60)]
        assert next(verdict_lines(report(rounds, []))).startswith("auto is as fast as plain decoding here")

    @pytest.mark.parametrize(
        ("last", "words"), [(0.5, "the reward rose"), (0.26, "did not change"), (0.05, "the reward fell")]
    )
    def test_says_what_became_of_the_reward(self, last: float, words: str) -> None:
        rounds = [Round(1, 1, 100, 2.0, 1.0, 60)] * 2
        lines = list(verdict_lines(report(rounds, [record(1, 0.25), record(2, last)])))
        assert words in lines[1]

    def test_table_of_half_a_demo(self) -> None:
        half = report([Round(1, 1, 100, 2.0, 1.0, 60)], [])
        console = Console(file=io.StringIO(), width=100)
        console.print(demo_table(half))
        assert "1 of 1" in console.file.getvalue()  # type: ignore[attr-defined]


class TestTasks:
    def test_no_prompt_comes_twice(self) -> None:
        prompts = list(itertools.islice(edit_prompts(0), 60))
        assert len(set(prompts)) == 60 and prompts == list(itertools.islice(edit_prompts(0), 60))

    def test_the_answer_is_worth_most(self) -> None:
        for task in itertools.islice(rename_tasks(0), 50):
            asked = task["prompt"].splitlines()[1].removesuffix(" ->")
            assert similarity(RewardSample("", f" {task['answer']}\nand more", task["answer"])) == 1.0
            assert 0.0 < similarity(RewardSample("", asked, task["answer"])) < 1.0
            assert asked != task["answer"]


@pytest.fixture
def target(tiny_model_dir: Path) -> TargetConfig:
    return TargetConfig(model=str(tiny_model_dir), max_batch=2, kv_cache_gb=0.01)


def requests(number: int, count: int = 3) -> list[TargetRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=40, seed=1)
    return [TargetRequest(f"{number}-{n}", ids, sampling) for n, ids in enumerate(tiny_prompt_ids(count, number))]


class TestByTurns:
    def test_rounds_decode_the_same_tokens(self, target: TargetConfig) -> None:
        always = SpeculationConfig(verify=VerifyPolicy.all)  # else measured times decide whether it drafts
        plain, auto = TurnTaker((), target), TurnTaker((DrafterConfig("suffix"),), target, always)
        rounds = [play_round(plain, auto, requests(number), number) for number in (1, 2)]
        for one in rounds:
            assert one.identical == one.requests == 3
            assert 0 < one.row_steps < one.tokens  # some drafts were right
            assert one.plain_s > 0.0 and one.auto_s > 0.0
        assert (
            plain.loop.metrics.committed_tokens == auto.loop.metrics.committed_tokens == sum(r.tokens for r in rounds)
        )

    def test_another_output_is_counted(self, target: TargetConfig) -> None:
        class Liar(TurnTaker):
            def outputs(self) -> Any:
                outputs = super().outputs()
                return outputs | {"1-0": outputs["1-1"]}

        one = play_round(TurnTaker((), target), Liar((), target), requests(1), 1)
        assert (one.identical, one.requests) == (2, 3)


class TestTrainingDisplay:
    def test_lines_within_a_step_and_after_it(self) -> None:
        text = io.StringIO()
        display = TrainingDisplay(Console(file=text, width=200), 4, DEMO_COLUMNS)
        assert display.doing().startswith("starting Ray")
        display.rollout_progress = lambda: (5, 24)
        display.begin(2)
        display.phase("rollout")
        assert display.doing().startswith("step 2/4: rollout 5/24, ")
        display.phase("update")
        assert display.doing().startswith("step 2/4: update, ")
        display.end(record(2, 0.5))
        assert text.getvalue().startswith("step 2/4: reward 0.500, samples 16")

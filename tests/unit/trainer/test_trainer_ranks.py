"""Ranks that are called together: whoever fails, hangs or writes elsewhere, the wait ends and says who."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specactor_ray.cluster.calls import Calls
from specactor_ray.core.errors import ActorLostError, ActorUnavailableError, RemoteError, SpecActorError
from specactor_ray.learner.engine import SavedPart
from specactor_ray.trainer.trainer_ranks import TrainerRanks
from tests.fakes.clocks import HandClock
from tests.fakes.ranks import NEVER, FakeRank, FakeTransport

LIMIT_S = 600.0


def together(*ranks: FakeRank) -> TrainerRanks:
    clock = ranks[0].clock
    return TrainerRanks(ranks, Calls(FakeTransport(clock), clock), LIMIT_S)


BOOM = RemoteError("boom")
RESET = RemoteError("connection reset by peer")


@pytest.mark.parametrize(
    ("first", "second", "error", "until_s", "is_usable"),
    [
        pytest.param((NEVER, None), (NEVER, None), r"rank 1: no progress for 600 s in update; .*stall_", 1620.0, False),
        pytest.param((NEVER, None), (3.0, BOOM), r"rank 1, update: boom", 30.0, False, id="one fails, one hangs"),
        # What a survivor's collective raises is known before the death of its peer.
        pytest.param((1.0, RESET), (3.0, ActorLostError("ended")), r"rank 1, update: ended", 30.0, False, id="lost"),
        pytest.param((4.0, None), (1.0, BOOM), r"rank 1, update: boom", 30.0, True, id="all in step"),
    ],
)
def test_a_failing_rank_ends_the_wait_and_is_named(
    first: tuple[float, Any], second: tuple[float, Any], error: str, until_s: float, is_usable: bool
) -> None:
    """The second rank makes no progress after 1000 s. Ranks that may be out of step are not used any more."""
    clock = HandClock()
    export = {"export_weights": (0.0, "weights")}
    ranks = together(FakeRank(clock, update=first, **export), FakeRank(clock, 1000.0, update=second))
    with pytest.raises(SpecActorError, match=f"trainer {error}"):
        ranks.update([], 0, 0)
    assert clock.seconds <= until_s
    if is_usable:
        assert ranks.export_weights(1) == "weights"
        assert together(FakeRank(clock, update=(50_000.0, {"loss": 1.0}))).update([], 0, 0) == {"loss": 1.0}
    else:
        with pytest.raises(ActorLostError, match=rf"trainer {error}(.|\n)*resume=auto"):
            ranks.save(Path("unused"))


def test_a_rank_out_of_reach_is_asked_again_with_the_same_step() -> None:
    clock = HandClock()

    class Flaky(FakeRank):
        def answer(self, method: str, arguments: Any) -> tuple[float, Any]:
            answer = super().answer(method, arguments)
            updates = [call for call in self.called if call[0] == "update"]
            return (1.0, ActorUnavailableError("a blip")) if method == "update" and len(updates) == 1 else answer

    rank = Flaky(clock, update=(1.0, {"loss": 1.0}), save=(0.0, SavedPart(Path("a"), "node")))
    ranks = together(rank)
    assert ranks.update(["sample"], 7, 3) == {"loss": 1.0}
    ranks.save(Path("a"))
    ranks.save(Path("a"))
    calls = [call for call in rank.called if call[0] in ("update", "save")]
    assert calls == [("update", (["sample"], 7, 3))] * 2 + [("save", ("a", number)) for number in (1, 2)]


def test_files_that_only_another_node_sees_whole_are_missed(tmp_path: Path) -> None:
    clock = HandClock()
    (tmp_path / "mine").write_text("12345")
    (tmp_path / "theirs").write_text("half")
    parts = [SavedPart(tmp_path, "node-a", {"mine": 5}), SavedPart(tmp_path, "node-b", {"theirs": 5})]
    ranks = together(*(FakeRank(clock, save=(1.0, part)) for part in parts))
    with pytest.raises(OSError, match=r"rank 1 .*theirs .*node-b.*checkpoint\.dir"):
        ranks.save(tmp_path)
    (tmp_path / "theirs").write_text("12345")
    ranks.save(tmp_path)


def test_errors_of_a_disk_are_recorded_and_no_others(tmp_path: Path) -> None:
    """As the libraries raise them: on a device that is always full, and in a folder that is not there."""
    for save in (
        lambda: torch.save({"a": torch.zeros(100_000)}, "/dev/full"),
        lambda: save_file({"a": torch.zeros(1)}, tmp_path / "none" / "x.safetensors"),
    ):
        part = SavedPart(tmp_path)
        with part.writing(tmp_path / "x"):
            save()
        assert part.problem and not part.sizes
    with pytest.raises(TypeError), part.writing():
        raise TypeError("bug")

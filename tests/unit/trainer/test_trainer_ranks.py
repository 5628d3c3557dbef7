"""Ranks that are called together: whoever fails, hangs or writes elsewhere, the wait ends and says who."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specactor_ray.cluster.calls import Calls
from specactor_ray.core.errors import ActorLostError, ActorUnavailableError, RemoteError
from specactor_ray.learner.engine import SavedPart, is_disk_error
from specactor_ray.trainer.trainer_ranks import TrainerRanks
from tests.fakes.clocks import HandClock
from tests.fakes.ranks import NEVER, FakeRank, FakeTransport

LIMIT_S = 600.0


def together(*ranks: FakeRank) -> TrainerRanks:
    clock = ranks[0].clock
    return TrainerRanks(ranks, Calls(FakeTransport(clock), clock), LIMIT_S)


def test_work_may_take_as_long_as_it_gets_anywhere() -> None:
    clock = HandClock()
    ranks = together(FakeRank(clock, update=(50_000.0, {"loss": 1.0})), FakeRank(clock, update=(1.0, {"loss": 2.0})))
    assert ranks.update([], 0, 0) == {"loss": 1.0}
    assert clock.seconds == 50_000.0


def test_a_rank_without_progress_ends_the_wait_and_is_named() -> None:
    clock = HandClock()
    ranks = together(FakeRank(clock, update=(NEVER, None)), FakeRank(clock, 1000.0, update=(NEVER, None)))
    with pytest.raises(ActorLostError, match=r"trainer rank 1: no progress for 600 s in update; .*stall_timeout_s"):
        ranks.update([], 0, 0)
    assert 1000.0 + LIMIT_S <= clock.seconds <= 1000.0 + LIMIT_S + 20.0
    ended = clock.seconds
    with pytest.raises(ActorLostError, match=r"cannot be used any more: trainer rank 1: no progress.*resume=auto"):
        ranks.save(Path("unused"))
    assert clock.seconds == ended, "refused at once"


def test_a_rank_that_failed_is_not_waited_for_by_the_driver() -> None:
    clock = HandClock()
    first, second = FakeRank(clock, update=(NEVER, None)), FakeRank(clock, update=(3.0, RemoteError("boom")))
    ranks = together(first, second)
    with pytest.raises(RemoteError, match=r"trainer rank 1, update: boom"):
        ranks.update([], 0, 0)
    assert clock.seconds < 30.0
    with pytest.raises(ActorLostError, match=r"cannot be used any more: trainer rank 1, update: boom"):
        ranks.update([], 1, 1)
    ranks.close()
    assert "stop" not in [method for method, _ in first.called], "it would wait behind what hangs"


def test_a_lost_rank_is_named_though_the_error_of_another_comes_first() -> None:
    """What a survivor's collective raises is known before the death of its peer."""
    clock = HandClock()
    survivor = FakeRank(clock, update=(1.0, RemoteError("connection reset by peer")))
    ranks = together(survivor, FakeRank(clock, update=(3.0, ActorLostError("its process ended"))))
    with pytest.raises(ActorLostError, match=r"trainer rank 1, update: its process ended"):
        ranks.update([], 0, 0)
    with pytest.raises(ActorLostError, match=r"cannot be used any more: trainer rank 1"):
        ranks.update([], 1, 0)


def test_after_an_error_that_leaves_all_ranks_in_step_the_group_is_used_further() -> None:
    clock = HandClock()
    first, second = (
        FakeRank(clock, teach_drafter=(4.0, None)),
        FakeRank(clock, teach_drafter=(1.0, RemoteError("boom"))),
    )
    ranks = together(first, second)
    with pytest.raises(RemoteError, match=r"rank 1"):
        ranks.teach_drafter([], 0)
    first.answers["export_weights"] = (0.0, "weights")
    assert ranks.export_weights(1) == "weights"
    ranks.close()
    assert first.called[-1][0] == second.called[-1][0] == "stop"


def test_a_rank_out_of_reach_is_asked_again_with_the_same_step() -> None:
    clock = HandClock()

    class Flaky(FakeRank):
        def answer(self, method: str, arguments: Any) -> tuple[float, Any]:
            answer = super().answer(method, arguments)
            updates = [call for call in self.called if call[0] == "update"]
            return (1.0, ActorUnavailableError("a blip")) if method == "update" and len(updates) == 1 else answer

    rank = Flaky(clock, update=(1.0, {"loss": 1.0}), save=(0.0, SavedPart("node")))
    ranks = together(rank)
    assert ranks.update(["sample"], 7, 3) == {"loss": 1.0}
    ranks.save(Path("a"))
    ranks.save(Path("a"))
    calls = [call for call in rank.called if call[0] in ("update", "save")]
    assert calls == [("update", (["sample"], 7, 3))] * 2 + [("save", ("a", number)) for number in (1, 2)]


@pytest.mark.parametrize("here", [None, "half"])
def test_files_that_only_another_node_sees_are_missed(here: str | None, tmp_path: Path) -> None:
    clock = HandClock()
    (tmp_path / "mine").write_text("12345")
    if here is not None:
        (tmp_path / "theirs").write_text(here)
    parts = [SavedPart("node-a", {"mine": 5}), SavedPart("node-b", {"theirs": 5})]
    ranks = together(*(FakeRank(clock, save=(1.0, part)) for part in parts))
    with pytest.raises(OSError, match=r"trainer rank 1 wrote theirs on node node-b.*checkpoint\.dir must be a folder"):
        ranks.save(tmp_path)
    (tmp_path / "theirs").write_text("12345")
    ranks.save(tmp_path)


def test_disk_errors_of_torch_and_safetensors_are_known(tmp_path: Path) -> None:
    """Errors as the libraries raise them: on a device that is always full, and in a folder that is not there."""
    import torch
    from safetensors.torch import save_file

    raised = []
    for save in (
        lambda: torch.save({"a": torch.zeros(100_000)}, "/dev/full"),
        lambda: torch.save({"a": torch.zeros(1)}, tmp_path / "none" / "x.pt"),
        lambda: torch.save({"a": torch.zeros(1)}, tmp_path),
        lambda: save_file({"a": torch.zeros(1)}, tmp_path / "none" / "x.safetensors"),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which types these are is what this is about
            save()
        raised.append(caught.value)
    assert all(is_disk_error(error) for error in raised), raised
    assert not is_disk_error(RuntimeError("CUDA out of memory")) and not is_disk_error(KeyError("x"))

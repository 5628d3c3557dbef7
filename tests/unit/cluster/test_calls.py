"""Calls: a deadline, a retry rule and an error of this package for each; and nobody else waits for Ray."""

from __future__ import annotations

import itertools
import pickle
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray import exceptions as ray_errors
from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo

from specactor_ray.cluster.calls import RayAnswer, translate_ray_error
from specactor_ray.core.errors import (
    ActorLostError,
    ActorUnavailableError,
    CallError,
    CallTimeoutError,
    ConfigError,
    InputError,
    RemoteError,
    SpecActorError,
)
from tests.fakes.virtual import Bench, Script

REPOSITORY = Path(__file__).parents[3]
UNAVAILABLE = ActorUnavailableError("out of reach")


def asked(answers: list[tuple[float, Any] | None], deadline_s: float, retry: bool = True) -> tuple[Any, Script, float]:
    """What one call came to: (value or error, transport, seconds it took)."""
    bench = Bench()
    script = Script(bench, answers)

    def body() -> Any:
        try:
            return script.calls().start("actor", "method", 1, 2, deadline_s=deadline_s, retry=retry).result()
        except SpecActorError as error:
            return error

    return bench.run(body), script, bench.kernel.now


GONE, BUG, INPUT = ActorLostError("gone"), RemoteError("bug"), InputError("too long")


@pytest.mark.parametrize(
    ("answers", "retry", "expected", "took_s"),
    [
        ([(3.0, "yes")], True, "yes", 3.0),
        ([None], True, CallTimeoutError, 5.0),
        ([(5.1, "late")], True, CallTimeoutError, 5.0),
        ([(0.5, UNAVAILABLE), (0.0, "twice")], False, UNAVAILABLE, 0.5),
        *(([(0.5, error), (0.0, "again")], True, error, 0.5) for error in (GONE, BUG, INPUT)),
    ],
    ids=["answered", "never", "late", "not idempotent", "gone", "bug", "input"],
)
def test_a_call_that_is_sent_once(answers: Any, retry: bool, expected: Any, took_s: float) -> None:
    outcome, script, took = asked(answers, deadline_s=5.0, retry=retry)
    assert script.sent == [(0.0, "actor", "method", (1, 2))] and took == took_s
    assert isinstance(outcome, expected) if isinstance(expected, type) else outcome is expected


class TestUnavailable:
    def test_the_actor_is_called_again_less_and_less_often(self) -> None:
        value, script, _took = asked([(0.0, UNAVAILABLE)] * 7 + [(0.0, "yes")], deadline_s=60.0)
        assert value == "yes"
        times = [time for time, *_ in script.sent]
        pauses = [round(after - before, 6) for before, after in itertools.pairwise(times)]
        assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]

    @pytest.mark.parametrize(("last", "least_s"), [((0.5, UNAVAILABLE), 8.0), (None, 10.0)], ids=["told", "silent"])
    def test_it_is_given_up_by_the_deadline(self, last: Any, least_s: float) -> None:
        error, _script, took = asked([(0.0, UNAVAILABLE)] + [last] * 50, deadline_s=10.0)
        assert error is UNAVAILABLE and least_s <= took <= 10.0


def test_a_call_that_cannot_be_sent_has_failed() -> None:
    script = Script(Bench(), [])
    script.send = Mock(side_effect=GONE)  # type: ignore[method-assign]
    call = script.calls().start("actor", "method", deadline_s=9.0)
    assert call.done and call.error is GONE


def test_waiting_ends_with_the_first_that_is_done_and_polling_does_not_wait() -> None:
    bench = Bench()
    calls = Script(bench, [(3.0, "a"), (1.0, "b"), (0.0, UNAVAILABLE), None]).calls()

    def body() -> None:
        first, second, third = begun = [calls.start("actor", "method", deadline_s=9.0) for _ in range(3)]
        assert not first.poll() and calls.wait(begun, 0.5) == [] and bench.kernel.now == 0.5
        assert calls.wait(begun, 7.0) == [second] and bench.kernel.now == 1.0
        assert calls.wait([first, third], 7.0) == [first] and bench.kernel.now == 3.0
        assert not third.poll() and calls.wait([third], 2.0) == [] and bench.kernel.now == 5.0
        assert calls.wait([third], 60.0) == [third] and bench.kernel.now == 9.0 and third.error is UNAVAILABLE

    bench.run(body)


def test_a_delivery_has_the_error_of_its_call() -> None:
    bench = Bench()
    script = Script(bench, [(1.0, None), (2.0, UNAVAILABLE)])

    def body() -> list[BaseException | None]:
        send, ended = script.calls().sender("actor", "deliver"), []
        for batch in (["x"], ["y", "z"]):
            send(batch).add_done_callback(lambda delivery: ended.append(delivery.exception()))
        bench.clock.sleep(3.0)
        return ended

    assert bench.run(body) == [None, UNAVAILABLE]
    assert [one[1:] for one in script.sent] == [("actor", "deliver", (["x"],)), ("actor", "deliver", (["y", "z"],))]


# ---- Ray's errors ----


def task_error(cause: BaseException) -> ray_errors.RayTaskError:
    return ray_errors.RayTaskError("f", "traceback", cause, proctitle="p", pid=1, ip="127.0.0.1")


def died(message: str, preempted: bool = False) -> ray_errors.ActorDiedError:
    """As Ray makes it of what the cluster knows."""
    info = NodeDeathInfo(reason=NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED) if preempted else None
    context = ActorDiedErrorContext(error_message=message, actor_id=b"0" * 16, node_death_info=info)
    return ray_errors.ActorDiedError(context)


NODE_DIED = "The actor died because its node has died. Node Id: 00ff"
OBJECT = ("00ff", None, "")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ray_errors.ActorUnavailableError("rpc failed", None), ActorUnavailableError),
        (died("Worker exits unexpectedly by a signal."), ActorLostError),
        (ray_errors.ActorDiedError(), ActorLostError),
        (ray_errors.ActorDiedError(task_error(ValueError("in __init__"))), ActorLostError),
        (ray_errors.RayActorError(), ActorLostError),
        (ray_errors.GetTimeoutError("timed out"), CallTimeoutError),
        (ray_errors.OwnerDiedError(*OBJECT), ActorLostError),
        (ray_errors.NodeDiedError("node"), ActorLostError),
        (ray_errors.ObjectLostError(*OBJECT), CallError),
        (ray_errors.ObjectStoreFullError("full"), CallError),
        (ray_errors.RpcError("bad"), CallError),
        (ray_errors.ActorUnschedulableError("no room"), ActorLostError),
        (ray_errors.OutOfMemoryError("killed"), ActorLostError),
        (ray_errors.WorkerCrashedError(), ActorLostError),
        (ray_errors.LocalRayletDiedError(), ActorLostError),
        (ray_errors.RuntimeEnvSetupError("no such folder"), ActorLostError),
        (ray_errors.ActorPlacementGroupRemoved(), ActorLostError),
        (ray_errors.OutOfDiskError("disk"), CallError),
        (ray_errors.RaySystemError("system"), CallError),
        (ray_errors.AuthenticationError("token"), CallError),
        (task_error(ValueError("bug")), RemoteError),
        (task_error(KeyboardInterrupt()), RemoteError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_error_of_ray_has_one_of_ours(error: BaseException, expected: type[SpecActorError]) -> None:
    ours = translate_ray_error(error, "verifier-0: ping")
    assert type(ours) is expected and str(ours).startswith("verifier-0: ping: ")
    assert not getattr(ours, "node_lost", False) or type(error).__name__ in ("NodeDiedError", "LocalRayletDiedError")
    assert str(pickle.loads(pickle.dumps(ours))) == str(ours)


@pytest.mark.parametrize(
    "lost", [ray_errors.ObjectLostError(*OBJECT), ray_errors.ObjectReconstructionFailedError("00ff")]
)
def test_a_lost_answer_says_nothing_about_its_actor(monkeypatch: pytest.MonkeyPatch, lost: Exception) -> None:
    monkeypatch.setattr(ray, "get", Mock(side_effect=lost))
    with pytest.raises(ActorUnavailableError, match="poll: its answer was lost"):
        RayAnswer(Mock()).result("poll")


@pytest.mark.parametrize("error", [died(NODE_DIED), died("drained", preempted=True), ray_errors.NodeDiedError("node")])
def test_the_loss_of_a_node_is_told_from_a_crash(error: BaseException) -> None:
    ours = translate_ray_error(error, "ping")
    assert isinstance(ours, ActorLostError) and ours.node_lost
    assert pickle.loads(pickle.dumps(ours)).node_lost


@pytest.mark.parametrize("raised", [InputError("too long"), ConfigError("a.b", "is wrong"), SpecActorError("x")])
def test_our_own_errors_come_through_as_they_were_raised(raised: SpecActorError) -> None:
    for error in (raised, task_error(raised), task_error(raised).as_instanceof_cause()):  # as `ray.get` raises it
        assert translate_ray_error(error, "ping") is raised


@pytest.mark.parametrize("raised", [ActorLostError("x"), ActorUnavailableError("x"), CallTimeoutError("x")])
def test_an_actor_that_could_not_reach_another_is_not_lost_itself(raised: CallError) -> None:
    for error in (task_error(raised), task_error(raised).as_instanceof_cause()):
        ours = translate_ray_error(error, "ping")
        assert type(ours) is RemoteError and str(ours) == f"ping: {type(raised).__name__}: x"


def test_only_calls_wait_for_ray() -> None:
    paths = [path for folder in ("specactor_ray", "jobs") for path in (REPOSITORY / folder).rglob("*.py")]
    waits = re.compile(r"\bray\.(get|wait)\b\(|from ray import (get|wait)\b")
    found = [path.relative_to(REPOSITORY).as_posix() for path in paths if waits.search(path.read_text("utf-8"))]
    assert found == ["specactor_ray/cluster/calls.py"], "ask through `Calls`"

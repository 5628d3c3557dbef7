"""Which drafters the verifier's speculator goes on asking, by a clock of the test's own."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from specactor_ray.loops.drafter_table import DrafterLink
from specactor_ray.loops.speculator import Speculator
from specactor_ray.queues.conflation import for_drafter
from specactor_ray.queues.outbox import Outbox
from specactor_ray.speculation.reconfigure import PLAIN, RequestPlan

from specactor_ray.config.schema import BreakerConfig, Candidates, RaceName, SpeculationConfig, VerifyPolicy
from specactor_ray.messages import DraftOpen, DraftResync, DraftTail, Mode, SamplingParams
from specactor_ray.spec.tree import DraftTree
from specactor_ray.targets.base import RowOutput, StepResult, TargetRequest
from tests.clocks import HandClock

SILENT_WAITS = 4


def speculator(mode: Mode) -> Speculator:
    breaker = BreakerConfig(max_silent_waits=SILENT_WAITS, cooldown_s=60.0)
    config = SpeculationConfig(verify=VerifyPolicy.all, breaker=breaker)
    made = Speculator("v0", mode, config, vocab_size=100, clock=HandClock())
    outbox: Outbox = Outbox(lambda batch: None, for_drafter())
    made.set_drafters({"slow": DrafterLink("draft_model", 4, outbox)})
    made.open(TargetRequest("r", (1, 2), SamplingParams()))
    return made


def step(spec: Speculator, position: int, message: DraftTail | None) -> None:
    """One step of the verifier that waits in vain; whatever arrives does so too late for it."""
    spec.plan_waits(["r"])
    spec.record_wait(["r"], spec.all_answered(["r"]))
    spec.choose_tails(["r"])
    spec.commit(RowOutput("r", position, [7], [0.0]))
    if message is not None:
        spec.inbox.put([message])
    spec.take_messages()


def openings(spec: Speculator) -> int:
    return int(spec.snapshot()["breakers"]["slow"]["openings"])


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.DECOUPLED])
def test_a_drafter_that_sends_nothing_is_left_alone(mode: Mode) -> None:
    spec = speculator(mode)
    for position in range(SILENT_WAITS + 1):
        step(spec, position, None)
    assert openings(spec) == 1


def test_a_drafter_that_is_always_one_step_late_is_not_silent_in_decoupled_mode() -> None:
    spec = speculator(Mode.DECOUPLED)
    for position in range(5 * SILENT_WAITS):
        step(spec, position, DraftTail("r", "slow", position, (7,)))
    assert spec.snapshot()["tails"]["stale"] > SILENT_WAITS
    assert openings(spec) == 0


def decoupled_with_a_coupled_request() -> Speculator:
    """Two requests of a decoupled layout that are alike but for the mode of one of them."""
    clock = HandClock()
    config = SpeculationConfig(verify=VerifyPolicy.all)
    made = Speculator("v0", Mode.DECOUPLED, config, vocab_size=100, clock=clock)
    outbox: Outbox = Outbox(lambda batch: None, for_drafter())
    made.set_drafters({"d": DrafterLink("draft_model", 4, outbox)})
    for name in ("coupled", "decoupled"):
        made.open(TargetRequest(name, (1, 2), SamplingParams()))
    plans = {"coupled": RequestPlan(3, Mode.COUPLED)}
    made._planner._reconfigurator.plan = plans.get  # type: ignore[method-assign]
    for tokens in (4, 8):  # a step costs 50 ms, whatever it verifies
        made.observe_step(StepResult(forward_s=0.05, num_tokens=tokens))
    return made


def test_a_coupled_request_in_a_decoupled_layout_waits_for_the_complete_tail_as_long_as_pays() -> None:
    spec = decoupled_with_a_coupled_request()
    for name in ("coupled", "decoupled"):
        spec.inbox.put([DraftTail(name, "d", 0, (7,))])
    spec.take_messages()
    wait = spec.plan_waits(["coupled", "decoupled"])
    assert spec.all_answered(["decoupled"]) and not spec.all_answered(["coupled"])
    # Two tokens of p = 0.5 are missing, 0.25 + 0.125; a step of two rows takes 50 ms; half the break-even is granted.
    assert wait == pytest.approx(0.5 * (0.25 + 0.125) * 0.05 / 2)
    spec.inbox.put([DraftTail("coupled", "d", 0, (7, 8), complete=True)])
    spec.take_messages()
    assert spec.all_answered(["coupled", "decoupled"]), "its drafter has no better guess"


def test_a_coupled_request_that_has_all_that_is_verified_is_not_waited_for() -> None:
    spec = decoupled_with_a_coupled_request()
    spec.inbox.put([DraftTail("coupled", "d", 0, (5, 7, 8, 9))])
    spec.take_messages()
    spec.commit(RowOutput("coupled", 0, [5], [0.0]))
    spec.plan_waits(["coupled"])
    assert spec.all_answered(["coupled"]), "three tokens are there, drafted before the newest commit"
    spec.commit(RowOutput("coupled", 1, [7], [0.0]))
    assert spec.plan_waits(["coupled"]) > 0.0 and not spec.all_answered(["coupled"])


def test_windows_and_modes_travel_to_the_drafters() -> None:
    sent: list = []
    spec = decoupled_with_a_coupled_request()
    spec._drafters["d"].link.outbox = Outbox(lambda batch: sent.extend(batch) or Future(), for_drafter())
    for name in ("coupled", "decoupled"):
        spec.commit(RowOutput(name, 0, [7], [0.0]))
    spec.inbox.put([DraftResync("coupled", "d")])
    spec.flush()
    assert {m.request_id: (m.window, m.mode) for m in sent} == {
        "coupled": (3, Mode.COUPLED),
        "decoupled": (4, Mode.DECOUPLED),
    }
    spec._drafters["d"].link.outbox = Outbox(lambda batch: sent.extend(batch) or Future(), for_drafter())
    spec.take_messages()
    spec.flush()
    assert isinstance(sent[-1], DraftOpen) and (sent[-1].window, sent[-1].mode) == (3, Mode.COUPLED)


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.DECOUPLED])
def test_a_plain_request_is_not_waited_for(mode: Mode) -> None:
    spec = speculator(mode)
    spec._planner._reconfigurator.plan = lambda request_id, base: PLAIN  # type: ignore[method-assign]
    spec.plan_waits(["r"])
    assert spec.all_answered(["r"])


def test_verify_lengths_follow_the_windows_of_the_requests() -> None:
    """What a request may not draft is not counted on when the step's positions are shared out."""
    spec = decoupled_with_a_coupled_request()
    spec.plan_waits(["coupled", "decoupled"])
    assert spec._waits._worthwhile == {"coupled": 3, "decoupled": 4}


def racing(candidates: Candidates, trees: bool) -> Speculator:
    """Three drafters of one request, of different methods; each has said something."""
    config = SpeculationConfig(verify=VerifyPolicy.all, candidates=candidates, race=RaceName.always)
    made = Speculator("v0", Mode.DECOUPLED, config, vocab_size=100, clock=HandClock(), trees=trees)
    outbox: Outbox = Outbox(lambda batch: None, for_drafter())
    made.set_drafters({name: DrafterLink(name, 4, outbox) for name in "abc"})
    made.open(TargetRequest("r", (1, 2), SamplingParams()))
    guesses = {"a": (5, 6, 7, 8), "b": (5, 9), "c": (5, 6)}
    made.inbox.put([DraftTail("r", drafter, 0, tokens) for drafter, tokens in guesses.items()])
    made.take_messages()
    return made


def test_all_guesses_go_into_one_tree_and_each_is_credited_for_its_own() -> None:
    spec = racing(Candidates.tree, trees=True)
    assert spec.choose_tails(["r"]) == {"r": DraftTree((5, 6, 7, 8, 9), (-1, 0, 1, 2, 0))}
    assert spec.supplied("r") == 4
    spec.commit(RowOutput("r", 0, [5, 9, 3], [0.0] * 3, num_drafted=5, num_accepted=2))
    assert spec.accepted_by_drafter("r") == {"a": (4, 1), "b": (2, 2), "c": (2, 1)}
    assert spec.choose_tails(["r"]) == {}, "every guess was used up or refuted"
    spec.inbox.put([DraftTail("r", "a", 3, (4, 4)), DraftTail("r", "c", 3, (4,))])
    spec.take_messages()
    assert spec.choose_tails(["r"]) == {"r": (4, 4)}, "one branch is an ordinary tail"


def test_what_the_engine_had_no_room_for_is_credited_to_nobody() -> None:
    spec = racing(Candidates.tree, trees=True)
    spec.choose_tails(["r"])
    spec.commit(RowOutput("r", 0, [5, 6], [0.0] * 2, num_drafted=1, num_accepted=1, finish_reason="length"))
    assert spec.accepted_by_drafter("r") == {"a": (1, 1), "b": (1, 1), "c": (1, 1)}


@pytest.mark.parametrize(("candidates", "trees"), [(Candidates.best_tail, True), (Candidates.tree, False)])
def test_the_best_tail_alone_is_verified_without_trees(candidates: Candidates, trees: bool) -> None:
    spec = racing(candidates, trees)
    assert spec.choose_tails(["r"]) == {"r": (5, 6, 7, 8)}
    spec.commit(RowOutput("r", 0, [5, 9], [0.0] * 2, num_drafted=4, num_accepted=1))
    assert spec.accepted_by_drafter("r") == {"a": (4, 1)}


def test_a_poor_guess_does_not_end_the_wait_for_a_better_drafter() -> None:
    spec = racing(Candidates.best_tail, trees=False)
    for _ in range(30):
        spec._acceptance.record("r", "a", 4, 0)
        spec._acceptance.record("r", "b", 4, 3)
    spec.choose_tails(["r"])
    spec.commit(RowOutput("r", 0, [3], [0.0]))
    spec.inbox.put([DraftTail("r", "a", 1, (7, 7, 7, 7))])
    spec.take_messages()
    for tokens in (4, 8):
        spec.observe_step(StepResult(forward_s=0.05, num_tokens=tokens))
    assert spec.plan_waits(["r"]) > 0.0 and not spec.all_answered(["r"]), "b is right three times in four"
    spec.inbox.put([DraftTail("r", "b", 1, ())])
    spec.take_messages()
    assert spec.all_answered(["r"]), "b has no guess, so a's is the best there is"


def auto(mode: Mode, remembers: bool) -> Speculator:
    """One drafter and one request, drafts verified where that pays; a step takes 50 ms and 1 ms per position."""
    made = Speculator("v0", mode, SpeculationConfig(), vocab_size=100, clock=HandClock())
    outbox: Outbox = Outbox(lambda batch: None, for_drafter())
    made.set_drafters({"d": DrafterLink("ngram", 4, outbox, remembers=remembers)})
    made.open(TargetRequest("r", (1, 2), SamplingParams(max_tokens=1000)))
    for tokens in (1, 1, 1, 2, 4):
        made.observe_step(StepResult(forward_s=0.05 + 0.001 * tokens, num_tokens=tokens))
    return made


def test_a_step_now_and_then_verifies_nothing_to_know_what_that_costs() -> None:
    spec = auto(Mode.DECOUPLED, remembers=True)
    verified = []
    for position in range(130):
        spec.inbox.put([DraftTail("r", "d", position, (7, 7), complete=True)])
        spec.take_messages()
        spec.plan_waits(["r"])
        verified.append(bool(spec.choose_tails(["r"])))
        spec.commit(RowOutput("r", position, [7], [0.0]))
    assert [step for step, any_of_it in enumerate(verified) if not any_of_it] == [0, 64, 128]


@pytest.mark.parametrize(("remembers", "waited"), [(True, False), (False, True)])
def test_a_coupled_step_does_not_wait_for_lookups_that_hardly_ever_find_anything(remembers: bool, waited: bool) -> None:
    """A model that drafts is waited for all the same: it runs on the verifier's cores."""
    spec = auto(Mode.COUPLED, remembers)
    clock = spec._clock
    assert isinstance(clock, HandClock)
    for position in range(60):
        spec.plan_waits(["r"])
        clock.seconds += 0.004
        spec.inbox.put([DraftTail("r", "d", position, (), complete=True)])
        spec.take_messages()
        spec.record_wait(["r"], spec.all_answered(["r"]))
        spec.choose_tails(["r"])
        spec.commit(RowOutput("r", position, [7], [0.0]))
    waits = []
    for position in range(60, 124):
        waits.append(spec.plan_waits(["r"]) > clock.now() and not spec.all_answered(["r"]))
        spec.choose_tails(["r"])
        spec.commit(RowOutput("r", position, [7], [0.0]))
    assert sum(waits) == (64 if waited else 2), "and now and then, to see whether that has changed"


def lookup_and_model() -> Speculator:
    """A coupled verifier with two drafters and one request; a step takes 50 ms and 1 ms per position."""
    made = Speculator("v0", Mode.COUPLED, SpeculationConfig(), vocab_size=100, clock=HandClock())
    links = {
        "lookup": DrafterLink("ngram", 4, Outbox(lambda batch: None, for_drafter()), remembers=True),
        "model": DrafterLink("eagle", 4, Outbox(lambda batch: None, for_drafter())),
    }
    made.set_drafters(links)
    made.open(TargetRequest("r", (1, 2), SamplingParams(max_tokens=1000)))
    for tokens in (1, 1, 1, 2, 4):
        made.observe_step(StepResult(forward_s=0.05 + 0.001 * tokens, num_tokens=tokens))
    return made


def offer(spec: Speculator, drafter_id: str, position: int, tokens: tuple[int, ...]) -> None:
    token_s = 0.015 if drafter_id == "model" else 0.0001
    spec.inbox.put([DraftTail("r", drafter_id, position, tokens, complete=True, token_s=token_s)])
    spec.take_messages()


def test_a_long_guess_that_was_looked_up_makes_the_wait_for_a_model_needless() -> None:
    spec = lookup_and_model()
    for position in range(40):
        spec.plan_waits(["r"])
        offer(spec, "lookup", position, (7, 7, 7, 7) if position % 2 else ())
        offer(spec, "model", position, (7 + position % 2, 8, 8, 8))
        spec.choose_tails(["r"])
        spec.commit(RowOutput("r", position, [7], [0.0]))
    assert set(spec._planner.drafters("r")) == {"lookup", "model"}
    spec._acceptance.record("r", "lookup", 40, 39)
    offer(spec, "lookup", 40, ())
    assert spec.plan_waits(["r"]) > 0.0 and not spec.all_answered(["r"]), "nothing was found: the model may know"
    offer(spec, "lookup", 40, (7, 7, 7, 7))
    spec.plan_waits(["r"])
    assert spec.all_answered(["r"]), "no model brings more than four sure tokens"


def test_in_a_coupled_layout_a_model_that_pays_is_the_base_and_lookups_follow() -> None:
    """Also from the first look on that knows of it: a lookup that gives the base away loses nothing."""
    spec = lookup_and_model()
    bases = []
    for position in range(24):
        spec.plan_waits(["r"])
        offer(spec, "lookup", position, (7,) if position % 4 == 0 else ())
        if "model" in spec._planner.drafters("r"):
            offer(spec, "model", position, (7, 7, 8, 8))
        spec.choose_tails(["r"])
        spec.commit(RowOutput("r", position, [7], [0.0]))
        bases.append(spec._planner.drafters("r"))
    assert bases[-1] == ["model", "lookup"]
    for _ in range(100):
        spec._acceptance.record("r", "model", 4, 0)
    for position in range(24, 24 + 80):
        spec.plan_waits(["r"])
        offer(spec, "lookup", position, ())
        spec.choose_tails(["r"])
        spec.commit(RowOutput("r", position, [9], [0.0]))
    assert spec._planner.drafters("r") == ["lookup"], "a model that is worse than plain decoding is let go"


class OnDemand:
    """A coupled verifier with a lookup and a model, both in its process, and eight requests; a step takes 20 ms and
    1.5 ms per position, a token of the model 5 ms. The next token is always 7."""

    def __init__(self, guess: int) -> None:
        self.spec = Speculator("v0", Mode.COUPLED, SpeculationConfig(), vocab_size=100, clock=HandClock(), max_batch=8)
        self.rows = [f"r{number}" for number in range(8)]
        self.guess, self.positions = guess, dict.fromkeys(self.rows, 0)
        self.spec.set_drafters(
            {
                "lookup": DrafterLink("ngram", 4, Outbox(lambda batch: None, for_drafter()), 8, False, True, True),
                "model": DrafterLink("eagle", 4, Outbox(lambda batch: None, for_drafter()), 8, on_demand=True),
            }
        )
        for row in self.rows:
            self.spec.open(TargetRequest(row, (1, 2), SamplingParams(max_tokens=1000)))
        for tokens in (8, 8, 8, 16, 32):
            self.spec.observe_step(StepResult(forward_s=0.02 + 0.0015 * tokens, num_tokens=tokens))

    def step(self, found: int = 0) -> bool:
        """`found`: requests for which the lookup has something. Returns whether the model drafted."""
        for number, row in enumerate(self.rows):
            self._offer("lookup", row, (7, 7) if number < found else (), 0.00001)
        wait = self.spec.plan_waits(self.rows) > self.spec._clock.now() and not self.spec.all_answered(self.rows)
        if wait:
            for row in self.rows:
                window = self.spec._planner.plan(row, "model").window
                self._offer("model", row, (self.guess,) * window, 0.005)
            self.spec.record_wait(self.rows, self.spec.all_answered(self.rows))
        tails = self.spec.choose_tails(self.rows)
        for row in self.rows:
            tail = tails.get(row, ())
            fresh = [7] * (1 + len(tail) * (7 in tail))
            self.spec.commit(RowOutput(row, self.positions[row], fresh, [0.0] * len(fresh)))
            self.positions[row] += len(fresh)
        return wait

    def _offer(self, drafter_id: str, row: str, tokens: tuple[int, ...], token_s: float) -> None:
        self.spec.inbox.put([DraftTail(row, drafter_id, self.positions[row], tokens, complete=True, token_s=token_s)])
        self.spec.take_messages()


def test_a_model_that_guesses_right_drafts_for_every_step() -> None:
    loop = OnDemand(guess=7)
    assert sum(loop.step() for _ in range(100)) >= 97, "all but those whose guesses a plain step left over"


def test_a_model_that_guesses_wrong_drafts_only_now_and_then() -> None:
    loop = OnDemand(guess=8)
    drafted = [loop.step() for _ in range(164)]
    assert sum(drafted[100:164]) == 2, "to see whether it has become better"
    assert all(loop.spec._planner.drafters(row)[0] == "model" for row in loop.rows), "it costs nothing meanwhile"
    assert all(loop.spec._planner.plan(row, "model").window == 1 for row in loop.rows)
    loop.guess = 7
    drafted = [loop.step() for _ in range(400)]
    assert sum(drafted[-50:]) >= 49, "it has become better"


def test_a_model_does_not_draft_for_the_few_requests_that_lookups_leave() -> None:
    """What one row gains is paid for by all: one in eight is not worth five milliseconds for each token."""
    loop = OnDemand(guess=7)
    for _ in range(64):
        loop.step(found=4)
    nobody, one, all_of_them = [sum(loop.step(found=found) for _ in range(64)) for found in (8, 7, 0)]
    assert nobody == one == 2, "now and then, to see how good it is"
    assert all_of_them >= 60

"""One simulated run: a driver that streams requests, updates weights and scales drafters while faults strike, and the
checks of what must hold whatever happened."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from specactor_ray.config.load import from_mapping
from specactor_ray.config.schema import VERIFIERS_PER_GROUP, Config
from specactor_ray.controller import seating
from specactor_ray.core.errors import ActorLostError, ConfigError, SpecActorError
from specactor_ray.core.types import SamplingParams
from specactor_ray.rollout.handle import Handle
from specactor_ray.rollout.journal import JournalEntry
from specactor_ray.simulation.cluster import LINGER_S, VirtualRun
from specactor_ray.simulation.kernel import SimulationError
from specactor_ray.simulation.network import Node, VirtualActor
from specactor_ray.simulation.world import World
from specactor_ray.transport.messages import RequestStats, WeightSet
from tests.faults.injector import FaultPlan, Injector
from tests.faults.models import FaultyHost, ModelFaults
from tests.faults.network import FaultyNetwork
from tests.faults.training import Training
from tests.number_text import HashedText, NumberText, stopped_output

_STANDSTILL_S = 900.0
"""Virtual seconds without any progress after which a run has failed to end. Three poison requests that block a lone
verifier take up to ten minutes: each step of narrowing them down waits for the engine to be found stalled."""
_SETTLE_S = 180.0
"""Virtual seconds for the desired state to be reached once faults have ended."""
_START_TIMEOUT_S = 30.0
_SINGLES = 6
"""Requests of each round beside its stream."""


@dataclass(frozen=True)
class FaultScenario:
    """What is run. Every run is a function of this and nothing else."""

    seed: int
    requests: int = 64
    verifiers: int = 2
    drafters: int = 4
    nodes: int = 3
    mode: str = "decoupled"
    hosted: bool = False
    """The verifiers host the n-gram drafter."""
    training: bool = False
    """Steps of training, instead of streams alone."""
    stops: bool = False
    """Stop texts end a third of the outputs."""
    group: int = VERIFIERS_PER_GROUP
    """Most verifiers of a gang."""
    faults: FaultPlan = field(default_factory=FaultPlan)

    @classmethod
    def draw(cls, seed: int, count: int, requests: int = 64) -> FaultScenario:
        """The scenario of a seed: layout, mode and kinds of faults are drawn from it."""
        rng = random.Random(f"scenario {seed}")
        training = rng.random() < 0.25
        plan = FaultPlan.draw(seed, count, training)
        return cls(
            seed,
            requests,
            verifiers=rng.choice((1, 2, 2, 3)),
            drafters=rng.choice((1, 2, 4)),
            nodes=rng.choice((2, 3, 4)),
            mode=rng.choice(("decoupled", "decoupled", "decoupled", "coupled", "plain")),
            training=training,
            faults=plan,
            hosted=rng.random() < 0.5,
            stops=rng.random() < 0.5,
            group=random.Random(f"gangs {seed}").choice((1, 2, VERIFIERS_PER_GROUP)),
        )


@dataclass
class Report:
    """What became of one run."""

    scenario: FaultScenario
    violations: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    """Kind → how often it struck."""
    finished: int = 0
    failed: int = 0
    gave_up: str = ""
    """Why the rollout ended with an error, if it may."""
    events: int = 0
    virtual_s: float = 0.0
    digest: int = 0
    restarts: int = 0
    """How often training was resumed."""
    failed_starts: int = 0
    """How often enough faults struck a start to end it."""


def make_config(scenario: FaultScenario) -> Config:
    """The product's own configuration of the simulated run."""
    ngrams = (scenario.drafters + 1) // 2
    return from_mapping(
        {
            "mode": scenario.mode,
            "cluster": {
                "address": "auto",
                "health_interval_s": 1.0,
                "health_timeout_s": 6.0,
                "stall_timeout_s": 20.0,
                "start_timeout_s": _START_TIMEOUT_S,
                "placement_timeout_s": 60.0,
            },
            "target": {"replicas": scenario.verifiers, "max_batch": 16},
            "speculation": {"window": 4},
            "trainer": {"offload": scenario.training and scenario.seed % 2 == 0},
            "drafters": [
                {"method": "ngram", "replicas": ngrams, "hosted": scenario.hosted},
                {
                    "method": "eagle",
                    "model": "m",
                    "replicas": scenario.drafters - ngrams,
                    "online": {"where": "trainer"},
                },
            ],
        }
    )


class Simulation(VirtualRun):
    """Sets a scenario up, runs it and checks it."""

    def __init__(self, scenario: FaultScenario) -> None:
        self.scenario, self.report = scenario, Report(scenario)
        self.rng = random.Random(f"scenario {scenario.seed}")
        skill = {method: self.rng.uniform(0.1, 0.9) for method in ("ngram", "eagle")}
        nodes = [Node(f"node-{index}", cpus=8.0) for index in range(scenario.nodes)]
        super().__init__(make_config(scenario), World(HashedText(skill)), nodes, scenario.seed, FaultyNetwork)
        self.models = ModelFaults()
        self.done = False
        self.version = 0
        self.injector = Injector(self, scenario.faults)

    def run(self) -> Report:
        """Run to the end."""
        with patch.object(seating, "VERIFIERS_PER_GROUP", self.scenario.group):
            return self._run()

    def _run(self) -> Report:
        report, kernel = self.report, self.kernel
        kernel.spawn(self._drive, "main", self.driver.process)
        try:
            before: Any = None
            while not self.done and before != (before := self._progress()):
                kernel.run(until=kernel.now + _STANDSTILL_S, done=lambda: self.done)
            if not self.done:
                self.fail(f"nothing has moved for {_STANDSTILL_S:.0f} s")
        except SimulationError as error:
            self.fail(str(error))
        for name, crash in kernel.crashes:
            self.fail(f"{name} raised {type(crash).__name__}: {crash}")
        report.violations += [*self.models.crowds, *self.models.groups.clashes]
        report.events, report.virtual_s, report.digest = kernel.events, kernel.now, kernel.digest
        report.faults = {kind: n for kind, n in sorted({**self.injector.struck, **self.network.hits}.items()) if n}
        kernel.close()
        return report

    def make_host(self, actor: VirtualActor) -> FaultyHost:
        return FaultyHost(self.network, actor, self.world, self.models)

    def scale(self, wanted: dict[str, int]) -> None:
        """Runs as a task of the driver."""
        while not self.controller.process.dead and wanted == self.injector.wanted_drafters():
            try:
                self.calls.ask(self.controller, "scale", wanted, deadline_s=60.0)
                return
            except ConfigError as error:
                self.fail(f"scale was refused: {error}")
                return
            except SpecActorError:
                self.clock.sleep(1.0)

    def _progress(self) -> tuple[int, ...]:
        """Numbers that grow as long as the run gets anywhere."""
        report = self.report
        tokens = sum(queue.dispatcher.journal.committed_tokens for queue in self.queues)
        return report.finished, report.failed, report.restarts, self.version, tokens, self.injector.left

    def fail(self, what: str) -> None:
        self.report.violations.append(what)

    # ---- the driver ----

    def start_run(self) -> None:
        """Start the run; again, while faults end its start, as many of them may."""
        while True:
            self.injector.start_begins()
            try:
                super().start_run()
                self.queue.tokenizer = NumberText()
                break
            except SpecActorError:
                if not self.injector.may_end_start():
                    raise
                self.report.failed_starts += 1
                self._check_nothing_left()
                self.end_run()
        self.injector.resume()

    def _drive(self) -> None:
        if self.scenario.training:
            Training(self).run()
        else:
            self._stream()
        self.done = True

    def _stream(self) -> None:
        self.start_run()
        try:
            number = 0
            while number < 1 or self.injector.left:
                self._round(number)
                number += 1
            self.injector.heal()
            self._round(number)
            if self.injector.wanted_drafters():
                self.ask("scale", self.injector.wanted_drafters())
            self._check_settled()
        except ActorLostError as error:
            self._check_loss(error)
        self.injector.heal()
        self._shut_down()

    def _round(self, number: int) -> None:
        """New weights, then a stream; what the plan says is done beside them."""
        if number:
            self._update_weights(number)
        singles = self._submit_singles(number)
        entries = self.entries(number)
        expected = {entry.request_id: entry for entry in entries}
        close_after = self.rng.randrange(len(entries)) if self.injector.closes_early() else len(entries)
        stream = self.stream(entries)
        seen: dict[str, None] = {}
        for entry in stream:
            if entry.request_id in seen or entry.request_id not in expected:
                self.fail(f"{entry.request_id} ended twice, or is of another round")
            seen[entry.request_id] = None
            self.check_entry(entry)
            if len(seen) >= close_after:
                break
        stream.close()
        if close_after == len(entries) and len(seen) != len(expected):
            self.fail(f"round {number}: {len(expected) - len(seen)} requests did not end")
        for handle, sampling in singles:
            self._check_single(handle, sampling)

    def _submit_singles(self, number: int) -> list[tuple[Handle, SamplingParams]]:
        """A few requests outside of the stream, some of them turns of two sessions."""
        rng, singles = random.Random(f"singles {self.scenario.seed} {number}"), []
        for index in range(_SINGLES):
            seed = self.scenario.seed * 1_000_000 + number * 10_000 + 5_000 + index
            self.world.version_of[seed] = self.version
            sampling = SamplingParams(max_tokens=rng.randrange(1, 120), seed=seed, stop=self._stops(seed))
            session = rng.choice((None, "a", "b"))
            singles.append((self.queue.submit([1, 2, 3], sampling, session=session), sampling))
        return singles

    def _check_single(self, handle: Handle, sampling: SamplingParams) -> None:
        """Some are aborted and continued; all end with the tokens of plain decoding."""
        output = handle.abort() if random.Random(sampling.seed).random() < 0.5 else handle.result()
        at = len(output.token_ids)
        if output.finish_reason == "abort" and at < sampling.max_tokens:
            is_right = output.token_ids == stopped_output(sampling, output.weight_version)[0][:at]
            sampling = replace(sampling, max_tokens=sampling.max_tokens - at, first_position=at)
            handle = self.queue.submit([1, 2, 3, *output.token_ids], sampling)
            streamed = tuple(token.token_id for token in handle.tokens())
            output = handle.result()
            is_right = is_right and streamed == output.token_ids
        else:
            is_right = True
        truth = stopped_output(sampling, output.weight_version)
        if output.error or not is_right or (output.token_ids, output.text) != truth:
            self.fail(f"{handle.request_id} of the queue has other tokens than plain decoding")

    def entries(self, number: int) -> list[JournalEntry]:
        """The requests of a round; the same whenever they are asked for."""
        rng = random.Random(f"round {self.scenario.seed} {number}")
        entries = []
        for index in range(self.scenario.requests):
            seed = self.scenario.seed * 1_000_000 + number * 10_000 + index
            length = min(200, int(rng.lognormvariate(2.7, 0.9)) + 1)
            self.world.version_of[seed] = self.version
            poison = self.injector.poison(length)
            if poison is not None:
                self.models.poison[seed] = poison
            stop = self._stops(seed) if poison is None else ()
            sampling = SamplingParams(max_tokens=length, seed=seed, stop=stop)
            prompt = tuple(range(rng.randrange(1, 40)))
            entries.append(JournalEntry(f"{number}-{index}", prompt, sampling))
        return entries

    def _stops(self, seed: int) -> tuple[str, ...]:
        """One that is likely within a few tokens, and one that lies across tokens."""
        return ("7,1", f",{seed % 10}3,") if self.scenario.stops and seed % 3 == 0 else ()

    def _update_weights(self, number: int) -> None:
        self.version += 1
        buckets = (self.calls.transport.put(f"weights {number}"),)
        weights, lesson = (WeightSet(self.version, buckets, 1, method) for method in ("", "eagle"))
        for _attempt in range(20):
            try:
                self.ask("offer_weights", lesson)
                self.queue.update_weights(weights)
                return
            except ActorLostError:
                raise
            except SpecActorError as error:
                reason = error
        self.fail(f"weights of version {self.version} could not be set: {reason}")

    # ---- checks ----

    def check_entry(self, entry: JournalEntry) -> None:
        """What holds for every request that ended."""
        truth, _ = stopped_output(entry.sampling, entry.weight_version)
        tokens, finished = tuple(entry.token_ids), entry.finished
        assert finished is not None
        if tokens != truth[: len(tokens)]:
            self.fail(f"{entry.request_id} has other tokens than plain decoding")
        poisoned = entry.sampling.seed in self.models.poison
        if finished.finish_reason == "error":
            self.report.failed += 1
            if not poisoned:
                self.fail(f"{entry.request_id} failed and is innocent: {finished.error}")
        else:
            self.report.finished += 1
            if len(tokens) != len(truth):
                self.fail(f"{entry.request_id} ended with {len(tokens)} of {len(truth)} tokens")
            if not is_sum_of_steps(entry.stats, len(tokens)):
                self.fail(f"{entry.request_id} has {len(tokens)} tokens of other steps than {entry.stats}")
            if len(entry.logprobs) != len(tokens):
                self.fail(f"{entry.request_id} has {len(entry.logprobs)} log-probabilities for {len(tokens)} tokens")

    def _check_loss(self, error: ActorLostError) -> None:
        """The rollout gave up: it may when its controller was killed, or when faults struck its only verifier again and
        again; that verifier then comes back once they end."""
        self.report.gave_up = str(error)
        if self.injector.controller_killed:
            return
        cluster = self.config.cluster
        patience_s = cluster.start_timeout_s + cluster.placement_timeout_s  # of the rollout, until it gives up
        struck = self.injector.left or self.kernel.now - self.injector.last_at < patience_s
        if self.scenario.verifiers == 1 and struck:
            self.injector.heal()
            self._check_settled()
        else:
            self.fail(f"the rollout gave up: {error}")

    def _check_settled(self) -> None:
        """Faults are over and no request runs: the desired state is reached, and nothing is left over."""
        deadline = self.kernel.now + _SETTLE_S
        problems = ["not looked at"]
        while problems and self.kernel.now < deadline:
            self.clock.sleep(1.0)
            problems = list(self._unsettled())
        for problem in problems:
            self.fail(f"{_SETTLE_S:.0f} s after the last fault: {problem}")

    def _unsettled(self) -> Iterator[str]:
        assert self.backend is not None
        view = self.ask("view")
        if len(view.verifiers) != self.scenario.verifiers:
            yield f"{len(view.verifiers)} verifiers serve instead of {self.scenario.verifiers}"
        wanted = self.injector.wanted_drafters()
        for method, number in wanted.items():
            ready = [one for one in view.drafters if one.drafter.method == method]
            if len(ready) != number:
                yield f"{len(ready)} draft actors of {method} are ready instead of {number}"
        alive = [actor for actor in self.backend.actors.values() if not actor.process.dead]
        if len(alive) != self.scenario.verifiers + sum(wanted.values()):
            yield f"{len(alive)} actors live: {[actor.name for actor in alive]}"
        if left := len(self.queue.dispatcher.journal.entries):
            yield f"the journal still has {left} requests"
        self.queue.metrics()  # takes the final counters
        for actor in alive:
            try:
                counters = self.calls.ask(actor, "ping", deadline_s=5.0)
            except SpecActorError as error:
                yield f"{actor.name} does not answer: {error}"
                continue
            open_requests = counters.get("running", 0) + counters.get("open_requests", 0)
            if open_requests:
                yield f"{actor.name} still has {open_requests} requests"
            if counters.get("inbox", 0):
                yield f"{actor.name} still has {counters['inbox']} messages"
            shown = self.queue.dispatcher.verifiers.counters.get(actor.name)
            if shown is not None and actor.name in self.queue.dispatcher.verifiers.links:
                for name in ("running", "steps", "committed_tokens", "busy_s"):
                    if shown[name] != counters[name]:
                        yield f"the driver shows {name} {shown[name]} of {actor.name}, which has {counters[name]}"

    def _shut_down(self) -> None:
        if not self.controller.process.dead:
            try:
                self.shut_down()
            except SpecActorError as error:
                self.fail(f"the shutdown failed: {error}")
            self._check_nothing_left()

    def _check_nothing_left(self) -> None:
        """The controller has ended the run, or its start."""
        if self.backend is not None and not self.controller.process.dead:
            self.clock.sleep(2.0 * LINGER_S[1])  # nobody waits for actors that had not said which process they are
            left = [name for name, actor in self.backend.actors.items() if not actor.process.dead]
            if left:
                self.fail(f"after the end these live: {left}")
            if self.machines.groups:
                self.fail(f"after the end these placement groups stand: {[one.name for one in self.machines.groups]}")


def is_sum_of_steps(stats: RequestStats, tokens: int) -> bool:
    """Whether these are the counters of all steps that committed so many tokens: each step commits its right drafts and
    one token of the target, or only drafts at the end of the output."""
    drafted, accepted = (sum(pair[n] for pair in stats.by_method.values()) for n in range(2))
    committed, most = tokens + stats.discarded, stats.steps + stats.accepted
    return (drafted, accepted) == (stats.drafted, stats.accepted) and most - 1 <= committed <= most


def simulate(scenario: FaultScenario) -> Report:
    """Run one scenario to its end."""
    return Simulation(scenario).run()

"""The tail book: what it takes, what it drops, and that no channel can make it lie."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor_ray.drafters.ngram import NgramProposer
from specactor_ray.messages import Commit, DraftClose, DraftOpen, DraftResync, DraftTail, SamplingParams
from specactor_ray.speculation.tails import TailBook, TailCounters

SAMPLING = SamplingParams()


def tail(base: int, *tokens: int, drafter: str = "d", request: str = "r", complete: bool = False) -> DraftTail:
    return DraftTail(request, drafter, base, tokens, complete=complete)


@pytest.fixture
def book() -> TailBook:
    made = TailBook()
    made.open("r", [1, 2, 3])
    return made


def test_a_tail_on_the_committed_prefix_is_usable(book: TailBook) -> None:
    assert book.offer(tail(3, 4, 5), 8)
    assert book.usable("r") == {"d": (4, 5)}
    assert book.counters == TailCounters(taken=1)


def test_a_tail_from_behind_is_cut_to_what_is_new(book: TailBook) -> None:
    assert book.offer(tail(1, 2, 3, 4), 8)
    assert book.usable("r") == {"d": (4,)}
    assert book.answered("r", "d")


def test_a_tail_keeps_the_version_of_its_weights(book: TailBook) -> None:
    assert book.weight_version("r", "d") == book.weight_version("other", "d") == 0
    book.offer(DraftTail("r", "d", 3, (4, 5), weight_version=7), 8)
    book.commit("r", [4])
    assert book.weight_version("r", "d") == 7, "what is left of it too"
    book.offer(DraftTail("r", "d", 4, (5, 6, 7), weight_version=8), 8)
    assert book.weight_version("r", "d") == 8


@pytest.mark.parametrize(
    ("offered", "counter"),
    [
        (tail(1, 2, 9, 4), "mismatch"),
        (tail(0, 9), "mismatch"),
        (tail(1, 2, 3), "stale"),
        (tail(2), "stale"),
        (tail(4, 5), "ahead"),
        (tail(3, 4, request="other"), "unknown"),
    ],
)
def test_other_tails_are_dropped_and_counted(book: TailBook, offered: DraftTail, counter: str) -> None:
    assert not book.offer(offered, 8)
    assert book.usable("r") == {}
    assert not book.answered(offered.request_id, "d")
    assert book.counters == TailCounters(**{counter: 1})


def test_too_long_a_tail_is_cut(book: TailBook) -> None:
    assert book.offer(tail(2, 3, 4, 5, 6), 2)
    assert book.usable("r") == {"d": (4, 5)}
    assert (book.counters.truncated, book.counters.taken) == (1, 1)


def test_a_commit_moves_tails_on_or_drops_them(book: TailBook) -> None:
    book.offer(tail(3, 4, 5, 6, drafter="right"), 8)
    book.offer(tail(3, 4, 9, drafter="wrong"), 8)
    book.offer(tail(3, 4, drafter="short"), 8)
    book.offer(tail(3, drafter="none"), 8)
    book.commit("r", [4, 5])
    assert book.committed("r") == (1, 2, 3, 4, 5)
    assert book.usable("r") == {"right": (6,)}
    assert not any(book.answered("r", drafter) for drafter in ("wrong", "short", "none"))
    assert book.counters.refuted == 1


def test_older_tails_do_not_replace_newer_ones(book: TailBook) -> None:
    book.offer(tail(3, 4, 5), 8)
    assert not book.offer(tail(2, 3, 4), 8)
    assert not book.offer(tail(2, 3, 9, 9), 8)
    assert not book.offer(tail(3, 4), 8)
    assert book.usable("r") == {"d": (4, 5)}
    assert book.counters.stale == 3
    assert book.offer(tail(3, 4, 5, 6), 8)
    assert book.offer(tail(3, 7), 8), "a different guess on the same base is a newer opinion"
    assert book.usable("r") == {"d": (7,)}


def test_answered_and_complete(book: TailBook) -> None:
    assert not book.answered("r", "d")
    book.offer(tail(3, complete=True), 8)
    assert book.answered("r", "d"), "no guess is an answer"
    assert book.complete("r", "d")
    book.commit("r", [4])
    assert not book.answered("r", "d"), "but only to the prefix it was given for"
    book.offer(tail(3, 4, 5, complete=True), 8)
    assert book.answered("r", "d")
    assert not book.complete("r", "d"), "drafted without knowledge of the newest commit"
    book.offer(tail(4, 5, 6), 8)
    assert not book.complete("r", "d")
    assert not book.answered("nobody", "d")
    assert not book.complete("nobody", "d")


def test_forgetting(book: TailBook) -> None:
    book.open("s")
    for request, base in (("r", 3), ("s", 0)):
        for drafter in "de":
            book.offer(tail(base, 4, drafter=drafter, request=request), 8)
    assert len(book) == 2 and all(book.answered(request, drafter) for request in "rs" for drafter in "de")
    book.forget_drafter("d")
    assert book.usable("r") == {"e": (4,)}
    book.close("r")
    book.close("r")
    assert (len(book), "r" in book, book.usable("s")) == (1, False, {"e": (4,)})
    assert book.usable("r") == {}
    with pytest.raises(KeyError):
        book.commit("r", [1])
    book.open("s", [1])
    assert book.usable("s") == {}


class Drafter:
    """What the draft actor does with messages, around a real proposer."""

    def __init__(self, drafter_id: str) -> None:
        self.drafter_id, self.proposer = drafter_id, NgramProposer(1, 3, history_tokens=0)

    def receive(self, message: DraftOpen | Commit | DraftClose) -> list[DraftResync]:
        if isinstance(message, DraftOpen):
            committed = message.committed_token_ids
            self.proposer.open(message.request_id, message.prompt_token_ids, committed, SAMPLING, message.window)
        elif isinstance(message, DraftClose):
            self.proposer.close(message.request_id)
        elif not self.proposer.commit(message.request_id, message.start, message.token_ids, message.window):
            return [DraftResync(message.request_id, self.drafter_id)]
        return []

    def publish(self) -> list[DraftTail]:
        ids = self.proposer.extend()
        return [DraftTail(r, self.drafter_id, *self.proposer.tail(r), complete=True) for r in ids]


class World:
    """A verifier's book, two drafters, and between them channels that lose, repeat and reorder at will."""

    REQUESTS, DRAFTERS, WINDOW = ("r", "s"), ("d", "e"), 4

    def __init__(self, truth: list[int]) -> None:
        self.truth = truth
        self.book = TailBook()
        self.drafters = {name: Drafter(name) for name in self.DRAFTERS}
        self.to_drafter: dict[str, list[object]] = {name: [] for name in self.DRAFTERS}
        self.to_verifier: list[object] = []
        for request in self.REQUESTS:
            self.book.open(request)
            self.send_open(request, self.DRAFTERS)

    def send_open(self, request: str, drafters: tuple[str, ...]) -> None:
        committed = self.book.committed(request)
        for name in drafters:
            self.to_drafter[name].append(DraftOpen(request, "v", (0, 1), committed, SAMPLING, self.WINDOW))

    def commit(self, request: str, number: int) -> None:
        start = self.book.committed_len(request)
        fresh = tuple(self.truth[(start + i) % len(self.truth)] for i in range(number))
        self.book.commit(request, fresh)
        for name in self.DRAFTERS:
            self.to_drafter[name].append(Commit(request, "v", start, fresh, self.WINDOW))

    def deliver_to_drafter(self, name: str, position: int, repeat: bool) -> None:
        queue = self.to_drafter[name]
        if queue:
            message = queue[position % len(queue)] if repeat else queue.pop(position % len(queue))
            self.to_verifier.extend(self.drafters[name].receive(message))

    def deliver_to_verifier(self, position: int, repeat: bool) -> None:
        queue = self.to_verifier
        if queue:
            message = queue[position % len(queue)] if repeat else queue.pop(position % len(queue))
            if isinstance(message, DraftResync):
                self.send_open(message.request_id, (message.drafter_id,))
            else:
                self.book.offer(message, self.WINDOW)

    def lose(self, name: str, position: int) -> None:
        for queue in (self.to_drafter[name], self.to_verifier):
            if queue:
                queue.pop(position % len(queue))

    def check(self) -> None:
        for request in self.REQUESTS:
            length = self.book.committed_len(request)
            assert self.book.committed(request) == tuple(self.truth[i % len(self.truth)] for i in range(length))
            for name, tokens in self.book.usable(request).items():
                assert 0 < len(tokens) <= self.WINDOW
                assert all(0 <= token < 4 for token in tokens)
                self.check_start(name, request, length, tokens)

    def check_start(self, name: str, request: str, length: int, tokens: tuple[int, ...]) -> None:
        """Tails start right behind the committed prefix: if the drafter has not drafted anew since, they are the end
        of its own tail that lies there."""
        try:
            base, mine = self.drafters[name].proposer.tail(request)
        except KeyError:
            return
        if base == length and mine and mine[: len(tokens)] != tokens:
            held = self.book._books[request].tails[name]
            assert held.base_len < length, "only a tail drafted from an older commit may differ"

    def heal(self) -> None:
        """From now on everything arrives, in order; what was lost stays lost."""
        for _ in range(6):
            for name in self.DRAFTERS:
                while self.to_drafter[name]:
                    self.deliver_to_drafter(name, 0, repeat=False)
                self.to_verifier.extend(self.drafters[name].publish())
            while self.to_verifier:
                self.deliver_to_verifier(0, repeat=False)
            self.check()


events = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "down", "down", "up", "lose", "draft", "down again", "up again"]),
        st.sampled_from(World.REQUESTS),
        st.sampled_from(World.DRAFTERS),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), events)
def test_no_channel_can_make_the_book_lie_and_a_healed_one_helps_again(truth, sequence) -> None:
    world = World(truth)
    for name, request, drafter, number in sequence:
        if name == "commit":
            world.commit(request, number)
        elif name.startswith("down"):
            world.deliver_to_drafter(drafter, number, repeat=name.endswith("again"))
        elif name.startswith("up"):
            world.deliver_to_verifier(number, repeat=name.endswith("again"))
        elif name == "lose":
            world.lose(drafter, number)
        else:
            world.to_verifier.extend(world.drafters[drafter].publish())
        world.check()

    # The truth repeats, so a drafter that follows must guess it. One commit after the channel healed is enough to
    # notice any gap.
    world.heal()
    for request in world.REQUESTS:
        world.commit(request, 3 * len(truth))
    world.heal()
    for request in world.REQUESTS:
        length = world.book.committed_len(request)
        ahead = tuple(truth[(length + i) % len(truth)] for i in range(World.WINDOW))
        for drafter in World.DRAFTERS:
            assert world.book.complete(request, drafter)
            if len(set(truth)) == len(truth):  # a repetition within the period may mislead short matches
                assert world.book.usable(request)[drafter] == ahead

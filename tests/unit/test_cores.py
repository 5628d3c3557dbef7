"""Core bookkeeping and binding: nobody is given a core that another holds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.cluster.cores import CoreLedger, bind_to_cores
from specactor_ray.errors import ClusterError


def ledger(**nodes: list[int]) -> CoreLedger:
    book = CoreLedger()
    for node, cores in nodes.items():
        book.add_node(node, cores)
    return book


def test_take_release_take() -> None:
    book = ledger(a=[4, 2, 7], b=[0])
    assert book.take("a", 2, "verifier-0") == (2, 4)
    assert book.take("b", 1, "ngram-0") == (0,)
    assert book.held_by("verifier-0") == (2, 4)
    book.release("verifier-0")
    book.release("verifier-0")
    assert book.take("a", 3, "ngram-1") == (2, 4, 7)


def test_refusal_names_the_holders_and_takes_nothing() -> None:
    book = ledger(a=[0, 1])
    book.take("a", 1, "verifier-0")
    with pytest.raises(ClusterError, match="verifier-0 holds 0") as caught:
        book.take("a", 2, "ngram-0")
    assert "ngram-0 needs 2" in str(caught.value)
    assert "1 of 2 are free" in str(caught.value)
    assert book.held_by("ngram-0") == ()
    assert book.take("a", 1, "ngram-0") == (1,)


def test_nodes_on_one_machine_share_their_cores() -> None:
    book = CoreLedger()
    book.add_node("a", [0, 1], machine="host")
    book.add_node("b", [0, 1], machine="host")
    assert book.take("a", 1, "verifier-0") == (0,)
    assert book.take("b", 1, "ngram-0") == (1,)
    with pytest.raises(ClusterError):
        book.take("b", 1, "ngram-1")


def test_an_owner_takes_once_and_nodes_must_be_known() -> None:
    book = ledger(a=[0, 1])
    book.take("a", 1, "x")
    with pytest.raises(ValueError, match="holds cores already"):
        book.take("a", 1, "x")
    with pytest.raises(KeyError):
        book.take("z", 1, "y")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 4), st.booleans()), max_size=40))
def test_no_core_has_two_holders_and_none_is_lost(steps: list[tuple[str, int, bool]]) -> None:
    book = ledger(n=list(range(6)))
    held: dict[str, tuple[int, ...]] = {}
    for owner, count, release in steps:
        if release:
            book.release(owner)
            held.pop(owner, None)
            continue
        free = 6 - sum(map(len, held.values()))
        if held.get(owner):
            continue
        if count > free:
            with pytest.raises(ClusterError):
                book.take("n", count, owner)
        else:
            held[owner] = book.take("n", count, owner)
        everyone = [core for cores in held.values() for core in cores]
        assert len(everyone) == len(set(everyone)) <= 6
        assert book.holders("n") == {name: cores for name, cores in held.items() if cores}


BIND = """
import os, sys, threading, time
{before}
stop = threading.Event()
thread = threading.Thread(target=stop.wait, daemon=True); thread.start()
from specactor_ray.cluster.cores import bind_to_cores
core = max(os.sched_getaffinity(0))
bind_to_cores([core])
import torch
torch.ones(64, 64) @ torch.ones(64, 64)
affinities = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]
stop.set()
assert all(a == {{core}} for a in affinities), affinities
assert torch.get_num_threads() == 1, torch.get_num_threads()
"""


@pytest.mark.parametrize("before", ["", "import torch; torch.set_num_threads(2)"], ids=["torch later", "torch loaded"])
def test_binding_reaches_every_thread_and_torch(before: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", BIND.format(before=before)], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_binding_to_a_core_that_is_not_there() -> None:
    with pytest.raises(ClusterError, match="4000"):
        bind_to_cores([4000])

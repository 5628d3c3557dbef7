"""Core bookkeeping and binding: nobody is given a core that another holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor_ray.cluster.cores import CoreLedger, bind_to_cores, cores_needed
from specactor_ray.core.errors import ClusterError


def ledger(**nodes: list[int]) -> CoreLedger:
    book = CoreLedger()
    for node, cores in nodes.items():
        book.add_node(node, cores)
    return book


def test_cores_are_taken_and_released_and_a_refusal_names_the_holders() -> None:
    book = ledger(a=[4, 2, 7], b=[0])
    assert book.take("a", 2, "verifier-0") == (2, 4)
    assert book.take("b", 1, "ngram-0") == (0,)
    with pytest.raises(ClusterError, match=r"ngram-1 needs 2 .*1 of 3 are free .*verifier-0 2,4"):
        book.take("a", 2, "ngram-1")
    assert book.holders("a") == {"verifier-0": (2, 4)}
    for _ in range(2):
        book.release("verifier-0")
    assert book.take("a", 3, "ngram-1") == (2, 4, 7)


def test_nodes_on_one_machine_share_their_cores() -> None:
    book = CoreLedger()
    book.add_node("a", [0, 1], machine="host")
    book.add_node("b", [0, 1], machine="host")
    assert book.take("a", 1, "verifier-0") == (0,)
    assert book.take("b", 1, "ngram-0") == (1,)
    with pytest.raises(ClusterError):
        book.take("b", 1, "ngram-1")


def test_shares_are_put_together_and_never_beside_a_whole() -> None:
    book = ledger(a=[0, 1, 2])
    book.take("a", 1, "verifier-0")
    assert book.take("a", 0.5, "ngram-0") == (1,)
    assert book.take("a", 0.25, "suffix-0") == (1,)
    assert book.take("a", 0.5, "eagle-0") == (2,)
    assert book.take("a", 0.25, "ngram-1") == (1,)  # the fullest that has room
    with pytest.raises(ClusterError, match=r"ngram-2 needs 0.75 .*eagle-0 2, .*verifier-0 0\)"):
        book.take("a", 0.75, "ngram-2")
    with pytest.raises(ClusterError, match="0 of 3 are free"):
        book.take("a", 1, "verifier-1")
    book.release("eagle-0")
    assert book.take("a", 1, "verifier-1") == (2,)


SIZES = st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.6, 0.75, 0.9, 1.0, 2.0, 3.0])


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), SIZES, st.booleans()), max_size=40))
def test_no_core_is_overfull_and_wholes_are_alone(steps: list[tuple[str, float, bool]]) -> None:
    book = ledger(n=list(range(5)))
    held: dict[str, tuple[float, tuple[int, ...]]] = {}
    for owner, size, release in steps:
        if release:
            book.release(owner)
            held.pop(owner, None)
        elif owner not in held:
            filled = [sum(min(s, 1.0) for s, cores in held.values() if core in cores) for core in range(5)]
            free = sum(share == 0 for share in filled)
            fits = free >= size if size >= 1 else min(filled) + size <= 1 + 1e-6
            if fits:
                held[owner] = (size, book.take("n", size, owner))
            else:
                with pytest.raises(ClusterError):
                    book.take("n", size, owner)
        for core in range(5):
            shares = [min(s, 1.0) for s, cores in held.values() if core in cores]
            assert sum(shares) <= 1 + 1e-6
            assert 1.0 not in shares or len(shares) == 1
        assert book.holders("n") == {name: cores for name, (_, cores) in held.items()}


@given(st.lists(SIZES, max_size=12))
def test_cores_needed(sizes: list[float]) -> None:
    needed = cores_needed(sizes)
    assert sum(sizes) - 1e-6 <= needed <= sum(math.ceil(size) for size in sizes)
    if all(size >= 1 for size in sizes):
        assert needed == sum(sizes)


def test_binding_to_a_core_that_is_not_there() -> None:
    with pytest.raises(ClusterError, match="4000"):
        bind_to_cores([4000])

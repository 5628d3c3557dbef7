"""Names of runs, actors and placement groups; everything a run owns can be found by its name.

Other processes look up `specactor::<run>::controller` only. A replaced actor gets a new incarnation suffix, so a
message to or from the old actor never counts as one of the new actor.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection

NAMESPACE = "specactor"
"""The Ray namespace of all named actors of this package."""

CONTROLLER = "controller"
_PREFIX = "specactor"
_ACTOR = re.compile(rf"{_PREFIX}::(?P<run>.+)::(?P<actor>.+)")


def new_run_name() -> str:
    """`20260131-142501-3f2a`: local date and time and a random suffix."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{random_suffix()}"


def random_suffix() -> str:
    """Four hexadecimal digits."""
    return secrets.token_hex(2)


def new_actor_id(stem: str, taken: Collection[str], suffix: Callable[[], str]) -> str:
    """A new incarnation id of `stem`, such as `ngram-1#9c0d`; never one of `taken`."""
    while True:
        actor_id = f"{stem}#{suffix()}"
        if actor_id not in taken:
            return actor_id


def actor_name(run: str, actor_id: str) -> str:
    """Cluster-wide name of an actor or of its placement group."""
    return f"{_PREFIX}::{run}::{actor_id}"


def run_and_actor(name: str) -> tuple[str, str]:
    """The run and the actor id of a name made by `actor_name`; empty for other names."""
    found = _ACTOR.fullmatch(name)
    return (found["run"], found["actor"]) if found else ("", "")

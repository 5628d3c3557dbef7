"""Errors of specactor_ray: one root, and one class per kind of fix.

A user's mistake (`ConfigError`, `InputError`, `ModelLoadError`, `ClusterError`) has a message with the problem, the
allowed values and the fix; the command line prints it without a traceback and exits with `EXIT_USER_ERROR`.
"""

from __future__ import annotations

import contextlib
import copyreg
import difflib
import re
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130
_LONGEST_VALUE, _LONGEST_KEY = 120, 400
"""Most characters of a value or a key in a message."""
_NOT_A_USERS = (__name__.partition(".")[0], "asyncio", "importlib")
"""Packages whose frames are not of a user's code."""
_USERINFO = re.compile(r"(?<=:/)(/?)[^/\s]*@")
"""Name and password before the host of a URL; `Path` keeps only one of two slashes."""


def redacted(text: str) -> str:
    """The text with names and passwords in its URLs replaced by `***`."""
    return _USERINFO.sub(r"\1***@", text)


def clipped(value: object) -> str:
    """Form of a value in a message: its `repr`, on one line and cut if it is long."""
    try:
        return clipped_text(repr(value))
    except ValueError:  # Python formats no number of more than 4300 digits
        return "a value with thousands of digits"


def clipped_text(text: str, longest: int = _LONGEST_VALUE) -> str:
    """Form of a text in messages: printable, without passwords in URLs, and cut if it is longer than `longest`."""
    text = redacted(text)
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text)} characters)"
    return text if text.isprintable() else repr(text)[1:-1]


def did_you_mean(name: str, known: Collection[str], prefix: str = "") -> str:
    """A sentence with the known name closest to a mistyped one, after a space; empty if there is none."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)  # a letter is wrong, as in `step` for `steps`
    close = close or [one for one in known if one.startswith(f"{name}_") or one.endswith(f"_{name}")]
    close = close or difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def first_of(names: Sequence[object], most: int = 3) -> str:
    """The first `most` names, and how many more there are, such as `a, b, c and 2 more`."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if names[most:] else "")


def counted_by_kind(reasons: Mapping[str, int]) -> str:
    """Failures by kind, most frequent first, such as `120 x TimeoutError, 8 x ValueError: no box`. A kind is the text
    before a colon; of several texts the most frequent one follows, as in `9 x ValueError, such as: no box`."""
    kinds: dict[str, Counter[str]] = {}
    for reason, count in reasons.items():
        kinds.setdefault(reason.partition(":")[0], Counter())[reason] += count
    parts = []
    for of in sorted(kinds.values(), key=Counter.total, reverse=True):
        text = clipped_text(of.most_common(1)[0][0], _LONGEST_KEY)
        parts.append(f"{of.total()} x {text if len(of) == 1 else text.replace(':', ', such as:', 1)}")
    return ", ".join(parts)


def in_words(error: BaseException) -> str:
    """Type and text of an error, and the line of the user's code that led to it, if there is one. Half a surrogate
    pair, which no file and no terminal takes, is escaped."""
    try:
        text = str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as own:  # noqa: BLE001 - a user's class may raise anything
        text = f"its text raises {type(own).__name__}"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_A_USERS:
            return f"{type(error).__name__}: {text} ({Path(frame.f_code.co_filename).name}, line {line})"
    return f"{type(error).__name__}: {text}"


def place_of(function: Any) -> str:
    """Where a function is defined, such as ` (my_rewards.py, line 3)`; empty if it is not written in Python."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if isinstance(code, CodeType) else ""


class SpecActorError(Exception):
    """Base class of all errors that this package raises on purpose. No message holds a password of a URL."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(one) if isinstance(one, str) else one for one in args))

    def __reduce__(self) -> tuple[Any, ...]:
        """An error is made from its message and attributes, whatever the arguments of its class are."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class UserError(SpecActorError, ValueError):
    """An error that the user can fix; the message has the fix."""


class ConfigError(UserError):
    """A configuration key (dotted, for example `target.max_batch`) is unknown, of the wrong type, out of range or
    contradicts another. `problem` includes the value, `fix` a remedy such as a valid value."""

    def __init__(self, key: str, problem: str, fix: str = "") -> None:
        self.key, self.problem, self.fix = key, problem, fix
        super().__init__(f"{clipped_text(key, _LONGEST_KEY)}: {problem}" + (f" Fix: {fix}" if fix else ""))


@contextlib.contextmanager
def keys_of(section: str) -> Iterator[None]:
    """Errors inside name this section of the configuration."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(section, f"{error.key}: {error.problem}", error.fix) from None


class InputError(UserError):
    """A prompt, a data file or a sampling parameter cannot be used."""


class RangeError(InputError):
    """The value of a dotted key, in the form of `clipped`, is not allowed; `allowed` is like `be true or false`."""

    def __init__(self, key: str, value: str, allowed: str) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        super().__init__(f"{key} is {value}; it must {allowed}")


class UnavailableError(InputError):
    """An option of another engine is not available here; `value` has the form of `clipped`, `where` begins the
    message."""

    def __init__(self, option: str, value: str, reason: str, fix: str = "leave it out", where: str = "") -> None:
        self.option = option
        super().__init__(f"{where}{clipped_text(option)}={value} is not available: {reason}. Fix: {fix}")


class WeightsError(SpecActorError):
    """Weights did not arrive: an engine cannot load them, or computes something else with them than transformers."""


class FetchError(SpecActorError):
    """Objects did not arrive from the object store. A retry may succeed; nothing was computed with them."""


class OverloadedError(SpecActorError):
    """Too many requests wait already; the same request may be accepted later (HTTP's 429)."""


class ModelLoadError(UserError):
    """A model could not be found or cannot be served by this engine."""


class ClusterError(UserError):
    """There is no cluster, or it lacks the requested resources."""


class CallError(SpecActorError):
    """A call to an actor failed; the subclass describes the state of the actor."""


class ActorUnavailableError(CallError):
    """The actor cannot be reached at present. The call may or may not have been executed; a retry may succeed."""


class CallTimeoutError(CallError):
    """There was no answer before the call's deadline. The call may still be executed."""


class ActorLostError(CallError):
    """The actor is permanently gone, with its state. `node_lost`: its node was lost, so it cannot be the cause."""

    def __init__(self, message: str, node_lost: bool = False) -> None:
        self.node_lost = node_lost
        super().__init__(message)


class RemoteError(CallError):
    """The actor's method raised an error that is neither a user's mistake nor an error of this package."""

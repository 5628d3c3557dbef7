"""Errors of specactor_ray: one root, and one class per kind of fix.

A user's mistake (`ConfigError`, `InputError`, `ModelLoadError`, `ClusterError`) says what was found, what
is allowed and what to do; the command line prints it without a traceback and exits with `EXIT_USER_ERROR`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130
_LONGEST_VALUE, _LONGEST_KEY = 120, 400
"""Characters of a value or a key that a message shows."""
_USERINFO = re.compile(r"(?<=:/)(/?)[^/\s]*@")
"""Name and password before the host of a URL; `Path` leaves one slash of two."""


def redacted(text: str) -> str:
    """The text with names and passwords in its URLs replaced by `***`."""
    return _USERINFO.sub(r"\1***@", text)


def clipped(value: object) -> str:
    """How a value appears in a message: its `repr`, on one line and cut where it is long."""
    try:
        return clipped_text(repr(value))
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a value with thousands of digits"


def clipped_text(text: str, longest: int = _LONGEST_VALUE) -> str:
    """A text as messages show it: printable, without passwords in URLs, and cut where it is longer than `longest`."""
    text = redacted(text)
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text)} characters)"
    return text if text.isprintable() else repr(text)[1:-1]


def did_you_mean(name: str, known: Collection[str], prefix: str = "") -> str:
    """A sentence that names the known one closest to a mistyped name, with a space before it; empty without one."""
    close = [one for one in known if one.startswith(f"{name}_") or one.endswith(f"_{name}")]
    close = close or difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


class SpecActorError(Exception):
    """Root of every error this package raises on purpose. No message holds a password of a URL."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(one) if isinstance(one, str) else one for one in args))


class UserError(SpecActorError, ValueError):
    """Something the person at the terminal can mend; the message says how."""


class ConfigError(UserError):
    """A configuration key is unknown, of the wrong type, out of range or contradicts another.

    Args:
        key: Dotted key, for example `target.max_batch`.
        problem: What is wrong, naming the value and the allowed values.
        fix: What to write instead.
    """

    def __init__(self, key: str, problem: str, fix: str = "") -> None:
        self.key, self.problem, self.fix = key, problem, fix
        super().__init__(f"{clipped_text(key, _LONGEST_KEY)}: {problem}" + (f" Fix: {fix}" if fix else ""))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, str]]:
        return type(self), (self.key, self.problem, self.fix)


class InputError(UserError):
    """A prompt, a data file or a sampling parameter cannot be used."""


class NoRunError(InputError):
    """No run is going on where one is looked for."""


class RangeError(InputError):
    """A value of a key is not among the allowed ones.

    Args:
        key: Dotted key.
        value: What was given, as `clipped` shows it.
        allowed: What must be given, as in `be true or false`.
    """

    def __init__(self, key: str, value: str, allowed: str) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        super().__init__(f"{key} is {value}; it must {allowed}")

    def __reduce__(self) -> tuple[type[RangeError], tuple[str, str, str]]:
        return type(self), (self.key, self.value, self.allowed)


class UnavailableError(InputError):
    """An option of another engine is not available here.

    Args:
        option: Its name.
        value: What was given, as `clipped` shows it.
        reason: Why there is no such option.
        where: Begins the message.
    """

    def __init__(self, option: str, value: str, reason: str, where: str = "") -> None:
        self.option, self.value, self.reason, self.where = option, value, reason, where
        super().__init__(f"{where}{option}={value} is not available: {reason}. Fix: leave it out")

    def __reduce__(self) -> tuple[type[UnavailableError], tuple[str, str, str, str]]:
        return type(self), (self.option, self.value, self.reason, self.where)


class OverloadedError(SpecActorError):
    """Too many requests wait already; the same request may be accepted later (HTTP's 429)."""


class ModelLoadError(UserError):
    """A model could not be found or cannot be served by this engine."""


class ClusterError(UserError):
    """There is no cluster, or it lacks the requested resources."""


class CallError(SpecActorError):
    """A call to an actor failed; the subclass says what is known about the actor."""


class ActorUnavailableError(CallError):
    """The actor is out of reach for now. The call may or may not have been carried out; asking again may help."""


class CallTimeoutError(CallError):
    """There was no answer before the call's deadline. The call may still be carried out."""


class ActorLostError(CallError):
    """The actor is gone for good; nothing that it held can be asked for any more.

    Args:
        message: What was lost, for people.
        node_lost: Its node went with it, so that nothing it did can have been the cause.
    """

    def __init__(self, message: str, node_lost: bool = False) -> None:
        self.node_lost = node_lost
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ActorLostError], tuple[str, bool]]:
        return type(self), (str(self), self.node_lost)


class RemoteError(CallError):
    """The actor's method raised something that is neither a user's mistake nor an error of this package."""

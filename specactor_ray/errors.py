"""Errors of specactor_ray: one root, and one kind per party that can mend the cause.

A user's mistake (`ConfigError`, `InputError`, `ModelLoadError`, `ClusterError`) says what was found, what
is allowed and what to do; the command line prints it without a traceback and exits with `EXIT_USER_ERROR`.
"""

from __future__ import annotations

EXIT_USER_ERROR = 2


class SpecActorError(Exception):
    """Root of every error this package raises on purpose."""


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
        super().__init__(f"{key}: {problem}" + (f" Fix: {fix}" if fix else ""))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, str]]:
        return type(self), (self.key, self.problem, self.fix)


class InputError(UserError):
    """A prompt, a data file or a sampling parameter cannot be used."""


class ModelLoadError(UserError):
    """A model could not be found or cannot be served by this engine."""


class ClusterError(UserError):
    """There is no cluster, or it has not what the configuration asks for."""


class ActorLostError(SpecActorError):
    """An actor that a request cannot do without died and was not replaced in time."""

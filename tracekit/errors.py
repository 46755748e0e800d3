"""What can go wrong through no fault of tracekit's code, each with the exit code that the command line gives it."""

from typing import ClassVar


class TracekitError(Exception):
    """Something the user can mend. The message says what, where, and what to do next, on one line."""

    exit_code: ClassVar[int] = 2


class InputError(TracekitError):
    """A path, run or argument cannot be used: missing, empty, or not a run at all."""


class BadTraceError(InputError):
    """One trace file cannot be read. A run with other good ranks goes on and reports it as a finding."""


class ConfigError(TracekitError):
    """A setting in tracekit.toml, pyproject.toml or ``--set`` does not exist or has the wrong type."""


class MissingExtraError(TracekitError):
    """An optional package is needed; the message names the extra that installs it."""


class NotComparableError(TracekitError):
    """Two runs differ in what must agree before a comparison of speed means anything."""

    exit_code: ClassVar[int] = 4


class RuleError(Exception):
    """A rule crashed: a bug of the rule, not of the input. Carries the rule's code."""

    exit_code: ClassVar[int] = 3

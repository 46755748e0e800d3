"""Errors that the user can fix, and errors of rules, each with its exit code on the command line."""

import difflib
from collections.abc import Iterable
from typing import ClassVar


class TracekitError(Exception):
    """An error that the user can fix. The message states what, where and what to do, on one line."""

    exit_code: ClassVar[int] = 2


class InputError(TracekitError):
    """A path, run or argument cannot be used: it is missing, empty or not a run."""


class BadTraceError(InputError):
    """One trace file cannot be read. A run with other readable ranks continues and reports it as a finding."""


class ConfigError(TracekitError):
    """A setting in tracekit.toml, pyproject.toml or ``--set`` does not exist or has the wrong type."""


class MissingExtraError(TracekitError):
    """An optional package is needed; the message names the extra that installs it."""


class NotComparableError(TracekitError):
    """Two runs differ in something that must be equal for a comparison of speed, such as the model."""

    exit_code: ClassVar[int] = 4


class RuleError(Exception):
    """A rule crashed: a bug of the rule, not of the input. Carries the rule's code."""

    exit_code: ClassVar[int] = 3


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Known names that are similar, as a question to append to an error; "" if there are none.

    >>> did_you_mean("colectives", ["collectives", "ops"])
    ', did you mean collectives?'
    """
    similar = difflib.get_close_matches(name.lower(), list(known), n=2)
    return f", did you mean {' or '.join(similar)}?" if similar else ""

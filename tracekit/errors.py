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
    names = similar_names(name, known)
    return f", did you mean {' or '.join(names)}?" if names else ""


def similar_names(name: str, known: Iterable[str], *, limit: int = 2) -> list[str]:
    """Known names that were probably meant, whatever their case: the most similar ones, in the order of `known`.

    >>> similar_names("COM001", ["COMM001", "COMP001", "HOST001"])
    ['COMM001', 'COMP001']
    """
    ratios = {text: _similarity(name.casefold(), text.casefold()) for text in known}
    least = max(_LEAST_SIMILARITY, max(ratios.values(), default=0.0) - _SIMILARITY_SPREAD)
    names = [text for text, ratio in ratios.items() if ratio >= least]
    return sorted(names, key=lambda text: -ratios[text])[:limit]


def _similarity(name: str, text: str) -> float:
    return difflib.SequenceMatcher(None, name, text).ratio()


_LEAST_SIMILARITY = 0.6
"""That of `difflib.get_close_matches`: below it, names have little more than single letters in common."""
_SIMILARITY_SPREAD = 0.05
"""Names this close to the most similar one are as probable: one typo in a code makes two codes equally similar."""

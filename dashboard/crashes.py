"""What crashed: which page or rule, why, and how to report it. Streamlit would show a box without any of that."""

import functools
import platform
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboard import widgets
from tracekit.conventions import VERSION
from tracekit.errors import RuleError, TracekitError
from tracekit.model import escaping
from tracekit.rules.registry import all_rules

_OURS = ("tracekit", "dashboard")
MAX_DETAILS, MAX_LINE = 8000, 500


@dataclass(frozen=True)
class Crash:
    """An error that is a bug: what raised it ("the page Ranks"), its reason, and the details of a report."""

    what: str
    reason: str
    package: str
    details: str


def describe(what: str, error: BaseException, package: str = "tracekit") -> Crash:
    """Return a crash, of which `package` is the Python package to which `what` belongs."""
    lines = "".join(traceback.format_exception(error))
    versions = f"tracekit {VERSION}, Streamlit {st.__version__}, Python {platform.python_version()}"
    # The end of a traceback names the place.
    details = f"{what}\n{versions}, {platform.platform()}\n\n{lines[-MAX_DETAILS:]}"
    root = package.partition(".")[0]
    return Crash(what, f"{type(error).__name__}: {error}", "tracekit" if root in _OURS else root, details)


def describe_rule(code: str, error: RuleError) -> Crash:
    """Return the crash of a rule."""
    package = next((rule.__module__ for rule in all_rules() if rule.code == code), "tracekit")
    return describe(f"rule {code}", error, package)


def show(crash: Crash, rest: str) -> None:
    """Show a crash, what it leaves working (`rest`, a sentence), and how to report it."""
    widgets.problem(f"{crash.what[0].upper()}{crash.what[1:]} failed: {crash.reason}. {rest}")
    with st.expander(f"Report this bug to the developers of {widgets.plain(crash.package)}"):
        st.caption("Send them the text below, and the trace if you can share it. Remove names that are confidential.")
        st.code("\n".join(escaping.inert(line, MAX_LINE) for line in crash.details.splitlines()), language=None)


def guard(show_part: Callable[..., None], what: str, rest: str, package: str = "tracekit") -> Callable[..., None]:
    """Return `show_part` so that it shows its errors instead of raising them, as a fragment needs."""

    @functools.wraps(show_part)  # Streamlit knows a fragment by its name
    def show_errors(*arguments: Any) -> None:
        try:
            show_part(*arguments)
        except TracekitError as error:  # an input that cannot be read is no bug
            widgets.problem(str(error))
        except Exception as error:  # noqa: BLE001 whatever a part raises, such as one of a plug-in
            show(describe(what, error, package), rest)

    return show_errors

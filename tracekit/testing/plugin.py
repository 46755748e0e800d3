"""Hooks of the pytest plugin. Nothing but pytest is imported before a test asks for a recording."""

import contextlib
import hashlib
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tracekit.testing.marks import TraceBudget
    from tracekit.testing.recording import TraceRun
    from tracekit.testing.verdict import SummaryRow

MARK = "trace_budget"
KEEP = ("failed", "all", "none")

_MAX_NAME = 80
_ROW = "tracekit"  # the attribute of a test report that takes its row to the terminal, also from pytest-xdist's workers


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("tracekit", "recorded training tests (tracekit)")
    group.addoption("--trace-dir", metavar="DIR", help="record runs of tests below DIR, not below the system's folder")
    group.addoption(
        "--trace-keep", choices=KEEP, default=KEEP[0], help="which recorded runs stay (default: those of failed tests)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register our mark, and the summary."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(steps, fail_on, **budgets): record the test's training loop and fail where a budget is broken, as in "
        f'{MARK}(steps="3:8", step_time="50ms", exposed_communication_ratio=0.2)',
    )
    config.stash[_STATE] = _State(config)
    config.pluginmanager.register(config.stash[_STATE], "tracekit-state")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove our folder if it is empty."""
    state = config.stash.get(_STATE, None)
    if state is not None:
        state.close()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Read the marks of tests: what is wrong with one is an error of collection."""
    collected = yield
    for item in collected if isinstance(collected, list) else [collected]:
        if isinstance(item, pytest.Item) and item.get_closest_marker(MARK):
            item.stash[_BUDGET] = _trace_budget(item)
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Read the marks of tests that are made elsewhere, such as those of unittest."""
    for item in items:
        if _BUDGET not in item.stash and item.get_closest_marker(MARK):
            try:
                item.stash[_BUDGET] = _trace_budget(item)
            except pytest.Collector.CollectError as error:
                raise pytest.UsageError(str(error)) from None


@pytest.fixture
def trace_run(request: pytest.FixtureRequest) -> "TraceRun":
    """The recording of this test: `step`, `span`, and `run`, the loaded tracekit.Run, which ends it."""
    return _recording(request.node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Record the test's body, and judge it."""
    budget = item.stash.get(_BUDGET, None)
    if budget is None and _RECORDING not in item.stash:
        return (yield)
    recording = _recording(item)
    item.stash[_JUDGED] = None
    try:
        recording.begin()
        result = yield
    finally:
        recording.stop()
    if budget is not None:
        from tracekit.testing import verdict

        budget_verdict = verdict.judge(recording, budget, item.nodeid, settings_from=item.path.parent)
        item.stash[_JUDGED] = budget_verdict.row
        if budget_verdict.failure:
            pytest.fail(budget_verdict.failure, pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give the report of a recorded test its row of the summary."""
    report = yield
    if call.when == "call" and _RECORDING in item.stash:
        item.stash[_FAILED] = report.failed
        row = item.stash.get(_JUDGED, None)
        if row is not None:
            vars(report)[_ROW] = {**row, "failed": report.failed}
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Close the recording, and remove its files unless --trace-keep keeps them."""
    try:
        return (yield)
    finally:
        recording = item.stash.get(_RECORDING, None)
        if recording is not None:
            recording.close()
            keep = item.config.getoption("--trace-keep")
            if keep == "none" or (keep == "failed" and not item.stash.get(_FAILED, False)):
                shutil.rmtree(recording.folder, ignore_errors=True)
            del item.stash[_RECORDING]


class _State:
    """What a session of pytest remembers: where runs go, and the rows of the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._given = config.getoption("--trace-dir", None)
        self._base = config.invocation_params.dir
        self._own: Path | None = None
        self.rows: list[SummaryRow] = []

    def folder(self, nodeid: str) -> Path:
        """Return a folder that is free for a test's run."""
        root = self._root()
        name = re.sub(r"[^\w.-]+", "-", nodeid.rpartition("/")[2]).strip("-")[:_MAX_NAME]
        name = f"{name}-{hashlib.sha256(nodeid.encode()).hexdigest()[:6]}"
        number = 1
        while True:
            folder = root / (name if number == 1 else f"{name}-{number}")
            if (folder / "run.json").is_file():  # of this very test, from an earlier session
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists() or not any(folder.iterdir()):
                return folder
            number += 1

    def close(self) -> None:
        """Remove the folder that was made for runs, if none is in it."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                self._own.rmdir()

    def _root(self) -> Path:
        if self._given:
            return self._base / str(self._given)
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="pytest-traces-"))
        return self._own

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the row of a report, wherever its test ran."""
        row = vars(report).get(_ROW)
        if row is not None:
            self.rows.append(row)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print all rows; with -q those of failed tests."""
        rows = [row for row in self.rows if row["failed"] or terminalreporter.verbosity >= 0]
        if rows:
            from tracekit.testing import summary

            summary.write(rows, terminalreporter)


_STATE = pytest.StashKey[_State]()
_BUDGET = pytest.StashKey["TraceBudget"]()
_RECORDING = pytest.StashKey["TraceRun"]()
_JUDGED = pytest.StashKey["SummaryRow | None"]()
_FAILED = pytest.StashKey[bool]()


def _trace_budget(item: pytest.Item) -> "TraceBudget":
    from tracekit.errors import TracekitError
    from tracekit.testing import marks

    nearest_last = list(item.iter_markers(MARK))[::-1]
    try:
        return marks.parse_marks([(mark.args, mark.kwargs) for mark in nearest_last])
    except (TracekitError, ValueError) as error:
        raise pytest.Collector.CollectError(f"{item.nodeid}: @pytest.mark.{MARK}: {error}") from None


def _recording(item: pytest.Item) -> "TraceRun":
    if _RECORDING not in item.stash:
        try:
            from tracekit.testing.marks import DEFAULT_STEPS
            from tracekit.testing.recording import TraceRun
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            pytest.fail("a recorded test needs PyTorch: pip install 'torch-tracekit[train]'", pytrace=False)
        budget = item.stash.get(_BUDGET, None)
        folder = item.config.stash[_STATE].folder(item.nodeid)
        item.stash[_RECORDING] = TraceRun(
            folder, steps=budget.steps if budget else DEFAULT_STEPS, settings_from=item.path.parent
        )
    return item.stash[_RECORDING]

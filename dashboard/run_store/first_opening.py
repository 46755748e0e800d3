"""The first opening of a run, which reads and checks all of its traces: in a thread, with its progress.

Pages of other sessions that open the same run wait for the same thread. A page that waits can be left: the work goes
on, and its result is there when the run is opened again.
"""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

import polars as pl
from streamlit.runtime.scriptrunner import add_script_run_ctx, get_script_run_ctx

from tracekit.analysis.time import breakdown
from tracekit.model.run import MeasuredTrace
from tracekit.rules.rule import Finding, Severity

_T = TypeVar("_T")


class FirstOpening(Generic[_T]):
    """A run that is being read and checked."""

    def __init__(self) -> None:
        """Begin now."""
        self.began_s = time.monotonic()
        self.read_traces, self.traces = 0, 0
        """How many traces were read so far, and how many there are: 0 while that is not known."""
        self.judged_rules, self.rules = 0, 0
        """How many rules have judged the run so far, and how many will: 0 until all traces are read."""
        self.first_claims: list[str] = []
        """What the warnings and errors found so far claim; their costs are known at the end."""
        self._read_bytes, self._bytes, self._read_s = 0, 0, 0.0
        self._steps: list[pl.DataFrame] = []
        self._windows: list[pl.DataFrame] = []
        self._result: Future[_T] = Future()

    def result(self) -> _T:
        """Wait until the work has ended; return its result, or raise its error."""
        return self._result.result()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait until the work has ended, at most `timeout_s`; return whether it has."""
        try:
            self._result.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    def on_progress(self, measured: MeasuredTrace) -> None:
        """Note that a trace was measured. A run may be measured in several passes: the first one counts."""
        if self.traces and self.read_traces == self.traces:
            return
        self.traces, self._bytes = len(measured.sources), sum(source.size_bytes for source in measured.sources)
        self._read_bytes += measured.source.size_bytes
        source = pl.lit(measured.source.window).alias("window"), pl.lit(measured.source.rank).alias("rank")
        for fact, tables in ((breakdown.by_step, self._steps), (breakdown.by_rank, self._windows)):
            if fact in measured.tables:
                tables.append(measured.tables[fact].select(*source, pl.all()))
        self._read_s = time.monotonic()
        self.read_traces += 1

    def on_rule(self, judged_rules: int, rules: int, findings: Sequence[Finding]) -> None:
        """Note that a rule has judged the run."""
        self.first_claims += [finding.claim for finding in findings if finding.severity > Severity.INFO]
        self.judged_rules, self.rules = judged_rules, rules

    @property
    def remaining_s(self) -> float | None:
        """Return about how long it takes to read the rest of the traces; None while none was read.

        That is the time needed so far for each byte of their files, times the bytes of the files not read yet.
        """
        if not self._read_bytes:
            return None
        rest_s = (self._read_s - self.began_s) * (self._bytes - self._read_bytes) / self._read_bytes
        return max(rest_s - (time.monotonic() - self._read_s), 0.0)

    @property
    def steps_by_rank(self) -> pl.DataFrame | None:
        """Time breakdown of the ranks read so far, as `breakdown.steps_by_rank`; None while none was read."""
        steps = pl.concat(self._steps).drop_nulls("step") if self._steps else None
        if steps is not None and steps.height:
            return breakdown.sums_of_steps(steps)
        return pl.concat(self._windows) if self._windows else None

    def run(self, work: Callable[[], _T]) -> None:
        """Do the work in this thread."""
        try:
            self._result.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised where the result is used
            self._result.set_exception(error)


_openings: dict[Hashable, FirstOpening[object]] = {}
_lock = threading.Lock()


def under_way(key: Hashable) -> FirstOpening[object] | None:
    """Return the opening of this key that is under way; None if there is none."""
    with _lock:
        return _openings.get(key)


def start(key: Hashable, work: Callable[[], _T]) -> FirstOpening[_T]:
    """Return the opening of this key that is under way, or start it in a thread of this session."""
    with _lock:
        running = _openings.get(key)
        if running is not None:
            return running  # type: ignore[return-value]  # the key determines the type
        opening: FirstOpening[_T] = FirstOpening()
        _openings[key] = opening  # type: ignore[assignment]

    def open_run() -> None:
        try:
            opening.run(work)
        finally:
            with _lock:
                del _openings[key]

    thread = threading.Thread(target=open_run, name="tracekit-first-opening", daemon=True)
    add_script_run_ctx(thread, get_script_run_ctx())  # the work looks up which files of the run this session has seen
    thread.start()
    return opening

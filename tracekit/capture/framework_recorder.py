"""What the adapters for frameworks share: a recorder that follows a loop which somebody else runs."""

import atexit
import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.profiler import record_function

from tracekit import conventions
from tracekit.capture import atomic_files
from tracekit.capture.metrics import Number
from tracekit.capture.recorder import Recorder

EVALUATION = "evaluation"  # a span like those of the phases, but no part of a step


class FrameworkRecorder:
    """A recorder that a framework's callbacks drive: begun and ended by them, told each turn that the loop takes.

    `options` are those of `Recorder`; what its `manifest` says wins over what the framework tells. Raises what
    `Recorder` raises for options that make no sense, at once, not when the training begins.
    """

    def __init__(self, out: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        Recorder(out, first_step=0, **options)  # only to have wrong options refused now
        self._out = out
        self._options = dict(options)
        self._recorder: Recorder | None = None
        self._span: contextlib.AbstractContextManager[Any] | None = None
        self._phase: str | None = None
        self._phase_start_ns = 0  # when the present phase began
        self._step_start_ns = 0  # when the present step began
        self._evaluation_ns = 0  # what of the present step was none
        self._phase_start_cpu_ns = self._step_start_cpu_ns = self._evaluation_cpu_ns = (
            0  # the same of the time that processors ran
        )
        self.abandoned = False

    @property
    def recording(self) -> bool:
        """Return whether a recording has begun and not ended."""
        return self._recorder is not None

    def begin(self, first_step: int, describe_run: Callable[[], Mapping[str, Any]]) -> None:
        """Begin a recording at optimizer step `first_step`; end an earlier one that was left open.

        `about` gives what the framework knows of the run, for the manifest. Where it raises, the manifest lacks that.
        """
        self.end()
        manifest = self._options.get("manifest") or {}
        try:
            manifest = {**describe_run(), **manifest}
        except Exception as error:  # noqa: BLE001 a run without it is still worth recording
            atomic_files.report_failure("what the framework knows of the run is not recorded", error)
        recorder = Recorder(self._out, first_step=first_step, **{**self._options, "manifest": manifest})
        recorder.__enter__()
        self._recorder = recorder
        atexit.register(self.end)  # a training that raises ends no callback
        self._phase, self._evaluation_ns, self._evaluation_cpu_ns = None, 0, 0
        self._step_start_ns = self._phase_start_ns = time.perf_counter_ns()
        self._step_start_cpu_ns = self._phase_start_cpu_ns = time.process_time_ns()

    def end(self) -> None:
        """End the recording, if there is one."""
        atexit.unregister(self.end)
        self._close_span()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)

    def enter_phase(self, phase: str | None, *, previous: str | None = None) -> None:
        """Tell that the loop turns to another phase, or to none; and what it did before, where that was not known."""
        if self._recorder is None:
            return
        self._close_span()
        now_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        previous = previous or self._phase
        if previous == EVALUATION:
            self._evaluation_ns += now_ns - self._phase_start_ns
            self._evaluation_cpu_ns += cpu_ns - self._phase_start_cpu_ns
        elif previous == conventions.DATA:
            self._recorder.add_data_wait(now_ns - self._phase_start_ns)
        self._phase, self._phase_start_ns, self._phase_start_cpu_ns = phase, now_ns, cpu_ns
        if phase is not None:
            self._span = record_function(conventions.span_name(phase))  # not recorder.span: was it data? that turns out
            self._span.__enter__()

    def step(self, metrics: Mapping[str, Number], *, tokens: int | None, last: bool = False) -> None:
        """Tell that an optimizer step ends. Evaluation since the one before counts neither to its time nor speed."""
        if self._recorder is None:
            return
        self.enter_phase(None)
        row = dict(metrics)
        if self._evaluation_ns:
            own_ns = max(1, time.perf_counter_ns() - self._step_start_ns - self._evaluation_ns)
            row[conventions.STEP_TIME_METRIC] = own_ns
            row[conventions.CPU_TIME_METRIC] = (
                time.process_time_ns() - self._step_start_cpu_ns - self._evaluation_cpu_ns
            )
            if tokens is not None:
                row[conventions.TOKENS_METRIC] = tokens * 1e9 / own_ns
        self._recorder.step(row, tokens=tokens, last=last)
        self._evaluation_ns = self._evaluation_cpu_ns = 0
        self._step_start_ns = self._phase_start_ns = time.perf_counter_ns()
        self._step_start_cpu_ns = self._phase_start_cpu_ns = time.process_time_ns()

    def abandon(self, error: BaseException) -> None:
        """Say that following failed, and end the recording for good."""
        self.abandoned = True
        atomic_files.report_failure("recording ends: the training could not be followed", error)
        with contextlib.suppress(Exception):
            self.end()

    def _close_span(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)


def never_raises(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a callback's method made such that it never raises: what fails in it ends the recording.

    The callback has its FrameworkRecorder under `recorder`.
    """

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.recorder.abandoned:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 whatever fails here, the training goes on
            self.recorder.abandon(error)

    return call

"""What the framework adapters share: a recorder driven by the callbacks of a framework's loop."""

import atexit
import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.profiler import record_function

from tracekit import conventions
from tracekit.capture import notices
from tracekit.capture.metrics import Number
from tracekit.capture.recorder import Recorder


class FrameworkRecorder:
    """A recorder that a framework's callbacks drive: they begin it, end it, and announce each phase of the loop.

    `options` are those of `Recorder`; its `manifest` overrides what the framework reports. Invalid options raise here
    what `Recorder` raises, not when the training begins.
    """

    def __init__(self, out: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        Recorder(out, first_step=0, **options)  # raises for invalid options now
        self._out = out
        self._options = dict(options)
        self._recorder: Recorder | None = None
        self._span: contextlib.AbstractContextManager[Any] | None = None
        self._phase: str | None = None
        self._phase_start_ns = 0  # when the current phase began
        self._step_start_ns = 0  # when the current step began
        self._evaluation_ns = 0  # evaluation within the current step
        self._phase_start_cpu_ns = self._step_start_cpu_ns = self._evaluation_cpu_ns = 0  # the same in CPU time
        self.abandoned = False

    @property
    def recording(self) -> bool:
        """Return whether a recording has begun and not ended."""
        return self._recorder is not None

    def begin(self, first_step: int, describe_run: Callable[[], Mapping[str, Any]]) -> None:
        """Begin a recording at optimizer step `first_step`; end an earlier one that is still open.

        `describe_run` returns what the framework knows about the run, for the manifest, which lacks it if that raises.
        """
        self.end()
        manifest = self._options.get("manifest") or {}
        try:
            manifest = {**describe_run(), **manifest}
        except Exception as error:  # noqa: BLE001 a run without it is still worth recording
            notices.report_failure("the framework's description of the run is not recorded", error)
        recorder = Recorder(self._out, first_step=first_step, **{**self._options, "manifest": manifest})
        recorder.__enter__()
        self._recorder = recorder
        atexit.register(self.end)  # a training that raises calls no end callback
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
        """Enter another phase, or none; `previous` names the phase before where that was not known until now."""
        if self._recorder is None:
            return
        self._close_span()
        now_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        previous = previous or self._phase
        if previous == conventions.EVALUATION:
            self._evaluation_ns += now_ns - self._phase_start_ns
            self._evaluation_cpu_ns += cpu_ns - self._phase_start_cpu_ns
        elif previous == conventions.DATA:
            self._recorder.add_data_wait(now_ns - self._phase_start_ns)
        self._phase, self._phase_start_ns, self._phase_start_cpu_ns = phase, now_ns, cpu_ns
        if phase is not None:
            self._span = record_function(
                conventions.span_name(phase)
            )  # not recorder.span: whether it was data is known later
            self._span.__enter__()

    def step(self, metrics: Mapping[str, Number], *, tokens: int | None, last: bool = False) -> None:
        """End an optimizer step. Evaluation since the previous one counts neither in its time nor in its speed."""
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
            row[conventions.PROCESSOR_WAIT_METRIC] = None
            if tokens is not None:
                row |= conventions.throughput(tokens, own_ns, ranks=self._recorder.world_size)
        self._recorder.step(row, tokens=tokens, last=last)
        self._evaluation_ns = self._evaluation_cpu_ns = 0
        self._step_start_ns = self._phase_start_ns = time.perf_counter_ns()
        self._step_start_cpu_ns = self._phase_start_cpu_ns = time.process_time_ns()

    def abandon(self, error: BaseException) -> None:
        """Report that the adapter failed, and end the recording for good."""
        self.abandoned = True
        notices.report_failure("recording ends: the framework's callbacks failed", error)
        with contextlib.suppress(Exception):
            self.end()

    def _close_span(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)


def never_raises(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a callback's method so that it never raises: a failure ends the recording.

    The callback has its FrameworkRecorder under `recorder`.
    """

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.recorder.abandoned:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 whatever fails here, the training continues
            self.recorder.abandon(error)

    return call

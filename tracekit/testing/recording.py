"""TraceRun: the recording of one test, and the run that it leaves."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.capture.launch_settings import Settings
from tracekit.capture.launcher import launch
from tracekit.capture.recorder import WARMUP_STEPS, Recorder
from tracekit.capture.step_inference import OptimizerSteps
from tracekit.cli import settings_file
from tracekit.errors import InputError
from tracekit.library import run as library
from tracekit.library.run import Run


class TraceRun:
    """Records a test's training loop. Steps end where an optimizer steps, or where the test calls `step`.

    With the mark ``trace_budget`` or this fixture, the recording begins before the test's body; `record` starts another
    for a block. `run` ends it and gives what was recorded, for the test's own assertions.
    """

    def __init__(self, folder: Path, *, steps: tuple[int, int], settings_from: Path | None = None) -> None:
        """Record to a folder; the devices of the settings file nearest to `settings_from` count in `run`."""
        self.folder = folder
        self._settings_from = settings_from
        self.steps = steps
        self._recorder: Recorder | None = None
        self._watched: OptimizerSteps | None = None
        self._run: Run | None = None
        self._steps_by_test = False  # the test says itself where steps end
        self._seen_since = False  # a step that an optimizer ended since the test last said so
        self._steps_done = 0
        self._of_ranks = False

    @property
    def steps_done(self) -> int:
        """Number of steps seen since the recording began."""
        return self._recorder.steps_done if self._recorder is not None else self._steps_done

    @property
    def run(self) -> Run:
        """Recorded run, loaded; this ends the recording.

        Raises InputError where the steps that were to be recorded were not all seen, and ConfigError where the settings
        file states devices that cannot be used.
        """
        self.stop()
        if self._run is None:
            self._require_steps()
            self._run = library.load(
                str(self.folder), cache=False, **vars(settings_file.nearest_read_settings(self._settings_from))
            )
        return self._run

    def step(self, metrics: Mapping[str, float] | None = None, *, tokens: int | None = None) -> None:
        """End a training step. From the first call on, steps of optimizers are not counted any more."""
        first, self._steps_by_test = not self._steps_by_test, True
        if first and self._seen_since:
            return  # the optimizer's step, which was counted, was a part of this one
        if self._recorder is not None:
            self._recorder.step(metrics, tokens=tokens)

    def span(self, phase: str) -> contextlib.AbstractContextManager[Any]:
        """Mark a block as a phase of the step: data, forward, backward, clip, optimizer or checkpoint."""
        return self._recorder.span(phase) if self._recorder is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def record(self, steps: str | None = None) -> Iterator["TraceRun"]:
        """Record the block in place of the test's body; `steps` such as "3:8" count from where it begins."""
        self.close()
        self._forget(steps)
        self.begin()
        try:
            yield self
        finally:
            self.stop()

    @contextlib.contextmanager
    def ranks(self, steps: str | None = None) -> Iterator["TraceRun"]:
        """Record the trainings of Python processes started in the block, in place of this process.

        They are recorded as by ``tracekit record``: what is started by subprocess, torchrun or multiprocessing's spawn.
        """
        self.close()
        self._forget(steps)
        self._of_ranks = True
        first, end = self.steps
        with tempfile.TemporaryDirectory(prefix="tracekit-") as place:
            (Path(place) / "notes").mkdir()
            launched = Settings(
                out=str(self.folder.absolute()),
                launch=launch.new_name(),
                notes=str(Path(place) / "notes"),
                scratch=place,
                steps=f"{first}:{end}",
                warmup=min(WARMUP_STEPS, first),
            )
            with _environment(launch.environment(launched)):
                yield self

    def begin(self) -> None:
        """Begin to record."""
        first, _ = self.steps
        self._recorder = Recorder(
            self.folder, steps=self.steps, warmup=min(WARMUP_STEPS, first), manifest={"recorded_by": "pytest"}
        )
        self._recorder.__enter__()
        self._watched = OptimizerSteps(self._step_of_optimizer)
        self._watched.watch()

    def stop(self) -> None:
        """End the recording, and wait until it is written."""
        if self._watched is not None:
            self._watched.remove()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._steps_done = recorder.steps_done
            recorder.__exit__(None, None, None)

    def close(self) -> None:
        """End the recording and let go of what was read of it."""
        self.stop()
        self._run = None

    def _step_of_optimizer(self) -> None:
        if not self._steps_by_test and self._recorder is not None:
            self._seen_since = True
            self._recorder.step()

    def _forget(self, steps: str | None) -> None:
        """Start another recording, in an unused folder."""
        from tracekit.testing import marks

        if steps is not None:
            self.steps = marks.parse_marks([((), {"steps": steps})]).steps
        number, name = 2, self.folder.name
        while self.folder.exists() and any(_traces(self.folder)):
            self.folder, number = self.folder.with_name(f"{name}-{number}"), number + 1
        if self.folder.exists():
            for path in self.folder.iterdir():
                path.unlink()
        self._steps_by_test = self._seen_since = self._of_ranks = False
        self._steps_done = 0

    def _require_steps(self) -> None:
        """Raise InputError, with the likely reason, unless all steps that were to be recorded are recorded."""
        first, end = self.steps
        demand = f"steps {first}:{end} were to be recorded"
        has_traces = any(_traces(self.folder))
        if self._of_ranks and not has_traces:
            raise InputError(
                f"{demand} in processes that the test starts, and none was: their optimizers made "
                "fewer steps, or they were not started by subprocess or spawn"
            )
        if has_traces and (self._of_ranks or self._steps_done >= end):
            return
        if conventions.RECORD_VARIABLE in os.environ and not has_traces:
            raise InputError("pytest itself is recorded by tracekit record, and torch has one profiler only")
        if self._steps_done >= end:
            raise InputError(f"{demand}, and were not: stderr says why")
        seen = f"the test made {self._steps_done}" if self._steps_done else "the test made none of them"
        hint = "trace_run.step() ends a step where no torch optimizer does"
        if self._watched is not None and (unseen := self._watched.unseen):
            hint = (
                f"{unseen} optimizer steps were inside of backward or on other threads: call trace_run.step() instead"
            )
        elif not self._steps_done:
            hint += ", and processes that the test starts are recorded in a block: with trace_run.ranks()"
        raise InputError(f"{demand}, but {seen}: {hint}")


def _traces(folder: Path) -> Iterator[Path]:
    return folder.glob("*" + conventions.TRACE_SUFFIX)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

"""An attempt at a job: a start of its training, which resumes from a checkpoint of an earlier one or begins anew."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracekit.model.intervals import EMPTY, Spans


@dataclass(frozen=True)
class CheckpointCall:
    """A save or load of an attempt, on the thread that trains; Unix times in ns."""

    path: str
    """The checkpoint's path, or its name where the log does not state the path."""
    step: int | None
    """Optimizer steps that the checkpoint contains, counted as its attempt counts; None where unknown."""
    start_ns: int
    end_ns: int
    """When the training goes on."""
    complete_ns: int
    """When all is written; later than `end_ns` for a save in the background."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """What one attempt did and when, in Unix ns; None where the log does not state it.

    `step_spans` are its optimizer steps, one row [begin, end) each in order, and `step_numbers` count these as the
    recorder does: from 0 over the whole training, or from 0 in each process where it does not know of a resume.
    """

    folder: str
    begin_ns: int
    """The recording begins: the training is ready for its first step."""
    has_begun: bool = True
    """False for a command that exited before its training began; its `first_step` says nothing."""
    first_step: int = 0
    world_size: int = 1
    process_start_ns: int | None = None
    launched_ns: int | None = None
    step_spans: Spans = field(default_factory=lambda: EMPTY)
    step_numbers: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    loop_end_ns: int | None = None
    error: str | None = None
    """Type of the exception that ended the training's loop."""
    exit_ns: int | None = None
    failed_ns: int | None = None
    """The first rank exited with an error."""
    exit_code: int | None = None
    exit_reason: str | None = None
    saves: tuple[CheckpointCall, ...] = ()
    loads: tuple[CheckpointCall, ...] = ()
    hang: str | None = None
    """The verdict on the dumps that its ranks left."""

    @property
    def launch_ns(self) -> int:
        """Earliest time at which a log shows that the attempt ran."""
        times = (self.begin_ns, self.process_start_ns, self.launched_ns)
        return min(time_ns for time_ns in times if time_ns is not None)

    @property
    def last_evidence_ns(self) -> int:
        """Latest time at which a log shows that the attempt ran or exited."""
        times = [self.begin_ns, self.loop_end_ns, self.failed_ns, self.exit_ns]
        times += [int(self.step_spans[-1, 1])] if len(self.step_spans) else []
        times += [call.end_ns for call in (*self.saves, *self.loads)]
        return max(time_ns for time_ns in times if time_ns is not None)

    @property
    def has_failed(self) -> bool:
        """Whether it ended by an error, a signal or a kill, which leaves neither an end of its loop nor exit code 0."""
        if self.error is not None or self.exit_code not in (None, 0):
            return True
        return self.loop_end_ns is None and self.exit_code is None

"""Recorder: a training loop's own profiler, metrics log and manifest, written as one run folder."""

import contextlib
import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import distributed
from torch.profiler import record_function

from tracekit import conventions
from tracekit.capture import notices, window_profiler
from tracekit.capture.attempts import AttemptsLog
from tracekit.capture.checkpoints.dcp import record_save
from tracekit.capture.checkpoints.recording import Recording
from tracekit.capture.collective_waits import CollectiveWaits
from tracekit.capture.device_metrics import DeviceMetrics
from tracekit.capture.manifest import ManifestFile
from tracekit.capture.metrics import MetricsLog, Number, Pending, ProcessorWait, StepTimer, allocator_counters
from tracekit.capture.perturbation import Perturbation, delayed_ranks
from tracekit.capture.perturbed_places import DELAY_RATIO, parse_places
from tracekit.capture.profiler_session import ProfilingOptions
from tracekit.capture.rank_info import this_rank, this_world_size
from tracekit.capture.slow_steps import REST_STEPS, SlowSteps
from tracekit.capture.uploader import RunUpload
from tracekit.capture.window_profiler import WindowProfiler
from tracekit.capture.window_schedule import Window, WindowRequests, WindowSchedule, parse_steps, peers
from tracekit.conventions import object_storage

DEFAULT_STEPS = "10:15"
WARMUP_STEPS = 2


class Recorder:
    """Records one rank of a training: traces of windows of steps, a line of metrics per step, checkpoint logs.

    Create it after the process group, and call `step` at the end of each optimizer step:

        with Recorder("runs/today", steps="10:15") as recorder:
            for batch in batches:
                with recorder.span("forward"):
                    loss = model(batch)
                …
                recorder.step(metrics={"loss": loss.item()}, tokens=batch.numel() * world_size)

    A failure of the recording never stops the training: one line on stderr reports it, and that part of the recording
    ends.

    Args:
        out: The run's folder, or a URL such as s3://bucket/run. With a URL, files are recorded into a local folder,
            uploaded in the background after each window, and removed.
        steps: The window of steps to profile, half-open, counted from the creation of this recorder: "10:15", or
            (10, 15), is its 11th to 15th step. None profiles only windows that are requested while it runs (touch the
            file ``record.now`` in the run).
        every: After how many steps another window of that length follows; None: there is one window.
        warmup: For how many steps the profiler warms up before each window.
        first_step: How many optimizer steps were done before. The trace marks optimizer step N as ``ProfilerStep#N``.
        mid_step: Whether the first step has begun already, so that its time is not logged.
        rank: The rank that is recorded; by default that of the process group or the launcher.
        world_size: The number of ranks; by default that of the process group or the launcher.
        role: What this process does in a job of several programs, such as "trainer" or "rollout"; by default that of
            TRACEKIT_ROLE or ``torchrun --role``. Each role needs a folder of its own: RUN/trainer, RUN/rollout.
        leads: Whether this rank writes the manifest and answers requests; by default, rank 0 does.
        device: "cuda" or "cpu"; by default "cuda" if available.
        memory: Whether the trace contains allocations.
        stacks: Whether the trace contains Python stacks.
        shapes: Whether the trace contains the input shapes of operators; by default on the CPU only.
        modules: Whether the trace contains a span for each forward call of a module.
        snapshot: Whether the CUDA allocator's history of each window is written.
        device_metrics: Whether the metrics contain the GPU's clocks (MHz), power (W), temperature (°C), throttle
            reasons and memory errors.
        scratch: A folder, such as one on a local disk, to which traces are written first.
        on_outlier: How many windows a day may be opened because steps of a rank are slow again and again, or for long;
            they are on that rank and its neighbours. 0: none.
        perturb: Places, such as ("data", "forward"), before which small delays are injected in some steps, to measure
            how much each delays the training; "all" are `conventions.PERTURBED_PLACES`.
        perturb_ratio: The length of a delay over the median step, at most 0.05; no delay is longer than 5 ms.
        perturb_ranks: The ranks that are delayed; by default up to 8, evenly spaced.
        disk_budget_bytes: The most that the traces of the run take: the oldest windows except the first are removed.
            With a URL, the most that waits to be uploaded.
        manifest: Fields of ``run.json`` (strategy, mesh, model, arguments). Secrets are redacted.

    Raises:
        ValueError: `steps`, `perturb` or `perturb_ratio` is invalid, or `on_outlier` is negative.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | RunUpload,
        *,
        steps: str | tuple[int, int] | None = DEFAULT_STEPS,
        every: int | None = None,
        warmup: int = WARMUP_STEPS,
        first_step: int = 0,
        mid_step: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        role: str | None = None,
        leads: bool | None = None,
        device: str | None = None,
        memory: bool = True,
        stacks: bool = False,
        shapes: bool | None = None,
        modules: bool = False,
        snapshot: bool = False,
        device_metrics: bool = False,
        scratch: str | os.PathLike[str] | None = None,
        disk_budget_bytes: int | None = None,
        on_outlier: int = 0,
        perturb: Iterable[str] = (),
        perturb_ratio: float = DELAY_RATIO,
        perturb_ranks: Iterable[int] | None = None,
        manifest: Mapping[str, Any] | None = None,
    ) -> None:
        out = object_storage.without_file_scheme(out) if isinstance(out, str) else out
        if isinstance(out, str) and object_storage.is_url(out):
            out = RunUpload.to(out, scratch)
        self._upload = out if isinstance(out, RunUpload) else None
        self.folder = out.folder if isinstance(out, RunUpload) else Path(out)
        self.rank = this_rank() if rank is None else rank
        self._step_time: Pending | int | None = None  # of the last step, in ns
        self._leads = self.rank == 0 if leads is None else leads
        self._manifest_fields = {**(manifest or {}), **({} if role is None else {"role": role})}
        self._world_size = world_size
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._step = self._first_step = first_step
        self._windows, self._length = _windows(steps, every, first_step)
        self._warmup = warmup
        self._disk_budget_bytes = disk_budget_bytes
        if self._upload is not None and disk_budget_bytes is not None:
            self._upload.max_bytes = disk_budget_bytes
        # On a GPU the collectives' kernels carry their sizes; on the CPU only the shapes of ops do.
        shapes = self._device == "cpu" if shapes is None else shapes
        scratch_folder = Path(scratch) if scratch is not None else None
        options = ProfilingOptions(self._device, memory, stacks, shapes, snapshot, warmup, scratch_folder, modules)
        require_room = self._upload.require_room if self._upload is not None else None
        self._profiler = WindowProfiler(
            self.folder, self.rank, self._windows, options, written=self._on_written, require_room=require_room
        )
        self._requests: WindowRequests | None = None
        if on_outlier < 0:
            raise ValueError(f"on_outlier is a number of windows a day, not {on_outlier}: use 0 for none")
        self._outlier_windows = on_outlier
        self._slow_steps = SlowSteps(self.rank) if on_outlier else None
        self._perturbation = Perturbation(
            parse_places(perturb), folder=self.folder, rank=self.rank, delay_ratio=perturb_ratio,
            ranks=delayed_ranks(self.world_size) if perturb_ranks is None else tuple(perturb_ranks),
        )  # fmt: skip
        self._is_perturbed = self._perturbation.is_on
        self._collective_waits: CollectiveWaits | None = None
        self._explained_steps: deque[int] = deque()  # whose time says nothing: they save or are profiled
        self._operation_count = 0
        self._manifest: ManifestFile | None = None
        self._metrics: MetricsLog | None = None
        self._attempts: AttemptsLog | None = None
        self._device_metrics = DeviceMetrics(self.rank) if device_metrics else None
        self._data_wait_ns: int | None = None
        self._mid_step = mid_step
        self._timer = StepTimer(self._device)
        self._began_ns = self._began_cpu_ns = 0
        self._processor_wait = ProcessorWait()
        self._began_wait_ns: int | None = None
        self._ended_wait_ns: int | None = None
        # The step's time, CPU time and end, if evaluation followed.
        self._ended: tuple[Pending | int | None, int, int] | None = None
        # Made once: each step enters them.
        self._metrics_guard = self._guard("metrics are no longer recorded", self._drop_metrics)
        self._attempts_guard = self._guard("attempts are no longer recorded", self._drop_attempts)
        self._timer_guard = self._guard("the step's time is not recorded", self._timer.skip)

    @property
    def step_time(self) -> Pending | None:
        """Time of the last step, in ns; None if it is unknown."""
        took = self._step_time
        return Pending(None, lambda: took) if isinstance(took, int) else took

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return this_world_size() if self._world_size is None else self._world_size

    @property
    def steps_done(self) -> int:
        """Optimizer steps done, those before this recording included."""
        return self._step

    def __enter__(self) -> "Recorder":  # noqa: PYI034 typing.Self is not in Python 3.10
        reference = weakref.ref(self)

        def leave_to_parent() -> None:
            if (recorder := reference()) is not None:
                recorder._leave_to_parent()

        os.register_at_fork(after_in_child=leave_to_parent)
        with self._guard("the run folder cannot be written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._leads:
                self._manifest = ManifestFile(
                    self.folder, self._manifest_fields, device=self._device, world_size=self._world_size
                )
                self._manifest.write()
        if self._leads:
            with self._guard("attempts are not recorded"):
                self._attempts = AttemptsLog(self.folder, first_step=self._first_step, world_size=self.world_size)
        if self._upload is not None:
            with self._guard(f"nothing is uploaded to {self._upload.url}"):
                self._upload.begin(self.rank, leads=self._leads)
        with self._guard("metrics are not recorded"):
            path = self.folder / conventions.rank_file(self.rank, conventions.METRICS_SUFFIX)
            has_judge = self._slow_steps is not None or self._perturbation.is_on
            self._metrics = MetricsLog(path, first_step=self._first_step, on_row=self._judge if has_judge else None)
        with self._guard("windows cannot be requested"):
            self._requests = WindowRequests(
                self.folder,
                self._windows,
                length=self._length,
                warmup=self._warmup,
                leads=self._leads,
                rank=self.rank,
                outlier_windows=self._outlier_windows,
            )
        with self._guard("waits for collectives are not recorded"):
            # On a GPU the host waits for no collective.
            if self._device == "cpu" and distributed.is_available() and distributed.is_initialized():
                self._collective_waits = CollectiveWaits()
        self._perturbation.install()
        self._profiler.begin(self._step)
        self._begin_step()
        if self._mid_step:
            self._timer.skip()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slow_steps = None  # a window that is requested now would be the next training's
        self._perturbation.close()
        self._profiler.stop(self._step)
        self._profiler.finish()
        if self._metrics is not None:
            with self._guard("the metrics log is incomplete"):
                self._metrics.close()
            self._metrics = None
        if self._attempts is not None:
            with self._guard("the attempts log is incomplete"):
                self._attempts.end(None if kind is None else kind.__name__)
            self._attempts = None
        self._processor_wait.close()
        if self._device_metrics is not None:
            self._device_metrics.close()
        if self._upload is not None:
            with self._guard("the upload is incomplete"):
                self._upload.finish()

    def describe(self, more: Mapping[str, Any]) -> None:
        """Add to ``run.json`` what became known during training, secrets redacted. The leading rank writes it."""
        if self._manifest is not None:
            with self._guard("the manifest was not written"):
                self._manifest.describe(more)

    def span(self, phase: str) -> contextlib.AbstractContextManager[Any]:
        """Mark a block as a phase of the step, one of `conventions.PHASES`, in the trace.

        The time in ``data`` is also in the metrics, as the step's data wait.
        """
        self.reach(phase)
        span: contextlib.AbstractContextManager[Any] = record_function(conventions.span_name(phase))
        return self._timed_data_wait(span) if phase == conventions.DATA else span

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Mark a block as evaluation; call it where a step ends, right before `step`.

        In the trace the block lies between that step and the next one. No step's time includes it.
        """
        if self._ended is None:
            self._ended = self._timer.end(), time.process_time_ns(), time.perf_counter_ns()
        self._profiler.end_mark()
        with record_function(conventions.span_name(conventions.EVALUATION)):
            yield

    @contextlib.contextmanager
    def checkpoint(
        self, writer: Any, planner: Any = None, *, checkpoint: str, step: int | None = None, blocking: bool = True
    ) -> Iterator[None]:
        """Record the distributed-checkpoint save in this block: `record_save`, into this run."""
        with record_save(
            self.folder, writer, planner, checkpoint=checkpoint, step=step, rank=self.rank, blocking=blocking
        ):
            yield

    def reach(self, place: str) -> None:
        """Inject the delay of this step if it is due at a place, one of `conventions.PERTURBED_PLACES`.

        `span` and hooks of torch call it; call it yourself before a place that they do not see.
        """
        self._perturbation.reach(place)

    def add_data_wait(self, wait_ns: int) -> None:
        """Add to the current step's data wait."""
        self._data_wait_ns = (self._data_wait_ns or 0) + wait_ns

    def step(
        self,
        metrics: Mapping[str, Number | torch.Tensor] | None = None,
        *,
        tokens: int | None = None,
        last: bool = False,
    ) -> None:
        """End an optimizer step: log its metrics and move the profiler on.

        `tokens`, those of all ranks in this step, become tokens_per_second (of all ranks) and
        tokens_per_second_per_gpu. A metric may be a tensor of one element, or a function: it is called at the end of
        the next step, or of the recording, in that step's time: it may wait for the device. Writing a trace counts in
        no step's time. No further step is marked in the trace after the `last` one.

        On a GPU the step's time is the device's, and a window begins once the device has done what is queued.
        """
        if self._metrics is not None:
            with self._metrics_guard:
                self._metrics.collect()
        ended_ns = time.perf_counter_ns() if self._ended is None else self._ended[2]
        row = self._row(tokens)
        if self._is_perturbed:
            row |= self._perturbation.end_step()
        if self._attempts is not None:
            with self._attempts_guard:
                self._attempts.add_step(self._began_ns, ended_ns)
        if self._metrics is not None:
            with self._metrics_guard:
                counters = self._device_metrics.take() if self._device_metrics is not None else {}
                self._metrics.add({**row, **(metrics or {}), **allocator_counters(), **counters})
        is_disturbed, is_quiet = False, self._is_quiet(last=last)
        if not is_quiet:
            is_disturbed = self._profiler.disturbs_steps
            self._note_explained_step(is_disturbed=is_disturbed)
            self._profiler.end(self._step)
        self._step += 1
        if not is_quiet:
            if not last:
                self._poll_requests()
                self._profiler.begin(self._step)
            is_disturbed |= self._profiler.disturbs_steps
        if self._is_perturbed:
            self._perturbation.begin_step(self._step, is_disturbed=is_disturbed)
        self._begin_step(wait_ns=None if is_disturbed else self._ended_wait_ns)

    def end_window(self, why: str) -> None:
        """End the window that is being recorded early, if there is one, and report why."""
        self._profiler.stop(self._step, why)

    def _begin_step(self, *, wait_ns: int | None = None) -> None:
        """Begin a step; `wait_ns` is what its thread has waited for a processor, None if that is to be read."""
        with self._timer_guard:
            self._timer.begin()
        self._began_ns = time.perf_counter_ns()
        self._began_cpu_ns = time.process_time_ns()
        self._began_wait_ns = self._processor_wait.read() if wait_ns is None else wait_ns

    def _row(self, tokens: int | None) -> dict[str, Number]:
        row: dict[str, Number] = {"step": self._step}
        if self._world_size is None:
            self._world_size = this_world_size()  # from the first step on it is final: to ask in each step takes longer
        took, ended_cpu_ns, _ = self._ended or (self._timer.end(), time.process_time_ns(), 0)
        self._ended_wait_ns = ended_wait_ns = self._processor_wait.read() if self._ended is None else None
        self._ended, self._step_time = None, took
        if took is not None:
            row[conventions.STEP_TIME_METRIC] = took
            row[conventions.CPU_TIME_METRIC] = ended_cpu_ns - self._began_cpu_ns
            if ended_wait_ns is not None and self._began_wait_ns is not None:
                row[conventions.PROCESSOR_WAIT_METRIC] = ended_wait_ns - self._began_wait_ns
            if tokens is not None and isinstance(took, Pending):
                for name in (conventions.TOKENS_METRIC, conventions.TOKENS_PER_GPU_METRIC):
                    row[name] = took.map(functools.partial(_throughput, name, tokens, self._world_size))
            if tokens is not None and not isinstance(took, Pending):
                row |= conventions.throughput(tokens, took, ranks=self._world_size)
        if self._collective_waits is not None:
            row[conventions.COLLECTIVE_WAIT_METRIC] = self._collective_waits.take()
        if self._data_wait_ns is not None:
            row[conventions.DATA_WAIT_METRIC], self._data_wait_ns = self._data_wait_ns, 0
        return row

    def _is_quiet(self, *, last: bool) -> bool:
        """Whether neither the step that ends nor the next one has to do with a window or a save."""
        is_due = self._requests is not None and self._requests.is_due
        is_saving = Recording.begun_count != self._operation_count
        return not (last or is_due or is_saving) and self._profiler.is_quiet(self._step + 1)

    def _poll_requests(self) -> None:
        requests, slow_steps = self._requests, self._slow_steps
        if requests is None or not requests.is_due or not self._profiler.idle:
            return
        with self._guard("a requested window is not recorded"):
            # The last step may be a slow one, of which fewer would fit into the time until the window.
            step_ns = self._timer.latest_ns if slow_steps is None else slow_steps.step_ns or self._timer.latest_ns
            window = requests.poll(self._step, step_ns)
            if window is not None and slow_steps is not None:
                slow_steps.rest(window.end + REST_STEPS)

    def _note_explained_step(self, *, is_disturbed: bool) -> None:
        operations = Recording.begun_count
        if self._slow_steps is not None and (is_disturbed or operations != self._operation_count):
            self._explained_steps.append(self._step)
        self._operation_count = operations

    def _judge(self, row: Mapping[str, float | None]) -> None:
        if self._slow_steps is not None and self._requests is not None:
            with self._guard("windows no longer open by themselves", self._drop_slow_steps):
                self._judge_step(row, self._slow_steps, self._requests)
        self._perturbation.add_row(row)

    def _judge_step(self, row: Mapping[str, float | None], slow_steps: SlowSteps, requests: WindowRequests) -> None:
        """Request a window if this rank's steps are slow again and again, or for long."""
        step, step_ns = int(row["step"] or 0), row.get(conventions.STEP_TIME_METRIC)
        if not step_ns:
            return
        while self._explained_steps and self._explained_steps[0] < step:
            self._explained_steps.popleft()
        is_explained = bool(self._explained_steps) and self._explained_steps[0] == step
        outlier = slow_steps.add(step, step_ns, None if is_explained else self._judged_ns(row, step_ns))
        if outlier is not None:
            requests.ask(outlier, peers(self.rank, self.world_size))

    def _judged_ns(self, row: Mapping[str, float | None], step_ns: float) -> float:
        """Time of a step without its waits for other ranks, which are judged there, and for a processor.

        A window does not explain why other programs had the processor.
        """
        if self._device != "cpu":  # the step's time is the GPU's, these waits are the host's
            return step_ns
        waits = (conventions.COLLECTIVE_WAIT_METRIC, conventions.PROCESSOR_WAIT_METRIC)
        return step_ns - sum(row.get(name) or 0 for name in waits)

    def _on_written(self, window: Window, steps: int) -> None:
        """Remove old windows beyond the disk budget, and list the rest in the manifest; or upload the window."""
        if self._manifest is not None:
            is_pruned = self._disk_budget_bytes is not None and self._upload is None
            removed = window_profiler.prune(self.folder, self._disk_budget_bytes or 0) if is_pruned else []
            reason = None if window.outlier is None else window.outlier.reason()
            self._manifest.add_window(
                window.number, first_step=window.first, steps=steps, removed=removed, reason=reason
            )
        if self._upload is not None and window.is_recorded:
            with self._guard(f"window {window.number} is not uploaded yet"):
                # This rank's files of the window, of its logs and, if it leads, of the manifest.
                folder = self.folder / conventions.window_folder(window.number) if window.number else self.folder
                suffixes = (conventions.METRICS_SUFFIX + conventions.PARTIAL_SUFFIX, conventions.CHECKPOINT_LOG_SUFFIX)
                run_files = [conventions.rank_file(self.rank, suffix) for suffix in suffixes]
                run_files += [conventions.MANIFEST_FILE, conventions.ATTEMPTS_FILE] if self._leads else []
                suffixes = (conventions.TRACE_SUFFIX, conventions.MEMORY_SNAPSHOT_SUFFIX)
                traces = [folder / conventions.rank_file(self.rank, suffix) for suffix in suffixes]
                self._upload.submit([*traces, *(self.folder / name for name in run_files)])

    @contextlib.contextmanager
    def _timed_data_wait(self, span: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        began_ns = time.perf_counter_ns()
        with span:
            yield
        self.add_data_wait(time.perf_counter_ns() - began_ns)

    def _guard(self, what: str, give_up: Callable[[], None] | None = None) -> "_Guard":
        return _Guard(self.rank, what, give_up)

    def _drop_metrics(self) -> None:
        self._metrics = None
        self._perturbation.close()  # a delay that no log states would be a slow-down

    def _drop_slow_steps(self) -> None:
        self._slow_steps = None

    def _drop_attempts(self) -> None:
        self._attempts = None

    def _leave_to_parent(self) -> None:
        """Record nothing more, in a forked process: files and profiler are its parent's."""
        if self._metrics is not None:
            with contextlib.suppress(OSError, ValueError):
                self._metrics.leave_to_parent()
        self._perturbation.close()
        self._metrics = self._device_metrics = self._upload = self._manifest = self._requests = None
        self._attempts = self._slow_steps = None
        self._profiler.leave_to_parent()


class _Guard:
    """Reports an exception of its block on stderr, calls `give_up`, and lets the training continue.

    A class: a generator takes four times as long, several times in each step.
    """

    __slots__ = ("_give_up", "_rank", "_what")

    def __init__(self, rank: int, what: str, give_up: Callable[[], None] | None) -> None:
        self._rank, self._what, self._give_up = rank, what, give_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        notices.report_failure(f"rank {self._rank}: {self._what}", error)
        if self._give_up is not None:
            self._give_up()
        return True


def _throughput(name: str, tokens: int, ranks: int, took_ns: float) -> float:
    return conventions.throughput(tokens, took_ns, ranks=ranks)[name]


def _windows(steps: str | tuple[int, int] | None, every: int | None, first_step: int) -> tuple[WindowSchedule, int]:
    """Window schedule of a run, and the length of a requested window."""
    first, end = parse_steps(steps or DEFAULT_STEPS) if not isinstance(steps, tuple) else steps
    if steps is None:
        return WindowSchedule(None), end - first
    return WindowSchedule(first_step + first, first_step + end, every=every), end - first

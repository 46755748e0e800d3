"""Recorder: a training loop's own profiler, metrics log and manifest, written as one run folder."""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from tracekit import conventions
from tracekit.capture import files
from tracekit.capture.checkpoint import record_save
from tracekit.capture.manifest import manifest
from tracekit.capture.metrics import MetricsLog, Number, allocator_counters
from tracekit.capture.place import this_rank
from tracekit.capture.redaction import redact
from tracekit.capture.stderr import without_noise


class Recorder:
    """Records one rank of a training: a trace of a window of steps, a line of metrics per step, checkpoint logs.

    Make it once the process group is there, and call `step` at the end of each optimizer step. Of the steps after
    `first_step` (the optimizer steps done before) it lets `wait` pass, warms the profiler up for `warmup`, and
    profiles `active`; `windows` times over. The trace marks optimizer step N, counted from 0, as ``ProfilerStep#N``.
    `manifest` goes into ``run.json`` (strategy, mesh, model, arguments), secrets redacted. `device` is cuda or cpu, by
    default cuda where there is one. `shapes` of operators are recorded by default on the CPU only.

    Nothing that fails in here raises: it is said once on stderr, and that part of the recording ends.

        with Recorder("runs/today", wait=5, warmup=2, active=5) as recorder:
            for batch in batches:
                with recorder.span("forward"):
                    loss = model(batch)
                …
                recorder.step(metrics={"loss": loss.item()}, tokens=batch.numel() * world_size)
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | None = None,
        first_step: int = 0,
        wait: int = 5,
        warmup: int = 2,
        active: int = 5,
        windows: int = 1,
        memory: bool = True,
        stacks: bool = False,
        shapes: bool | None = None,
        manifest: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(out)
        self.rank = this_rank() if rank is None else rank
        self._world_size = world_size
        self._given = manifest or {}
        self._manifest: dict[str, Any] = {}
        self._step = first_step
        self._first_step = first_step
        self._lengths = (wait, warmup, active)
        self._windows = windows
        # On a GPU the collectives' kernels tell their sizes; on the CPU only the shapes of ops do.
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        shapes = self._device == "cpu" if shapes is None else shapes
        self._options = {"profile_memory": memory, "with_stack": stacks, "record_shapes": shapes or stacks}
        self._written: list[dict[str, int]] = []
        self._profiler: profile | None = None
        self._metrics: MetricsLog | None = None
        self._began_ns = 0
        self.step_time_ns = 0  # of the last step

    def __enter__(self) -> "Recorder":  # noqa: PYI034 typing.Self is not in Python 3.10
        with self._guard("the run folder cannot be written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_manifest()
        with self._guard("metrics are not recorded"):
            path = self.folder / conventions.rank_file(self.rank, conventions.METRICS_SUFFIX)
            self._metrics = MetricsLog(path, first_step=self._first_step)
        with self._guard("the profiler did not start", self._drop_profiler):
            self._start_profiler()
        self._began_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            with self._guard("the trace was not written"), without_noise():
                self._profiler.stop()
            self._drop_profiler()
        if self._metrics is not None:
            with self._guard("the metrics log was not finished"):
                self._metrics.close()
            self._metrics = None

    def describe(self, more: Mapping[str, Any]) -> None:
        """Add to ``run.json`` what became known in training, secrets redacted. Rank 0 writes it."""
        self._given = {**self._given, **more}
        with self._guard("the manifest was not written"):
            self._manifest = {**self._manifest, **redact(dict(more))} if self._manifest else {}
            self._write_manifest()

    def span(self, phase: str) -> contextlib.AbstractContextManager[Any]:
        """Mark a block as a phase of the step, one of `conventions.PHASES`, in the trace."""
        span: contextlib.AbstractContextManager[Any] = record_function(conventions.span_name(phase))
        return span

    @contextlib.contextmanager
    def checkpoint(
        self, writer: Any, planner: Any = None, *, checkpoint: str, step: int | None = None, blocking: bool = True
    ) -> Iterator[None]:
        """Record the distributed-checkpoint save in this block: `record_save`, into this run."""
        with record_save(
            self.folder, writer, planner, checkpoint=checkpoint, step=step, rank=self.rank, blocking=blocking
        ):
            yield

    def step(
        self, metrics: Mapping[str, Number] | None = None, *, tokens: int | None = None, last: bool = False
    ) -> None:
        """End an optimizer step: log its metrics and move the profiler on.

        `tokens`, those of all ranks in this step, become tokens_per_second. A metric may be a function: it is called
        at the end of the next step, or of the recording. Writing a trace counts to no step's time. After the `last`
        step of a training none begins, so the trace shows none.
        """
        self.step_time_ns = elapsed_ns = max(1, time.perf_counter_ns() - self._began_ns)
        if self._metrics is not None:
            row: dict[str, Number] = {"step": self._step, conventions.STEP_TIME_METRIC: elapsed_ns}
            if tokens is not None:
                row[conventions.TOKENS_METRIC] = tokens * 1e9 / elapsed_ns
            with self._guard("metrics are no longer recorded", self._drop_metrics):
                self._metrics.add({**row, **(metrics or {}), **allocator_counters()})
        self._step += 1
        if self._profiler is not None and not last:
            with self._guard("the trace is no longer recorded", self._drop_profiler):
                self._move_profiler(self._profiler)
        self._began_ns = time.perf_counter_ns()

    def _start_profiler(self) -> None:
        wait, warmup, active = self._lengths
        plan = schedule(wait=wait, warmup=warmup, active=active, repeat=self._windows)
        self._profiler = profile(
            activities=_activities(self._device),
            # Asked for step 0 when made, whatever the first step is.
            schedule=lambda step: plan(max(0, step - self._first_step)),
            on_trace_ready=self._write_trace,
            experimental_config=_experimental_config(self._device),
            **self._options,
        )
        self._profiler.step_num = self._first_step
        _refuse_a_second_profiler()
        with without_noise():
            self._profiler.start()

    def _move_profiler(self, profiler: profile) -> None:
        before = profiler.current_action
        upcoming = profiler.schedule(profiler.step_num + 1)
        if before != upcoming and before in (ProfilerAction.NONE, ProfilerAction.WARMUP):
            _refuse_a_second_profiler()
        block = torch.empty(1)
        with contextlib.nullcontext() if before == upcoming else without_noise(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # so it does: each window is its own
            profiler.step()
            # torch complains of the first block freed that it has not seen allocated: let that be one, in here.
            del block
        if self._written and len(self._written) == self._windows:
            profiler.stop()
            self._drop_profiler()

    def _write_trace(self, profiler: Any) -> None:
        """Write the trace of the window that just ended, and say so in the manifest."""
        window = len(self._written)
        folder = self.folder / conventions.window_folder(window) if window else self.folder
        trace = folder / conventions.rank_file(self.rank, conventions.TRACE_SUFFIX)
        plain = trace.with_suffix("").with_suffix(".json" + conventions.PARTIAL_SUFFIX)
        wait, warmup, active = self._lengths
        first = self._first_step + (wait + warmup + active) * window + wait + warmup
        self._written.append({"window": window, "first_step": first, "steps": self._step - first})
        with self._guard(f"{trace.name} was not written"):
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(plain))
            if not plain.exists():  # Kineto removes what it could not write whole
                raise OSError("the profiler could not write it; is the disk full?")
            files.compress(plain, trace)
            self._write_manifest()

    def _write_manifest(self) -> None:
        if self.rank == 0:
            self._manifest = self._manifest or manifest(self._given, world_size=self._world_size, device=self._device)
            files.write_json(self.folder / conventions.MANIFEST_FILE, {**self._manifest, "windows": self._written})

    @contextlib.contextmanager
    def _guard(self, what: str, give_up: Callable[[], None] | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 whatever fails here, the training goes on
            files.complain(f"rank {self.rank}: {what}", error)
            if give_up is not None:
                give_up()

    def _drop_profiler(self) -> None:
        self._profiler = None

    def _drop_metrics(self) -> None:
        self._metrics = None


def _refuse_a_second_profiler() -> None:
    """Raise RuntimeError if the training profiles itself just now: torch has one profiler, ours would end that one."""
    if torch.autograd._profiler_enabled():
        raise RuntimeError("another profiler is running")


def _activities(device: str) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])


def _experimental_config(device: str) -> Any:
    """Return the setting that records waits between streams, which only CUDA has."""
    if device != "cuda":
        return None
    return torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)

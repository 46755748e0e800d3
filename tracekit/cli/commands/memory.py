"""``tracekit memory``: who uses memory, and the effect of other allocator settings."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit import conventions
from tracekit.cli import output, run_loading
from tracekit.cli.options import DocumentOptions, RoleName, UseCache, expand_options
from tracekit.conventions import regular_files
from tracekit.errors import BadTraceError, InputError

if TYPE_CHECKING:
    from tracekit.model.run import Run
    from tracekit.model.trace import MemorySnapshot
    from tracekit.replay.allocator.memory_usage import MemoryUsage
    from tracekit.replay.allocator.playback import History

_PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How to replay the allocator, if at all."""

    replay: Annotated[
        str | None,
        typer.Option(
            metavar="SETTINGS",
            help="Replay the allocator's history with these settings, in the syntax of PYTORCH_CUDA_ALLOC_CONF; "
            "'default' uses the recorded ones; unit_buffers:2 uses two buffers for all FSDP units.",
        ),
    ] = None
    device: Annotated[int | None, typer.Option(metavar="N", help="Device of the snapshot.")] = None
    device_memory_gib: Annotated[
        float | None, typer.Option(metavar="GIB", min=0.0, help="Device memory available to the replay.")
    ] = None

    def apply(self, usage: "MemoryUsage", history: "History") -> "MemoryUsage":
        """Return the usage with the replay of a history."""
        from tracekit.replay.allocator import memory_usage

        assert self.replay is not None
        capacity_bytes = None if self.device_memory_gib is None else int(self.device_memory_gib * _GIB)
        return memory_usage.with_replay(usage, history, self.replay, capacity_bytes=capacity_bytes)


@expand_options
def memory(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SNAPSHOT",
            help="A run, a file by torch.cuda.memory._dump_snapshot, or a folder of such files; or a URL of one.",
        ),
    ],
    *,
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN|SNAPSHOT", help="Show what changed since another run or snapshot, at the peaks."),
    ] = None,
    options: ReplayOptions,
    cache: UseCache = True,
    role: RoleName = None,
    table: DocumentOptions,
) -> None:
    """Show who uses memory: allocations at the peak, churn, growth, and allocations from the device.

    --replay runs every recorded allocation and free through a model of the caching allocator. It reports reserved
    memory, device allocations and failed allocations. It needs a memory snapshot with a history (in a run:
    RUN/rank00000.memory.pickle); without one it uses the trace and reports what it inferred.
    """
    from tracekit.report import memory as report

    usage = usage_of(path, options, cache=cache, role=role)
    if against is not None:
        usage = replace(usage, against=usage_of(against, ReplayOptions(device=options.device), cache=cache, role=role))
    for note in usage.notes if table.is_json else ():
        output.notify(note)
    table.write_document(report.document(usage))


def usage_of(path: str, options: ReplayOptions, *, cache: bool, role: str | None = None) -> "MemoryUsage":
    """Memory of a run, of a snapshot or of a folder of snapshots. Raises InputError if the path is none of them."""
    if _is_snapshot(path):
        from tracekit.ingest.readers import memory_snapshots
        from tracekit.replay.allocator import memory_usage
        from tracekit.replay.allocator import playback as replaying

        if options.replay is not None and memory_usage.uses_unit_buffers(options.replay):
            raise InputError(f"{memory_usage.UNIT_BUFFERS} needs the FSDP spans of a run's traces; a snapshot has none")
        snapshot = memory_snapshots.read(path, cache=cache)
        device = _device(snapshot, options.device)
        usage = memory_usage.of_snapshot(snapshot, device)
        return usage if options.replay is None else options.apply(usage, replaying.from_snapshot(snapshot, device))
    if snapshots := _snapshots_without_traces(path):
        return _of_snapshots(snapshots, options)
    try:
        return _of_run(path, options, cache=cache, role=role)
    except BadTraceError as error:
        return _of_snapshots_among_others(path, options, error)


def _of_snapshots_among_others(path: str, options: ReplayOptions, error: BadTraceError) -> "MemoryUsage":
    """Return the memory of a folder's snapshots if none of its other files is a trace. Raises the error without any."""
    from tracekit.analysis.memory import snapshot_files

    snapshots = snapshot_files.in_folder(Path(path)) if Path(path).is_dir() else []
    if not snapshots:
        raise error
    usage = _of_snapshots(snapshots, options)
    reason = str(error).partition(";")[0]
    return replace(usage, notes=(*usage.notes, f"Only memory snapshots were read: {reason}."))


def _is_snapshot(path: str) -> bool:
    """Return whether a path is a pickle, by its name or its first bytes (the opcode PROTO and 2 to 5)."""
    if path.endswith(conventions.SNAPSHOT_SUFFIXES):
        return not Path(path).is_dir()
    if not Path(path).is_file():
        return False
    with regular_files.open_to_read(path) as file:
        start = file.read(2)
    return start[:1] == b"\x80" and start[1:] in _PROTOCOLS


def _snapshots_without_traces(path: str) -> list[tuple[int, Path]]:
    from tracekit.analysis.memory import snapshot_files
    from tracekit.ingest import files

    folder = Path(path)
    if not folder.is_dir():
        return []
    try:
        files.find(folder)
    except InputError:
        return snapshot_files.in_folder(folder)
    return []


def _of_snapshots(snapshots: list[tuple[int, Path]], options: ReplayOptions) -> "MemoryUsage":
    from tracekit.ingest.readers import memory_snapshots
    from tracekit.replay.allocator import memory_usage
    from tracekit.replay.allocator import playback as replaying

    read = [(rank, memory_snapshots.read(path)) for rank, path in snapshots]
    usage = memory_usage.of_snapshots(read)
    if options.replay is None:
        return usage
    snapshot = next(candidate for rank, candidate in read if rank == usage.rank)
    return options.apply(usage, replaying.from_snapshot(snapshot, _device(snapshot, options.device)))


def _of_run(path: str, options: ReplayOptions, *, cache: bool, role: str | None) -> "MemoryUsage":
    from tracekit.replay.allocator import memory_usage

    run = run_loading.open_measured(path, memory_usage.FACTS, cache=cache, role=role)
    usage = memory_usage.of_run(run)
    if options.replay is None:
        return usage
    with_buffers = memory_usage.uses_unit_buffers(options.replay)
    return options.apply(
        usage, memory_usage.history_with_buffers(next(run.traces())) if with_buffers else _history(run, cache=cache)
    )


def _history(run: "Run", *, cache: bool) -> "History":
    """Return the history of the first rank that has a snapshot, else of the first rank's trace."""
    from tracekit.analysis.memory import snapshot_files
    from tracekit.ingest.readers import memory_snapshots
    from tracekit.replay.allocator import playback as replaying

    folder = Path(run.path)
    local = sorted(folder.glob(f"**/*{conventions.MEMORY_SNAPSHOT_SUFFIX}")) if folder.is_dir() else []
    snapshots = [*map(str, local), *(file.path for file in snapshot_files.files(run) if not local)]
    if not snapshots:
        return replaying.from_trace(next(run.traces()))
    snapshot = memory_snapshots.read(snapshots[0], cache=cache)
    return replaying.from_snapshot(snapshot, _device(snapshot, None))


def _device(snapshot: "MemorySnapshot", device: int | None) -> int:
    """Return the requested device, else the one with the longest history, else the one with most segments."""
    devices = snapshot.devices
    if device is not None and device not in devices:
        listed = ", ".join(map(str, devices)) or "none"
        raise InputError(f"{snapshot.path}: has no data of device {device}; it has data of: {listed}")
    return snapshot.main_device if device is None else device

"""Which traces the files of a run hold: rank, window and job of each, from file headers and names."""

import dataclasses
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tracekit.errors import BadTraceError
from tracekit.ingest import decompression, disk_cache, readers, remote, trace_files
from tracekit.ingest.files import File, natural_key
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.ingest.remote import RemoteFile
from tracekit.ingest.remote_listing import MAX_CONCURRENT_REQUESTS
from tracekit.ingest.trace_files import HOUR_NS, SAME_START_NS, QualityIssue, TraceFile, word_rank
from tracekit.model import units

_NUMBER = re.compile(r"(?:^|[_-])(\d{1,18})(?=[._-]|$)")
_STAMP = re.compile(r"\.(\d{10,19})\.(?:pt\.)?trace\.json")
_WINDOW_FOLDER = re.compile(r"/window(\d{1,9})/")
_TRACE_NAME = (".trace.json", ".trace.json.gz", ".trace.json.zst")
_OTHER_BASE_NS = 10 * 365 * 24 * HOUR_NS
FIRST_BYTES = 64 << 10
_HEAD_BYTES = (FIRST_BYTES, 512 << 10, 4 << 20)
_CODE = ("ingest/*.py", "ingest/readers/**/*.py", "conventions/*.py")

Header = tuple[Reader, Sequence[TraceInfo]]


class Identified(NamedTuple):
    """The traces of one run, and an issue for what is left out, guessed or inconsistent.

    `other_runs` are the traces of other runs in the same files, each of which has an issue.
    """

    traces: list[TraceFile]
    issues: list[QualityIssue]
    other_runs: tuple[list[TraceFile], ...] = ()


def identify(
    files: Sequence[File],
    *,
    manifest_folders: Iterable[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
    cache: bool = True,
) -> Identified:
    """Return the traces of one run in these files, its issues, and the traces of other runs.

    Remote files are read concurrently; with `cache`, only those whose header is not cached. Raises BadTraceError if no
    file has a trace.
    """
    opened = dict.fromkeys(file.archived.archive for file in files if file.archived is not None)
    issues = [
        QualityIssue("damaged_archive", problem, a.path, affected_ratio=1.0) for a in opened for problem in a.problems
    ]
    files, rank_of_folder = trace_files.without_profiler_infos(files)
    files, named_count = _possible(files), sum(not file.is_neighbor for file in files)
    traces: list[TraceFile] = []
    companions: list[TraceFile] = []
    first_error = ""
    for done, (file, header) in enumerate(_headers(files, cache=cache), 1):
        if isinstance(header, BadTraceError):
            if named_count == 1 and not file.is_neighbor:
                raise header
            issues.append(_left_out(file, header, named_count))
            first_error = first_error or str(header)
        else:
            reader, infos = header
            file_traces = [TraceFile(file, reader, info, _job(file, info, manifest_folders)) for info in infos]
            file_traces = [trace_files.with_profiler_rank(t, rank_of_folder) for t in file_traces]
            (companions if reader.is_companion else traces).extend(file_traces)
        if on_progress:
            on_progress(done, len(files))
    if not traces and companions:
        raise trace_files.without_traces(companions[0])
    if not traces:
        raise BadTraceError(first_error or "no trace")
    traces = trace_files.with_ranks_of_all_hosts(_without_logs(traces, issues), issues)
    traces = trace_files.with_one_world_size(traces, issues)
    ranked = _with_ranks(traces, issues)
    run, other_runs = trace_files.latest_run(ranked, issues)
    if len(run) < len(ranked):  # ranks that were assumed from the order of all files
        issues[:] = [issue for issue in issues if issue.kind != "rank_guessed"]
        run = _with_ranks(run, issues)
    windowed = _windows(_without_copies(run, issues), issues)
    joined = trace_files.attach_companions(windowed, companions, issues)
    return Identified(sorted(joined, key=lambda t: (t.window, t.rank)), issues, other_runs)


def _without_logs(traces: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Return the traces of profilers, if there are some; report the logs of the same job, which state less of it."""
    profiled = [t for t in traces if not t.reader.is_log]
    if not profiled:
        return traces
    for log in (t for t in traces if t.reader.is_log):
        message = f"{log.file.path}: {log.reader.name}, left out: there are traces of a profiler; load it by itself"
        issues.append(QualityIssue("unused_log", message, log.file.path))
    return profiled


def missing_ranks(
    traces: Sequence[TraceFile],
    manifest_world_size: int | None,
    reported_ranks: set[int | None],
    *,
    listed_windows: Mapping[int, bool] = MappingProxyType({}),
) -> list[QualityIssue]:
    """Return an issue for each window without some ranks; `reported_ranks` already have an issue of their own.

    `listed_windows` are those that the manifest of the whole run lists, and whether each was opened by itself: then
    only a rank and its neighbours record it.
    """
    sizes = [size for t in traces if (size := t.info.world_size) is not None]
    world_size = max(manifest_world_size or 0, max((t.rank for t in traces), default=-1) + 1, *sizes, 0)
    by_window: dict[int, set[int]] = defaultdict(set)
    for t in traces:
        by_window[t.window].add(t.rank)
    present = set().union(*by_window.values()) | {rank for rank in reported_ranks if rank is not None}
    issues = []
    if sizes and max(sizes) < len(present):
        message = f"{len(present)} ranks have a trace, but their traces state {units.count(max(sizes), 'rank')}."
        issues.append(QualityIssue("world_size", message))
    if len(present) < world_size:
        absent = _numbers(sorted(set(range(world_size)) - present))
        message = f"{len(present)} of {world_size} ranks have a trace (not {absent}); the others cannot be analyzed."
        issues.append(QualityIssue("missing_ranks", message, affected_ratio=1 - len(present) / world_size))
    for window, ranks in sorted(by_window.items()):
        absent_here = sorted(present - ranks - reported_ranks)
        if absent_here and not listed_windows.get(window, False):
            message = f"Window {window} has no trace of rank {_numbers(absent_here)}, other windows do."
            issues.append(QualityIssue("missing_ranks", message, affected_ratio=len(absent_here) / len(present)))
    for window in sorted(set(listed_windows) - set(by_window)):
        message = f"Window {window} is listed in the manifest, but no rank has a trace of it."
        issues.append(QualityIssue("missing_ranks", message, affected_ratio=0.0))
    return issues


def partial_traces(files: Iterable[File]) -> list[QualityIssue]:
    """Return an issue for each trace that has the name of one that is not complete."""
    return [
        QualityIssue(
            "partial",
            f"{file.path}: the trace of {'a rank' if rank is None else f'rank {rank}'} is not complete and was not "
            "read: it is being written, or the rank ended before it was",
            file.path,
            rank,
        )
        for file in files
        for rank in (word_rank(file),)
    ]


# One file ------------------------------------------------------------------------------------------------------------


def _headers(files: Sequence[File], *, cache: bool) -> Iterator[tuple[File, Header | BadTraceError]]:
    def header(file: File) -> Header | BadTraceError:
        try:
            return read_header(file, cache=cache)
        except BadTraceError as error:
            return error

    if all(file.remote is None for file in files):
        yield from ((file, header(file)) for file in files)
        return
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
        yield from zip(files, pool.map(header, files), strict=True)


def _possible(files: Sequence[File]) -> list[File]:
    """Return the files without those next to named traces whose names are of other ranks."""
    ranks = {word_rank(file) for file in files if not file.is_neighbor}
    is_known = None not in ranks
    return [file for file in files if not (is_known and file.is_neighbor and word_rank(file) not in {None, *ranks})]


def _left_out(file: File, error: BadTraceError, file_count: int) -> QualityIssue:
    """Return the issue of a file without a trace: a warning only if its name says that it should have one."""
    rank = word_rank(file)
    is_beside_traces = readers.is_of_log_or_companion(file.name.lower())
    if is_beside_traces or (rank is None and file.size_bytes and not file.name.endswith(_TRACE_NAME)):
        reason = str(error).removeprefix(f"{file.path}: ").partition(";")[0]
        return QualityIssue("not_a_trace", f"{file.path}: not a trace, left out ({reason})", file.path)
    return QualityIssue("unreadable", str(error), file.path, rank, 1 / file_count)


def _job(file: File, info: TraceInfo, manifest_folders: Iterable[str]) -> tuple[object, ...]:
    folder = max((m for m in manifest_folders if f"{file.folder}/".startswith(f"{m}/")), key=len, default="")
    return (folder, info.world_size, info.job_id)


# Ranks ---------------------------------------------------------------------------------------------------------------


def _with_ranks(traces: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Return the traces with their ranks: by the file's header, else its name, else the order of files."""
    misstated = _ids_with_wrong_ranks(traces)
    stated = {id(t): rank for t in traces if (rank := t.info.rank if t.job_rank is None else t.job_rank) is not None}
    stated = {trace_id: rank for trace_id, rank in stated.items() if trace_id not in misstated}
    silent = [t for t in traces if id(t) not in stated]
    named_ranks = _named_ranks(silent)
    free = iter(sorted(set(range(len(traces))) - set(stated.values()) - set(named_ranks.values())))
    of_process: dict[tuple[object, ...], int] = {}
    ranked = []
    for t in traces:
        rank, how = stated.get(id(t)), ""
        if rank is None and (rank := named_ranks.get(t.file.path)) is not None:
            how = f"the trace does not state its rank; rank {rank} is assumed from its name"
            if id(t) in misstated:
                how = f"several traces state rank {t.info.rank}; rank {rank} is assumed from its name"
        elif rank is None:
            process = _process(t)
            rank = of_process.get(process) if process else None
            rank = next(free, len(traces)) if rank is None else rank
            of_process[process] = rank
            how = f"neither trace nor name state a rank; rank {rank} is assumed from the order of files"
        if how and len(traces) > 1:
            issues.append(QualityIssue("rank_guessed", f"{t.file.path}: {how}", t.file.path, rank))
        is_stated = id(t) in stated or word_rank(t.file) is not None
        ranked.append(replace(t, rank=rank, is_rank_assumed=not is_stated))
    return ranked


def _ids_with_wrong_ranks(traces: Sequence[TraceFile]) -> set[int]:
    """Ids of traces of folders in which recordings of several processes state one rank, while all names differ in it.

    Such a folder is one job, whose world has all ranks of the names: its header may be copied, or written before the
    process group existed.
    """
    misstated: set[int] = set()
    of_folder: dict[str, list[TraceFile]] = defaultdict(list)
    for t in traces:
        of_folder[t.file.folder].append(t)
    for listed in of_folder.values():
        named_ranks = {rank for t in listed if (rank := word_rank(t.file)) is not None}
        sizes = {t.info.world_size for t in listed}
        (size,) = sizes if len(sizes) == 1 else (None,)
        if (
            len(named_ranks) < len(listed)
            or size is None
            or max(named_ranks) >= size
            or any(t.job_rank is not None for t in listed)
        ):
            continue
        of_rank: dict[int | None, list[TraceFile]] = defaultdict(list)
        for t in listed:
            of_rank[t.info.rank].append(t)
        shared = [same for rank, same in of_rank.items() if rank is not None and len(same) > 1]
        if not any(map(_has_copies, shared)):
            misstated.update(id(t) for same in shared for t in same)
    return misstated


def _has_copies(traces: Sequence[TraceFile]) -> bool:
    """Whether two files hold one recording: by its id, else as `_same_recording` says."""
    recordings = [t.info.recording_id for t in traces]
    if None not in recordings:
        return len(set(recordings)) < len(recordings)
    return any(_same_recording(a, b) for a, b in pairwise(sorted(traces, key=lambda t: t.info.start_ns or 0)))


def _process(t: TraceFile) -> tuple[object, ...]:
    """The key that windows of one process share: the name up to a time stamp, and the process id."""
    stamp = _STAMP.search(t.file.name)
    return () if stamp is None or t.info.process_id is None else (t.file.name[: stamp.start()], t.info.process_id)


def _named_ranks(traces: Sequence[TraceFile]) -> dict[str, int]:
    """Return ranks by path: the number after rank or worker, else the one number that differs between names.

    A number is no rank if it is the process id, as in `HOST_813.1741234567.pt.trace.json` in a container.
    """
    by_word = {t.file.path: rank for t in traces if (rank := word_rank(t.file)) is not None}
    rest = [t for t in traces if t.file.path not in by_word]
    numbers = {t.file.path: [int(n) for n in _NUMBER.findall(t.file.name)] for t in rest}
    process_ids = [t.info.process_id for t in rest]
    rank_limit = max(1024, 2 * len(traces))  # a larger number is a process id, a port or a date
    for place in range(min((len(n) for n in numbers.values()), default=0)):
        column = [n[place] for n in numbers.values()]
        if len(set(column)) == len(column) and max(column) < rank_limit and column != process_ids:
            return by_word | dict(zip(numbers, column, strict=True))
    return by_word


# Copies and windows --------------------------------------------------------------------------------------------------


def _without_copies(listed: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Leave out copies of a recording: files of a rank with the same recording id, start or, without these, size."""
    by_rank: dict[tuple[int, int], list[TraceFile]] = defaultdict(list)
    for t in sorted(listed, key=lambda t: (-t.file.size_bytes, natural_key(t.file.path))):
        alike = by_rank[t.rank, _window_folder(t) or 0]
        first = next((other for other in alike if _same_recording(other, t)), None)
        if first is None:
            alike.append(t)
            continue
        message = f"{t.file.path}: left out, a copy of the recording {first.file.name} of rank {t.rank}"
        issues.append(QualityIssue("duplicate_rank", message, t.file.path, t.rank))
    return [t for alike in by_rank.values() for t in alike]


def _same_recording(a: TraceFile, b: TraceFile) -> bool:
    if a.info.recording_id is not None and a.info.recording_id == b.info.recording_id:
        return True
    if a.info.start_ns is None or b.info.start_ns is None:
        return a.file.size_bytes == b.file.size_bytes
    return abs(a.info.start_ns - b.info.start_ns) < SAME_START_NS


def _windows(listed: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Return the traces with their windows: by the recorder's folders, else by time, else by any folder."""
    if all(t.info.window is not None for t in listed):
        windowed = [replace(t, window=t.info.window or 0) for t in listed]
    elif any(_window_folder(t) is not None for t in listed):
        windowed = [replace(t, window=_window_folder(t) or 0) for t in listed]
    elif _is_one_recording(listed):
        windowed = [replace(t, window=0) for t in listed]
    elif (times := _times(listed)) is not None:
        windowed = _by_time(listed, times, issues)
    else:
        folders = sorted({t.file.folder for t in listed}, key=natural_key)
        several = len({t.rank for t in listed}) < len(listed)
        windowed = [replace(t, window=folders.index(t.file.folder) if several else 0) for t in listed]
    _report_assumed_windows(windowed, issues)
    first_of: dict[tuple[int, int], TraceFile] = {}
    for t in windowed:
        first = first_of.setdefault((t.window, t.rank), t)
        if first is not t:
            message = f"{t.file.path}: left out, a second trace of rank {t.rank} in window {t.window}"
            issues.append(QualityIssue("duplicate_rank", message, t.file.path, t.rank))
    return list(first_of.values())


def _is_one_recording(listed: list[TraceFile]) -> bool:
    """Whether each rank of the size that all headers state has one trace, in one folder: clocks may be hours apart."""
    sizes = {t.info.world_size for t in listed}
    ranks = sorted(t.rank for t in listed)
    return len({t.file.folder for t in listed}) == 1 and sizes == {len(ranks)} and ranks == list(range(len(ranks)))


def _window_folder(listed: TraceFile) -> int | None:
    match = _WINDOW_FOLDER.search(f"/{listed.file.path}")
    return int(match[1]) if match else None


def _report_assumed_windows(windowed: list[TraceFile], issues: list[QualityIssue]) -> None:
    """Report folders that are assumed to be windows of one job, unless their names differ only in numbers."""
    folders = {t.window: t.file.folder for t in windowed}
    stems = {re.sub(r"\d+", "", f"/{folder}/") for folder in folders.values()} - {"/"}
    if (
        len(set(folders.values())) == len(folders) > 1
        and len(stems) > 1
        and not any(_window_folder(t) is not None for t in windowed)
    ):
        windows = ", ".join(f"{folder} is window {window}" for window, folder in sorted(folders.items()))
        issues.append(
            QualityIssue(
                "windows_assumed",
                f"Folders are assumed to be windows of one job: {windows}. If they are jobs, load each by itself.",
            )
        )


def _times(listed: list[TraceFile]) -> list[int] | None:
    """Return the start times of all recordings, else the end times in their file names; None if not all are known.

    A file may state the base of its times after its events, where its header is not read: times relative to it differ
    by decades from others.
    """
    begins = [t.info.start_ns for t in listed if t.info.start_ns is not None]
    if len(begins) == len(listed) and max(begins) - min(begins) < _OTHER_BASE_NS:
        return begins
    stamps = [int(stamp[1].ljust(19, "0")) for t in listed if (stamp := _STAMP.search(t.file.name))]
    return stamps if len(stamps) == len(listed) else None


def _by_time(listed: list[TraceFile], times: list[int], issues: list[QualityIssue]) -> list[TraceFile]:
    """Number windows by time: a new one begins when a rank repeats, or after a long pause."""
    ordered = sorted(zip(times, listed, strict=True), key=lambda pair: (pair[0], pair[1].rank))
    of_rank: dict[int, list[int]] = defaultdict(list)
    for time_ns, t in ordered:
        of_rank[t.rank].append(time_ns)
    repeats = [b - a for starts in of_rank.values() for a, b in pairwise(starts)]
    pause_ns = min([HOUR_NS, *(gap // 2 for gap in repeats)])
    windowed: list[TraceFile] = []
    window, began, window_ranks = 0, ordered[0][0], set[int]()
    for time_ns, t in ordered:
        if t.rank in window_ranks or time_ns - began > pause_ns:
            if time_ns - began > HOUR_NS:
                hours = (time_ns - began) / HOUR_NS
                message = (
                    f"Windows {window} and {window + 1} began {hours:.1f} h apart. If these are two jobs, load each"
                )
                issues.append(QualityIssue("windows_assumed", message + " by itself.", t.file.path))
            window, began, window_ranks = window + 1, time_ns, set()
        window_ranks.add(t.rank)
        windowed.append(replace(t, window=window))
    return windowed


# Text ----------------------------------------------------------------------------------------------------------------


def _numbers(ranks: Sequence[int]) -> str:
    """Return ranks as ranges, such as 0, 2-5; at most eight."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in pieces]
    return ", ".join(texts[:8]) + (" …" if len(texts) > 8 else "")


# Headers of files: of remote files from the first bytes, cached by version -------------------------------------------


def read_header(file: File, *, cache: bool) -> Header:
    """Return the reader of a file and the traces in it. Raises BadTraceError if it has none or cannot be read.

    Of a remote file, 64 KiB are read, and more only where they do not state rank, start and process.
    """
    if file.archived is not None:
        try:
            return _of_local(file.local, file.name)
        except BadTraceError as error:
            raise BadTraceError(file.archived.archive.shown(str(error))) from error
    if file.remote is None:
        return _of_local(file.path, file.name)
    header = _recall_header(file.remote) if cache else None
    if header is None:
        header = _read_remote(file, file.remote, cache=cache)
        if cache:
            remote.remember(file.remote, _what(), _as_json(header))
    if isinstance(header, str):
        raise BadTraceError(header)
    return header


def _of_local(path: str, name: str, *, is_complete: bool = True) -> Header:
    head = next(iter(decompression.Blocks(path)), b"")
    reader = readers.find(head, name)
    if reader is None:
        raise BadTraceError(f"{path}: {readers.unknown_format(head, name)}")
    return reader, reader.traces(path, head, is_complete=is_complete)


def _read_remote(file: File, origin: RemoteFile, *, cache: bool) -> Header | str:
    with tempfile.TemporaryDirectory(prefix="tracekit-") as folder:
        copy = Path(folder, file.name)
        try:
            header = _from_first_bytes(origin, copy)
            if header is None:
                remote.fetch(origin, copy, cache=cache, keep=True)
                header = _of_local(str(copy), file.name)
        except remote.DownloadError:
            raise
        except BadTraceError as error:
            return str(error).replace(str(copy), file.path)
    return header


def _from_first_bytes(origin: RemoteFile, copy: Path) -> Header | None:
    """The header by the first bytes of a file; None if it must be read whole to know its rank."""
    for byte_count in _HEAD_BYTES:
        head = remote.head(origin, byte_count)
        copy.write_bytes(head)
        is_complete = len(head) < byte_count or len(head) == origin.size_bytes
        try:
            reader, infos = _of_local(str(copy), origin.name, is_complete=is_complete)
        except BadTraceError:
            if is_complete or not _may_need_more(copy, origin.name):
                raise
            continue
        if not is_complete and any(info.rank is None for info in infos):
            return None
        if is_complete or byte_count == _HEAD_BYTES[-1] or _is_settled(infos, copy):
            return reader, infos
    raise BadTraceError(
        f"{copy}: no profiler events in its first {_HEAD_BYTES[-1] >> 20} MiB, so this is no profiler trace; "
        "name a trace file or run"
    )


def _may_need_more(copy: Path, name: str) -> bool:
    """Return whether more bytes of a file may show a trace: not if its format is known to have none."""
    reader = readers.find(next(iter(decompression.Blocks(str(copy))), b""), name)
    return reader is not None and reader.has_traces


def _is_settled(infos: Sequence[TraceInfo], copy: Path) -> bool:
    """Return whether a longer head would say the same: readers look at one block of the decompressed file."""
    if all(info.start_ns is not None and info.process_id is not None for info in infos):
        return True
    return len(next(iter(decompression.Blocks(str(copy))), b"")) >= decompression.BLOCK_BYTES


# In the cache --------------------------------------------------------------------------------------------------------


def _what() -> str:
    plugins = [disk_cache.plugin_hash(type(r)) for r in readers.available() if r not in readers.READERS]
    return "+".join(("header", disk_cache.code_hash(Path(__file__).parents[1], _CODE), *plugins))


def _as_json(header: Header | str) -> Any:
    if isinstance(header, str):
        return header
    reader, infos = header
    names = [f.name for f in dataclasses.fields(TraceInfo) if f.name not in ("trace", "companions")]
    return [reader.name, [{name: _plain(getattr(info, name)) for name in names} for info in infos]]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _recall_header(origin: RemoteFile) -> Header | str | None:
    stored = remote.recall(origin, _what())
    if stored is None or isinstance(stored, str):
        return stored
    try:
        name, infos = stored
        reader = next(reader for reader in readers.available() if reader.name == name)
        return reader, [TraceInfo(**{name: _as_tuple(value) for name, value in info.items()}) for info in infos]
    except (TypeError, ValueError, StopIteration):  # of a plug-in that is gone
        return None

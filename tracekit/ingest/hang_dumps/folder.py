"""A folder of dumps -> what each rank left: flight recorder dumps, and stacks laid next to them.

Stacks are texts of `faulthandler`, or of ``py-spy dump`` (text or --json).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from tracekit.conventions import regular_files
from tracekit.errors import InputError
from tracekit.ingest.hang_dumps import flight_recorder
from tracekit.ingest.hang_dumps.flight_recorder import BadDumpError
from tracekit.ingest.pickles import ManyPickles
from tracekit.model.hang_dump import Frame, HangDumps, RankDump, ThreadStack
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.units import duration, ranges

_MAX_THREADS = 4096
_MAX_FRAMES = 128
_MAX_TEXT = 1000
_MAX_LINE = 1 << 31
_FAULT_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ (?:\[(.*)\] )?\(most recent call first\):")
_FAULT_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)')
_SPY_THREAD = re.compile(r'Thread (?:0x)?[0-9A-Fa-f]+ \((idle|active)[^)]*\)(?:: "(.*)")?')
_SPY_FRAME = re.compile(r"    (\S.*) \((.*?)(?::(\d{1,9}))?\)")
_SPY_PROCESS = re.compile(r"^Process (\d{1,9}): ", re.MULTILINE)
_MAIN = "MainThread"

MAX_BYTES = 256 << 20
_MAX_FILES = 100_000
_TEXT_ENDINGS = ("", ".txt", ".log", ".stack", ".stacks", ".trace", ".dump", ".out", ".err")
_RANK = re.compile(r"rank[-_]?(\d{1,7})(?!\d)", re.I)
_LAST_NUMBER = re.compile(r"(\d{1,7})(?!.*\d)")
_OTHER_TIME_NS = 600 * 10**9
_HOW_TO = "record with tracekit record --hang-timeout 300, or copy the files of TORCH_FR_DUMP_TEMP_FILE there"


@dataclass(frozen=True)
class _Stacks:
    """The stacks of one file."""

    path: str
    rank: int | None
    process_id: int | None
    threads: tuple[ThreadStack, ...]


def read(path: Path) -> HangDumps:
    """Return the dumps of a folder and the folders in it. Raises InputError if there is none that can be used."""
    notes: list[str] = []
    dumps: list[RankDump] = []
    texts: list[_Stacks] = []
    with ManyPickles() as many:
        for file in _files(path):
            try:
                _read_file(file, many, dumps, texts)
            except BadDumpError as error:
                notes.append(f"{file.name}: {error}; it is left out")
    if not dumps and not any(stacks.rank is not None for stacks in texts):
        reason = f": {notes[0]}" if notes else ""
        raise InputError(f"{path}: no dump of a flight recorder that can be used{reason}; {_HOW_TO}")
    by_rank = _latest(dumps, notes)
    of_process = {dump.process_id: rank for rank, dump in by_rank.items() if dump.process_id is not None}
    for process in texts:
        rank = of_process.get(process.process_id) if process.process_id is not None else None
        rank = process.rank if rank is None else rank
        if rank is None:
            notes.append(f"{Path(process.path).name}: process of an unknown rank; put rank3 or so in its name")
            continue
        of_stacks = RankDump(rank, (process.path,), threads=process.threads)
        by_rank[rank] = by_rank[rank].with_stacks(of_stacks) if rank in by_rank else of_stacks
    _drop_other_times(by_rank, notes)
    return HangDumps(dict(sorted(by_rank.items())), tuple(notes))


def parse_text(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of a text by faulthandler or py-spy, the last dump in it; none if it is not such a text."""
    if "(most recent call first):" in text:
        return _of_faulthandler(text.splitlines())
    return _of_py_spy(text.splitlines()) if _SPY_THREAD.search(text) else ()


def process_id(text: str) -> int | None:
    """Return the process that a text by py-spy is of."""
    match = _SPY_PROCESS.search(text)
    return int(match[1]) if match else None


def parse_json(value: Any) -> tuple[ThreadStack, ...]:
    """Return the threads of ``py-spy dump --json``; none if a value is something else."""
    if not isinstance(value, list) or not all(isinstance(thread, dict) and "frames" in thread for thread in value):
        return ()
    return tuple(_spy_thread(thread) for thread in value[:_MAX_THREADS])


def is_spy_of(value: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the process that the threads of ``py-spy dump --json`` are of."""
    pid = value[0].get("pid") if value else None
    return pid if type(pid) is int else None


def _files(path: Path) -> list[Path]:
    if path.is_file():
        raise InputError(f"{path}: is a file; name the folder with the dumps of all ranks")
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; check the path")
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]  # a FIFO or socket would block
    if len(files) > _MAX_FILES:
        raise InputError(f"{path}: contains more than {_MAX_FILES:,} files; name the folder of the dumps")
    return files


def _read_file(file: Path, many: ManyPickles, dumps: list[RankDump], texts: list[_Stacks]) -> None:
    """Add what a file contains; nothing if it is neither a dump nor stacks. Raises BadDumpError if it is damaged."""
    with regular_files.open_to_read(file) as opened:
        head = opened.read(64)
    is_pickle = head[:1] == b"\x80"
    is_json = head.lstrip()[:1] in (b"{", b"[")
    is_text = file.suffix.lower() in _TEXT_ENDINGS
    if not (is_pickle or is_json or is_text) or not head:
        return
    if file.stat().st_size > MAX_BYTES:
        if is_pickle:
            raise BadDumpError(f"has {file.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read")
        return
    data = regular_files.read_bytes(file)
    if is_pickle or is_json:
        _read_value(file, data, many, dumps, texts)
    elif threads := parse_text(text := data.decode("utf-8", "replace")):
        texts.append(_Stacks(str(file), _named_rank(file), process_id(text), threads))


def _read_value(file: Path, data: bytes, many: ManyPickles, dumps: list[RankDump], texts: list[_Stacks]) -> None:
    if data[:1] != b"\x80" and b'"frames"' not in data and b'"version"' not in data:
        return
    value = flight_recorder.load(data, many)
    if flight_recorder.is_dump(value):
        rank = flight_recorder.stated_rank(value)
        rank = _named_rank(file) if rank is None else rank
        if rank is None:
            raise BadDumpError("has no rank in its name, such as nccl_trace_rank_3")
        dump = flight_recorder.parse(value, rank=rank, path=str(file))
        dumps.append(replace(dump, modified_ns=file.stat().st_mtime_ns))
    elif threads := parse_json(value):
        texts.append(_Stacks(str(file), _named_rank(file), is_spy_of(value), threads))
    elif data[:1] == b"\x80":
        raise BadDumpError("is no dump of a flight recorder")


def _named_rank(file: Path) -> int | None:
    """Return the rank in a file's name: after "rank", else the last number, as torch's prefix_3 has it."""
    match = _RANK.search(file.name) or _LAST_NUMBER.search(file.stem)
    rank = int(match[1]) if match else None
    return rank if rank is not None and rank < MAX_RANKS else None


def _latest(dumps: Iterable[RankDump], notes: list[str]) -> dict[int, RankDump]:
    by_rank: dict[int, RankDump] = {}
    for dump in dumps:
        other = by_rank.get(dump.rank)
        if other is None:
            by_rank[dump.rank] = dump
            continue
        older, newer = sorted((other, dump), key=_moment)
        if _same_hang(older, newer):
            stating, native = sorted((older, newer), key=lambda dump: not dump.reason)
            by_rank[dump.rank] = stating.with_stacks(native)
            continue
        by_rank[dump.rank] = newer.with_stacks(older)
        notes.append(f"rank {dump.rank} has several dumps; {Path(newer.paths[0]).name} is the latest and is used")
    return by_rank


def _same_hang(older: RankDump, newer: RankDump) -> bool:
    """Return whether torch and tracekit both wrote a dump of one hang: the rank made no call between them."""
    if bool(older.reason) is bool(newer.reason):
        return False
    last = [next((call for call in reversed(dump.calls) if call.is_recorded), None) for dump in (older, newer)]
    first, second = last
    return first is not None and second is not None and first.created_ns == second.created_ns is not None


def _moment(dump: RankDump) -> int:
    return dump.written_ns or (dump.span_ns or (0, 0))[1]


def _drop_other_times(by_rank: dict[int, RankDump], notes: list[str]) -> None:
    """Remove dumps of another time: those whose events are far from the time of the median rank's events."""
    spans = {rank: span for rank, dump in by_rank.items() if (span := dump.span_ns)}
    if len(spans) > 1:
        typical = (median_low(first for first, _ in spans.values()), median_low(last for _, last in spans.values()))
        far = {rank: gap for rank, span in spans.items() if (gap := _gap_ns(span, typical)) > _OTHER_TIME_NS}
        for rank, gap_ns in far.items() if len(far) * 2 < len(spans) else ():
            name = Path(by_rank.pop(rank).paths[0]).name
            notes.append(f"{name}: the dump of rank {rank} is {duration(gap_ns)} from the others; it is left out")
        if far and len(far) * 2 >= len(spans):
            notes.append(f"the dumps are of different times, {duration(max(far.values()))} apart: check the folder")
    written = {rank: dump.written_ns for rank, dump in by_rank.items() if dump.written_ns}
    if written and (spread := max(written.values()) - min(written.values())) > _OTHER_TIME_NS:
        early = ranges(rank for rank, ns in written.items() if ns < max(written.values()) - _OTHER_TIME_NS)
        notes.append(f"dumps were written up to {duration(spread)} apart: those of ranks {early} are older")


def _gap_ns(span: tuple[int, int], other: tuple[int, int]) -> int:
    """Return the time between two spans; 0 where they overlap."""
    return max(span[0] - other[1], other[0] - span[1], 0)


def _of_faulthandler(lines: list[str]) -> tuple[ThreadStack, ...]:
    """Return the threads of the last dump. Faulthandler writes the main thread last, each as 'innermost first'."""
    last = max((n for n, line in enumerate(lines) if line.startswith(("Timeout (", "Fatal Python error"))), default=-1)
    threads: list[tuple[str, list[Frame]]] = []
    for line in lines[last + 1 :]:
        if (head := _FAULT_THREAD.match(line)) and len(threads) < _MAX_THREADS:
            threads.append(((head[2] or "")[:_MAX_TEXT], []))
        elif threads and (frame := _FAULT_FRAME.match(line)) and len(threads[-1][1]) < _MAX_FRAMES:
            number = int(frame[2]) if frame[2].isdigit() else 0
            threads[-1][1].append(Frame(frame[3][:_MAX_TEXT], frame[1][:_MAX_TEXT], number))
    main = len(threads) - 1  # the thread that the interpreter created first
    return tuple(ThreadStack(name, tuple(frames), is_main=n == main) for n, (name, frames) in enumerate(threads))


def _of_py_spy(lines: list[str]) -> tuple[ThreadStack, ...]:
    threads: list[tuple[str, str, list[Frame]]] = []
    for line in lines:
        if (head := _SPY_THREAD.match(line)) and len(threads) < _MAX_THREADS:
            threads.append((head[1], (head[2] or "")[:_MAX_TEXT], []))
        elif threads and (frame := _SPY_FRAME.match(line)) and len(threads[-1][2]) < _MAX_FRAMES:
            threads[-1][2].append(Frame(frame[1][:_MAX_TEXT], frame[2][:_MAX_TEXT], int(frame[3] or 0)))
    return tuple(
        ThreadStack(name, tuple(frames), is_main=name == _MAIN, cpu_ratio=_activity(active))
        for active, name, frames in threads
    )


def _activity(state: object) -> float | None:
    """Return 1 for an active thread; py-spy calls a thread idle also where it cannot know."""
    return 1.0 if state in ("active", True) else None


def _spy_thread(value: Mapping[str, Any]) -> ThreadStack:
    frames = value["frames"] if isinstance(value["frames"], list) else []
    name = value.get("thread_name")
    return ThreadStack(
        name[:_MAX_TEXT] if isinstance(name, str) else "",
        tuple(_spy_frame(frame) for frame in frames[:_MAX_FRAMES] if isinstance(frame, dict)),
        is_main=name == _MAIN,
        cpu_ratio=_activity(value.get("active")),
    )


def _spy_frame(value: Mapping[str, Any]) -> Frame:
    name, file, line = value.get("name"), value.get("filename"), value.get("line")
    return Frame(
        str(name)[:_MAX_TEXT] if isinstance(name, str) else "",
        file[:_MAX_TEXT] if isinstance(file, str) else "",
        line if type(line) is int and 0 <= line < _MAX_LINE else 0,
    )

"""A dump of torch's flight recorder, versions 1.5 to 2.x, as pickle or JSON -> the calls of one rank.

Source of the fields: torch/csrc/distributed/c10d/FlightRecorder.hpp and FlightRecorderDetail.hpp. `tracekit record
--hang-timeout` writes the same JSON with stacks of the calls, and its own part under "tracekit".
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from tracekit.ingest import pickle_child, pickles, untrusted_json
from tracekit.ingest.pickles import ManyPickles
from tracekit.model.hang_dump import Call, CallState, Frame, RankDump, SystemCall, ThreadStack
from tracekit.model.manifest import MAX_RANKS

MAX_ENTRIES = 200_000
_MAX_FRAMES = 64
_MAX_SIZES = 1 << 20  # of one dump
_MAX_TEXT = 1000
_INT64 = 1 << 63
_MAX_LINE = 1 << 31
_MAX_CPU_RATIO = 1000.0
_PEERS = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7}|\?)\Z")
_COALESCED = frozenset({"coalesced", "ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced"})
_NUMBER = re.compile(r"\d{1,7}")
_GLOO, _NCCL = "gloo", "nccl"
_MAX_DURATION_MS = 1e9  # 11 days: no collective takes longer
_WATCHDOG_NS = 10**9  # ten times the interval of NCCL's watchdog
_ANY = "?"  # the source of a receive from any rank, as tracekit writes it
_SCALARS = (int, float, bool, type(None))


class BadDumpError(ValueError):
    """A file that is no dump, or a damaged one. The message is a predicate, such as "is truncated"."""


def load(data: bytes, many: ManyPickles) -> Any:
    """Return the value of a pickle, which `many` reads, or of a JSON file. Raises BadDumpError."""
    try:
        if data[:1] == b"\x80":
            return json.loads(many.read(pickle_child.PLAIN, data)[0])
        return untrusted_json.parse(data)
    except pickles.WrongFormError as error:
        raise BadDumpError(f"is no plain data ({error})") from None
    except pickles.PickleError as error:
        raise BadDumpError(str(error)) from None
    except ValueError as error:
        raise BadDumpError(f"is not valid JSON ({error})") from None


def is_dump(value: Any) -> bool:
    """Return whether a value has the form of a flight recorder's dump."""
    return isinstance(value, dict) and "version" in value and ("entries" in value or "pg_config" in value)


def parse(value: Mapping[str, Any], *, rank: int, path: str) -> RankDump:
    """Return the dump of a rank. Raises BadDumpError if a field is not what it should be."""
    entries = value.get("entries") or []
    if not isinstance(entries, list):
        raise BadDumpError("has entries that are not a list")
    if len(entries) > MAX_ENTRIES:
        raise BadDumpError(f"has {len(entries):,} entries; at most {MAX_ENTRIES:,} are read")
    reader = _Entries(rank)
    extra = value.get("tracekit")
    reason = extra.get("reason") if isinstance(extra, dict) else ""
    calls = [reader.call(index, entry) for index, entry in enumerate(entries)]
    calls = _without_false_ends(calls, entries, is_at_rest=reason in ("", "timeout"))
    # Calls, those that an entry "coalesced" closes as its parts: only it has the state of all. Entries of one coalesced
    # call have the same number in their group and stand one after the other.
    merged: list[Call] = []
    for _, same in groupby(calls, key=lambda call: (call.group, call.is_p2p, call.seq)):
        members: list[Call] = []
        for call in same:
            if call.op in _COALESCED:
                merged.append(replace(call, parts=tuple(members)))
                members = []
            else:
                members.append(call)
        merged += members
    dump = RankDump(rank, (path,), tuple(merged), _groups(value.get("pg_config")), has_recorder=True)
    return _with_extra(dump, extra) if isinstance(extra, dict) else dump


def stated_rank(value: Mapping[str, Any]) -> int | None:
    """Return the rank that a dump states itself."""
    extra = value.get("tracekit")
    rank = extra.get("rank", value.get("rank")) if isinstance(extra, dict) else value.get("rank")
    return rank if type(rank) is int and 0 <= rank < MAX_RANKS else None


class _Entries:
    """Converts entries. Stacks repeat: each list of frames is converted once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sizes = 0
        self._frames: dict[tuple[str, str, int], Frame] = {}

    def call(self, index: int, entry: Any) -> Call:
        """Return the call of an entry. Raises BadDumpError."""
        if not isinstance(entry, dict):
            raise BadDumpError(f"has an entry {index} that is no object")
        try:
            return self._call(index, entry)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, BadDumpError):
                raise
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)[:200]
            raise BadDumpError(f"has a damaged entry {index} ({what})") from None

    def _call(self, index: int, entry: Mapping[str, Any]) -> Call:
        backend, name = _text(entry["profiling_name"]).rpartition(":")[::2]
        peers = _PEERS.match(name)
        stated_p2p = entry.get("is_p2p")
        is_p2p = peers is not None if stated_p2p is None else bool(stated_p2p)
        collective_seq = _integer(entry["collective_seq_id"] if "collective_seq_id" in entry else entry["seq_id"])
        stated_group = entry["process_group"]  # name and description, or the name alone
        parts = (stated_group, "") if isinstance(stated_group, str) else tuple(stated_group)[:2]
        group, description = map(_text, parts)
        created_ns = _time(entry.get("time_created_ns")) or 1000 * (_time(entry.get("time_created_us")) or 0)
        ended_ns = _time(entry.get("time_discovered_completed_ns"))
        group_rank = int(peers[2]) if peers else None
        peer = int(peers[4]) if peers and peers[4] != _ANY else None
        return Call(
            self._rank,
            index,
            group,
            description,
            _integer(entry.get("p2p_seq_id", collective_seq)) if is_p2p else collective_seq,
            peers[1] if peers else name,
            backend,
            _state(entry, backend, ended_ns),
            is_p2p=is_p2p,
            source=group_rank if peers and peers[1] == "send" else peer,
            target=peer if peers and peers[1] == "send" else group_rank,
            input_sizes=self._tensor_sizes(entry.get("input_sizes")),
            output_sizes=self._tensor_sizes(entry.get("output_sizes")),
            input_dtypes=_dtypes(entry.get("input_dtypes")),
            output_dtypes=_dtypes(entry.get("output_dtypes")),
            created_ns=created_ns or None,
            ended_ns=ended_ns,
            duration_ns=_duration_ns(entry.get("duration_ms")),
            timeout_ms=_time(entry.get("timeout_ms")),
            frames=self.frames(entry.get("frames")),
            error=_text(entry.get("failed") or ""),
            is_recorded=entry.get("is_recorded") is not False,
        )

    def _tensor_sizes(self, value: Any) -> tuple[tuple[int, ...], ...]:
        if value is None:
            return ()
        sizes = tuple(tuple(map(_integer, _iter_list(tensor))) for tensor in _iter_list(value))
        self._sizes += sum(len(tensor) + 1 for tensor in sizes)
        if self._sizes > _MAX_SIZES:
            raise BadDumpError(f"has more than {_MAX_SIZES:,} sizes of tensors")
        return sizes

    def frames(self, value: Any) -> tuple[Frame, ...]:
        """Return the innermost frames of a stack."""
        if not isinstance(value, list):
            return ()
        return tuple(self._frame(frame) for frame in value[:_MAX_FRAMES] if isinstance(frame, dict))

    def _frame(self, value: Mapping[str, Any]) -> Frame:
        line = value.get("line")
        line = line if type(line) is int and 0 <= line < _MAX_LINE else 0
        key = (_text(value.get("name")), _text(value.get("filename")), line)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(*key, source=_text(value.get("source") or ""))
        return frame


def _state(entry: Mapping[str, Any], backend: str, ended_ns: int | None) -> CallState:
    if entry.get("failed"):
        return CallState.FAILED
    # Gloo's works have no events: an entry is retired when its work has run, and its state stays "scheduled".
    if ended_ns or (backend == _GLOO and entry.get("retired") is True):
        return CallState.COMPLETED
    try:
        return CallState(entry["state"])
    except ValueError:
        raise BadDumpError(f"has an entry in the unknown state {_shown(entry['state'])}") from None


def _without_false_ends(calls: list[Call], entries: list[Any], *, is_at_rest: bool) -> list[Call]:
    """Return the calls; as pending those that CUDA reports as complete while the host is still in them.

    NCCL connects two ranks in their first send or receive, and the host waits there. The event of the call's end is not
    in the stream yet, and CUDA says of such an event that it is complete. NCCL's watchdog looks every 0.1 s and retires
    calls that are complete, so that a last call is not, if it was not retired and its end was seen only by the dump.
    """
    blocked = [n for n, entry in enumerate(entries) if entry.get("host_in_call") is True]
    if is_at_rest and calls and _is_discovered_by_dump(calls[-1]) and entries[-2:-1] != []:
        blocked += [len(calls) - 1] if entries[-2].get("retired") is True else []
    result = list(calls)
    for number in blocked:
        call = calls[number]
        if call.backend == _NCCL and call.state is CallState.COMPLETED and entries[number].get("retired") is False:
            result[number] = replace(call, state=CallState.SCHEDULED, ended_ns=None)
    return result


def _is_discovered_by_dump(call: Call) -> bool:
    """Return whether the end of a call was discovered so late that NCCL's watchdog did not discover it."""
    return bool(call.ended_ns and call.created_ns and call.ended_ns - call.created_ns >= _WATCHDOG_NS)


def _groups(value: Any) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    if not isinstance(value, dict):
        return {}
    return {
        _text(group.get("name") or name): (_text(group.get("desc")), _ranks(group.get("ranks")))
        for name, group in value.items()
        if isinstance(group, dict) and (group.get("name") or name)
    }


def _ranks(value: Any) -> tuple[int, ...] | None:
    numbers = _NUMBER.findall(value) if isinstance(value, str) else _items(value)
    try:
        ranks = tuple(dict.fromkeys(_integer(number) for number in numbers))
    except ValueError:
        return None
    return ranks if ranks and max(ranks) < MAX_RANKS else None


def _with_extra(dump: RankDump, extra: Mapping[str, Any]) -> RankDump:
    """Return the dump with what tracekit's recorder added."""
    frames = _Entries(dump.rank).frames
    threads = [thread for thread in _items(extra.get("threads")) if isinstance(thread, dict)]
    return replace(
        dump,
        threads=tuple(_thread(thread, frames(thread.get("frames"))) for thread in threads),
        world_size=_rank_number(extra.get("world_size"), MAX_RANKS),
        written_ns=_optional(extra.get("written_ns")),
        reason=_text(extra.get("reason")),
        error=_text(extra.get("error")),
        host=_text(extra.get("host")),
        process_id=_optional(extra.get("pid")),
        stalled_ns=_optional(extra.get("stalled_ns")),
        dead_ranks=tuple(
            rank for raw in _items(extra.get("dead_ranks")) if (rank := _rank_number(raw, MAX_RANKS - 1)) is not None
        ),
    )


def _thread(value: Mapping[str, Any], frames: tuple[Frame, ...]) -> ThreadStack:
    ratio, call = value.get("cpu_ratio"), value.get("system_call")
    return ThreadStack(
        _text(value.get("name")),
        frames,
        is_main=value.get("is_main") is True,
        cpu_ratio=float(ratio) if isinstance(ratio, int | float) and 0 <= ratio <= _MAX_CPU_RATIO else None,
        system_call=SystemCall(_text(call.get("name")), _text(call.get("path"))) if isinstance(call, dict) else None,
    )


# Values -----------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if type(value) is int and not -_INT64 <= value < _INT64:
        return ""  # Python refuses to print an integer of 5,000 digits
    return str(value)[:_MAX_TEXT] if isinstance(value, str | int) else ""


def _integer(value: Any) -> int:
    """Return an integer that may be written as text. Raises ValueError."""
    if isinstance(value, str) and len(value) < 20 and value.lstrip("-").isdigit():
        value = int(value)
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise ValueError(f"{_shown(value)} is no integer")
    return value


def _optional(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _INT64 else None


def _rank_number(value: Any, largest: int) -> int | None:
    """A number of a rank or of ranks; None beyond what a job can have: lists of all ranks are made of it."""
    number = _optional(value)
    return number if number is not None and number <= largest else None


def _time(value: Any) -> int | None:
    """A time; None for 0, which JSON dumps have where there is none."""
    return None if value is None else _integer(value) or None


def _duration_ns(value_ms: Any) -> int | None:
    """A duration in ns; None for anything that is no time of a collective."""
    is_number = isinstance(value_ms, int | float) and not isinstance(value_ms, bool)
    return round(value_ms * 1e6) if is_number and 0 <= value_ms < _MAX_DURATION_MS else None


def _dtypes(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) and value:
        return (value,)
    return tuple(map(_text, _iter_list(value))) if value else ()


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _iter_list(value: Any) -> Iterator[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{_shown(value)} is not a list")
    return iter(value)


def _shown(value: Any) -> str:
    """Return a value for a message; a container may be too large to print, or contain itself."""
    if isinstance(value, str):
        return repr(value[:40])
    return str(value) if type(value) in _SCALARS else f"a {type(value).__name__}"

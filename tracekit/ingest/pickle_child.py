"""One pickle of any origin -> JSON and columns, in a process of its own that `tracekit.ingest.pickles` starts.

A pickle is a program. C's unpickler runs it here with nothing to call: every import is refused, or for a checkpoint's
metadata replaced by an inert stand-in. A pickle of a few bytes can still fill the memory, build cycles or crash the
interpreter; so the memory and the time of this process are limited by what it has read, and the caller survives its
end. It imports nothing of tracekit, so it starts quickly; its limits are those of `budget`, which states them as JSON.

Protocol: stdin is the pickle, the first argument what it should contain, the second the limits. With exit code 0,
stdout is the answer; with REFUSED, WRONG_FORM or OVER_BUDGET, it is the reason. With the argument MANY, stdin has one
pickle after the other, each behind a line with its kind and size; a fork for each answers, so that none spoils the
next, and stdout has exit code, size and answer.
"""

import contextlib
import gc
import io
import json
import os
import pickle
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn

PLAIN, SNAPSHOT, METADATA, MANY = "plain", "snapshot", "metadata", "many"
REFUSED, WRONG_FORM, OVER_BUDGET = 3, 4, 5
MISSING = -(1 << 63)
"""Stands in a column for an absent value."""
_BUFFER_BYTES = 1 << 17  # what the unpickler asks for at a time
_MAX_LINE = 1 << 31
_METADATA_MODULES = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|filesystem|_fsspec_filesystem|storage|planner|hf_storage|_hf_utils)"
    r"|torch\.distributed\._shard\.(metadata|sharded_tensor\.metadata)"
)
_METADATA_NAMES = re.compile(
    r"torch\.(Size|bool|strided|jagged|sparse_\w+|contiguous_format|preserve_format|channels_last(_3d)?"
    r"|(bfloat|float|u?int|complex|quint|qint|bits)\d+\w*)"
    r"|torch\.serialization\._get_layout|collections\.OrderedDict|pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path"
)


class Limits(NamedTuple):
    """What the process may take: absolute, and by the bytes of the pickle."""

    memory_bytes: int
    memory_ratio: float
    json_bytes: int
    json_ratio: float
    seconds: float
    bytes_per_s: float

    def most_memory_bytes(self, pickle_bytes: int) -> int:
        """Memory that a pickle of this size may need."""
        return int(self.memory_bytes + self.memory_ratio * pickle_bytes)

    def most_json_bytes(self, pickle_bytes: int) -> int:
        """Characters that the answer to a pickle of this size may have."""
        return int(self.json_bytes + self.json_ratio * pickle_bytes)

    def most_seconds(self, pickle_bytes: int) -> int:
        """CPU time that a pickle of this size may take."""
        return max(1, int(self.seconds + pickle_bytes / self.bytes_per_s))


class OverBudgetError(Exception):
    """A pickle that needs more than its limits. The message is a predicate."""


class RefusedError(Exception):
    """A pickle that would import something. The message is a predicate."""


def main() -> None:
    """Answer for the pickle of stdin, or for each of many."""
    limits = Limits(*json.loads(sys.argv[2]))
    if sys.argv[1] != MANY:
        _answer_one(sys.argv[1], limits)
    while request := sys.stdin.buffer.readline():
        kind, size = request.decode().split()
        code, answer = _answer_in_fork(kind, bytearray(sys.stdin.buffer.read(int(size))), limits)
        sys.stdout.buffer.write(f"{code} {len(answer)}\n".encode() + answer)
        sys.stdout.buffer.flush()


def _answer_one(kind: str, limits: Limits) -> NoReturn:
    """Answer for the pickle of stdin and end the process: freeing millions of objects takes as long as making them."""
    gc.disable()
    source = MeteredInput(limits)
    try:
        code, answer = 0, [*_answer(kind, source)]
    except Exception as error:  # noqa: BLE001 whatever a damaged pickle makes the unpickler raise
        source.limit(1 << 30)  # enough to say so
        code, answer = _explain(error, limits.most_memory_bytes(source.read_bytes))
    for part in answer:
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()
    os._exit(code)


def _answer_in_fork(kind: str, data: bytearray, limits: Limits) -> tuple[int, bytes]:
    """Return the exit code and the answer of a fork of this process, in which the pickle and its limits stay."""
    (pickled, data_in), (answer_out, answered) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.dup2(pickled, 0)
            os.dup2(answered, 1)
            os.closerange(3, answered + 1)
            data.clear()  # it counts against the limit of the memory
            _answer_one(kind, limits)
        finally:
            os._exit(1)
    os.close(pickled)
    os.close(answered)
    with contextlib.suppress(BrokenPipeError), os.fdopen(data_in, "wb") as pipe:  # a fork that refuses reads no more
        pipe.write(data)
    with os.fdopen(answer_out, "rb") as pipe:
        answer = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), answer


class WrongFormError(Exception):
    """Plain data that is not what it should be."""


class MeteredInput(io.RawIOBase):
    """Standard input; what is read from it sets the limits of the process."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.read_bytes = 0
        self.limit(0, is_first=True)

    def readable(self) -> bool:
        """True, which the buffer asks for."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, and allow the memory and the time that so much data may take."""
        data = os.read(0, len(buffer))
        buffer[: len(data)] = data
        self.read_bytes += len(data)
        self.limit(0)
        return len(data)

    def limit(self, more_bytes: int, *, is_first: bool = False) -> None:
        """Limit memory and time to those of the data that was read, and `more_bytes` of memory."""
        try:
            import resource
        except ImportError:
            return  # not POSIX
        limits = {
            resource.RLIMIT_AS: self.limits.most_memory_bytes(self.read_bytes) + more_bytes,
            resource.RLIMIT_CPU: self.limits.most_seconds(self.read_bytes),
        }
        if is_first:
            limits |= {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
        for kind, limit in limits.items():
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


class PlainUnpickler(pickle.Unpickler):
    """Unpickler that can import nothing, so has nothing to call."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse an import, by name."""
        raise RefusedError(
            f"would import {module[:99]}.{name[:99]} and could run code when unpickled: refused; do not load it"
        )

    def persistent_load(self, _pid: object) -> Any:
        """Refuse an object that the program which unpickles should provide."""
        raise RefusedError("refers to objects outside of it and could run code when unpickled: refused; do not load it")


class StandIn:
    """An object that the pickle of a checkpoint's metadata would have built."""

    state: dict[str, Any]

    def __init__(self, *_args: object) -> None:
        """Ignore what the class would have been called with."""

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes of an object that states them as a dict."""
        self.state = state if type(state) is dict else {}

    def __setitem__(self, _key: object, _value: object) -> None:
        """Ignore an item: an OrderedDict is built empty and then filled."""


class MetadataUnpickler(PlainUnpickler):
    """Unpickler of a checkpoint's metadata: each class that such metadata needs becomes a `StandIn`."""

    def find_class(self, module: str, name: str) -> Any:
        """Stand-in for a class that such metadata needs; refuse others."""
        if name.isidentifier() and (
            _METADATA_MODULES.fullmatch(module) or _METADATA_NAMES.fullmatch(f"{module}.{name}")
        ):
            return StandIn
        return super().find_class(module, name)


def _answer(kind: str, source: MeteredInput) -> Iterator[Any]:
    unpickler = MetadataUnpickler if kind == METADATA else PlainUnpickler
    value = unpickler(io.BufferedReader(source, _BUFFER_BYTES)).load()
    tabulate: Callable[[Any], tuple[Any, Sequence[array[Any]]]] = {
        PLAIN: lambda value: (value, ()), SNAPSHOT: _snapshot, METADATA: _storage_index
    }[kind]  # fmt: skip
    try:
        document, columns = tabulate(value)
        if _written_length(document) > (most := source.limits.most_json_bytes(source.read_bytes)):
            raise OverBudgetError(f"would take more than {most >> 20:,} MiB when it is written out")
        # A lone surrogate, which no encoding can represent, becomes '?'.
        line = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise WrongFormError(f"{type(error).__name__}: {error}") from None
    yield line + b"\n"
    yield from columns


def _written_length(document: Any) -> int:
    """Characters that a document takes at least when a container is written wherever it is referred to."""
    lengths: dict[int, int] = {}
    path, opened = [document], set[int]()
    while path:
        node = path[-1]
        values = [*node, *node.values()] if type(node) is dict else node if type(node) in (list, tuple) else ()
        inner = [value for value in values if type(value) in (dict, list, tuple)]
        unknown = [value for value in inner if id(value) not in lengths]
        if unknown and id(node) not in opened:  # in a cycle, which JSON refuses, a node is met again
            opened.add(id(node))
            path += unknown
            continue
        texts = sum([len(value) for value in values if type(value) is str])
        lengths[id(node)] = len(values) + texts + sum([lengths.get(id(value), 0) for value in inner])
        path.pop()
    return lengths[id(document)]


def _explain(error: Exception, most_memory_bytes: int) -> tuple[int, list[bytes]]:
    code = REFUSED
    if isinstance(error, MemoryError):
        code, reason = OVER_BUDGET, f"needs more than {most_memory_bytes >> 20:,} MiB of memory, far more than its size"
    elif isinstance(error, OverBudgetError):
        code, reason = OVER_BUDGET, str(error)
    elif isinstance(error, WrongFormError):
        code, reason = WRONG_FORM, str(error)
    elif isinstance(error, RefusedError):
        reason = str(error)
    elif isinstance(error, EOFError) or "truncated" in str(error):
        reason = "is truncated or damaged"
    else:
        reason = f"is damaged, or is not plain data ({error})"
    one_line = " ".join(reason.split())[:400].encode("utf-8", "replace")
    return code, [one_line]


# Memory snapshots -----------------------------------------------------------------------------------------------------


class StackTable:
    """Frames and stacks, each once. `stacks` has the frames of all stacks concatenated; stack i ends at `ends[i]`."""

    def __init__(self) -> None:
        self.frames: dict[tuple[str, str, int], int] = {}
        self.stacks = array("i")
        self.ends = array("q")
        self._frame_of_object: dict[int, int] = {}
        self._stack_of_object: dict[int, int] = {}  # objects live as long as this process: their ids are not used again
        self._stack_of_objects: dict[tuple[int, ...], int] = {}
        self._stack_of_frames: dict[bytes, int] = {}

    def number(self, frames: Any) -> int:
        """Number of a stack, a list of frames; -1 if it is none."""
        if type(frames) is not list or not frames:
            return -1
        number = self._stack_of_object.get(id(frames))
        if number is None:
            # Most stacks are lists of their own of the same objects.
            objects = tuple(map(id, frames))
            number = self._stack_of_objects.get(objects)
            if number is None:
                number = self._stack_of_objects[objects] = self._new(array("i", map(self._frame, frames)))
            self._stack_of_object[id(frames)] = number
        return number

    def _new(self, frames: "array[int]") -> int:
        key = frames.tobytes()
        number = self._stack_of_frames.get(key)
        if number is None:
            number = self._stack_of_frames[key] = len(self.ends)
            self.stacks.extend(frames)
            self.ends.append(len(self.stacks))
        return number

    def _frame(self, fields: Any) -> int:
        number = self._frame_of_object.get(id(fields))
        if number is None:
            if type(fields) is not dict or "filename" not in fields:
                raise TypeError("a stack of something other than frames")
            line = fields.get("line")
            line = int(line) if isinstance(line, int) and abs(line) < _MAX_LINE else 0
            key = (str(fields.get("name", "")), str(fields["filename"]), line)
            number = self._frame_of_object[id(fields)] = self.frames.setdefault(key, len(self.frames))
        return number


def _snapshot(root: Any) -> tuple[Any, Sequence["array[Any]"]]:
    """Snapshot with the number of each stack, and the columns: of all events, then of stacks."""
    document = (
        dict(root) if type(root) is dict else {"segments": root}
    )  # old: torch.cuda.memory_snapshot(), a bare list
    stacks = StackTable()
    document["segments"] = [_segment(segment, stacks) for segment in _require_list(document.get("segments"))]
    traces = [_require_list(trace) for trace in _require_list(document.get("device_traces", []))]
    if len({id(trace) for trace in traces}) < len(traces):
        raise ValueError("several devices with one list of events")
    actions: dict[str, int] = {}
    columns = [*_event_columns(traces, actions, stacks)]
    document |= {
        "device_traces": [len(trace) for trace in traces],
        "actions": list(actions),
        "frames": list(stacks.frames),
        "stacks": [len(stacks.stacks), len(stacks.ends)],
    }
    return document, [*columns, stacks.ends, stacks.stacks]


def _segment(part: Any, stacks: StackTable) -> Any:
    """Copy of a segment with the numbers of its stack and its blocks' stacks."""
    copy = _with_stack(part, stacks)
    if "blocks" in copy:
        copy["blocks"] = [_with_stack(block, stacks) for block in _require_list(copy["blocks"])]
    return copy


def _with_stack(part: Any, stacks: StackTable) -> Any:
    """Copy of a segment or block with the number of its stack."""
    if type(part) is not dict:
        raise TypeError("no list of segments")
    frames, history = part.get("frames"), part.get("history")
    if frames is None and history:  # before torch 2.1 a block had the history of its last allocations
        frames = history[0].get("frames")
    return {**part, "frames": stacks.number(frames), "history": None}


def _event_columns(traces: Sequence[list[Any]], actions: dict[str, int], stacks: StackTable) -> Iterable["array[Any]"]:
    def events() -> Iterator[Any]:
        return chain.from_iterable(traces)

    for key in ("time_us", "size", "stream"):
        yield array("q", [MISSING if (value := event.get(key)) is None else value for event in events()])
    # An oom has the device's free memory in place of an address.
    addresses = (event["addr"] if "addr" in event else event.get("device_free") for event in events())
    yield array("q", [MISSING if address is None else address for address in addresses])
    yield array("i", [stacks.number(event.get("frames")) for event in events()])
    column = array("h", [actions.setdefault(event["action"], len(actions)) for event in events()])
    if any(type(action) is not str for action in actions):
        raise TypeError("an action that is not text")
    yield column


def _require_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError("no list of segments, blocks or events")
    return value


# Metadata of checkpoints ----------------------------------------------------------------------------------------------


def _storage_index(metadata: Any) -> tuple[Any, Sequence["array[Any]"]]:
    """Name, file, offset and length of each entry, in the order of the index."""
    index = getattr(metadata, "state", {}).get("storage_data") if type(metadata) is StandIn else None
    if type(index) is not dict:
        raise RefusedError("holds no storage index of torch.distributed.checkpoint")
    try:
        return [
            [str(key.state.get("fqn", "?")), *(place.state[field] for field in ("relative_path", "offset", "length"))]
            for key, place in index.items()
        ], ()
    except (AttributeError, KeyError):
        raise RefusedError("holds a storage index in a form that is not known") from None


if __name__ == "__main__":
    main()

"""The flight recorders of this process: torch's, of NCCL and of other backends, as one dump.

Gloo's records collectives, but neither the ranks of its groups nor sends and receives; both are added here.
"""

import contextlib
import functools
import json
import pickle
import sys
import time
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from tracekit.capture.hangs import threads

_MAX_CALLS = 500
_MAX_FRAMES = 32
_DTYPE_PREFIX = "torch."


class MessageLog:
    """A ring of the last sends and receives."""

    def __init__(self) -> None:
        self._calls: deque[dict[str, Any]] = deque(maxlen=_MAX_CALLS)
        self._numbers: Counter[Any] = Counter()

    def install(self) -> None:
        """Observe the methods of process groups that send and receive."""
        group = distributed.ProcessGroup
        for name, op in (("send", "send"), ("recv", "recv"), ("recv_anysource", "recv")):
            setattr(group, name, self._observe(getattr(group, name), op))

    def progress(self) -> tuple[int, int]:
        """Number of calls made, and that of the last ones which are complete."""
        calls = list(self._calls)
        return sum(self._numbers.values()), sum(_is_complete(call) for call in calls)

    def entries(self) -> list[dict[str, Any]]:
        """Calls as entries of a flight recorder."""
        return [_entry(call) for call in list(self._calls)]

    def _observe(self, method: Callable[..., Any], op: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._begin(group, op, tensors, args)
            work = method(group, tensors, *args, **kwargs)
            if call is not None and work is not None:
                call["work"] = weakref.ref(work)
            return work

        vars(wrapper)["_torchdynamo_disable"] = True
        return wrapper

    def _begin(self, group: Any, op: str, tensors: Any, args: tuple[Any, ...]) -> dict[str, Any] | None:
        try:
            if "nccl" in group.name().lower():
                return None  # its own flight recorder has them
            self._numbers[group.group_name] += 1
            call = {
                "name": (str(group.group_name), str(group.group_desc)),
                "seq": self._numbers[group.group_name],
                "op": op,
                "own": group.rank(),
                "peer": args[0] if len(args) > 1 else None,
                "sizes": [list(tensor.shape) for tensor in tensors],
                "dtypes": [str(tensor.dtype).removeprefix(_DTYPE_PREFIX) for tensor in tensors],
                "created_ns": time.time_ns(),
                "frames": _stack(),
                "work": None,
            }
        except Exception:  # noqa: BLE001 whatever fails here, the training goes on
            return None
        self._calls.append(call)
        return call


def _is_complete(call: dict[str, Any]) -> bool:
    """Return whether a call is complete. A work that nobody holds any more can't be waited for."""
    reference = call["work"]
    if reference is None:
        return False
    work = reference()
    return work is None or bool(work.is_completed())


def _entry(call: dict[str, Any]) -> dict[str, Any]:
    rank, peer = call["own"], "?" if call["peer"] is None else call["peer"]
    is_send = call["op"] == "send"
    return {
        "process_group": call["name"],
        "collective_seq_id": 0,
        "p2p_seq_id": call["seq"],
        "op_id": call["seq"],
        "profiling_name": f"gloo:send {rank}->{peer}" if is_send else f"gloo:recv {rank}<-{peer}",
        "time_created_ns": call["created_ns"],
        "input_sizes": call["sizes"] if is_send else [],
        "input_dtypes": call["dtypes"] if is_send else [],
        "output_sizes": [] if is_send else call["sizes"],
        "output_dtypes": [] if is_send else call["dtypes"],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": _is_complete(call),
        "is_p2p": True,
        "frames": call["frames"],
    }


def _stack() -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        if not threads.is_own(code.co_filename):
            frames.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return frames


_CLOCK_STEP_NS = 10**6
# Methods of a process group -> operations as the flight recorder names them (ProcessGroupNCCL.cpp).
_OPERATIONS = {
    "allreduce": "all_reduce", "allreduce_coalesced": "allreduce_coalesced", "allgather": "all_gather",
    "_allgather_base": "_all_gather_base", "all_gather_single": "_all_gather_base",
    "allgather_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced", "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base", "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced", "broadcast": "broadcast", "reduce": "reduce",
    "gather": "gather", "scatter": "scatter", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all", "barrier": "all_reduce_barrier", "monitored_barrier": "monitored_barrier",
    "send": "send", "recv": "recv", "recv_anysource": "recv",
}  # fmt: skip
_MESSAGES = frozenset({"send", "recv"})

_NAMES = ("_dump_fr_trace", "_dump_nccl_trace")
_MAX_LISTED_RANKS = 1 << 16


def is_available() -> bool:
    """Return whether this torch has a flight recorder that can be read: for gloo, since torch 2.9 or so."""
    return any(hasattr(torch._C._distributed_c10d, name) for name in _NAMES)


def progress(messages: MessageLog) -> str:
    """Text that changes whenever a call is made or completes. It costs about 0.1 ms."""
    texts = []
    for name in _NAMES:
        as_json = getattr(torch._C._distributed_c10d, f"{name}_json", None)
        if as_json is not None:
            status = json.loads(as_json(False, False)).get("pg_status")
            texts.append(json.dumps(status, sort_keys=True))
    return f"{texts} {messages.progress()}"


def dump(messages: MessageLog, *, most_entries: int | None = None) -> dict[str, Any]:
    """Flight recorder's dump in torch's format, with stacks; of its entries the last ones, if limited."""
    with _without_inductor():
        dumps = [call() for name in _NAMES if (call := getattr(torch._C._distributed_c10d, name, None))]
    recorders = [pickle.loads(data) for data in dumps]  # noqa: S301 of this very process
    result: dict[str, Any] = {"version": "2.10", "pg_config": {}, "pg_status": {}}
    entries: list[dict[str, Any]] = []
    for recorder in recorders:
        recorder_entries = recorder.pop("entries", [])
        entries += recorder_entries
        result.update({key: value for key, value in recorder.items() if recorder_entries or key not in result})
    entries += messages.entries()
    add_host_calls(entries)
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    result["entries"] = entries if most_entries is None else entries[-most_entries:]
    result["pg_config"] = {**{k: v for k, v in result["pg_config"].items() if k}, **_groups()}
    return result


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """Keep torch from importing its compiler, whose frames it looks for when it names frames of stacks.

    The import takes seconds, and reads from a disk that may be what hangs.
    """
    if "torch._inductor" in sys.modules:
        yield
        return
    stand_in = types.SimpleNamespace()
    vars(torch)["_inductor"] = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is stand_in:
            del vars(torch)["_inductor"]


def _groups() -> dict[str, dict[str, str]]:
    groups = {}
    for group, ranks in list(distributed_c10d._world.pg_group_ranks.items()):
        name, description = str(group.group_name), str(group.group_desc)
        members = sorted(ranks, key=lambda rank: ranks[rank])[:_MAX_LISTED_RANKS]
        groups[name] = {"name": name, "desc": description, "ranks": str([int(rank) for rank in members])}
    return groups


def mark_failed(entries: list[dict[str, Any]], error: str, callers: set[tuple[str, int]]) -> None:
    """Mark the last call that was made in one of these lines (file and number) as failed; the last call, if none was.

    Gloo's entries do not say whether a call has failed or is complete.
    """
    for entry in reversed(entries):
        places = {(frame.get("filename"), frame.get("line")) for frame in entry.get("frames", ())}
        if callers & places:
            entry["failed"] = error
            return
    if entries:
        entries[-1]["failed"] = error


def observe_calls() -> None:
    """Observe the collectives, sends and receives of process groups: 0.4 to 0.8 µs a call."""
    group = distributed.ProcessGroup
    for name, op in _OPERATIONS.items():
        method = getattr(group, name, None)
        if method is not None and getattr(method, "__code__", None) is not _in_call_code():
            setattr(group, name, _observe(method, op))


def _observe(method: Callable[..., Any], op: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def in_call(group: Any, *args: Any, **kwargs: Any) -> Any:
        call = (op, time.time_ns())  # noqa: F841 `add_host_calls` reads it from the frame, as nothing is to be undone then
        return method(group, *args, **kwargs)

    vars(in_call)["_torchdynamo_disable"] = True
    return in_call


def _in_call_code() -> CodeType:
    """Code that all observed methods share."""
    return next(const for const in _observe.__code__.co_consts if isinstance(const, CodeType))


def add_host_calls(entries: list[dict[str, Any]]) -> None:
    """Mark the entries whose call has not returned to the host, and add the calls that have no entry."""
    for frame in list(sys._current_frames().values()):
        values = _innermost_call(frame)
        if values is not None:
            with contextlib.suppress(Exception):  # of a group that is being destroyed: the dump goes on without it
                _add_call(values, entries)


def _innermost_call(frame: FrameType | None) -> dict[str, Any] | None:
    code = _in_call_code()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None or "call" not in frame.f_locals:
        return None
    return {**frame.f_locals, "caller": frame.f_back}


def _add_call(values: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    group, (op, entered_ns) = values["group"], values["call"]
    name = (str(group.group_name), str(group.group_desc))
    same = [entry for entry in entries if str(entry["process_group"][0]) == name[0]]
    recorded = [entry for entry in same if entry["time_created_ns"] >= entered_ns - _CLOCK_STEP_NS]
    if recorded:
        recorded[-1]["host_in_call"] = True
        return
    is_message, call_name = op in _MESSAGES, op
    if is_message:  # with its ranks in the group
        peer = values["args"][1] if len(values["args"]) > 2 else "?"
        call_name = f"{op} {group.rank()}->{peer}" if op == "send" else f"{op} {group.rank()}<-{peer}"
    number = "p2p_seq_id" if is_message else "collective_seq_id"
    seq = 1 + max((entry[number] for entry in same if bool(entry.get("is_p2p")) is is_message), default=0)
    entries.append({
        "process_group": name, "collective_seq_id": 0 if is_message else seq, "p2p_seq_id": seq if is_message else 0,
        "op_id": seq, "profiling_name": f"{group.name().lower()}:{call_name}",
        "time_created_ns": entered_ns, "input_sizes": [], "input_dtypes": [], "output_sizes": [], "output_dtypes": [],
        "state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": False, "is_p2p": is_message, "frames": threads.stack(values["caller"]), "host_in_call": True,
        "is_recorded": False,
    })  # fmt: skip

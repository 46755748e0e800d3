"""Calls that block the host before a flight recorder has them: NCCL creates the communicator of a group there."""

from collections.abc import Iterable
from dataclasses import replace

from tracekit.analysis.hangs import host
from tracekit.analysis.hangs.host import Activity
from tracekit.model.hang_dump import Call, CallState, HangDumps, RankDump

_NCCL = "nccl"
# Functions of torch.distributed for all ranks of a group -> operations as the flight recorder names them.
_OPERATIONS = {
    "all_reduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce", "all_gather": "all_gather",
    "all_gather_into_tensor": "_all_gather_base", "gather": "gather", "scatter": "scatter",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor": "_reduce_scatter_base", "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all", "barrier": "all_reduce_barrier",
}  # fmt: skip


def with_inferred_calls(dumps: HangDumps) -> HangDumps:
    """Return the dumps with the calls that stacks show and whose group is certain: the only one without a call yet."""
    return replace(dumps, ranks={rank: _with_inferred_call(dump) for rank, dump in dumps.ranks.items()})


def _with_inferred_call(dump: RankDump) -> RankDump:
    op = _OPERATIONS.get(host.state(dump).operation) if is_blocked(dump) else None
    names = groups_without_calls(dump)
    has_first_calls = not dump.calls or dump.calls[0].seq == 1  # the recorder's ring drops the oldest calls
    if op is None or len(names) != 1 or not has_first_calls or dump.main_thread is None:
        return dump
    description = dump.groups[names[0]][0]
    call = Call(
        dump.rank, len(dump.calls), names[0], description, 1, op, _NCCL, CallState.SCHEDULED,
        frames=dump.main_thread.frames, is_recorded=False,
    )  # fmt: skip
    return replace(dump, calls=(*dump.calls, call))


def is_blocked(dump: RankDump) -> bool:
    """Return whether the host is in a call of torch.distributed, and the flight recorder has no pending call."""
    may_be_nccl = not dump.calls or any(call.backend == _NCCL for call in dump.calls)
    return (
        dump.has_recorder and may_be_nccl and not dump.pending and host.state(dump).activity is Activity.COMMUNICATION
    )


def groups_without_calls(dump: RankDump) -> list[str]:
    """Return the names of a rank's groups of several ranks that the rank has no call of."""
    called = {call.group for call in dump.calls}
    return [name for name, (_, ranks) in dump.groups.items() if name not in called and len(ranks or (0, 1)) > 1]


def creates_communicator(call: Call, dump: RankDump) -> bool:
    """Return whether a call is the first one of its group, in which NCCL creates the communicator."""
    is_first = not any(other.is_recorded and other.group == call.group for other in dump.calls)
    return not call.is_recorded and call.backend == _NCCL and is_first


def describe_groups(dumps: Iterable[RankDump]) -> list[str]:
    """Return the groups of blocked ranks that have no call yet, for a message."""
    descriptions = {}
    for dump in dumps:
        for name in groups_without_calls(dump):
            description = dump.groups[name][0]
            descriptions[name] = f'"{name}"' + (f" ({description})" if description not in ("", "undefined") else "")
    return list(descriptions.values())

"""The flight recorders of this process: torch's, of NCCL and of other backends, as one dump.

Gloo's records collectives, but neither the ranks of its groups nor sends and receives; both are added here.
"""

import contextlib
import json
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d

from tracekit.capture.hangs import host_calls
from tracekit.capture.hangs.messages import MessageLog

_NAMES = ("_dump_fr_trace", "_dump_nccl_trace")
_MAX_LISTED_RANKS = 1 << 16


def is_available() -> bool:
    """Return whether this torch has a flight recorder that can be read: for gloo, since torch 2.9 or so."""
    return any(hasattr(torch._C._distributed_c10d, name) for name in _NAMES)


def progress(messages: MessageLog) -> str:
    """Return a text that changes whenever a call is made or completes. It costs about 0.1 ms."""
    texts = []
    for name in _NAMES:
        as_json = getattr(torch._C._distributed_c10d, f"{name}_json", None)
        if as_json is not None:
            status = json.loads(as_json(False, False)).get("pg_status")
            texts.append(json.dumps(status, sort_keys=True))
    return f"{texts} {messages.progress()}"


def dump(messages: MessageLog, *, most_entries: int | None = None) -> dict[str, Any]:
    """Return the flight recorder's dump in torch's format, with stacks; of its entries the last ones, if limited."""
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
    host_calls.add(entries)
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
    """Return names, descriptions and global ranks of this process's groups."""
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

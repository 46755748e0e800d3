"""Flight recorder dumps in torch's format, for tests: entries as torch 2.13 writes them."""

import itertools
from typing import Any

GROUP = ("0", "default_pg")
SECOND_NS = 10**9
BEGAN_NS = 1_700_000_000 * SECOND_NS


def entry(
    op: str,
    seq: int,
    *,
    state: str = "completed",
    size: tuple[int, ...] = (8,),
    dtype: str = "Float",
    group: tuple[str, str] = GROUP,
    backend: str = "nccl",
    created_ns: int | None = None,
    is_p2p: bool = False,
    outputs: tuple[int, ...] | None = None,
    frames: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    created_ns = BEGAN_NS + seq * SECOND_NS if created_ns is None else created_ns
    return {
        "frames": frames or [{"name": "train", "filename": "/home/user/train.py", "line": 10 + seq}],
        "record_id": seq,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": 0 if is_p2p else seq,
        "p2p_seq_id": seq if is_p2p else 0,
        "op_id": seq,
        "profiling_name": f"{backend}:{op}",
        "time_created_ns": created_ns,
        "input_sizes": [list(size)],
        "input_dtypes": [dtype],
        "output_sizes": [list(size if outputs is None else outputs)],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": None if state == "scheduled" else created_ns + 1000,
        "time_discovered_completed_ns": created_ns + 2000 if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": is_p2p,
    }


def dump(entries: list[dict[str, Any]], *, groups: dict[tuple[str, str], list[int]], **fields: Any) -> dict[str, Any]:
    for number, each in enumerate(entries):
        each["record_id"] = number
    config = {name: {"name": name, "desc": text, "ranks": str(ranks)} for (name, text), ranks in groups.items()}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries, **fields}


def done(ops: list[str], **options: Any) -> list[dict[str, Any]]:
    """Return complete calls, numbered from 1."""
    return [entry(op, seq, **options) for op, seq in zip(ops, itertools.count(1), strict=False)]

"""The node of each rank: as the manifest states GPUs per node, else by where the ranks' device indices start again."""

import polars as pl

from tracekit.model.run import Run
from tracekit.model.trace import Trace


def device_index(trace: Trace) -> pl.DataFrame:
    """Return the index of the rank's first device. Column device (null on a CPU run); one row."""
    return pl.DataFrame({"device": [trace.lanes["device"].min()]}, schema={"device": pl.Int64})


def node_of_rank(run: Run) -> dict[int, int]:
    """Return the number of each rank's node; {} where it is not known, or all ranks share one."""
    hardware = run.manifest.get("hardware")
    size = hardware.get("gpus_per_node") if isinstance(hardware, dict) else None
    size = size if isinstance(size, int) and size > 0 else _size_by_devices(run)
    nodes = {rank: rank // size for rank in run.ranks} if size else {}
    return nodes if len(set(nodes.values())) > 1 else {}


def _size_by_devices(run: Run) -> int | None:
    """Return after how many ranks device indices start again from 0; None if they do not."""
    devices = run.table(device_index).unique("rank").sort("rank")
    if devices["device"].null_count() or devices.is_empty():
        return None
    size = 1 + max(devices["device"].to_list())
    agrees = all(rank % size == device for rank, device in devices.select("rank", "device").iter_rows())
    return size if agrees and size > 1 else None

"""Functions of NCCL as NCCL's own tools state them: the op of each, and the bytes that a rank sends and receives."""

from tracekit.ingest.readers.normalize.events import MessageBytes

OPS = {
    "AllReduce": "allreduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "Broadcast": "broadcast",
    "Bcast": "broadcast", "Reduce": "reduce", "Send": "send", "Recv": "recv", "AllToAll": "all_to_all",
    "AlltoAll": "all_to_all",
}  # fmt: skip
"""Collectives in the spelling of PyTorch's profiler, by the name of the function without its prefix."""


def message_bytes(op: str, part_bytes: int, ranks: int | None) -> MessageBytes:
    """Bytes that a rank sends and receives, by the bytes that NCCL states: those of one rank's part.

    >>> message_bytes("all_gather", 8, 4)
    MessageBytes(sent=8, received=32)
    """
    total_bytes = None if ranks is None else part_bytes * ranks
    if op == "all_gather":
        return MessageBytes(part_bytes, total_bytes)
    if op == "reduce_scatter":
        return MessageBytes(total_bytes, part_bytes)
    if op == "all_to_all":  # NCCL states the part for one peer
        return MessageBytes(total_bytes, total_bytes)
    return MessageBytes(part_bytes, part_bytes)

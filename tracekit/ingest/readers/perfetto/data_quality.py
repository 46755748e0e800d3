"""Data-quality issues of a Perfetto file."""

from collections.abc import Iterator

from tracekit.ingest.readers.perfetto.events import Events, Slices


def of_file(events: Events, slices: Slices) -> Iterator[tuple[str, str, float]]:
    """Yield the kind, message and affected share of each issue."""
    packets = events.packets
    if packets.broken or packets.read_bytes < packets.total_bytes:
        why = packets.broken or f"{packets.read_bytes:,} of {packets.total_bytes:,} bytes can be read"
        lost = 1 - packets.read_bytes / max(packets.total_bytes, 1)
        yield "truncated", f"The Perfetto file is damaged or truncated: {why}.", lost
    lost_events = events.void + packets.damaged
    if lost_events:
        share = lost_events / max(len(events.kind) + lost_events, 1)
        message = f"{lost_events:,} events of the Perfetto file cannot be read or lack their state and were left out."
        yield "damaged_events", message, share
    unmatched = slices.unfinished + slices.stray_ends
    if unmatched:
        message = f"{unmatched:,} begin or end events lack their counterpart and were ignored."
        yield "unmatched_pairs", message, unmatched / max(len(events.kind), 1)

"""The memory of a run or of a snapshot as a document."""

import polars as pl

from tracekit.analysis.memory.usage import change_by_category, change_by_owner
from tracekit.model import units
from tracekit.replay.allocator.memory_usage import MemoryUsage, ReservedMemory
from tracekit.replay.allocator.out_of_memory import OutOfMemoryEvent
from tracekit.report.document import Document, Section, Table, heading, line

_MOST_ROWS = 15
_EARLIER = "(allocated earlier, or without a stack)"


def document(usage: MemoryUsage) -> Document:
    """Peaks, live blocks at the peak, churn, the replay, and what changed since another run or snapshot."""
    oom, other = usage.out_of_memory, usage.against
    sentences = [] if oom is None else oom_sentences(oom, usage.rank)
    sentences.append(_peak(usage))
    if usage.recorded is not None and usage.replayed is not None:
        sentences.append(replay_line(usage.settings, usage.recorded, usage.replayed))
    sentences += usage.notes
    sentences += [] if other is None else [_change_of_peak(usage.peak_allocated_bytes, other.peak_allocated_bytes)]
    return Document(([line(sentence) for sentence in sentences], *_tables(usage)), values=_values(usage))


def _tables(usage: MemoryUsage) -> list[Section]:
    tables = oom_tables(usage.out_of_memory)
    if usage.against is not None:
        by_category, by_owner = _change(usage, usage.against)
        tables["Change of the memory at the peak, by what it is for"] = by_category
        tables["Change of the memory at the peak, by who requested it"] = by_owner
    tables["What the memory at the peak is for"] = usage.categories.drop("device")
    tables |= {"Allocated at the peak": usage.live_at_peak, "Allocations": usage.churn, **usage.tables}
    return [_section(title, rows) for title, rows in tables.items() if rows.height]


def _section(title: str, rows: pl.DataFrame) -> Section:
    more = rows.height - _MOST_ROWS
    rest = [line(f"and {more:,} more: use --format json to see all")] if more > 0 else []
    return [heading(title), Table(_for_people(rows).head(_MOST_ROWS)), *rest]


def _values(usage: MemoryUsage) -> dict[str, object]:
    values: dict[str, object] = {
        "peak_allocated_bytes": usage.peak_allocated_bytes,
        "peak_reserved_bytes": usage.peak_reserved_bytes,
        "live_at_peak": usage.live_at_peak.to_dicts(),
        "churn": usage.churn.to_dicts(),
        "categories": usage.categories.to_dicts(),
        "oom": _oom_values(usage),
    }
    if usage.against is not None:
        by_category, by_owner = _change(usage, usage.against)
        values["against"] = {
            "peak_allocated_bytes": usage.against.peak_allocated_bytes,
            "peak_reserved_bytes": usage.against.peak_reserved_bytes,
            "by_category": by_category.to_dicts(),
            "by_owner": by_owner.to_dicts(),
        }
    if usage.recorded is not None:
        values |= {"recorded": usage.recorded, "replayed": usage.replayed}
    return values


def _change(usage: MemoryUsage, against: MemoryUsage) -> tuple[pl.DataFrame, pl.DataFrame]:
    by_category = change_by_category(usage.categories, against.categories)
    return by_category, change_by_owner(usage.live_at_peak, against.live_at_peak)


def oom_sentences(oom: OutOfMemoryEvent, rank: int | None = None) -> list[str]:
    """Sentences on the cause where it is known, the request that failed, and what would have served it."""
    by = " in ".join(filter(None, (oom.operator, oom.location))) or "code that is not in the snapshot"
    where = f"device {oom.device}" + ("" if rank is None else f" of rank {rank}")
    size = units.size(oom.requested_bytes)
    cause, other_reasons = _oom_reasons(oom)
    sentences = [f"Out of memory: {by} requested {size} on {where}."]
    if cause:
        sentences = [f"Out of memory: {cause}", f"The request that failed: {size} on {where}, by {by}."]
    if oom.segment_bytes != oom.requested_bytes:
        sentences.append(f"PyTorch tried to allocate {units.size(oom.segment_bytes)} of the device for it.")
    if oom.free_bytes is not None:
        sentences.append(f"{units.size(oom.free_bytes)} of the device was free{_limit(oom)}.")
    if oom.reserved_unallocated_bytes:
        sentences.append(
            f"{units.size(oom.reserved_unallocated_bytes)} was reserved by PyTorch but unallocated; the largest block "
            f"that could serve the request has {units.size(oom.largest_free_block_bytes or 0)}."
        )
    more = [f"{reason[0].upper()}{reason[1:]}" for reason in other_reasons]
    return [*sentences, *more, *_oom_advice(oom), *oom.notes]


def _oom_reasons(oom: OutOfMemoryEvent) -> tuple[str, list[str]]:
    """Cause of a request that failed, and what else filled the memory; "" where the request is simply too large.

    Growth is the cause if it is at least as large as the request.
    """
    growth = [
        f"memory grows by {units.size(row['step_bytes'])} a step, which {row['op']} requested in each of the "
        f"last {row['steps']} steps and nothing freed: {units.size(row['bytes'])}."
        for row in oom.growth.head(1).iter_rows(named=True)
    ]
    fragmentation = (
        ["the memory is fragmented; enough was free, but in smaller blocks."] if oom.is_fragmentation else []
    )
    if growth and oom.growth["bytes"][0] >= oom.requested_bytes:
        return growth[0], fragmentation
    return "".join(fragmentation), growth


def _limit(oom: OutOfMemoryEvent) -> str:
    """Return a clause on the limit that refused a request for which the device had enough free memory."""
    if not oom.is_process_limit or oom.reserved_bytes is None or oom.peak_reserved_bytes is None:
        return ""
    upper = units.size(oom.reserved_bytes + oom.segment_bytes)
    return (
        f": a limit of this process refused the request, which is between {units.size(oom.peak_reserved_bytes)} "
        f"and {upper} of reserved memory (see torch.cuda.set_per_process_memory_fraction)"
    )


def _oom_advice(oom: OutOfMemoryEvent) -> list[str]:
    serving = oom.tried.filter("fits")["settings"].to_list()
    if serving:
        return [
            f"Set PYTORCH_CUDA_ALLOC_CONF={serving[0]}: the allocator's history, replayed with it on the same device, "
            f"serves the request{', but not those of later steps, as memory grows' if oom.growth.height else ''}."
        ]
    tried = f" None of {', '.join(oom.tried['settings'])} would have served it." if oom.tried.height else ""
    if oom.is_fragmentation:
        return [tried.strip()] if tried else []
    if oom.allocated_bytes is None or oom.free_bytes is None or oom.reserved_bytes is None:
        return []
    missing_bytes = oom.requested_bytes - oom.room_bytes - (oom.reserved_bytes - oom.allocated_bytes)
    how = "about" if oom.is_process_limit else "at least"
    if missing_bytes > oom.allocated_bytes:
        rest = units.size(missing_bytes - oom.allocated_bytes)
        return [
            f"{units.size(oom.allocated_bytes)} was allocated: the request is {rest} larger than all of it and what is "
            "free. Make the request smaller, or free the device of what this snapshot does not show, such as other "
            "processes."
        ]
    return [
        f"{units.size(oom.allocated_bytes)} was allocated: {how} {units.size(missing_bytes)} less must be."
        f"{tried or ' No allocator setting can serve the request.'} See the owners below."
    ]


def oom_tables(oom: OutOfMemoryEvent | None) -> dict[str, pl.DataFrame]:
    """Return the tables that explain an out-of-memory by their titles: owners, growth, free blocks, other settings."""
    if oom is None:
        return {}
    return {
        "Allocated when memory ran out": oom.allocated_by,
        "Memory that grows from step to step": oom.growth,
        "Free blocks when memory ran out": oom.free_blocks,
        "Other settings, replayed": oom.tried,
    }


def _oom_values(usage: MemoryUsage) -> dict[str, object] | None:
    oom = usage.out_of_memory
    if oom is None:
        return None
    return {
        "rank": usage.rank,
        "device": oom.device,
        "at_ns": oom.at_ns,
        "count": oom.count,
        "requested_bytes": oom.requested_bytes,
        "segment_bytes": oom.segment_bytes,
        "free_bytes": oom.free_bytes,
        "is_process_limit": oom.is_process_limit,
        "peak_reserved_bytes": oom.peak_reserved_bytes,
        "reserved_bytes": oom.reserved_bytes,
        "allocated_bytes": oom.allocated_bytes,
        "reserved_unallocated_bytes": oom.reserved_unallocated_bytes,
        "largest_free_block_bytes": oom.largest_free_block_bytes,
        "operator": oom.operator,
        "location": oom.location,
        "is_fragmentation": oom.is_fragmentation,
        "allocated_by": oom.allocated_by.to_dicts(),
        "free_blocks": oom.free_blocks.to_dicts(),
        "growth": oom.growth.to_dicts(),
        "tried": oom.tried.to_dicts(),
    }


def replay_line(settings: str, recorded: ReservedMemory, replayed: ReservedMemory) -> str:
    """Return a replay in one line."""
    return (
        f"{settings}: reserved {units.size(recorded['peak_reserved_bytes'])} → "
        f"{units.size(replayed['peak_reserved_bytes'])}, "
        f"{recorded['device_allocations']:,} → {replayed['device_allocations']:,} device allocations, "
        f"{recorded['retries']:,} → {replayed['retries']:,} retries"
    )


def _change_of_peak(here_bytes: int | None, there_bytes: int | None) -> str:
    if here_bytes is None or there_bytes is None:
        return "The peaks cannot be compared: one of them is not known."
    change, other_size = here_bytes - there_bytes, units.size(there_bytes)
    if not change:
        return "The other has the same peak."
    return f"That is {units.size(abs(change))} {'more' if change > 0 else 'less'} than the {other_size} of the other."


def _peak(usage: MemoryUsage) -> str:
    if usage.peak_allocated_bytes is None:
        return "The memory is not known."
    reserved = f", {units.size(usage.peak_reserved_bytes)} reserved" if usage.peak_reserved_bytes else ""
    return f"{units.size(usage.peak_allocated_bytes)} allocated at the peak{reserved}"


def _for_people(rows: pl.DataFrame) -> pl.DataFrame:
    if "peak_ratio" not in rows.columns or "category" in rows.columns or not rows["peak_ratio"].count():
        return rows
    rows = rows.drop("at_ns", "peak_bytes", strict=False)
    if "op" in rows.columns and rows["op"].count():
        return rows.with_columns(pl.col("op").fill_null(_EARLIER))
    return rows.drop("op", strict=False).with_columns(op=pl.lit(_EARLIER))

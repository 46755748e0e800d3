"""The allocator's settings, as PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF) writes them."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tracekit.errors import InputError, did_you_mean

MIB = 1 << 20
BLOCK_BYTES = 512
"""Every block is a multiple of this."""
SMALL_BYTES = 1 * MIB
"""Requests up to this are small; a large block is split only where more than this is left."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""From this a request gets a segment of its own size, in steps of 2 MiB."""
SEGMENT_STEP_BYTES = 2 * MIB
UNLIMITED = 1 << 62
INTERVALS = 16
"""Powers of two from 1 MiB to 32 GiB and above, each with its own number of divisions."""

_KEYS = (
    "expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions",
    "max_non_split_rounding_mb", "per_process_memory_fraction",
)  # fmt: skip
# Settings that don't change what is taken of the device.
_WITHOUT_EFFECT = (
    "backend", "release_lock_on_cudamalloc", "pinned_use_cuda_host_register", "pinned_num_register_threads",
    "pinned_use_background_threads", "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
)  # fmt: skip
_PAIR = re.compile(r"\s*([\w.]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+?)\s*(?:,|$)")


@dataclass(frozen=True)
class Settings:
    """What changes the allocator's decisions. The defaults are the allocator's own."""

    expandable: bool = False
    max_split_bytes: int = UNLIMITED
    """Blocks of at least this are not split, and serve only requests of at least this."""
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """How much larger than the request such a block may be."""
    gc_threshold: float = 0.0
    """Share of the allowed memory from which unused blocks are given back; needs `memory_fraction`."""
    roundup_divisions: tuple[int, ...] = (0,) * INTERVALS
    """For each power of two from 1 MiB, into how many sizes it is divided; 0 or 1: multiples of 512 bytes."""
    memory_fraction: float | None = None
    """Share of the device's memory that the process may take; None: no limit of its own."""

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Return the settings that `text` writes, such as ``expandable_segments:True,max_split_size_mb:128``.

        Empty or ``default`` are the allocator's defaults. Raises InputError, naming the key and what it may be.
        """
        if text.strip() in ("", "default"):
            return cls()
        recorded: dict[str, object] = {}
        position = 0
        while position < len(text):
            pair = _PAIR.match(text, position)
            if pair is None:
                raise InputError(
                    f"{text[position:]!r}: allocator settings are key:value pairs, such as max_split_size_mb:128"
                )
            recorded |= _one(pair[1], pair[2])
            position = pair.end()
        return cls(**recorded)  # type: ignore[arg-type]

    @classmethod
    def of_snapshot(cls, recorded: Mapping[str, object]) -> "Settings":
        """Return the settings under which a snapshot was taken, by its `allocator_settings`."""
        split, divisions = recorded.get("max_split_size"), recorded.get("roundup_power2_divisions")
        collect = recorded.get("garbage_collection_threshold")
        written = cls()
        with contextlib.suppress(InputError):  # what only the text has; of another torch it may be more than is known
            written = cls.parse(str(recorded.get("PYTORCH_CUDA_ALLOC_CONF") or ""))
        return replace(
            written,
            expandable=recorded.get("expandable_segments") is True,
            max_split_bytes=split if isinstance(split, int) and split > 0 else UNLIMITED,
            gc_threshold=collect if isinstance(collect, int | float) and 0 < collect < 1 else 0.0,
            roundup_divisions=_of_snapshot(divisions) if isinstance(divisions, dict) else (0,) * INTERVALS,
        )

    @property
    def gives_back_some(self) -> bool:
        """Whether the allocator may give back a part of its cache, rather than all of it, when it needs memory."""
        return self.gc_threshold > 0 or self.max_split_bytes < UNLIMITED

    def round_up(self, requested_bytes: int) -> int:
        """Return the size of the block that a request needs.

        >>> Settings().round_up(1), Settings().round_up(513)
        (512, 1024)
        >>> Settings(roundup_divisions=(4,) * 16).round_up(1200 * 1024)
        1310720
        """
        if requested_bytes < BLOCK_BYTES:
            return BLOCK_BYTES
        interval = min(max(requested_bytes.bit_length() - 21, 0), INTERVALS - 1)
        divisions = self.roundup_divisions[interval]
        if divisions > 1 and requested_bytes > BLOCK_BYTES * divisions:
            step = (1 << (requested_bytes.bit_length() - 1)) // divisions
            return -(-requested_bytes // step) * step
        return -(-requested_bytes // BLOCK_BYTES) * BLOCK_BYTES


def segment_bytes(block_bytes: int) -> int:
    """Return the size of the segment that is taken of the device for a block."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def _one(key: str, value: str) -> dict[str, object]:
    if key in _WITHOUT_EFFECT:
        return {}
    if key not in _KEYS:
        raise InputError(f"{key}: no allocator setting{did_you_mean(key, _KEYS)} (of {', '.join(_KEYS)})")
    if key == "expandable_segments":
        if value not in ("True", "False"):
            raise InputError(f"{key}:{value}: must be True or False")
        return {"expandable": value == "True"}
    if key == "roundup_power2_divisions":
        return {"roundup_divisions": _divisions(value)}
    number = _number(key, value)
    if key == "max_split_size_mb":
        if number <= LARGE_SEGMENT_BYTES // MIB:
            raise InputError(f"{key}:{value}: must be more than 20")
        return {"max_split_bytes": int(number) * MIB}
    if key == "max_non_split_rounding_mb":
        return {"max_non_split_rounding_bytes": int(number) * MIB}
    if not 0 < number < 1 and not (key == "per_process_memory_fraction" and number == 1):
        raise InputError(f"{key}:{value}: must lie between 0 and 1")
    return {"gc_threshold" if key == "garbage_collection_threshold" else "memory_fraction": number}


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"{key}:{value}: must be a number") from None
    if not 0 <= number < 1 << 40:
        raise InputError(f"{key}:{value}: must be a number from 0")
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """Return divisions by interval, of `8` or `[256:1,512:2,>:4]`: what comes before the first is as the first."""
    if not value.startswith("["):
        return (_division(value),) * INTERVALS
    by_interval = [0] * INTERVALS
    last = -1
    for pair in value.strip("[] ").split(","):
        size, _, count = (part.strip() for part in pair.partition(":"))
        divisions = _division(count)
        if size == ">":
            by_interval[last + 1 :] = [divisions] * (INTERVALS - last - 1)
            continue
        if not size.isdigit() or int(size) & (int(size) - 1) or int(size) == 0:
            raise InputError(f"roundup_power2_divisions: {size!r} must be a power of two, in MiB, or >")
        index = min(int(size).bit_length() - 1, INTERVALS - 1)
        if last < 0:
            by_interval[:index] = [divisions] * index
        by_interval[index] = divisions
        last = index
    return tuple(by_interval)


def _division(value: str) -> int:
    if not value.isdigit() or int(value) & (int(value) - 1):
        raise InputError(f"roundup_power2_divisions: {value!r} must be a power of two")
    return int(value)


def _of_snapshot(recorded: Mapping[object, object]) -> tuple[int, ...]:
    by_interval = [0] * INTERVALS
    for size, divisions in recorded.items():
        index = int(str(size)).bit_length() - 1 if str(size).isdecimal() else -1
        if 0 <= index < INTERVALS and isinstance(divisions, int):
            by_interval[index] = divisions
    return tuple(by_interval)

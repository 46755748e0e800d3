"""The files of one log, in order: a long log is a sequence of parts, each closed when it has reached a size."""

from collections.abc import Callable

from tracekit import conventions

PART_BYTES = 16 << 20  # a metrics log of 200,000 steps; a million are 87 MB


def part_name(name: str, number: int) -> str:
    """Name of a log's part, the first being 1.

    >>> part_name("rank00003.metrics.jsonl", 2)
    'rank00003.part002.metrics.jsonl'
    """
    rank, _, rest = name.partition(".")
    return f"{rank}.part{number:03d}.{rest}"


def closed_parts(name: str, exists: Callable[[str], bool]) -> list[str]:
    """Names of the parts of a log that are closed, in order; `exists` says of a name whether the file is there."""
    parts: list[str] = []
    while exists(part := part_name(name, len(parts) + 1)):
        parts.append(part)
    return parts


def files(name: str, exists: Callable[[str], bool]) -> list[str]:
    """Names of the files of a log, in order: its closed parts, and the last one, which may still be growing.

    A file that grows is newer than one with the final name: the training was resumed.
    """
    last = next((last for last in (name + conventions.PARTIAL_SUFFIX, name) if exists(last)), None)
    return [*closed_parts(name, exists), *([] if last is None else [last])]

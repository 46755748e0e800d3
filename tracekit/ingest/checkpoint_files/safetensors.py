"""Folders of Hugging Face: the header of each .safetensors file against its size, and the index against the files."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracekit.ingest import untrusted_json
from tracekit.ingest.checkpoint_files import result
from tracekit.ingest.checkpoint_files.result import Part, Problem

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as the library itself allows
_MAX_INDEX_BYTES = 1 << 30


class _DamagedError(ValueError):
    pass


def check(folder: Path, names: list[str], indexes: list[str]) -> Part:
    """Return the problems of safetensors files, and of indexes that name files of either format."""
    problems: list[Problem] = []
    tensors: dict[str, set[str]] = {}
    total = 0
    for name in names:
        try:
            size, tensors[name] = _tensors(folder / name)
            total += size
        except OSError as error:
            problems.append(result.unreadable(name, error))
        except _DamagedError as error:
            problems.append(result.problem(name, str(error)))
    damaged = {problem.file for problem in problems}
    for index in indexes:
        problems.extend(_against_index(folder, index, tensors, damaged))
    notes = ("safetensors holds no checksums: headers and sizes were verified, not the weights",) if names else ()
    return Part("safetensors" if names else "index", tuple(problems), notes, len(names) + len(indexes), total)


def _tensors(path: Path) -> tuple[int, set[str]]:
    """Return size and tensors of a file. Raises OSError, or _DamagedError if header and size disagree."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length_bytes = file.read(_LENGTH_BYTES)
        if len(length_bytes) < _LENGTH_BYTES:
            raise _DamagedError(f"has {size} bytes: it was cut in its header")
        (length,) = struct.unpack("<Q", length_bytes)
        if length > min(_MAX_HEADER_BYTES, size):
            raise _DamagedError(f"has {size:,} bytes and declares a header of {length:,}: it was cut, or is damaged")
        raw = file.read(length)
    try:
        header: Mapping[str, Any] = untrusted_json.parse(raw)
        spans = sorted(_span(tensor["data_offsets"]) for name, tensor in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _DamagedError(f"has a header that cannot be read ({error})") from None
    data_end = 0
    for begin, end in spans:
        if begin != data_end or end < begin:
            raise _DamagedError(f"has a header with a hole, or an overlap, at byte {data_end:,} of its data")
        data_end = end
    needed = _LENGTH_BYTES + length + data_end
    if size != needed:
        how = "it was cut" if size < needed else "something was added"
        raise _DamagedError(f"has {size:,} bytes, {needed:,} by its header: {how}")
    return size, {name for name in header if name != "__metadata__"}


def _span(offsets: object) -> tuple[int, int]:
    match offsets:
        case [int(begin), int(end)] if begin >= 0:
            return begin, end
    raise TypeError(f"data_offsets are {offsets!r:.80}")


def _against_index(folder: Path, index: str, tensors: Mapping[str, set[str]], damaged: set[str]) -> list[Problem]:
    try:
        if (folder / index).stat().st_size > _MAX_INDEX_BYTES:
            return [result.problem(index, "is larger than any index")]
        places = untrusted_json.parse((folder / index).read_bytes())["weight_map"].items()
    except OSError as error:
        return [result.unreadable(index, error)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return [result.problem(index, f"is damaged ({error})")]
    by_file: dict[str, list[str]] = {}
    for tensor, file in places:
        by_file.setdefault(str(file), []).append(tensor)
    problems = []
    for file, names in sorted(by_file.items()):
        if not (folder / file).is_file():
            problems.append(result.problem(file, f"is missing: {index} looks there for {len(names)} tensors"))
        elif file in tensors and (lost := [name for name in names if name not in tensors[file]]):
            problems.append(result.problem(file, f"lacks {lost[0]} and {len(lost) - 1} more tensors of {index}"))
    return [problem for problem in problems if problem.file not in damaged]

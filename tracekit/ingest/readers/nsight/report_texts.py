"""What the texts of an Nsight Systems report name: CUDA calls, copies, operators, steps."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize.numbers import Ints
from tracekit.ingest.readers.normalize.sqlite_tables import Database

UNKNOWN = "?"

_VERSION = re.compile(r"(?:_ptsz|_ptds)?_v\d+$|(?:_ptsz|_ptds)$")
_MOST_NAME = 64 << 10
_FEW = 1000
# Enumerations of CUPTI (CUpti_ActivityMemcpyKind, CUpti_ActivityMemoryKind); tables of the report name them, too.
_COPIES = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "HtoD", 12: "DtoH", 13: "DtoD",
}  # fmt: skip
_MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
# github.com/pytorch/pytorch torch/csrc/autograd/profiler_legacy.cpp and profiler/util.cpp, getNvtxStr.
_OPERATOR = re.compile(
    r"(?P<name>[^,]+(?:,(?! (?:seq|op_id|sizes|input_op_ids) = )[^,]*)*?)"
    r"(?:, seq = (?P<seq>-?\d{1,18}))?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>\[.*?\]))?(?:, input_op_ids = .*)?$",
    re.S,
)
_MARKS = (", seq = ", ", op_id = ", ", sizes = ")
_STEP = re.compile(
    r"(?:(?:train|training)[ _-]?)?(step|iteration|iter|global[ _]step|batch|ProfilerStep)[ _:#=-]*(\d{1,15})$", re.I
)


class Texts:
    """The texts that rows refer to by id. Most rows of large reports name texts of their own, so each is read once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._few: dict[int, str] = {}

    def get(self, key: object) -> str:
        """Return the text of an id; ? where there is none."""
        if not isinstance(key, int):
            return UNKNOWN
        if key not in self._few:
            rows = self._database.rows("StringIds", ("value",), f"WHERE id = {key} LIMIT 1")
            value = rows[0][0] if rows else None
            self._few[key] = value[:_MOST_NAME] if isinstance(value, str) else UNKNOWN
        return self._few[key]

    def of_all(self, keys: Ints) -> tuple[pl.Series, Ints]:
        """Return the distinct texts of ids, and the place of each id's text among them; ? where there is none."""
        distinct, inverse = np.unique(keys, return_inverse=True)
        texts = [UNKNOWN] * len(distinct)
        place = dict(zip(distinct.tolist(), range(len(distinct)), strict=True))
        few = f"WHERE id IN ({', '.join(map(str, place))})" if len(place) <= _FEW else ""  # they are found by an index
        for key, value in self._database.each("StringIds", ("id", "value"), few):
            if isinstance(value, str) and (i := place.get(key)) is not None:
                texts[i] = value[:_MOST_NAME]
        return pl.Series("name", texts, dtype=pl.String), np.asarray(inverse, np.int64).copy()


@dataclass(frozen=True)
class Operator:
    """An operator that PyTorch's emit_nvtx annotated."""

    name: str
    sequence: int
    sizes: str | None
    """Shapes of its inputs, as JSON."""


def operator(text: str) -> Operator | None:
    """Return the operator that a range of PyTorch's emit_nvtx names; None for other ranges.

    >>> operator("aten::mm, seq = 7, op_id = 12, sizes = [[2, 3], [3, 4]]")
    Operator(name='aten::mm', sequence=7, sizes='[[2, 3], [3, 4]]')
    """
    if not any(mark in text for mark in _MARKS):
        return None
    match = _OPERATOR.match(text)
    return None if match is None else Operator(match["name"], max(int(match["seq"] or 0), 0), match["sizes"])


def of_call(name: str) -> str:
    """Return the name of a CUDA function without the version that CUPTI appends.

    >>> of_call("cudaLaunchKernel_ptsz_v7000"), of_call("cuMemcpyAsync")
    ('cudaLaunchKernel', 'cuMemcpyAsync')
    """
    return _VERSION.sub("", name)


def of_copy(kind: int, source: int, target: int) -> str:
    """Return the name of a copy, as PyTorch's profiler writes it.

    >>> of_copy(1, 1, 2)
    'Memcpy HtoD (Pinned -> Device)'
    """
    places = (_MEMORY_KINDS.get(place, "Unknown") for place in (source, target))
    return f"Memcpy {_COPIES.get(kind, 'Unknown')} ({' -> '.join(places)})"


def of_memset(kind: int) -> str:
    """Return the name of a memory set, as PyTorch's profiler writes it."""
    return f"Memset ({_MEMORY_KINDS.get(kind, 'Unknown')})"


def step_names(ranges: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Return the profiler's name of a step for each name that marks one, such as "step 12" or "iteration 12".

    `ranges` are names with their total duration in ns. Of several words for steps, the one that lasts longest counts.

    >>> step_names([("step 3", 90), ("batch 7", 20), ("forward", 50)])
    {'step 3': 'ProfilerStep#3'}
    """
    marks: dict[str, dict[str, str]] = defaultdict(dict)
    total_ns: dict[str, int] = defaultdict(int)
    for name, dur_ns in ranges:
        if (match := _STEP.match(name)) is not None:
            marks[match[1].lower()][name] = f"ProfilerStep#{int(match[2])}"
            total_ns[match[1].lower()] += dur_ns
    return marks[max(total_ns, key=lambda word: total_ns[word])] if total_ns else {}

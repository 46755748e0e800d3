"""Slices by their name, over all ranks: how many there are, how long they take, and the first of them."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.nesting import Ints
from tracekit.report.timeline import ranges
from tracekit.report.timeline.mapped_file import Array
from tracekit.report.timeline.scene import Scene
from tracekit.report.timeline.trace_part import Part

MATCHES = schema.columns("track row id start_ns dur_ns name", track=pl.Int32, row=pl.Int32, id=pl.Int32)
_FEW = 16


@dataclass(frozen=True, eq=False)
class Matches:
    """The result of a search: `count` slices, `total_ns` in total, and the first of them in `table`.

    Columns of the table: MATCHES; one row per slice, by time; times are on the run's clock.
    """

    count: int
    total_ns: int
    table: pl.DataFrame


def find_by_name(scene: Scene, text: str, *, ranks: Collection[int] | None = None, limit: int = 1000) -> Matches:
    """Return the slices whose name contains `text`, ignoring case; none for ''.

    `ranks` limits the search to some ranks; the table has the first `limit` slices.
    """
    folded = text.casefold()
    is_match = np.array([bool(folded) and folded in name for name in scene.casefolded_names], bool)
    total, total_ns, parts = 0, 0, [pl.DataFrame(schema=MATCHES)]
    for part in scene.parts:
        if ranks is None or part.rank in ranks:
            index = part.by_name_index[is_match[part.by_name_index["name"]]]
            total += int(index["count"].sum())
            total_ns += int(index["busy_ns"].sum())
            rows = part.table(_earliest(part, index, limit))
            name = scene.names["name"].gather(rows["name_id"]).alias("name")
            parts.append(schema.select(rows.with_columns(name), MATCHES))
    matches = pl.concat(parts).sort("start_ns", "track", "row", "id")
    return Matches(total, total_ns, matches.head(limit))


def _earliest(part: Part, index: Array, limit: int) -> Ints:
    """Return the positions of the first `limit` slices of these names, possibly of some more."""
    first, count = index["first"], index["count"]
    if not len(index) or limit < 1:
        return np.empty(0, np.int64)
    start_ns, share = part.slices["start_ns"], max(_FEW, 4 * limit // len(index))
    while True:
        counts = np.minimum(count, share)
        positions = part.by_name[ranges.positions(first, counts)]
        if counts.sum() == count.sum():
            return positions.astype(np.int64)
        if counts.sum() >= limit:
            break
        share *= 4
    # At least `limit` slices begin by then, the first ones among them.
    until_ns = np.partition(start_ns[positions], limit - 1)[limit - 1]
    past = ranges.first_true(first, first + count, lambda i: start_ns[part.by_name[i]] > until_ns)
    return part.by_name[ranges.positions(first, past - first)].astype(np.int64)

"""The mesh and the pipeline that a manifest (run.json) states: which ranks form the groups of each axis, and stages."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import polars as pl
from msgspec import Meta

from tracekit.conventions.strategies import PP
from tracekit.model.fact import run_fact
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.run import Run

_Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
_Size = Annotated[int, Meta(ge=1, le=MAX_RANKS)]


class Mesh(msgspec.Struct, frozen=True):
    """Axes by name, outermost first, and their sizes; ranks are numbered row-major."""

    axes: tuple[str, ...]
    shape: tuple[_Size, ...]


class Pipeline(msgspec.Struct, frozen=True):
    """The schedule: `stage_ranks[s]` are the global ranks of stage s, `stage_layers[s]` the numbers of its layers."""

    schedule: str | None = None
    stages: int | None = None
    virtual_stages: int | None = None
    micro_batches: int | None = None
    stage_ranks: tuple[tuple[_Rank, ...], ...] = ()
    stage_layers: tuple[tuple[int, ...], ...] = ()


def pipeline_of(manifest: Mapping[str, Any]) -> Pipeline:
    """Return the pipeline that a manifest states; empty where it states none or no valid one."""
    return _convert(manifest.get("pipeline"), Pipeline) or Pipeline()


def groups_of(manifest: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """Return the groups of each axis with two ranks or more: as the manifest lists them, else by its mesh."""
    listed: Any = _convert(manifest.get("groups"), dict[str, list[list[_Rank]]])
    mesh: Any = _convert(manifest.get("mesh"), Mesh)
    by_mesh = mesh_groups(mesh) if mesh else {}
    return by_mesh | (listed or {})


@run_fact
def mesh_table(run: Run) -> pl.DataFrame:
    """Return the groups of `groups_of` as a table. Columns axis, ranks, source; one row per axis and group."""
    rows = [(axis, ranks, "manifest") for axis, groups in groups_of(run.manifest).items() for ranks in groups]
    return pl.DataFrame(rows, {"axis": pl.String, "ranks": pl.List(pl.Int64), "source": pl.String}, orient="row")


def mesh_groups(mesh: Mesh) -> dict[str, list[list[int]]]:
    """Return the ranks of each group of each axis that has two or more ranks.

    >>> mesh_groups(Mesh(("pp", "tp"), (2, 2)))
    {'pp': [[0, 2], [1, 3]], 'tp': [[0, 1], [2, 3]]}
    """
    if len(mesh.axes) != len(mesh.shape) or math.prod(mesh.shape) > MAX_RANKS:
        return {}
    return {axis: _along(mesh.shape, index) for index, axis in enumerate(mesh.axes) if mesh.shape[index] > 1}


def coordinates(groups: Mapping[str, Sequence[Sequence[int]]]) -> dict[int, dict[str, tuple[int, int]]]:
    """Return of each rank and axis the number of its group and its place in the group; `groups` as of `groups_of`.

    >>> coordinates({"pp": [[0, 2], [1, 3]]})
    {0: {'pp': (0, 0)}, 2: {'pp': (0, 1)}, 1: {'pp': (1, 0)}, 3: {'pp': (1, 1)}}
    """
    places: dict[int, dict[str, tuple[int, int]]] = {}
    for axis, listed in groups.items():
        for number, ranks in enumerate(listed):
            for place, rank in enumerate(ranks):
                places.setdefault(rank, {})[axis] = (number, place)
    return places


def _along(shape: Sequence[int], index: int) -> list[list[int]]:
    stride, size = math.prod(shape[index + 1 :]), shape[index]
    firsts = [rank for rank in range(math.prod(shape)) if rank // stride % size == 0]
    return [[first + place * stride for place in range(size)] for first in firsts]


def stages_by_rank(manifest: Mapping[str, Any]) -> dict[int, int]:
    """Return the stage of each rank that runs one stage; {} where the manifest does not state it."""
    stage_ranks = pipeline_of(manifest).stage_ranks or tuple(zip(*groups_of(manifest).get(PP, ()), strict=False))
    pairs = [(rank, stage) for stage, ranks in enumerate(stage_ranks) for rank in ranks]
    return dict(pairs) if len({rank for rank, _ in pairs}) == len(pairs) else {}


def _convert(value: object, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, TypeError):
        return None

"""Places of ranks: in the mesh, on nodes, in pipeline stages and process groups, and what some ranks share."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
import polars as pl
from msgspec import Meta

from tracekit.conventions import strategies
from tracekit.conventions.strategies import JOINT, PP, axis_of_description
from tracekit.model import rank_lists
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

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


_HOST = re.compile(r"(?P<host>[A-Za-z][\w.-]*?)_\d+\.\d+\.pt\.trace\.json")
"""How torch.profiler.tensorboard_trace_handler names files: HOST_PID.TIME.pt.trace.json."""
_AXIS_NAMES = {
    strategies.DP_REPLICATE: "replica",
    strategies.DP_SHARD: "data-parallel coordinate",
    strategies.CP: "context-parallel coordinate",
    strategies.TP: "tensor-parallel coordinate",
}
_GROUP_NAMES = {
    strategies.TP: "tensor-parallel group",
    strategies.CP: "context-parallel group",
    strategies.DP_SHARD: "shard group",
    strategies.DP_REPLICATE: "replica group",
}


@dataclass(frozen=True)
class Place:
    """Ranks that share something, such as a node, and how that is called."""

    name: str
    ranks: tuple[int, ...]


@trace_fact
def rank_hosts(trace: Trace) -> pl.DataFrame:
    """Host and device of a rank. Columns host (from the file's name; null where not known), device; one row."""
    match = _HOST.search(PurePath(trace.path).name)
    device = trace.lanes["device"].min() if trace.lanes.height else None
    return pl.DataFrame(
        {"host": [match["host"] if match else None], "device": [device]},
        schema={"host": pl.String, "device": pl.Int64},
    )


@trace_fact
def rank_groups(trace: Trace) -> pl.DataFrame:
    """Return the process groups of a rank with several ranks. Columns description, ranks; one row per group.

    ranks is a text of `rank_lists`: see `process_groups`.
    """
    groups = trace.groups.filter(pl.col("ranks").list.len() > 1)
    return groups.select("description", rank_lists.texts(groups["ranks"]))


FACTS: tuple[TraceFact, ...] = (rank_hosts, rank_groups)
"""The facts that the functions of this module read."""


@memoize
def process_groups(run: Run) -> pl.DataFrame:
    """Return the distinct process groups with several ranks. Columns description, ranks (a list); sorted by both."""
    groups = run.table(rank_groups).select("description", "ranks").unique()
    return groups.with_columns(rank_lists.lists(groups["ranks"])).sort("description", "ranks")


@run_fact
def nodes(run: Run) -> pl.DataFrame:
    """Return the node of each rank; use ``run.table``. Columns rank, node (its name); empty where not known.

    By the host in the files' names; else each time the device index of consecutive ranks starts again, a node begins,
    or after the GPUs per node that run.json states.
    """
    places = run.table(rank_hosts).unique("rank", keep="first", maintain_order=True).sort("rank")
    hosts = places.select("rank", node="host")
    if hosts["node"].null_count() == 0 and hosts["node"].n_unique() > 1:
        return hosts
    size = _node_size(run, places)
    if size is None:
        return hosts.clear()
    return places.select("rank", node=(pl.col("rank") // size).cast(pl.String))


def node_of_rank(run: Run) -> dict[int, str]:
    """Return the node of each rank; {} where nodes are not known, or all ranks share one."""
    node_of = dict(run.table(nodes).select("rank", "node").iter_rows())
    return node_of if len(set(node_of.values())) > 1 else {}


def share_node(run: Run, ranks: Iterable[int]) -> bool:
    """Return whether ranks are known to be on one node: by `nodes`, one host, or devices of different indices."""
    members = sorted(set(ranks))
    if node_of := dict(run.table(nodes).select("rank", "node").iter_rows()):
        return len({node_of.get(rank) for rank in members}) == 1
    places_of_ranks = run.table(rank_hosts).unique("rank").filter(pl.col("rank").is_in(members))
    hosts, indices = places_of_ranks["host"], places_of_ranks["device"]
    if places_of_ranks.height < len(members) or indices.null_count():
        return False
    return indices.n_unique() == len(members) or (hosts.null_count() == 0 and hosts.n_unique() == 1)


def stages(run: Run) -> dict[int, int]:
    """Return the pipeline stage of each rank, by its first one; {} without pipeline parallelism.

    From `pipeline` or `mesh` in run.json, else from groups that are named after the axis.
    """
    pipeline = run.manifest.get("pipeline")
    stage_of: dict[int, int] = {}
    value = pipeline.get("stage_ranks") if isinstance(pipeline, dict) else None
    lists = [entry for entry in value if isinstance(entry, list)] if isinstance(value, list) else []
    for stage, ranks in enumerate(
        [tuple(numbers) for numbers in lists if numbers and all(isinstance(number, int) for number in numbers)]
    ):
        stage_of |= {rank: stage for rank in ranks if rank not in stage_of}
    if not stage_of:
        groups = (group for axis, group in axis_groups(run) if axis == strategies.PP)
        stage_of = {rank: stage for group in groups for stage, rank in enumerate(group)}
    return stage_of if len(set(stage_of.values())) > 1 else {}


def is_of_stages(run: Run, ranks: Iterable[int]) -> bool:
    """Return whether some ranks are all traced ranks of one or more pipeline stages."""
    stage_of, members = stages(run), set(ranks)
    member_stages = {stage_of.get(rank) for rank in members}
    return bool(stage_of) and members == {rank for rank in run.ranks if stage_of.get(rank) in member_stages}


def places(run: Run) -> list[Place]:
    """Return the places that several ranks share, but not all: nodes, coordinates of axes, process groups."""
    all_places = [*_node_places(run), *_coordinate_places(run), *_group_places(run)]
    present = set(run.ranks)
    with_traces = [Place(place.name, tuple(sorted(present & set(place.ranks)))) for place in all_places]
    return [place for place in with_traces if 1 < len(place.ranks) < len(present)]


def shared_place(run: Run, ranks: Sequence[int]) -> str | None:
    """Place that some ranks and no others share, such as "node 3"; two nodes or more are named together.

    None where nothing is known that they share.
    """
    members = tuple(sorted(ranks))
    for place in places(run):
        if place.ranks == members:
            return place.name
    within = [node for node in _node_places(run) if set(node.ranks) <= set(members)]
    if len(within) > 1 and sorted(rank for node in within for rank in node.ranks) == list(members):
        return "nodes " + ", ".join(node.name.removeprefix("node ") for node in within)
    return None


def axis_groups(run: Run) -> list[tuple[str, tuple[int, ...]]]:
    """Return the groups of each mesh axis: from run.json, else from the descriptions of groups in the traces.

    Of several descriptions of one axis the shortest counts: others are of experts, or together with context
    parallelism.
    """
    if stated := groups_of(run.manifest):
        return [(axis, tuple(ranks)) for axis, groups in stated.items() for ranks in groups]
    rows = process_groups(run).drop_nulls()
    described = [(axis_of_description(text), text, tuple(ranks)) for text, ranks in rows.iter_rows()]
    plain: dict[str, str] = {}
    for axis, text, _ in described:
        if axis and axis not in JOINT:
            plain[axis] = min(plain.get(axis, text), text, key=len)
    return [(axis, ranks) for axis, text, ranks in described if axis in plain and text == plain[axis]]


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
    groups = {}
    for index, (axis, size) in enumerate(zip(mesh.axes, mesh.shape, strict=True)):
        if size > 1:
            stride = math.prod(mesh.shape[index + 1 :])
            firsts = [rank for rank in range(math.prod(mesh.shape)) if rank // stride % size == 0]
            groups[axis] = [[first + place * stride for place in range(size)] for first in firsts]
    return groups


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


def stages_by_rank(manifest: Mapping[str, Any]) -> dict[int, int]:
    """Return the stage of each rank that runs one stage; {} where the manifest does not state it."""
    stage_ranks = pipeline_of(manifest).stage_ranks or tuple(zip(*groups_of(manifest).get(PP, ()), strict=False))
    pairs = [(rank, stage) for stage, ranks in enumerate(stage_ranks) for rank in ranks]
    return dict(pairs) if len({rank for rank, _ in pairs}) == len(pairs) else {}


def _node_size(run: Run, places_of_ranks: pl.DataFrame) -> int | None:
    """Number of consecutive ranks that share a node; None if not known, or if all do."""
    hardware = run.manifest.get("hardware")
    stated = hardware.get("gpus_per_node") if isinstance(hardware, dict) else None
    if isinstance(stated, int) and 0 < stated < len(run.ranks):
        return stated
    devices = places_of_ranks.drop_nulls("device")
    size = int(devices["device"].max() or 0) + 1  # type: ignore[arg-type]
    restarts = devices.filter(pl.col("rank") % size != pl.col("device"))
    is_known = devices.height == places_of_ranks.height and restarts.is_empty()
    return size if is_known and 1 < size < devices.height else None


def _node_places(run: Run) -> list[Place]:
    rows = run.table(nodes).group_by("node", maintain_order=True).agg("rank")
    return [Place(f"node {node}", tuple(ranks)) for node, ranks in rows.iter_rows()]


def _coordinate_places(run: Run) -> Iterator[Place]:
    """Yield the ranks of each coordinate of the axes that have a name."""
    by_axis: dict[str, list[tuple[int, ...]]] = {}
    for axis, group in axis_groups(run):
        by_axis.setdefault(axis, []).append(group)
    for axis, name in _AXIS_NAMES.items():
        groups = by_axis.get(axis, [])
        for index in range(max(map(len, groups), default=0)):
            yield Place(f"{name} {index}", tuple(sorted(group[index] for group in groups if index < len(group))))


def _group_places(run: Run) -> Iterator[Place]:
    """Yield the process groups, the known axes first."""
    numbers: dict[str, int] = {}
    for axis, group in axis_groups(run):
        number = numbers[axis] = numbers.get(axis, -1) + 1
        if axis in _GROUP_NAMES:
            yield Place(f"{_GROUP_NAMES[axis]} {number}", group)
    rows = process_groups(run).unique("ranks", keep="last", maintain_order=True).sort("ranks")
    for description, ranks in rows.iter_rows():
        yield Place(f"process group {description}" if description else "one process group", tuple(sorted(ranks)))


def _convert(value: object, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, TypeError):
        return None

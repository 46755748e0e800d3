"""RANK004 in meshes of several axes: who is late, what late ranks share, and what is no lateness."""

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tracekit.analysis.parallelism import rank_places
from tracekit.model import schema
from tracekit.rules.engine import check
from tracekit.rules.stragglers import LateGroup, Straggler, UnevenRanks

STEPS = "".join(str(step) * 40 for step in range(3))
EARLY, TARDY = "aa......", "aaaaa..."
SHORT, LONG = "..xyyyy.", "..xxxxy."
"""A rank that waits 3 in y, the collective across nodes; one that waits 3 in x, the collective of its node."""
LATE = ".....xy."
LATE_NODE = ((EARLY, SHORT), (EARLY, SHORT), (TARDY, LATE), (TARDY, LATE))
LATE_RANK = ((EARLY, LONG), (TARDY, LATE), (EARLY, SHORT), (EARLY, SHORT))
HYBRID = {"axes": ["dp_replicate", "dp_shard"], "shape": [2, 2]}
PIPELINE = {"axes": ["pp", "dp_shard"], "shape": [2, 2]}


def mesh_run(pictures, path="{}", **manifest):
    """Return four ranks, two per node: x is a collective of one node, y of one rank of each node."""
    traces = []
    for rank, (compute, communication) in enumerate(pictures):
        node, local = divmod(rank, 2)
        groups = {f"s{node}": [2 * node, 2 * node + 1], f"r{local}": [local, local + 2]}
        trace = drawn_hosts.trace(
            f"step {STEPS}\ncompute {compute * 15}\ncomm {communication * 15}",
            {"a": 0},
            rank=rank,
            groups=pl.DataFrame({"group": list(groups), "ranks": list(groups.values())}),
            ops={"x": "reduce_scatter", "y": "all_reduce"},
        )
        of_op = pl.when(pl.col("op") == "all_reduce").then(pl.lit(f"r{local}")).otherwise(pl.lit(f"s{node}"))
        collectives = trace.collectives.with_columns(group=of_op)
        traces.append(trace.replace(collectives=collectives, path=path.format(rank)))
    return drawn_traces.run(*traces, **{"world_size": 4, **manifest})


def judge(run):
    return [(found.code, found.ranks) for found in check(run, [Straggler(), LateGroup(), UnevenRanks()]).findings]


def test_a_node_whose_ranks_have_no_collective_in_common_with_others_is_one_finding():
    assert judge(mesh_run(LATE_NODE)) == [("RANK004", (2, 3))]


def test_ranks_that_one_rank_of_their_node_delays_are_no_late_group():
    assert judge(mesh_run(LATE_RANK)) == [("RANK001", (1,))]


@pytest.mark.parametrize(
    ("manifest", "path", "place"),
    [
        ({}, "{}", "one process group (ranks 2–3)"),
        ({"mesh": HYBRID}, "{}", "replica 1 (ranks 2–3)"),
        ({"groups": {"tp": [[0, 1], [2, 3]]}}, "{}", "tensor-parallel group 1 (ranks 2–3)"),
        ({"hardware": {"gpus_per_node": 2}, "mesh": HYBRID}, "{}", "node 1 (ranks 2–3)"),
    ],
    ids=["group", "axis", "group of axis", "node"],
)
def test_late_ranks_are_named_by_what_they_share(manifest, path, place):
    (found,) = check(mesh_run(LATE_NODE, path, **manifest), [LateGroup()]).findings
    assert place in found.claim


def test_nodes_are_named_by_the_hosts_in_the_names_of_files():
    run = mesh_run(LATE_NODE)
    hosts = ["gpu-a", "gpu-a", "gpu-b", "gpu-b"]
    named = [
        trace.replace(path=f"{host}_{trace.rank + 9}.1698955894.pt.trace.json.gz")
        for host, trace in zip(hosts, run.traces(), strict=True)
    ]
    assert rank_places.shared_place(drawn_traces.run(*named), (2, 3)) == "node gpu-b"


def test_nodes_begin_where_device_indices_start_again():
    traces = [
        trace.replace(lanes=trace.lanes.with_columns(device=pl.lit(trace.rank % 2, pl.Int64)))
        for trace in mesh_run(LATE_NODE).traces()
    ]
    assert rank_places.shared_place(drawn_traces.run(*traces), (2, 3)) == "node 1"


def test_a_pipeline_stage_that_others_wait_for_is_no_straggler():
    assert judge(mesh_run(LATE_NODE, mesh=PIPELINE)) == []


def test_a_late_rank_within_a_pipeline_stage_is_a_straggler():
    assert judge(mesh_run(LATE_RANK, mesh=PIPELINE)) == [("RANK001", (1,))]


@pytest.mark.parametrize(
    "manifest",
    [
        {"mesh": {"axes": "pp", "shape": ["2", 2]}},
        {"mesh": [1], "pipeline": {"stage_ranks": 3}},
        {"groups": {"tp": [[0, "1"], 4]}, "hardware": {"gpus_per_node": "8"}},
        {"mesh": {"axes": None, "shape": [2, 2]}},
    ],
)
def test_a_manifest_with_other_types_than_expected_names_no_place(manifest):
    assert judge(mesh_run(LATE_NODE, **manifest)) == [("RANK004", (2, 3))]


@pytest.mark.parametrize(
    ("descriptions", "stages", "names"),
    [
        (("mesh_pp", "mesh_fsdp", "mesh_loss_mesh"), 2, ["data-parallel coordinate 0", "data-parallel coordinate 1"]),
        (("PIPELINE_MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP", "MODEL_PARALLEL_GROUP"), 2,
         ["tensor-parallel coordinate 0", "tensor-parallel coordinate 1"]),
        (("mesh_dim_0", "mesh_dim_1", "default_pg"), 0, []),
    ],
    ids=["torchtitan", "megatron", "a mesh without names"],
)  # fmt: skip
def test_stages_and_coordinates_are_read_from_the_descriptions_of_groups(descriptions, stages, names):
    outer, inner, every = descriptions
    traces = []
    for rank, trace in enumerate(mesh_run(LATE_NODE).traces()):
        first, second = 2 * (rank // 2), rank % 2
        rows = [(outer, [second, second + 2]), (inner, [first, first + 1]), (every, [0, 1, 2, 3])]
        groups = [{"group": str(at), "description": text, "ranks": ranks} for at, (text, ranks) in enumerate(rows)]
        traces.append(trace.replace(groups=schema.GROUPS.conform(pl.DataFrame(groups))))
    run = drawn_traces.run(*traces)
    assert rank_places.stages(run) == ({0: 0, 1: 0, 2: 1, 3: 1} if stages else {})
    assert [each.name for each in rank_places.places(run) if "coordinate" in each.name] == names

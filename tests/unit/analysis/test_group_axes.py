"""The axis of process groups: described, stated by the manifest, or inferred; and the communication of each axis."""

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tracekit.analysis.parallelism import axis_communication, group_axes, rank_places
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace

PICTURE = """
    step     0000000000
    compute  aaaa..bb..
    comm     ..xx.xx.yy
"""


def trace(rank: int = 0, groups: list[dict[str, object]] | None = None, **of: dict[str, object]) -> Trace:
    """Return PICTURE as a rank's trace, with the collectives of its letters."""
    drawn = drawn_traces.trace(PICTURE, rank=rank, columns={"x": {"phase": "forward"}})
    rows = [
        {"activity_id": row["id"], **of.get(row["name"], {})}
        for row in drawn.activities.filter(pl.col("kind") == "communication").iter_rows(named=True)
    ]
    described = schema.GROUPS.conform(pl.DataFrame(groups)) if groups else schema.GROUPS.empty()
    return drawn.replace(collectives=schema.COLLECTIVES.conform(pl.DataFrame(rows)), groups=described)


def axes(run: Run) -> dict[str | None, tuple[str | None, str]]:
    rows = run.table(group_axes.group_axes)
    return {row["group"]: (row["axis"], row["source"]) for row in rows.iter_rows(named=True)}


REDUCE = {"op": "all_reduce", "group": "1", "sent_bytes": 8 << 20}
SCATTER = {"op": "reduce_scatter", "group": "2", "sent_bytes": 4096}


def test_a_description_counts_before_the_manifest():
    groups = [
        {"group": "1", "description": "mesh_tp", "ranks": [0, 1]},
        {"group": "2", "description": "default_pg", "ranks": [0, 2]},
    ]
    run = drawn_traces.run(trace(groups=groups, x=REDUCE, y=SCATTER), groups={"pp": [[0, 1]], "dp_shard": [[0, 2]]})
    assert axes(run) == {"1": ("tp", "description"), "2": ("dp_shard", "manifest")}


def test_the_mesh_gives_the_groups_of_each_axis():
    run = drawn_traces.run(
        trace(groups=[{"group": "1", "description": None, "ranks": [0, 4]}], x=REDUCE, y=REDUCE),
        mesh={"axes": ["pp", "dp_shard", "tp"], "shape": [2, 2, 2]},
    )
    assert axes(run) == {"1": ("pp", "manifest")}


def test_an_invalid_mesh_states_nothing():
    for document in ({"mesh": {"axes": ["pp"], "shape": [2, 2]}}, {"mesh": 3}, {"groups": {"pp": "0,1"}}, {}):
        assert rank_places.groups_of(document) == {}


def usage(**counts: int) -> dict[str, object]:
    names = (
        "sends all_to_alls all_reduces all_gathers reduce_scatters reduce_scatters_in_forward all_reduces_in_forward "
        "all_reduces_of_unknown_purpose all_reduces_of_activations all_reduces_alike of_parameters of_activations"
    )
    kinds = ("sends", "all_to_alls", "all_reduces", "all_gathers", "reduce_scatters")
    row = dict.fromkeys(names.split(), 0) | counts
    return {
        "calls": sum(row[kind] for kind in kinds),
        "places": 1,
        "usual_bytes": 8 << 20,
        "ranks": [0, 1],
        "group": "0",
    } | row


@pytest.mark.parametrize(
    ("found", "axis"),
    [
        (usage(sends=16), "pp"),
        (usage(all_to_alls=8, all_reduces=2), "ep"),
        (usage(all_gathers=8, reduce_scatters=8, reduce_scatters_in_forward=4), "tp"),
        (usage(all_gathers=8, reduce_scatters=4), "dp_shard"),
        (usage(all_reduces=16, all_reduces_in_forward=8, all_reduces_alike=16), "tp"),
        (usage(all_reduces=6, all_reduces_alike=4), "dp"),
        (usage(all_reduces=6, all_reduces_in_forward=6, all_reduces_alike=6) | {"usual_bytes": 1024}, "dp"),
    ],
    ids=["sends", "all-to-all", "sequence parallel", "fsdp", "tensor parallel", "ddp", "synchronized batch norm"],
)
def test_an_axis_is_inferred_from_the_collectives(found, axis):
    inferred, confidence = group_axes._infer_axis(found, 8, has_mesh=False)
    assert inferred == axis
    assert 0 < confidence < 1


UNSIZED = {"usual_bytes": None}
TENSOR_PARALLEL = {"all_reduces": 8, "all_reduces_of_activations": 8, "of_activations": 8, "all_reduces_in_forward": 4}


@pytest.mark.parametrize(
    ("found", "axis"),
    [
        (usage(**TENSOR_PARALLEL) | UNSIZED, "tp"),
        (usage(**TENSOR_PARALLEL) | UNSIZED | {"places": 4}, None),
        (usage(all_reduces=8, of_parameters=8) | UNSIZED, "dp"),
        (usage(all_reduces=8) | UNSIZED, "dp"),
        (usage(all_reduces=2, of_parameters=2) | UNSIZED | {"calls": 26}, "dp"),
        (usage(**TENSOR_PARALLEL | {"all_reduces": 16, "of_parameters": 8}) | {"group": None}, None),
        (usage(all_gathers=8, reduce_scatters=8, of_parameters=16) | {"group": None}, "dp_shard"),
    ],
    ids=["tensor parallel", "one a step", "ddp", "after backward", "zero-1", "unnamed groups", "fsdp2"],
)
def test_without_sizes_the_purpose_of_the_collectives_decides(found, axis):
    assert group_axes._infer_axis(found, 8, has_mesh=False)[0] == axis


def test_communication_of_an_axis_is_a_union_and_what_compute_does_not_hide_is_exposed():
    groups = [
        {"group": "1", "description": "mesh_tp", "ranks": [0, 1]},
        {"group": "2", "description": "mesh_dp", "ranks": [0, 2]},
    ]
    run = drawn_traces.run(trace(groups=groups, x=REDUCE, y=SCATTER))
    rows = axis_communication.by_axis(run).select("axis", "communication_ns", "exposed_communication_ns", "calls")
    assert rows.rows() == [("dp", 2, 2, 1), ("tp", 4, 1, 2)]


def test_collectives_without_a_group_are_of_the_axis_that_the_mesh_leaves():
    send = {"op": "send", "peer": 2}
    run = drawn_traces.run(trace(x=send, y={"op": "all_reduce"}), mesh={"axes": ["pp", "dp_shard"], "shape": [2, 2]})
    assert set(axis_communication.by_axis(run)["axis"]) == {"pp", "dp_shard"}


def test_of_several_axes_activations_are_of_tp_and_what_has_no_known_purpose_of_none():
    run = drawn_traces.run(
        trace(x={"op": "all_reduce"}, y={"op": "all_reduce"}), mesh={"axes": ["dp_shard", "tp"], "shape": [2, 2]}
    )
    assert axis_communication.by_axis(run)["axis"].to_list() == ["tp", None]


def test_calls_without_group_names_have_an_axis_each_by_op_and_purpose():
    picture = "step 00000000\ncompute aaaaaaaa\ncomm uvwxyz.."
    drawn = drawn_traces.trace(picture)
    names = dict(zip(drawn.activities["name"], drawn.activities["id"], strict=True))
    rows = [
        {"activity_id": names[name], "op": op, "sent_bytes": 4 << 20}
        for name, op in zip("uvwxyz", (*3 * ("all_to_all",), "send", "send_recv", "all_reduce"), strict=True)
    ]

    def axis_of(calls: list[dict[str, object]]) -> dict[str, str | None]:
        run = drawn_traces.run(drawn.replace(collectives=schema.COLLECTIVES.conform(pl.DataFrame(calls))))
        return dict(run.table(group_axes.axis_of_calls).select("op", "axis").rows())

    # A SendRecv kernel of which nothing else is known may be part of an all-to-all.
    assert axis_of(rows) == {"all_to_all": "ep", "send": "pp", "send_recv": None, "all_reduce": "dp"}
    assert axis_of(rows[2:]) == {"all_to_all": None, "send": "pp", "send_recv": None, "all_reduce": "dp"}


def test_all_reduces_of_activations_are_not_of_data_parallelism():
    few = usage(all_reduces=6, all_reduces_of_activations=6, of_activations=6, all_reduces_alike=2)
    assert group_axes._infer_axis(few, 4, has_mesh=False) == (None, 0.0)
    small = usage(all_reduces=8, all_reduces_in_forward=4, all_reduces_of_activations=8, of_activations=8)
    small |= {"all_reduces_alike": 8, "usual_bytes": 16 << 10}
    assert group_axes._infer_axis(small, 4, has_mesh=False)[0] == "tp"
    assert group_axes._infer_axis(small | {"usual_bytes": 256}, 4, has_mesh=False)[0] is None


@pytest.mark.parametrize(
    ("compute", "communication", "axis"),
    [
        ("ffffbb.bb.bb.bb.oo", "......x..x..x..x..", "dp"),
        ("f.f.f.f.f.bbbbbbbb", ".x.x.x.x..........", "tp"),
        ("f.f.f.f.f.b.b.b.bb", ".x.x.x.x...x.x.x..", "tp"),
    ],
    ids=["gradients", "activations of forward", "activations of both passes"],
)
def test_without_links_between_passes_all_reduces_next_to_backward_compute_are_of_gradients(
    compute, communication, axis
):
    # Buckets of gradients are of one size, as activations are: where they are reduced decides.
    picture = f"step {'0' * len(compute)}\ncompute {compute}\ncomm {communication}"
    phases = {"b": "backward", "o": "optimizer"}
    traces = [drawn_hosts.trace(picture, ops={"x": "all_reduce"}, phases=phases, rank=rank) for rank in (0, 1)]
    large = pl.lit(50 << 20, pl.Int64)
    large_traces = [
        trace.replace(collectives=trace.collectives.with_columns(sent_bytes=large, group=pl.lit("0")))
        for trace in traces
    ]
    assert axes(drawn_traces.run(*large_traces))["0"] == (axis, "inferred")

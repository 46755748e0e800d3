import polars as pl
import pytest

from tests.support import drawn_kernels, drawn_traces
from tests.support.drawn_kernels import Kernel
from tracekit.analysis.compute import kernels
from tracekit.model.trace import Trace

LINEAR = Kernel("aten::addmm", 4, shapes=[[8], [4, 2], [2, 8]], name="gemm")
GELU = Kernel("aten::gelu", 2, shapes=[[4, 8]])
EMBEDDING = Kernel("aten::embedding", 1, name="indexSelectLargeIndex")
ADD = Kernel("aten::add", 2, shapes=[[4, 8], [4, 8]])


def as_graph(trace: Trace, first: int, last: int) -> Trace:
    """Return the trace as if a graph launched kernels `first` to `last` of each step: one call, no operators."""
    per_step = trace.activities.filter(step=0).height
    at = pl.int_range(pl.len()) % per_step
    is_inside = at.is_between(first, last)
    launch = pl.when(is_inside).then(pl.col("launch_id") - at + first).otherwise("launch_id")
    activities = trace.activities.with_columns(launch.cast(pl.Int64))
    calls = activities.filter(is_inside)["launch_id"].unique()
    is_graph = pl.col("id").is_in(calls.implode())
    ops = trace.ops.with_columns(
        pl.when(is_graph).then(pl.lit("cudaGraphLaunch")).otherwise("name").alias("name"),
        pl.when(is_graph).then(pl.lit("runtime")).otherwise("kind").alias("kind"),
    )
    return type(trace)(**{**vars(trace), "activities": activities, "ops": ops})


def ops_of(trace: Trace, twin: Trace) -> list[str | None]:
    found = kernels.EagerTwin(drawn_traces.run(twin)).op_columns(trace)
    return pl.DataFrame(found)["op"].to_list()


def test_kernels_of_a_graph_have_the_ops_of_the_eager_twin():
    eager = drawn_kernels.trace(LINEAR, GELU, ADD)
    replayed = as_graph(eager, 0, 1)
    assert kernels.recorded_ops(replayed)[0].to_list() == [None, None, "aten::add"] * 2
    assert ops_of(replayed, eager) == ["aten::addmm", "aten::gelu", "aten::add"] * 2
    run, twin = drawn_traces.run(replayed), kernels.EagerTwin(drawn_traces.run(eager))
    named = kernels.kernels(run, ("op", "shapes"), ops=twin.op_columns)
    assert named.rows() == kernels.kernels(twin.run, ("op", "shapes")).rows()
    assert kernels.replay_attribution(run, twin) == (4, 4)


def test_what_places_of_the_twin_disagree_on_is_unknown():
    # the twin has the same two kernels by other operators, too: gelu, add and add, gelu are one kernel by name
    eager = drawn_kernels.trace(LINEAR, GELU, LINEAR, ADD)
    assert ops_of(as_graph(eager, 0, 1), eager) == ["aten::addmm", None, "aten::addmm", "aten::add"] * 2


def test_a_longer_graph_is_one_place_of_the_twin():
    eager = drawn_kernels.trace(EMBEDDING, LINEAR, GELU, LINEAR, ADD)
    ops = ["aten::embedding", "aten::addmm", "aten::gelu", "aten::addmm", "aten::add"]
    assert ops_of(as_graph(eager, 0, 4), eager) == ops * 2


@pytest.mark.parametrize("others", [(ADD,), (LINEAR,), (GELU, LINEAR)])
def test_kernels_that_the_twin_does_not_have_in_this_order_stay_unknown(others):
    replayed = as_graph(drawn_kernels.trace(LINEAR, GELU), 0, 1)
    assert ops_of(replayed, drawn_kernels.trace(*others, steps=1)) == [None] * 4


def test_a_run_without_graphs_is_as_it_was():
    eager = drawn_kernels.trace(LINEAR, GELU)
    assert ops_of(eager, eager) == ["aten::addmm", "aten::gelu"] * 2

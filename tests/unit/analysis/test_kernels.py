import math
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests.support import drawn_kernels, drawn_traces
from tests.support.cli_runner import ROOT
from tests.support.drawn_kernels import Kernel
from tracekit.analysis.compute import kernels
from tracekit.errors import ConfigError
from tracekit.model import schema
from tracekit.model.trace import Trace

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "demo-fsdp2"


def work(*rows: tuple[str, str, int], start_ns: int = 0) -> pl.DataFrame:
    """Return activities of (name, kind, dur_ns), one after the other on lane 0."""
    types = {"name": pl.String, "kind": pl.String, "dur_ns": pl.Int64}
    table = pl.DataFrame(rows, schema=types, orient="row").with_row_index("id")
    return table.with_columns(lane=pl.lit(0), start_ns=start_ns + pl.col("dur_ns").cum_sum() - pl.col("dur_ns"))


def trace(*rows: tuple[str, str, int], rank: int = 0, **tables: pl.DataFrame):
    return drawn_traces.trace("compute a", rank=rank, activities=work(*rows), **tables)


def test_a_row_sums_all_ranks_and_shows_their_spread():
    # rank 0: a 2 + 4, b 6       rank 1: a 10 + 8, no b
    run = drawn_traces.run(
        trace(("a", "compute", 2), ("a", "compute", 4), ("b", "compute", 6)),
        trace(("a", "compute", 10), ("a", "compute", 8), rank=1),
    )
    assert kernels.kernels(run).to_dicts() == [
        {
            "name": "a",
            "kind": "compute",
            "count": 4,
            "total_ns": 24,
            "mean_ns": 6,
            "p50_ns": 4,
            "p95_ns": 10,
            "max_ns": 10,
            "spread_ratio": (18 - 6) / 12,
            "most_rank": 1,
            "time_ratio": 24 / 30,
        },
        {
            "name": "b",
            "kind": "compute",
            "count": 1,
            "total_ns": 6,
            "mean_ns": 6,
            "p50_ns": 6,
            "p95_ns": 6,
            "max_ns": 6,
            "spread_ratio": (6 - 0) / 3,
            "most_rank": 0,
            "time_ratio": 6 / 30,
        },
    ]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["compute", "memcpy"]), st.integers(0, 50), st.integers(0, 2)
        ),
        min_size=1,
        max_size=60,
    )
)
def test_every_number_equals_brute_force(rows):
    run = drawn_traces.run(*(trace(*(row[:3] for row in rows if row[3] == rank), rank=rank) for rank in (0, 1, 2)))
    found = {(row["name"], row["kind"]): row for row in kernels.kernels(run).to_dicts()}
    assert set(found) == {row[:2] for row in rows}
    for key, row in found.items():
        durations = sorted(each[2] for each in rows if each[:2] == key)
        by_rank = [sum(each[2] for each in rows if each[:2] == key and each[3] == rank) for rank in (0, 1, 2)]
        assert (row["count"], row["total_ns"], row["max_ns"]) == (len(durations), sum(durations), durations[-1])
        assert abs(row["mean_ns"] - sum(durations) / len(durations)) <= 0.5
        for name, share in (("p50_ns", 0.5), ("p95_ns", 0.95)):
            enough = [d for d in durations if sum(each <= d for each in durations) >= share * len(durations)]
            assert row[name] == enough[0]
        spread = (max(by_rank) - min(by_rank)) / (sum(by_rank) / 3) if sum(by_rank) else 0
        assert row["spread_ratio"] == pytest.approx(spread)
        assert by_rank[row["most_rank"]] == max(by_rank)


def test_fifty_names_yield_fifty_rows_with_their_own_statistics():
    # HTA joins all but its first ten names into "others", and gives each of those one value for min, max and mean.
    rows = [(f"kernel_{i}", "compute", 10 * i + d) for i in range(1, 51) for d in (1, 2, 9)]
    found = kernels.kernels(drawn_traces.run(trace(*rows)))
    assert found.height == 50
    assert (
        found.select((pl.col("p50_ns") < pl.col("mean_ns")) & (pl.col("mean_ns") < pl.col("max_ns"))).to_series().all()
    )
    assert found["name"].n_unique() == 50


def test_work_of_two_kinds_has_separate_rows_even_under_one_name():
    # HTA takes the kind from the name, so that ^hip is communication and *Sync* or *dma* is not compute.
    names = ("hipLaunch", "fused_Sync_kernel", "dma_copy")
    rows = [(name, kind, 5) for name in names for kind in ("compute", "communication", "memcpy")]
    found = kernels.kernels(drawn_traces.run(trace(*rows)))
    assert sorted(found.select("name", "kind").rows()) == sorted((name, kind) for name, kind, _ in rows)


def test_names_that_differ_only_in_template_arguments_are_separate():
    rows = [(f"void gemm<{i}, float>(Params<{i}>)", "compute", i + 1) for i in range(3)]
    assert kernels.kernels(drawn_traces.run(trace(*rows))).height == 3


def test_kernels_without_a_known_launch_such_as_those_of_cuda_graphs_are_counted():
    found = kernels.kernels(drawn_traces.run(trace(("graphed", "compute", 5))), by=("name", "op", "shapes"))
    assert found.select("name", "op", "shapes", "total_ns").rows() == [("graphed", None, None, 5)]


def test_a_cpu_only_rank_among_gpu_ranks_is_accepted():
    cpu = drawn_traces.trace("compute  bb", rank=1, on_device=False)
    found = kernels.kernels(drawn_traces.run(trace(("a", "compute", 2)), cpu))
    assert sorted(found["name"].to_list()) == ["a", "b"]


def test_the_last_step_is_counted():
    run = drawn_traces.run(drawn_traces.trace("step 00112\ncompute ababa"))
    assert kernels.kernels(run, by=("step",)).sort("step").select("step", "count").rows() == [(0, 2), (1, 2), (2, 1)]


def test_a_run_without_work_has_no_kernels_and_no_nan():
    found = kernels.kernels(drawn_traces.run(trace()))
    assert found.is_empty()
    one = kernels.kernels(drawn_traces.run(trace(("empty", "compute", 0)))).row(0, named=True)
    assert one["spread_ratio"] is None
    assert one["time_ratio"] is None or not math.isnan(one["time_ratio"])


def test_kernels_are_grouped_by_op_shapes_stream_and_rank():
    slices = pl.DataFrame(
        [
            (0, -1, "aten::linear", "cpu_op", "[[2,3]]"),
            (1, 0, "aten::mm", "cpu_op", "[[2,3],[3,4]]"),
            (2, 1, "cudaLaunchKernel", "runtime", None),
            (3, 0, "cudaMemcpyAsync", "runtime", None),
        ],
        schema=["id", "parent_id", "name", "kind", "shapes"],
        orient="row",
    ).with_columns(lane=pl.lit(9), start_ns=pl.lit(0), dur_ns=pl.lit(1))
    activities = work(("gemm", "compute", 7), ("copy", "memcpy", 3)).with_columns(launch_id=pl.Series([2, 3]))
    made = drawn_traces.trace("compute a", rank=4, activities=activities, ops=schema.OPS.conform(slices))
    found = kernels.kernels(drawn_traces.run(made), by=("name", "op", "shapes", "stream", "device", "rank"))
    assert found.select("name", "op", "shapes", "stream", "device", "rank", "kind").rows() == [
        ("gemm", "aten::mm", "[[2,3],[3,4]]", "compute", 0, 4, "compute"),
        ("copy", "aten::linear", "[[2,3]]", "compute", 0, 4, "memcpy"),
    ]


@pytest.mark.parametrize("by", [("nmae",), (), ("name", "thread")])
def test_an_unknown_key_is_rejected_and_the_known_ones_are_listed(by, wording):
    with wording.raises(ConfigError):
        kernels.kernels(drawn_traces.run(drawn_traces.trace("compute a")), by=by)


@pytest.mark.parametrize("by", [("name",), ("op", "shapes", "unit"), ("phase", "step", "rank")])
def test_grouping_a_recorded_run_by_any_key_preserves_the_total(by):
    run = tracekit.load(SAMPLE)
    found = kernels.kernels(run, by=by)
    whole = pl.concat([each.activities for each in run.traces()])
    assert (found["count"].sum(), found["total_ns"].sum()) == (whole.height, whole["dur_ns"].sum())
    assert found.select(*by, "kind").is_duplicated().sum() == 0


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


def test_kernels_of_a_graph_have_the_modules_of_the_eager_twin():
    eager = drawn_kernels.trace(LINEAR, GELU, ADD, around="nn.Module: Net.mlp")
    replayed = as_graph(drawn_kernels.trace(LINEAR, GELU, ADD), 0, 1)
    run, twin = drawn_traces.run(replayed), kernels.EagerTwin(drawn_traces.run(eager))
    named = kernels.kernels(run, ("module",), ops=twin.op_columns)
    assert {row["module"]: row["count"] for row in named.to_dicts()} == {"Net.mlp": 4, None: 2}
    plain = kernels.kernels(run, ("module",))
    assert {row["module"]: row["count"] for row in plain.to_dicts()} == {None: 6}


def test_modules_that_places_of_the_twin_disagree_on_are_unknown():
    first = drawn_kernels.trace(LINEAR, GELU, around="nn.Module: Net.first", steps=1)
    second = drawn_kernels.trace(LINEAR, GELU, around="nn.Module: Net.first", steps=2)
    other = pl.when(pl.col("step") == 1).then(pl.lit("nn.Module: Net.second")).otherwise("name")
    names = pl.when(pl.col("kind") == "annotation").then(other).otherwise("name").alias("name")
    second = second.replace(ops=second.ops.with_columns(names))
    replayed = as_graph(drawn_kernels.trace(LINEAR, GELU, steps=1), 0, 1)
    run = drawn_traces.run(replayed)
    for eager, modules in ((first, {"Net.first"}), (second, {None})):
        twin = kernels.EagerTwin(drawn_traces.run(eager))
        assert set(kernels.kernels(run, ("module",), ops=twin.op_columns)["module"]) == modules


@pytest.mark.parametrize(
    ("sample", "advice"), [("cuda-graphs", "--eager-twin"), ("compiled", "--modules"), ("slow-rank", None)]
)
def test_a_run_without_modules_says_what_to_record(sample, advice):
    missing = kernels.missing_modules(tracekit.load(ROOT / "sample_traces" / "gpu" / sample))
    assert (missing is None) if advice is None else (missing is not None and advice in missing)


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

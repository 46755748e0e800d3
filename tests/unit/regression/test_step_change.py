"""The change of a step is explained by its operators: contributions sum to it, and what changed comes first."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import drawn_traces, operator_traces
from tests.support.operator_traces import Call
from tests.support.wording import Wording
from tracekit.analysis.compute import call_matching
from tracekit.errors import ConfigError
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.regression import step_change
from tracekit.regression.step_change import RunSteps, StepChange

STEPS = 5


def forward(*, mm_ns: int = 4_000, batch: int = 8, extra: tuple[Call, ...] = ()) -> list[Call]:
    """Return the calls of a step."""
    return [
        ("forward", [("aten::linear", [("aten::mm", mm_ns, f"[{batch}]")]), *extra]),
        ("backward", [("aten::mm", 6_000, f"[{batch}]"), ("aten::relu", 1_000, f"[{batch}]")]),
        ("c10d::allreduce_", 500),
    ]


def run(*calls: list[Call], name: str, ranks: int = 1) -> Run:
    steps = [each for _ in range(STEPS) for each in calls] if len(calls) == 1 else list(calls)
    return drawn_traces.run(*(operator_traces.trace(*steps, rank=rank) for rank in range(ranks)), path=name)


def change(before: Run, after: Run, *by: str) -> StepChange:
    a, b = RunSteps.of(before), RunSteps.of(after)
    changed = step_change.step_change(a, b, by or ("operator",), allow_different=True)
    assert_explained(changed)
    return changed


def assert_explained(changed: StepChange) -> None:
    rows, step = changed.rows, changed.step
    assert rows["change_ns"].sum() == pytest.approx(step.difference, abs=1e-6 * step.reference)
    assert rows["before_ns"].sum() == pytest.approx(step.reference, rel=1e-9)
    assert rows["after_ns"].sum() == pytest.approx(step.candidate, rel=1e-9)
    if rows["contribution_ratio"].null_count() == 0:
        assert rows["contribution_ratio"].sum() == pytest.approx(1)


def test_an_operator_that_takes_longer_is_first_with_the_whole_change() -> None:
    changed = change(run(forward(), name="a"), run(forward(mm_ns=9_000), name="b"))
    first = changed.rows.row(0, named=True)
    assert (first["name"], first["part"], first["status"], first["verdict"]) == (
        "aten::mm", "compute", "slower", "worse",
    )  # fmt: skip
    assert (first["change_ns"], first["contribution_ratio"]) == pytest.approx((5_000, 1))
    assert (first["before_ns"], first["after_ns"], first["calls_change_ns"]) == pytest.approx((10_000, 15_000, 0))
    assert (first["before_count"], first["after_count"], first["new_count"], first["gone_count"]) == (2, 2, 0, 0)
    assert (first["path"], first["shapes"]) == ("forward > aten::linear > aten::mm", "[8]")
    assert 0 < first["low_ns"] < 5_000 < first["high_ns"]
    assert set(changed.rows["status"][1:]) == {"same"}


def test_rows_by_operator_and_path_divide_those_by_operator() -> None:
    rows = change(run(forward(), name="a"), run(forward(mm_ns=5_000), name="b"), "operator", "path").rows
    own = rows.filter(pl.col("name") == "aten::mm").select("path", "before_ns", "change_ns")
    assert own.rows() == [
        ("forward > aten::linear > aten::mm", pytest.approx(4_000), pytest.approx(1_000)),
        ("backward > aten::mm", pytest.approx(6_000), pytest.approx(0, abs=1e-6)),
    ]


def test_a_new_operator_is_new_and_the_one_that_it_replaces_is_gone() -> None:
    before, after = forward(extra=(("aten::add", 700), ("aten::mul", 700))), forward(extra=(("fused::add_mul", 800),))
    changed = change(run(before, name="a"), run(after, name="b"))
    statuses = dict(changed.rows.select("name", "status").iter_rows())
    assert (statuses["fused::add_mul"], statuses["aten::add"], statuses["aten::mul"]) == ("new", "gone", "gone")
    assert (changed.status_counts["new"], changed.status_counts["gone"]) == (1, 2)
    new = changed.rows.row(by_predicate=pl.col("name") == "fused::add_mul", named=True)
    assert (new["change_ns"], new["calls_change_ns"], new["new_count"]) == pytest.approx((800, 800, 1))


def test_one_more_call_of_an_operator_is_a_change_of_counts_and_not_of_speed() -> None:
    more = forward(extra=(("aten::relu", 1_000),))
    rows = change(run(forward(), name="a"), run(more, name="b")).rows
    relu = rows.row(by_predicate=pl.col("name") == "aten::relu", named=True)
    assert (relu["before_count"], relu["after_count"], relu["new_count"], relu["gone_count"]) == (1, 2, 1, 0)
    assert (relu["change_ns"], relu["calls_change_ns"], relu["status"]) == (
        pytest.approx(1_000), pytest.approx(1_000), "slower",
    )  # fmt: skip


def test_calls_with_other_shapes_are_the_same_calls() -> None:
    rows = change(run(forward(), name="a"), run(forward(batch=16), name="b"), "operator", "shapes").rows
    mm = rows.filter(pl.col("name") == "aten::mm")
    assert (mm["shapes"].to_list(), mm["new_count"].sum(), mm["gone_count"].sum()) == (["[8] → [16]"], 0, 0)


def test_calls_under_another_annotation_are_the_same_calls() -> None:
    renamed = [("train", calls[1]) if calls[0] == "forward" else calls for calls in forward()]
    rows = change(run(forward(), name="a"), run(renamed, name="b"), "operator", "path").rows
    assert "forward > aten::linear > aten::mm → train > aten::linear > aten::mm" in rows["path"].to_list()
    assert rows["new_count"].sum() == 0


def test_kernels_are_rows_of_their_own() -> None:
    rows = change(run(forward(), name="a"), run(forward(mm_ns=5_000), name="b"), "kernel").rows
    assert rows["name"][0] == "kernel of aten::mm"
    assert rows["before_count"][0] == 2


def test_modules_explain_the_change_too() -> None:
    def steps(mm_ns: int) -> list[list[Call]]:
        inside = ("nn.Module: Model.block", [("aten::mm", mm_ns), ("aten::relu", 500)])
        return [[("nn.Module: Model", [inside, ("aten::add", 900)]), ("aten::adam", 700)] for _ in range(STEPS)]

    changed = change(run(*steps(4_000), name="a"), run(*steps(9_000), name="b"), "module")
    compute = changed.rows.filter(pl.col("part") == "compute").select("name", "before_ns", "change_ns")
    assert compute.sort("before_ns").rows() == [
        ("(outside modules)", pytest.approx(700), pytest.approx(0)),
        ("Model", pytest.approx(900), pytest.approx(0)),
        ("Model.block", pytest.approx(4_500), pytest.approx(5_000)),
    ]


def test_idle_time_is_named_by_its_cause() -> None:
    steps = [forward() for _ in range(STEPS)]
    later = drawn_traces.run(operator_traces.trace(*steps, idle_ns=2_010), path="b")
    first = change(run(forward(), name="a"), later).rows.row(0, named=True)
    assert (first["name"], first["part"], first["before_count"]) == ("idle (unknown)", "idle", 0)
    assert first["change_ns"] == pytest.approx(2_000)


def test_runs_of_several_ranks_are_explained_by_the_ranks_that_both_have() -> None:
    a, b = run(forward(), name="a", ranks=3), run(forward(mm_ns=5_000), name="b", ranks=2)
    assert change(a, b).rows["change_ns"][0] == pytest.approx(1_000)


def test_a_slow_rank_explains_the_step_of_all() -> None:
    slow = [forward(mm_ns=9_000) for _ in range(STEPS)]
    fast = [forward() for _ in range(STEPS)]
    b = drawn_traces.run(operator_traces.trace(*fast), operator_traces.trace(*slow, rank=1), path="b")
    first = change(run(forward(), name="a", ranks=2), b).rows.row(0, named=True)
    assert (first["name"], first["change_ns"]) == ("aten::mm", pytest.approx(5_000))


def test_an_outlier_step_changes_nothing() -> None:
    steps = [forward(), forward(), forward(mm_ns=900_000), forward(), forward(), forward()]
    rows = change(run(forward(), name="a"), run(*steps, name="b")).rows
    assert abs(rows["change_ns"][0]) < 1e-6


def test_two_steps_are_too_few_for_an_interval() -> None:
    changed = change(run(forward(), forward(), name="a"), run(forward(mm_ns=5_000), forward(mm_ns=5_000), name="b"))
    assert changed.rows["low_ns"].null_count() == changed.rows.height
    assert (changed.rows["status"][0], changed.rows["verdict"][0]) == ("slower", "inconclusive")


def test_an_unknown_key_is_refused_with_the_known_ones(wording: Wording) -> None:
    with wording.raises(ConfigError):
        change(run(forward(), name="a"), run(forward(), name="b"), "color")


def test_the_runs_are_not_changed_by_their_comparison() -> None:
    a = run(forward(), name="a")
    trace: Trace = a.trace(0)
    before = trace.activities.clone()
    change(a, a)
    assert trace.activities.equals(before)


# The weights of steps and ranks ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 10**9)), min_size=1, max_size=40))
def test_weights_give_the_step_time_that_runs_are_compared_by(rows: list[tuple[int, int, int]]) -> None:
    schema = {"rank": pl.Int64, "step": pl.Int64, "duration_ns": pl.Int64}
    cells = pl.DataFrame(rows, schema=schema, orient="row").unique(["rank", "step"], maintain_order=True)
    cells = cells.with_columns(window=pl.lit(0, pl.Int64))
    step_ns = float(np.median(cells.group_by("step").agg(pl.col("duration_ns").max())["duration_ns"].to_numpy()))
    found = step_change.with_weights(cells, step_ns)
    assert found["weight"].sum() == pytest.approx(1)
    assert found["weight"].min() >= 0
    assert (found["weight"] * found["duration_ns"]).sum() == pytest.approx(step_ns, rel=1e-6)
    assert found.group_by("step").agg(pl.col("rank_weight").sum())["rank_weight"].to_list() == pytest.approx(
        [1] * cells["step"].n_unique()
    )


def test_ranks_that_take_equally_long_weigh_equally_and_the_slowest_and_fastest_steps_nothing() -> None:
    times = [10, 40, 20, 30, 22, 28, 24, 26]
    rows = [(0, rank, step, time) for step, time in enumerate(times) for rank in range(2)]
    cells = pl.DataFrame(rows, schema=["window", "rank", "step", "duration_ns"], orient="row")
    weights = step_change.with_weights(cells, 25.0)["weight"].round(3).to_list()
    assert weights == [0, 0, 0, 0, 0, 0, 0, 0, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125]


# Matching -------------------------------------------------------------------------------------------------------------


def sites(*rows: tuple[str, str, str | None, int]) -> pl.DataFrame:
    types = {"operator": pl.String, "path": pl.String, "shapes": pl.String, "order_ns": pl.Int64}
    return pl.DataFrame(rows, schema=types, orient="row")


def test_sites_are_matched_by_all_then_without_shapes_then_without_path_in_order() -> None:
    a = sites(("mm", "x", "[1]", 0), ("mm", "x", "[2]", 5), ("mm", "y", "[3]", 9), ("add", "z", None, 10))
    b = sites(("mm", "x", "[7]", 0), ("mm", "x", "[1]", 4), ("mm", "w", "[3]", 6), ("mul", "z", None, 10))
    matched = call_matching.match_calls(a, b, ("operator",), ("path", "shapes"))
    of_a, of_b = (
        {call: (row[1], row[2]) for *row, call in side.select("operator", "path", "shapes", "call").iter_rows()}
        for side in matched
    )
    assert sorted((of_a.get(call), of_b.get(call)) for call in of_a | of_b if call in of_a and call in of_b) == [
        (("x", "[1]"), ("x", "[1]")),
        (("x", "[2]"), ("x", "[7]")),
        (("y", "[3]"), ("w", "[3]")),
    ]
    assert len(of_a | of_b) == 5


# The same work by another library ------------------------------------------------------------------------------------


def convolution(library: str, *, ns: int = 4_000, batch: int = 8, bias: str = "") -> Call:
    shapes = f"[[{batch}, 3, 32, 32], [64, 3, 7, 7]{bias}]"
    inner = ("aten::_convolution", [(f"aten::{library}_convolution", ns, shapes)])
    return ("aten::conv2d", [("aten::convolution", [inner])])


def attention(library: str, ns: int) -> Call:
    inside = (f"aten::_{library}_forward", ns, "[[2, 8, 64, 32], [2, 8, 64, 32], [2, 8, 64, 32]]")
    return ("aten::scaled_dot_product_attention", [(f"aten::_scaled_dot_product_{library}", [inside])])


def named(changed: StepChange) -> dict[str, list[object]]:
    """Return the status and the ns before and after of each row of compute."""
    rows = changed.rows.filter(pl.col("part") == "compute").with_columns(pl.col("before_ns", "after_ns").round(6))
    return {name: values for name, *values in rows.select("name", "status", "before_ns", "after_ns").iter_rows()}


@pytest.mark.parametrize("annotation", ["forward", "DistributedDataParallel.forward"])
@pytest.mark.parametrize("batch", [8, 32])
def test_a_convolution_by_another_library_is_the_same_work(annotation: str, batch: int) -> None:
    before = [("forward", [convolution("cudnn"), ("aten::relu", 500)])]
    other = convolution("miopen", ns=7_000, batch=batch, bias=", [], []")
    after = [(annotation, [other, ("aten::relu", 500)])]
    found = named(change(run(before, name="a"), run(after, name="b")))
    assert found.keys() == {"aten::cudnn_convolution → aten::miopen_convolution", "aten::relu"}
    assert found["aten::cudnn_convolution → aten::miopen_convolution"] == ["slower", 4_000, 7_000]


def test_attention_by_another_library_is_the_same_work() -> None:
    before = [("forward", [attention("flash_attention", 3_000)])]
    after = [("forward", [attention("efficient_attention", 5_000)])]
    found = named(change(run(before, name="a"), run(after, name="b")))
    assert found == {"aten::_flash_attention_forward → aten::_efficient_attention_forward": ["slower", 3_000, 5_000]}


def test_the_backward_pass_is_matched_by_the_operators_of_the_forward_pass() -> None:
    def made(library: str, *backward: Call, name: str) -> Run:
        forward = ("aten::batch_norm", [(f"aten::{library}_batch_norm", 2_000)])
        node = f"{library}BatchNormBackward0"
        traces = operator_traces.trace([forward, ("backward", [(node, list(backward))])], [("aten::relu", 100)])
        return drawn_traces.run(operator_traces.linked(traces, **{node: f"aten::{library}_batch_norm"}), path=name)

    a = made("cudnn", ("aten::cudnn_backward_input", 3_000), ("aten::cudnn_backward_weight", 1_000), name="a")
    found = named(change(a, made("miopen", ("aten::miopen_backward", 5_000), name="b")))
    weighted = {name: after / before for name, (_, before, after) in found.items()}  # type: ignore[operator]
    assert weighted == {
        "aten::cudnn_batch_norm → aten::miopen_batch_norm": pytest.approx(1),
        "aten::cudnn_backward_input + aten::cudnn_backward_weight → aten::miopen_backward": pytest.approx(5 / 4),
        "aten::relu": pytest.approx(1),
    }


def test_another_operator_of_the_model_is_no_library() -> None:
    before = [("forward", [convolution("cudnn"), ("aten::relu", 500), ("torch_x::step", [("aten::mul", 300)])])]
    after = [("forward", [convolution("cudnn"), ("aten::gelu", 500), ("torch_y::step", [("aten::div", 300)])])]
    found = named(change(run(before, name="a"), run(after, name="b")))
    assert {name: status for name, (status, *_) in found.items()} == {
        "aten::cudnn_convolution": "same", "aten::relu": "gone", "aten::gelu": "new",
        "aten::mul": "gone", "aten::div": "new",
    }  # fmt: skip


def test_what_both_runs_call_is_not_counted_to_the_other_library() -> None:
    before = [("aten::linear", [("aten::addmm", 4_000), ("aten::copy_", 300)])]
    after = [("aten::linear", [("aten::mm", 4_000), ("aten::add", 200), ("aten::copy_", 300)])]
    found = named(change(run(before, name="a"), run(after, name="b")))
    assert found == {
        "aten::addmm → aten::add + aten::mm": ["slower", 4_000, 4_200],
        "aten::copy_": ["same", 300, 300],
    }


def test_links_to_what_comes_later_make_no_loop() -> None:
    trace = operator_traces.trace(*[[("aten::a", [("aten::b", 100)]), ("aten::c", 100)]] * 3)
    looped = trace.replace(ops=trace.ops.with_columns(forward_id=(pl.col("id") + 2) % trace.ops.height))
    broken = trace.replace(ops=trace.ops.with_columns(forward_id=pl.lit(10**9, pl.Int64)))
    for each in (looped, broken):
        assert change(drawn_traces.run(trace, path="a"), drawn_traces.run(each, path="b")).rows.height

"""Modules: which slice and which kernel belongs to which, backward included, and totals that are conserved."""

from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces, operator_traces
from tracekit.analysis.compute import call_paths, flops, kernels
from tracekit.analysis.host import ops
from tracekit.analysis.memory import allocations
from tracekit.model.run import Run
from tracekit.model.trace import Trace

ROOT = Path(__file__).parents[3]
TRACES = ROOT.parent / "shared" / "traces"
FRAMES = {f"nn.Module: {name}" for name in ("Model_0", "Block_0", "Linear_0", "Linear_1")}


def by_operator(trace: Trace) -> dict[str, str | None]:
    """Return the module of each operator that launches a kernel."""
    own = trace.ops.with_columns(call_paths.op_modules(trace)).filter(pl.col("kind") == "cpu_op")
    return dict(own.select("name", "module").iter_rows())


def with_frames() -> Trace:
    """Return a step with profiler frames, as `with_stack` records them; the block is checkpointed."""
    forward = (
        "nn.Module: Model_0",
        [
            ("aten::embedding", 30),
            ("nn.Module: Block_0", [("nn.Module: Linear_0", [("aten::mm", 50)]), ("aten::relu", 20)]),
            ("nn.Module: Linear_1", [("aten::addmm", 40)]),
        ],
    )
    backward = [
        ("AddmmBackward0::", [("aten::bmm", 60)]),
        ("CheckpointBackward::", [("nn.Module: Block_0", [("nn.Module: Linear_0", [("aten::mm_again", 50)])])]),
        ("MmBackward0::", [("aten::mv", 70)]),
    ]
    trace = operator_traces.trace([forward, *backward, ("aten::_fused_adamw_", 10)], frames=FRAMES)
    return operator_traces.linked(trace, **{"AddmmBackward0::": "aten::addmm", "MmBackward0::": "aten::mm"})


def with_spans() -> Trace:
    """Return the same as `record --modules` records it; the loss's backward is called inside another module."""
    inner = ("nn.Module: Model.block", [("nn.Module: Model.block.0", [("aten::mm", 50)]), ("aten::relu", 20)])
    backward = [("MmBackward0::", [("aten::mv", 70)]), ("aten::detach", 5)]
    trace = operator_traces.trace(
        [("nn.Module: Model", [("aten::embedding", 30), inner]), ("nn.Module: Trainer", backward)]
    )
    return operator_traces.linked(trace, **{"MmBackward0::": "aten::mm"})


def test_frames_make_paths_of_the_modules_around_them_and_backward_belongs_to_its_forward():
    assert by_operator(with_frames()) == {
        "aten::embedding": "Model_0",
        "aten::mm": "Model_0.Block_0.Linear_0",
        "aten::relu": "Model_0.Block_0",
        "aten::addmm": "Model_0.Linear_1",
        "AddmmBackward0::": "Model_0.Linear_1",
        "aten::bmm": "Model_0.Linear_1",
        "CheckpointBackward::": None,
        "aten::mm_again": "Model_0.Block_0.Linear_0",
        "MmBackward0::": "Model_0.Block_0.Linear_0",
        "aten::mv": "Model_0.Block_0.Linear_0",
        "aten::_fused_adamw_": None,
    }


def test_spans_have_paths_of_their_own_and_the_gradient_of_an_op_is_of_its_module_wherever_backward_is_called():
    assert by_operator(with_spans()) == {
        "aten::embedding": "Model",
        "aten::mm": "Model.block.0",
        "aten::relu": "Model.block",
        "MmBackward0::": "Model.block.0",
        "aten::mv": "Model.block.0",
        "aten::detach": "Trainer",
    }


def test_without_marks_fsdp_units_are_the_modules():
    trace = operator_traces.trace([("aten::mm", 50), ("aten::add", 5)])
    unit = pl.when(pl.col("name") == "aten::mm").then(pl.lit("layers.0")).otherwise(pl.lit("")).alias("unit")
    assert by_operator(trace.replace(ops=trace.ops.with_columns(unit))) == {
        "aten::mm": "layers.0",
        "aten::add": call_paths.ROOT_UNIT,
    }


def test_kernels_and_ops_are_grouped_by_module():
    run = drawn_traces.run(with_frames())
    rows = kernels.kernels(run, ("module",)).select("module", "count", "total_ns")
    assert {module: (count, total) for module, count, total in rows.iter_rows()} == {
        "Model_0": (1, 30),
        "Model_0.Block_0": (1, 20),
        "Model_0.Block_0.Linear_0": (3, 170),
        "Model_0.Linear_1": (2, 100),
        None: (1, 10),
    }
    grouped = ops.ops(run, ("module",), ops.KINDS)
    assert grouped["self_ns"].sum() == ops.self_times(with_frames().ops).sum()
    assert grouped.filter(pl.col("module").is_null(), pl.col("kind") == "cpu_op")["device_ns"].item() == 10


def test_a_module_has_its_own_time_and_that_of_the_modules_inside_it():
    rows = {row["module"]: row for row in ops.modules(with_frames()).iter_rows(named=True)}
    assert {name: (row["parent"], row["depth"], row["calls"]) for name, row in rows.items()} == {
        "Model_0": (None, 0, 1),
        "Model_0.Block_0": ("Model_0", 1, 2),
        "Model_0.Block_0.Linear_0": ("Model_0.Block_0", 2, 2),
        "Model_0.Linear_1": ("Model_0", 1, 1),
        None: (None, None, None),
    }
    assert {name: (row["compute_ns"], row["total_compute_ns"]) for name, row in rows.items()} == {
        "Model_0": (30, 320),
        "Model_0.Block_0": (20, 190),
        "Model_0.Block_0.Linear_0": (170, 170),
        "Model_0.Linear_1": (100, 100),
        None: (10, 10),
    }


def test_a_container_that_is_never_called_is_a_module_too():
    trace = operator_traces.trace([("nn.Module: Model.layers.0", [("aten::mm", 50)])])
    rows = ops.modules(trace).select("module", "calls", "compute_ns", "total_compute_ns").rows()
    assert rows == [("Model", 0, 0, 50), ("Model.layers", 0, 0, 50), ("Model.layers.0", 1, 50, 50), (None, None, 0, 0)]


def conserved(run: Run) -> pl.DataFrame:
    """Return the modules of a run, whose measures have to sum to those of its traces."""
    found = run.table(ops.modules)
    for rank in run.ranks:
        trace, own = run.trace(rank), found.filter(pl.col("rank") == rank)
        durations = dict(trace.activities.group_by("kind").agg(pl.col("dur_ns").sum()).iter_rows())
        assert own["compute_ns"].sum() == durations.get("compute", 0)
        assert own["communication_ns"].sum() == durations.get("communication", 0)
        assert own["copy_ns"].sum() == durations.get("memcpy", 0) + durations.get("memset", 0)
        assert own["host_ns"].sum() == ops.self_times(trace.ops).sum()
        assert own["flops"].sum() == flops.counted_calls(trace)["flops"].sum()
        assert own["sent_bytes"].sum() == trace.collectives["sent_bytes"].sum()
        allocated = trace.allocations.filter(allocations.of_training(trace), pl.col("delta_bytes") > 0)
        assert own["allocated_bytes"].sum() == allocated["delta_bytes"].sum()
        outermost = own.filter((pl.col("depth") == 0) | pl.col("module").is_null())
        for name in ops.MEASURES:
            assert outermost[f"total_{name}"].sum() == own[name].sum(), name
    total_ns = kernels.kernels(run)["total_ns"].sum()
    assert kernels.kernels(run, ("module",))["total_ns"].sum() == total_ns
    return found


def test_totals_of_a_recorded_fsdp_run_are_conserved():
    found = conserved(tracekit.load(ROOT / "sample_traces" / "demo-fsdp2"))
    assert {"layers.0", "layers.3", call_paths.ROOT_UNIT} <= set(found["module"])


@pytest.mark.parametrize(
    ("name", "root", "least_inside"),
    [
        ("tracelens_mi300_resnet_ddp", "ResNet_0", 0.99),
        ("tracelens_h100_memory_stacks", "Owlv2ForObjectDetection_0", 1),
    ],
)
def test_totals_of_recorded_stacks_are_conserved(name: str, root: str, least_inside: float) -> None:
    if not (TRACES / name).is_dir():
        pytest.skip("no traces of other projects next to this checkout")
    found = conserved(tracekit.load(TRACES / name))
    whole = found.row(by_predicate=pl.col("module") == root, named=True)
    assert whole["total_compute_ns"] >= least_inside * found["compute_ns"].sum()
    assert whole["total_flops"] == found["flops"].sum() > 1e12


def test_modules_of_all_ranks_are_a_tree_of_one_measure():
    run = drawn_traces.run(with_frames(), with_frames().replace(rank=1))
    table = ops.by_module(run)
    tree = ops.tree(table, "compute_ns")
    alone = dict(ops.modules(with_frames()).select("module", "total_compute_ns").iter_rows())
    names = dict(tree.select("node", "name").iter_rows())
    inside = {
        name: (names.get(parent), total)
        for name, parent, total in tree.select("name", "parent", "total_ns").iter_rows()
    }
    assert inside == {
        "Model_0": (None, 2 * alone["Model_0"]),
        "Block_0": ("Model_0", 2 * alone["Model_0.Block_0"]),
        "Linear_0": ("Block_0", 2 * alone["Model_0.Block_0.Linear_0"]),
        "Linear_1": ("Model_0", 2 * alone["Model_0.Linear_1"]),
        ops.OUTSIDE: (None, 2 * alone[None]),
    }
    assert tree["self_ns"].sum() == tree.filter(parent=-1)["total_ns"].sum()

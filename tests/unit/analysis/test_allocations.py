"""Memory allocations: small histories by hand, simulated growth, and recorded traces."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.rule_examples import metrics, ops
from tracekit.analysis.memory import allocations, usage
from tracekit.errors import InputError
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.replay.allocator import double_buffering, memory_usage, playback
from tracekit.replay.allocator.recorded_history import ALLOC
from tracekit.replay.allocator.settings import Settings

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared" / "traces"
WITH_TOTALS = (("hta_ddp_v100_memory", 28_010), ("tracelens_h100_memory_stacks", 13_474))
SAMPLES = ("demo-fsdp2", "demo-yafsdp")
PICTURE = """
    step     0000011111
    compute  aaaaaaaaaa
"""


@lru_cache
def recorded(path: Path) -> Run:
    return tracekit.load(str(path), cache=False)


def sample(name: str) -> Run:
    return recorded(ROOT / "sample_traces" / name)


def memory(*rows: tuple, total: int | None = None, device: int | None = 0, **columns: list) -> pl.DataFrame:
    """Return events (at, address, delta, step); `total` is allocated before the first."""
    at, address, delta, step = (list(column) for column in zip(*rows, strict=True))
    events = {"at_ns": at, "address": address, "delta_bytes": delta, "step": step, "device": [device] * len(at)}
    if total is not None:
        events["allocated_bytes"] = (total + np.cumsum(delta)).tolist()
    return pl.DataFrame(events | columns, schema_overrides={"device": pl.Int64, "address": pl.Int64, "step": pl.Int64})


def traced(allocated: pl.DataFrame, **tables: pl.DataFrame) -> Trace:
    return drawn_traces.trace(PICTURE, allocations=allocated, **tables)


# time      0    1    2    3    4    5    6
# block x   +4        -4   +4        -4           at one address, twice
# block y        +2                       (stays)
# block z             -8                          from before the window
COME_AND_GO = memory(
    (0, 100, 4, 0), (1, 200, 2, 0), (2, 100, -4, 0), (2, 300, -8, 0), (3, 100, 4, 1), (5, 100, -4, 1), total=9
)  # fmt: skip


def test_an_allocation_is_matched_with_the_next_free_at_its_address():
    found = allocations.blocks(traced(COME_AND_GO))
    rows = found.select("address", "bytes", "start_ns", "end_ns", "lifetime_ns", "step", "end_step", "freed").rows()
    assert rows == [
        (300, 8, None, 2, None, None, 0, True),
        (100, 4, 0, 2, 2, 0, 0, True),
        (200, 2, 1, None, None, 0, None, False),
        (100, 4, 3, 5, 2, 1, 1, True),
    ]


def test_a_block_without_a_recorded_free_ends_when_its_address_is_reused():
    found = allocations.blocks(traced(memory((0, 100, 4, 0), (3, 100, 6, 0), (4, 100, -6, 0))))
    assert found.select("bytes", "start_ns", "end_ns", "freed").rows() == [(4, 0, 3, False), (6, 3, 4, True)]


def test_equal_addresses_on_different_devices_are_different_blocks():
    parts = [memory((at, 100, 4, 0), (at + 5, 100, -4, 0), device=device) for at, device in ((0, 0), (1, 1), (2, None))]
    found = allocations.blocks(traced(pl.concat(parts).sort("at_ns")))
    assert found.select("device", "start_ns", "end_ns").rows() == [(0, 0, 5), (1, 1, 6), (None, 2, 7)]


def test_events_without_addresses_yield_no_blocks():
    old = COME_AND_GO.with_columns(address=pl.lit(None, pl.Int64), allocated_bytes=pl.lit(None, pl.Int64))
    trace = traced(old)
    assert allocations.blocks(trace).is_empty()
    assert double_buffering.alternating(trace).is_empty()
    # Of earlier memory only what is freed is known: at least 8.
    assert allocations.live(trace)["live_bytes"].to_list() == [10, 12, 8, 0, 4, 0]
    assert allocations.at_peak(trace).select("op", "count", "bytes").rows() == [(None, None, 12)]


def test_live_bytes_start_from_the_first_total():
    usage = allocations.live(traced(COME_AND_GO.with_columns(reserved_bytes=pl.lit(20))))
    assert usage["live_bytes"].to_list() == COME_AND_GO["allocated_bytes"].to_list() == [13, 15, 11, 3, 7, 3]
    assert usage["slack_bytes"].to_list() == [7, 5, 9, 17, 13, 17]
    assert usage["total"].all()


def test_an_allocator_that_does_not_count_reserved_bytes_has_no_slack():
    usage = allocations.live(traced(COME_AND_GO.with_columns(reserved_bytes=pl.lit(0))))
    assert usage["slack_bytes"].null_count() == usage.height


def test_the_peak_is_split_by_requesting_op():
    slices = ops(
        ("aten::mm", "cpu_op", 0, 9), ("aten::empty", "cpu_op", 0, 1), ("tracekit::forward", "annotation", 0, 9)
    )
    slices = slices.with_columns(parent_id=pl.Series([2, 0, None], dtype=pl.Int64))
    events = COME_AND_GO.with_columns(op_id=pl.Series([1, 0, 1, 1, 1, 1]))
    found = allocations.at_peak(traced(events, ops=slices))
    assert found.select("at_ns", "peak_bytes", "op", "count", "bytes").rows() == [
        (1, 15, None, None, 9),  # of which 1 has no event
        (1, 15, "aten::mm", 2, 6),
    ]
    assert found["peak_ratio"].to_list() == [9 / 15, 6 / 15]


def test_module_and_code_location_are_the_innermost_around_the_op_or_its_forward_op():
    slices = ops(
        ("train.py(9): main", "python", 0, 99),
        ("nn.Module: Block_3", "python", 1, 50),
        ("torch/nn/modules/module.py(1): _call_impl", "python", 2, 49),
        ("model.py(7): forward", "python", 3, 48),
        ("nn.Module: Linear_1", "python", 4, 47),
        ("torch/nn/modules/linear.py(2): forward", "python", 5, 46),
        ("<built-in function linear>", "python", 6, 45),
        ("aten::addmm", "cpu_op", 7, 44),
        ("AddmmBackward0", "cpu_op", 60, 70),
        ("aten::mm", "cpu_op", 61, 69),
    )
    parents = [None, 0, 1, 2, 3, 4, 5, 6, None, 8]
    slices = slices.with_columns(
        parent_id=pl.Series(parents, dtype=pl.Int64), forward_id=pl.Series([None] * 9 + [7], dtype=pl.Int64)
    )
    rows = memory((8, 1, 40, 0), (62, 2, 60, 0), total=0).with_columns(op_id=pl.Series([7, 9]))
    found = allocations.at_peak(traced(rows, ops=slices)).select("op", "module", "stack", "bytes").rows()
    assert found == [
        ("aten::mm", "Linear_1", "model.py(7): forward", 60),
        ("aten::addmm", "Linear_1", "model.py(7): forward", 40),
    ]


def test_churn_is_allocated_bytes_over_the_peak_of_the_step():
    assert allocations.churn(traced(COME_AND_GO)).rows() == [(0, 0, 2, 6, 15, 6 / 15, 2), (1, 0, 1, 4, 7, 4 / 7, 1)]


# Unit buffers ---------------------------------------------------------------------------------------------------------
def gathered(units: int, *, unit_bytes: int = 100, freed: bool = True, in_backend: bool = False) -> Trace:
    """Simulate a step that gathers each unit into a flat buffer, copies it out into two weights, and reduces it."""
    gathers = [("all_gather", unit_bytes), ("all_gather_copy_out", unit_bytes - 40), ("all_gather_copy_out", 40)]
    taken = [*gathers, ("post_backward_reduce", unit_bytes), ("post_backward_reduce", unit_bytes // 2)]
    rows, spans, names = [], [], []
    for number in range(units):
        at, span = 100 * number, []
        unit = f"layers.{number}"
        for offset, (kind, size) in enumerate(taken):
            address = 10 * number + offset
            span.append((at + offset, address, size, 0, unit, kind, len(spans) + (kind != "all_gather")))
            if freed:
                span.append((at + 150 + offset, address, -size, 0, unit, kind, None))
        spans += [(f"FSDP::all_gather ({unit})", at, at + 1), (f"FSDP::all_gather_copy_out ({unit})", at + 1, at + 9)]
        rows += span
        names += [unit, unit]
    rows.sort(key=lambda row: row[0])
    events = memory(*[row[:4] for row in rows]).with_columns(
        unit=pl.Series([row[4] for row in rows]),
        span=pl.Series([row[5] for row in rows]),
        op_id=pl.Series([row[6] for row in rows]),
    )
    slices = ops(*((name, "annotation", start, end) for name, start, end in spans))
    slices = slices.with_columns(unit=pl.Series(names), span=slices["name"].str.extract(r"::(\w+)"))
    if in_backend:
        slices = slices.with_columns(name=pl.lit("c10d::_allgather_base_"), dur_ns=pl.lit(10_000, pl.Int64))
    return traced(events, ops=slices)


def test_two_buffers_of_the_largest_unit_would_replace_the_allocations_of_all_units():
    found = double_buffering.alternating(gathered(4)).rows(named=True)
    gradients, weights = found
    assert (weights["kind"], weights["units"], weights["count"], weights["bytes"]) == ("weights", 4, 12, 800)
    assert (weights["buffer_bytes"], weights["buffers_bytes"]) == (100, 200)
    assert weights["peak_bytes"] == 400  # each unit's 200 until 50 after the next one began
    assert (gradients["kind"], gradients["count"], gradients["buffers_bytes"]) == ("gradients", 8, 200)


def test_a_double_buffering_replay_replaces_unit_allocations_by_two_permanent_buffers():
    mib = 1 << 20
    trace = gathered(4, unit_bytes=20 * mib)
    recorded, served = playback.from_trace(trace), memory_usage.history_with_buffers(trace)
    # Two units at once, each with two weights and a gradient of 20 MiB and a reduced one of 10.
    assert playback.predict(recorded, Settings()).peak_allocated_bytes // mib == 140
    assert (served.action == ALLOC).sum() == 0
    assert playback.predict(served, Settings()).peak_allocated_bytes == 80 * mib


def test_without_unit_buffers_double_buffering_has_no_rows(wording):
    with wording.raises(InputError):
        memory_usage.history_with_buffers(gathered(2))


@pytest.mark.parametrize("trace", [gathered(2), gathered(4, freed=False), gathered(4, in_backend=True)])
def test_double_buffering_ignores_concurrent_units_permanent_blocks_and_backend_memory(trace):
    assert double_buffering.alternating(trace).is_empty()


def test_double_buffering_predicted_for_fsdp2_equals_the_buffers_of_yafsdp():
    fsdp2, yafsdp = (sample(name).trace(0) for name in SAMPLES)
    predicted = double_buffering.alternating(fsdp2).unique("kind").sort("kind")["buffer_bytes"].to_list()
    calls = yafsdp.collectives.join(yafsdp.activities, left_on="activity_id", right_on="id")
    of_units = calls.filter(pl.col("unit").str.starts_with("layers"))
    gathers = of_units.filter(pl.col("op") == "all_gather")["received_bytes"].max()
    reductions = of_units.filter(pl.col("op") == "reduce_scatter")["sent_bytes"].max()
    assert predicted == pytest.approx([reductions, gathers], rel=0.05)
    assert double_buffering.alternating(yafsdp).is_empty()
    less, more = (allocations.churn(trace)["bytes"].median() for trace in (yafsdp, fsdp2))
    assert less < 0.8 * more


# Growth ---------------------------------------------------------------------------------------------------------------
def grown(per_step: np.ndarray) -> Trace:
    """Simulate a step for each item, which leaves that many more bytes allocated; the rest is freed."""
    rows = []
    for step, more in enumerate(per_step.tolist()):
        rows += [(10 * step, 1, 50_000_000, step), (10 * step + 1, 1, -50_000_000, step)]
        if more:
            rows.append((10 * step + 2, 100 + step, int(more), step))
    return traced(memory(*rows, total=1 << 30))


def test_simulated_leaks_are_distinguished_from_healthy_runs():
    rng = np.random.default_rng(7)
    growing = []
    for number in range(80):
        steps = int(rng.integers(6, 60))
        leaks = number % 2 == 0
        # Buffers that live for some steps make memory vary: they are freed in a later step.
        wander = rng.integers(-(1 << 20), 1 << 20, steps)
        leak = rng.integers(3 << 20, 9 << 20) if leaks else 0
        (row,) = usage.growth(grown(np.diff(wander, prepend=0) + leak)).rows(named=True)
        growing.append((leaks, row["low_bytes"] > 0))
    found = sum(said for leaks, said in growing if leaks)
    false = sum(said for leaks, said in growing if not leaks)
    assert found / 40 >= 0.95
    assert found / (found + false) >= 0.95


def test_steady_growth_is_detected_despite_an_outlier_step():
    more = np.full(12, 4096)
    more[5] = 1 << 24
    more[6] = 4096 * 2 - (1 << 24)
    (row,) = usage.growth(grown(more)).rows(named=True)
    assert (row["slope_bytes"], row["low_bytes"] > 0) == (4096, True)
    assert (row["source"], row["steps"], row["first_step"], row["last_step"]) == ("events", 12, 0, 11)


def test_growth_needs_at_least_five_steps():
    assert usage.growth(grown(np.full(4, 4096))).is_empty()


def test_the_metrics_log_shows_growth_when_the_window_is_too_short():
    logged = metrics("allocated_bytes", *(1000 + 10 * step for step in range(40)))
    (row,) = usage.growth(traced(COME_AND_GO, metrics=logged)).rows(named=True)
    assert (row["source"], row["steps"], row["slope_bytes"], row["low_bytes"]) == ("metrics", 39, 10, 10)


@pytest.mark.parametrize("name", SAMPLES)
def test_our_healthy_recordings_do_not_grow(name):
    run = sample(name)
    assert (run.table(usage.growth)["low_bytes"] <= 0).all()


def test_the_spread_of_steps_excludes_their_growth():
    wander = np.array([0, 9, 0, 9, 0, 9, 0, 9, 0, 9])
    (row,) = usage.growth(grown(np.diff(wander, prepend=0) + 100)).rows(named=True)
    assert row["slope_bytes"] == 100
    assert row["spread_bytes"] == 9


def host_steps(*, leak: int = 0, unseen: int = 0) -> Trace:
    """Draw 8 steps on the host, each with a new block of `leak` bytes and one of `unseen`, whose free is not recorded.

    The last `unseen` block is at the address of the first, as an allocator reuses what was freed.
    """
    # step        0   1   2   3   4   5   6   7
    # unseen at   0   1   2   3   4   5   6   0
    # leak at     100 101 102 103 104 105 106 107
    rows = []
    for step in range(8):
        rows += [(10 * step, step % 7, unseen, step)] if unseen else []
        rows += [(10 * step + 1, 100 + step, leak, step)] if leak else []
    return drawn_traces.trace(PICTURE, on_device=False, allocations=memory(*rows, device=None))


def test_blocks_that_a_thread_without_a_profiler_frees_are_no_growth():
    (unseen,) = usage.growth(host_steps(unseen=4_726_272)).rows(named=True)
    assert (unseen["slope_bytes"], unseen["last_bytes"]) == (0, 0)
    (both,) = usage.growth(host_steps(unseen=4_726_272, leak=1 << 20)).rows(named=True)
    assert (both["slope_bytes"], both["low_bytes"], both["last_bytes"]) == (1 << 20, 1 << 20, 8 << 20)


# Traces with totals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "events"), WITH_TOTALS)
def test_live_bytes_equal_the_total_at_every_event_of_recorded_traces(name, events):
    if not SHARED.exists():
        pytest.skip("needs the shared traces")
    run = recorded(SHARED / name)
    _check_totals(run.trace(run.ranks[0]), events)


@pytest.mark.parametrize(
    ("name", "events", "unrecorded"), [("demo-fsdp2", 11_778, 77_633), ("demo-yafsdp", 10_069, 2_876_680)]
)
def test_a_block_on_the_host_is_freed_where_its_address_is_allocated_again(name, events, unrecorded):
    trace = sample(name).trace(0)
    held: dict[int, int] = {}
    expected = []
    for address, delta in trace.allocations.select("address", "delta_bytes").iter_rows():
        if delta > 0:
            held[address] = delta
        else:
            del held[address]
        expected.append(sum(held.values()))
    assert allocations.live(trace)["live_bytes"].to_list() == expected
    assert len(expected) == events
    assert trace.allocations["allocated_bytes"][-1] - expected[-1] == unrecorded
    _check_peaks(trace)


def _check_totals(trace: Trace, events: int) -> None:
    usage = allocations.live(trace)
    assert usage.height == events
    assert usage["live_bytes"].to_list() == trace.allocations["allocated_bytes"].to_list()
    assert _check_peaks(trace) == trace.allocations["allocated_bytes"].max()


def _check_peaks(trace: Trace) -> int:
    peaks = allocations.at_peak(trace).group_by("device").agg(pl.col("bytes").sum(), pl.col("peak_bytes").first())
    assert (peaks["bytes"] == peaks["peak_bytes"]).all()
    return int(peaks["peak_bytes"].max())


def test_empty_tables_have_all_columns():
    empty = Trace(0, 0, "empty", lanes=schema.LANES.empty())
    for fact, columns in (
        (allocations.blocks, allocations.BLOCK_COLUMNS),
        (allocations.live, allocations.LIVE_COLUMNS),
        (allocations.at_peak, allocations.PEAK_COLUMNS),
        (allocations.churn, allocations.CHURN_COLUMNS),
        (double_buffering.alternating, double_buffering.COLUMNS),
        (usage.growth, usage.GROWTH_COLUMNS),
    ):
        for trace in (empty, traced(COME_AND_GO)):
            assert dict(fact(trace).schema) == columns, fact.__name__


def test_the_slope_equals_scipys_theil_sen_slope():
    from scipy import stats  # takes each worker that collects this file half a second

    random = np.random.default_rng(20261122)
    for count in (5, 8, 40, 200):
        x = np.arange(count)
        y = 3.0 * x + random.normal(size=count)
        expected = stats.theilslopes(y, x, alpha=0.99)
        assert usage.theil_sen(x, y) == pytest.approx((expected.slope, expected.low_slope, expected.high_slope))

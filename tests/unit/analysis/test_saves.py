import statistics
from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import drawn_traces, rule_examples
from tests.support.rule_examples import MS, metrics, save_log, save_run, writer_run
from tracekit.analysis.checkpoint import save_stages, stalls
from tracekit.analysis.checkpoint import saves as analysis
from tracekit.model import schema
from tracekit.model.run import Run


def dominant(run: Run, clock: str = stalls.BLOCKED) -> tuple[str, int, str]:
    found = run.table(stalls.dominant).filter(pl.col("clock") == clock)
    (row,) = found.select("kind", "rank", "stage").rows()
    return row


def run_of(table: pl.DataFrame, *steps_ms: int) -> Run:
    times = metrics("step_time_ns", *(ms * MS for ms in steps_ms))
    return drawn_traces.run(drawn_traces.trace("step 01\ncompute ab", checkpoints=table, metrics=times))


def line(checkpoint: str, stage: str, start_ns: int, dur_ns: int, **more: object) -> dict[str, object]:
    row = {"checkpoint": checkpoint, "operation": "save", "step": 5, "stage": stage, "blocking": True}
    return row | {"start_ns": start_ns, "dur_ns": dur_ns} | more


def test_a_background_save_has_blocked_and_background_time():
    # time      0 1 2 3 4 5 6 7 8
    # training  # # . . . . . . .    blocked 2
    # thread    . . # # # # # . .
    # complete  # # # # # # # # .    written after 8
    rows = [
        line("a", "stage", 0, 2),
        line("a", "total", 0, 2),
        line("a", "write", 2, 5, blocking=False, bytes=10),
        line("a", "total", 2, 5, blocking=False, bytes=10),
        line("a", "complete", 0, 8, blocking=False, durable=True),
    ]
    table = schema.CHECKPOINTS.conform(pl.DataFrame(rows, infer_schema_length=None))
    table = table.with_columns(durable=pl.when(pl.col("bytes") > 0).then(True).otherwise("durable"))
    (row,) = run_of(table, 10).table(analysis.by_rank).iter_rows(named=True)
    assert (row["blocked_ns"], row["stages_ns"], row["written_ns"], row["durable_ns"]) == (2, 2, 8, 8)
    assert row["background"] is True


def test_an_unsynced_save_is_not_durable_and_has_no_storage_rate():
    run = save_run({"write": 500, "total": 500}, columns={"total": {"durable": False, "bytes": 5}})
    (row,) = run.table(analysis.by_rank).iter_rows(named=True)
    assert (row["written_ns"], row["durable_ns"], row["storage_bytes_per_s"]) == (500 * MS, None, None)


def test_storage_rate_covers_writing_and_syncing():
    columns = {"write": {"bytes": 10**9}, "total": {"durable": True, "bytes": 10**9}}
    run = save_run({"write": 250, "fsync": 750, "total": 1000}, columns=columns)
    (row,) = run.table(analysis.by_save).iter_rows(named=True)
    assert row["bytes_per_s"] == 10**9
    assert row["durable_ns"] == 1000 * MS


def test_files_of_one_save_are_grouped():
    # Two files after step 5 into one folder, 10 and 30; the training in between is not the save's.
    rows = [
        line("ckpt-5/optimizer.pt", "total", 0, 10, call="torch.save", bytes=3),
        line("ckpt-5/model.safetensors", "total", 50, 30, call="safetensors.save_file", bytes=4),
        line("ckpt-9/optimizer.pt", "total", 200, 10, call="torch.save", bytes=3, step=9),
    ]
    table = schema.CHECKPOINTS.conform(pl.DataFrame(rows, infer_schema_length=None))
    each = run_of(table, 1).table(analysis.by_save)
    assert each.select("save", "blocked_ns", "written_ns", "bytes").rows() == [
        ("ckpt-5 (step 5)", 40, 40, 7),
        ("ckpt-9 (step 9)", 10, 10, 3),
    ]


def test_windows_with_the_same_log_are_counted_once():
    table = schema.CHECKPOINTS.conform(save_log(write=5, total=5))
    run = drawn_traces.run(*(drawn_traces.trace("step 01\ncompute ab", window=w, checkpoints=table) for w in (0, 1)))
    assert run.table(analysis.by_rank)["blocked_ns"].to_list() == [5]


def test_next_step_extra_time_and_overhead_ratio():
    # Steps of 100 ms, the save after two of them blocks 50 ms, and the next step takes 130 ms.
    run = save_run({"write": 50, "total": 50}, steps_ms=(100, 150, 130, 100, 100))
    (row,) = run.table(analysis.by_save).iter_rows(named=True)
    assert (row["next_step_extra_ns"], row["interval_ns"], row["overhead_ratio"]) == (30 * MS, 200 * MS, 0.2)


@pytest.mark.parametrize(("first", "steps", "ratio"), [(0, 2.0, 0.2), (10_000, 2.0, 0.2), (10_002, None, None)])
def test_the_interval_of_a_single_save_is_the_training_before_it(first, steps, ratio):
    # A save after two steps of 100 ms, the first of the training or of what was resumed.
    trace = save_run({"write": 50, "total": 50}, steps_ms=(100, 150, 100)).trace(0)
    later = pl.col("step") + first
    saved = trace.checkpoints.with_columns(step=pl.lit(min(first, 10_000) + 2))
    run = drawn_traces.run(replace(trace, checkpoints=saved, metrics=trace.metrics.with_columns(later)))
    (row,) = run.table(analysis.by_save).iter_rows(named=True)
    assert (row["interval_steps"], row["overhead_ratio"]) == (steps, ratio)


@pytest.mark.parametrize(
    ("stages", "kind"),
    [
        ({"serialize": 60, "write": 10, "total": 100}, stalls.SERIALIZE),
        ({"stage": 60, "write": 10, "total": 100}, stalls.STAGING),
        ({"write": 60, "fsync": 10, "total": 100}, stalls.WRITE),
        ({"write": 20, "fsync": 30, "finish": 30, "total": 100}, stalls.FSYNC),
        ({"plan": 60, "write": 10, "total": 100}, stalls.PLAN),
        ({"write": 10, "wait": 90, "total": 100}, stalls.PLAN),
    ],
)
def test_the_dominant_class_has_most_of_the_save_time(stages, kind):
    assert dominant(save_run(stages))[0] == kind


def test_the_parts_of_a_save_sum_to_its_length():
    run = save_run({"plan": 5, "stage": 5, "write": 60, "fsync": 10, "finish": 5, "wait": 15, "total": 100})
    parts = run.table(stalls.parts)
    assert parts["dur_ns"].sum() == 100 * MS
    assert parts["ratio"].sum() == pytest.approx(1)


def test_waiting_counts_as_cpu_contention_up_to_the_run_delay_of_a_rank():
    stages = {"write": 10, "wait": 90, "total": 100}
    run = save_run(stages, columns={"total": {"run_delay_ns": 60 * MS}})
    kinds = dict(run.table(stalls.parts).select("kind", "dur_ns").rows())
    assert kinds == {stalls.CPU_CONTENTION: 60 * MS, stalls.PLAN: 30 * MS, stalls.WRITE: 10 * MS}


def test_the_critical_path_follows_the_slowest_rank_between_synchronizations():
    run = save_run({"plan": 5, "write": 20, "wait": 75, "total": 100}, {"plan": 5, "serialize": 90, "total": 100})
    assert dominant(run) == (stalls.SERIALIZE, 1, "serialize")


def test_a_rank_that_writes_a_third_more_bytes_is_no_straggler():
    # ZeRO-1: the first data-parallel rank writes 1.333 times what the others do.
    assert dominant(writer_run((4 * 10**8, 400), (3 * 10**8, 300)))[0] == stalls.WRITE
    assert dominant(writer_run((4 * 10**8, 400), (3 * 10**8, 200)))[0] == stalls.WRITE


def test_a_rank_that_is_slow_for_its_bytes_is_a_straggler_with_its_excess():
    run = writer_run((10**9, 50), (10**9, 450))
    assert dominant(run) == (stalls.STRAGGLER, 1, "write")
    (excess_ns,) = run.table(stalls.parts).filter(pl.col("kind") == stalls.STRAGGLER)["dur_ns"]
    assert excess_ns == 400 * MS


def test_a_slow_sync_of_every_file_is_no_straggler_though_one_rank_syncs_two():
    ranks = ({"write": 5, "fsync": 200, "total": 205}, {"write": 5, "fsync": 100, "wait": 100, "total": 205})
    runs = [
        save_run(stages, columns={"fsync": {"files": files}, "write": {"bytes": 10}}).trace(0)
        for stages, files in zip(ranks, (2, 1), strict=True)
    ]
    run = drawn_traces.run(runs[0], drawn_traces.trace("step 01\ncompute ab", rank=1, checkpoints=runs[1].checkpoints))
    assert dominant(run)[0] == stalls.FSYNC


def test_with_many_small_tensors_planning_counts_as_serializing():
    stages = {"plan": 50, "serialize": 30, "write": 5, "total": 100}
    columns = {"stage": {"bytes": 40}, "write": {"bytes": 100}}
    run = save_run(stages | {"stage": 5}, columns=columns)
    assert dominant(run)[0] == stalls.SERIALIZE
    (part,) = run.table(stalls.dominant).iter_rows(named=True)
    assert part["envelope_ratio"] == pytest.approx(0.6)


def test_steps_during_a_background_save_are_compared_with_the_other_steps():
    # 20 steps of 100 ms, then 13 of 150 ms fit into the save's 2 s, and begin within it.
    (row,) = rule_examples.background_save_run().table(analysis.background_slowdown).iter_rows(named=True)
    assert (row["baseline_step_ns"], row["steps"], row["lost_ns"]) == (100 * MS, 10, 500 * MS)


ONE_RANK = st.tuples(
    st.integers(0, 3),
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 40), st.integers(0, 5)), max_size=4),
)


@given(st.lists(ONE_RANK, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_steps_during_saves_equal_a_step_by_step_reference(ranks):
    """Each rank has a first step, the times of its steps, and saves: after which step, how long, blocking how long."""
    traces, expected = [], {}
    for rank, (first, took, saved) in enumerate(ranks):
        rows = [line(f"{rank}-{n}", "total", 0, blocked, step=after) for n, (after, _, blocked) in enumerate(saved)]
        rows += [line(row["checkpoint"], "complete", 0, long, step=after, blocking=False)
                 for row, (after, long, _) in zip(rows, saved, strict=True)]  # fmt: skip
        log = schema.CHECKPOINTS.conform(pl.DataFrame(rows)) if rows else schema.CHECKPOINTS.empty()
        times = metrics("step_time_ns", *took).with_columns(pl.col("step") + first)
        traces.append(drawn_traces.trace("step 01\ncompute ab", rank=rank, checkpoints=log, metrics=times))
        concurrent, touched = {}, {after - 1 for after, _, _ in saved}
        for n, (after, long, blocked) in enumerate(saved):
            at_ns, concurrent[n] = 0, []
            for step, ns in enumerate(took, first):
                if step >= after and at_ns < max(long, blocked) - blocked:
                    concurrent[n].append(ns)
                    touched.add(step)
                at_ns += ns if step >= after else 0
        plain = [ns for step, ns in enumerate(took, first) if step not in touched]
        for n, found in concurrent.items():
            if found and plain:
                median = statistics.median(plain)
                expected[f"{rank}-{n}"] = (len(found), round(median), round(sum(found) - len(found) * median))
    slowdown = drawn_traces.run(*traces).table(analysis.background_slowdown)
    assert {save: row for save, *row in slowdown.select("save", "steps", "baseline_step_ns", "lost_ns").rows()} == {
        save: list(row) for save, row in expected.items()
    }


def test_waited_ratio_is_time_neither_running_nor_runnable():
    (row,) = (
        rule_examples.background_save_run(cpu_ns=900, run_delay_ns=500)
        .table(analysis.background_slowdown)
        .iter_rows(named=True)
    )
    assert (row["waited_ratio"], row["delayed_ratio"]) == (0.3, 0.25)


def test_read_amplification_counts_each_rank_that_reads_a_file():
    (row,) = (
        rule_examples.load_run(8, 8, whole_bytes=0, call="torch.load").table(save_stages.restores).iter_rows(named=True)
    )
    assert (row["unique_bytes"], row["amplification"]) == (8, 2.0)


def test_without_metadata_unique_bytes_are_null():
    (row,) = rule_examples.load_run(8, 8, whole_bytes=0).table(save_stages.restores).iter_rows(named=True)
    assert row["amplification"] is None


def test_a_public_trace_shows_copies_collectives_and_idle_time_in_a_save():
    # time     0123456789
    # save     .xxxxxxxx.
    # copy     .mm.......
    # comm     ......yy..
    found = drawn_traces.trace(
        """
        step     0000000000
        compute  a.........
        copy     .mm.......
        comm     ......yy..
        """,
        ops=rule_examples.ops(("dcp.save", "annotation", 1, 9)),
        columns={"m": {"name": "Memcpy DtoH (Device -> Pageable)", "bytes": 64}},
    )
    (row,) = save_stages.save_spans(found).iter_rows(named=True)
    names = ("dur_ns", "copied_ns", "pageable_bytes", "collective_ns", "idle_ns", "write_ns", "fsync_ns")
    assert [row[name] for name in names] == [8, 2, 64, 2, 4, None, None]


def test_traces_with_stacks_show_write_and_fsync_time():
    stack = rule_examples.ops(
        ("torch/serialization.py(942): save", "python", 1, 9),
        ("<built-in function fsync>", "python", 4, 7),
        ("<built-in method write of _io.BufferedWriter object>", "python", 2, 4),
    )
    (row,) = save_stages.save_spans(drawn_traces.trace("step 0000000000\ncompute aaaaaaaaaa", ops=stack)).iter_rows(
        named=True
    )
    assert (row["write_ns"], row["fsync_ns"]) == (2, 3)

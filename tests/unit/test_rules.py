"""What every rule must hold to, and what each one says of timelines drawn by hand."""

import dataclasses

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests import drawn, judged
from tracekit import units
from tracekit.rule import Rule, Severity
from tracekit.rules import RULES
from tracekit.rules.checkpoint import BlockingCheckpoint
from tracekit.rules.comm import ExposedCommunication
from tracekit.rules.memory import AllocatorChurn
from tracekit.rules.stream import GiveWay

MS = judged.MS
SECTIONS = ("What it does:", "Why it costs:", "How it is measured:", "How to fix:", "Blind spots:")
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)


# Every rule -----------------------------------------------------------------------------------------------------------


@every_rule
def test_a_rule_documents_itself(rule: type[Rule]) -> None:
    assert rule.__doc__
    first, *_ = rule.__doc__.splitlines()
    assert first.endswith(".")
    at = [rule.__doc__.find(section) for section in SECTIONS]
    assert -1 not in at
    assert at == sorted(at)


@every_rule
def test_a_rule_has_typed_thresholds_with_defaults(rule: type[Rule]) -> None:
    for field in dataclasses.fields(rule):
        assert isinstance(getattr(rule(), field.name), int | float | bool | str)


def test_codes_and_names_are_unique() -> None:
    assert len({rule.code for rule in RULES}) == len({rule.name() for rule in RULES}) == len(RULES)


@every_rule
def test_a_rule_fires_on_the_trouble_and_is_silent_without_it(rule: type[Rule]) -> None:
    case = judged.CASES[rule.code]
    findings = list(rule().check(case.fires()))
    assert [found.code for found in findings] == [rule.code]
    assert case.told in findings[0].message
    assert list(rule().check(case.silent())) == []


@every_rule
def test_a_finding_is_whole(rule: type[Rule]) -> None:
    for found in rule().check(judged.CASES[rule.code].fires()):
        assert found.fix
        assert any(character.isdigit() for character in found.message)
        assert 0 <= found.impact <= 1
        assert 0 < found.confidence <= 1
        assert found.cost_ns >= 0 <= found.cost_bytes
        assert found.evidence.height
        if {"start_ns", "dur_ns"} & set(found.evidence.columns):
            assert {"window", "rank", "start_ns", "dur_ns"} <= set(found.evidence.columns)


@every_rule
def test_a_rule_says_nothing_of_a_run_without_work(rule: type[Rule]) -> None:
    run = drawn.run(tracekit.Trace(rank=0, window=0, path="empty"))
    assert [found.severity for found in rule().check(run) if rule.code != "DATA001"] == []


# Exposed communication -----------------------------------------------------------------------------------------------

cells = st.text("a.", min_size=4, max_size=24)


@given(compute=cells, communication=st.text("x.", min_size=24, max_size=24))
@settings(max_examples=100, deadline=None)
def test_exposed_communication_is_what_one_counts_moment_by_moment(compute: str, communication: str) -> None:
    compute = compute.ljust(24, ".")
    picture = f"step {'0' * 24}\ncompute {compute}\ncomm {communication}"
    exposed = sum(c == "." and x == "x" for c, x in zip(compute, communication, strict=True))
    found = list(ExposedCommunication(max_exposed_ratio=0.25).check(drawn.run(drawn.trace(picture, scale_ns=MS))))
    assert bool(found) == (exposed / 24 > 0.25)
    if found:
        assert found[0].cost_ns == exposed * MS
        assert found[0].impact == pytest.approx(exposed / 24)


def test_a_step_at_the_threshold_is_within_it() -> None:
    run = judged.CASES["COMM001"].fires()
    assert list(ExposedCommunication(max_exposed_ratio=0.3).check(run)) == []
    assert [found.severity for found in ExposedCommunication(max_exposed_ratio=0.29).check(run)] == [Severity.WARNING]
    strict = ExposedCommunication(max_exposed_ratio=0.1, error_exposed_ratio=0.15)
    assert [found.severity for found in strict.check(run)] == [Severity.ERROR]


def test_collectives_of_a_save_are_not_exposed_communication_of_the_step() -> None:
    picture = """
        step     0000000000
        compute  aaaa......
        comm     ....xxxyyy
    """
    of_save = {"y": {"phase": "checkpoint"}}
    found = list(ExposedCommunication().check(drawn.run(drawn.trace(picture, scale_ns=MS, columns=of_save))))
    assert found[0].cost_ns == 3 * MS
    assert found[0].evidence["name"].to_list() == ["x"]


@pytest.mark.parametrize(
    ("strategy", "on_device", "wanted"),
    [
        ("fsdp2", True, "set_modules_to_forward_prefetch"),
        ("fsdp2", False, "unshard(async_op=True)"),
        ("fsdp1", True, "backward_prefetch=BackwardPrefetch.BACKWARD_PRE"),
        ("ddp", True, "bucket_cap_mb"),
        ("yafsdp", True, "buffers=3"),
        (None, True, "async_op=True"),
    ],
)
def test_the_fix_names_what_the_strategy_has(strategy: str | None, *, on_device: bool, wanted: str) -> None:
    trace = drawn.trace("step 0000\ncompute a...\ncomm .xxx", on_device=on_device)
    manifest = {"strategy": strategy} if strategy else {}
    (found,) = ExposedCommunication().check(drawn.run(trace, **manifest))
    assert wanted in found.fix


def test_the_engine_is_told_by_its_spans_where_no_manifest_tells() -> None:
    ops = pl.DataFrame(
        {"id": [0], "lane": [3], "name": ["FullyShardedDataParallel._pre_forward"], "kind": "annotation"}
    )
    run = drawn.run(drawn.trace("step 0000\ncompute a...\ncomm .xxx", ops=ops))
    (found,) = ExposedCommunication().check(run)
    assert "BackwardPrefetch" in found.fix


# Give-way ------------------------------------------------------------------------------------------------------------


def test_give_way_tells_the_delay_and_what_compute_lost_of_it() -> None:
    run = judged.give_way("""
        step     0000000000000000000000000000
        compute  ....aaaaaaaaaaaa.bbbbbb.....
        comm     pp..pppppppp..xxxx..........
    """)
    (found,) = GiveWay().check(run)
    # p takes 8 instead of 2 ms, so x starts 6 ms late; compute idles for 1 ms while x runs.
    assert "4.0 times" in found.message
    assert "6 ms late" in found.message
    assert found.cost_ns == 1 * MS
    assert found.impact == pytest.approx(1 / 28)


def test_several_preparations_of_one_collective_lose_its_idle_time_once() -> None:
    run = judged.give_way("""
        step     00000000000000000000000000000000
        compute  ......aaaaaaaaaaaaaa...bbbbbb...
        comm     p.qq..ppppppqqqqqqqq.xxx........
    """)
    (found,) = GiveWay().check(run)
    assert "9 ms late" not in found.message  # 5 of p and 6 of q
    assert "11 ms late" in found.message
    assert found.cost_ns == 2 * MS  # x runs for 3 ms, of which b covers the last


SILENT_PICTURES = {
    "no compute beside it": """
        step     0000000000000000000000000000
        compute  aaaa........bb..............
        comm     ....pp.pppppp..xxxx.........
    """,
    "no collective follows": """
        step     0000000000000000000000000000
        compute  ....aaaaaaaa....bbbb........
        comm     pp..pppppp..................
        comm1    ............................
    """,
    "a collective runs meanwhile": """
        step     0000000000000000000000000000
        compute  ....aaaaaaaa....bbbb........
        comm     pp..pppppp..xxxx............
        comm1    ....yyyyyyyy................
    """,
    "compute never waits": """
        step     0000000000000000000000000000
        compute  ....aaaaaaaaaaaaaaaa........
        comm     pp..pppppp..xxxx............
    """,
    "never seen alone": """
        step     0000000000000000000000000000
        compute  aaaaaaaaaaaa....bbbb........
        comm     pp..pppppp..xxxx............
    """,
}


@pytest.mark.parametrize("picture", SILENT_PICTURES.values(), ids=SILENT_PICTURES)
def test_give_way_needs_inflation_a_gap_and_idle_compute(picture: str) -> None:
    assert list(GiveWay().check(judged.give_way(picture))) == []


def test_copies_are_told_apart_by_their_bytes() -> None:
    picture = """
        step     0000000000000000000000000000
        compute  ....aaaaaaaa....bbbb........
        comm     pp..pppppp..xxxx............
    """
    trace = drawn.trace(picture, scale_ns=MS, columns={"p": {"kind": "memcpy"}})
    sizes = pl.when(pl.col("start_ns") == 0).then(1 << 20).otherwise(3 << 20).cast(pl.Int64)
    activities = trace.activities.with_columns(pl.when(pl.col("name") == "p").then(sizes).alias("bytes"))
    assert list(GiveWay().check(drawn.run(trace))) != []
    assert list(GiveWay().check(drawn.run(dataclasses.replace(trace, activities=activities)))) == []


def test_a_cpu_run_is_not_judged_and_says_so() -> None:
    run = judged.give_way("step 0000\ncompute .aa.\ncomm pp.x", on_device=False)
    assert "CPU" in str(GiveWay().blind_spot(run))
    assert list(GiveWay().check(run)) == []


tracks = st.text("aa.", min_size=30, max_size=30)


@given(compute=tracks, lane=st.text("pqx..", min_size=30, max_size=30))
@settings(max_examples=150, deadline=None)
def test_give_way_never_claims_more_than_compute_idled_while_collectives_ran(compute: str, lane: str) -> None:
    run = judged.give_way(f"step {'0' * 30}\ncompute {compute}\ncomm {lane}")
    # What p and q compute counts as compute too.
    busy = [c == "a" or x in "pq" for c, x in zip(compute, lane, strict=True)]
    idle = sum(x == "x" and not b for x, b in zip(lane, busy, strict=True))
    for found in GiveWay(min_inflation=1.0, min_cost_ratio=0.0).check(run):
        assert found.cost_ns <= idle * MS
        assert 0 <= found.impact <= 1


# Allocator churn -----------------------------------------------------------------------------------------------------


def test_a_device_call_costs_what_the_device_idled_during_it() -> None:
    # In steps 3 and 4 the device idles from 27 to 29 and from 35 to 37 ms. Steps 0 and 1 are warm-up.
    calls = (("cudaMalloc", 2, 16, 3), ("cudaMalloc", 3, 24, 6), ("cudaMalloc", 4, 32, 6))
    (found,) = AllocatorChurn().check(judged.with_calls(*calls))
    assert "1 device malloc" in found.message
    assert "hold up the host for 5 ms" in found.message
    assert found.cost_ns == 4 * MS // 3
    assert found.severity is Severity.WARNING


def test_calls_that_the_device_does_not_wait_for_are_information() -> None:
    (found,) = AllocatorChurn().check(judged.with_calls(("cudaHostAlloc", 3, 24, 2), ("cudaHostAlloc", 4, 32, 2)))
    assert found.severity is Severity.INFO
    assert found.impact == 0


def test_calls_of_the_first_profiled_step_are_warm_up() -> None:
    assert list(AllocatorChurn(warm_up_steps=0).check(judged.with_calls(("cudaMalloc", 0, 2, 3)))) == []
    assert list(AllocatorChurn(warm_up_steps=0).check(judged.with_calls(("cudaMalloc", 1, 10, 3)))) != []
    assert list(AllocatorChurn(warm_up_steps=2).check(judged.with_calls(("cudaMalloc", 1, 10, 3)))) == []


def test_retries_after_warm_up_are_counted_by_the_metrics_log() -> None:
    counted = [0, 3, 3, 3, 5, 5, 6]
    rows = [{"step": n, "name": "num_alloc_retries", "value": float(value)} for n, value in enumerate(counted)]
    run = drawn.run(drawn.trace("compute aaa", metrics=pl.DataFrame(rows)))
    (found,) = AllocatorChurn().check(run)
    assert "retried 3 times" in found.message  # the 3 of step 1 are warm-up
    assert found.steps == (4, 6)


def test_unit_buffers_are_those_of_spans_of_units_that_come_every_step() -> None:
    def allocated(span: str | None, step: int, size: int) -> dict[str, object]:
        return {"at_ns": step * MS, "delta_bytes": size, "step": step, "unit": "layers.0", "span": span}

    mib = 1 << 20
    kept = [allocated("all_gather", step, 2 * mib) for step in range(5)]
    others = [allocated(None, 1, 8 * mib), allocated("all_gather", 2, mib - 1), allocated("all_gather", 3, -2 * mib)]
    rows = pl.DataFrame(kept + others)
    (found,) = AllocatorChurn().check(drawn.run(drawn.trace(judged.STEPS, scale_ns=MS, allocations=rows)))
    assert found.severity is Severity.INFO
    assert (found.impact, found.cost_bytes) == (0, 2 * mib)
    assert found.evidence["bytes"].to_list() == [2 * mib] * 5


# Blocking checkpoints ------------------------------------------------------------------------------------------------


def test_a_save_is_blamed_on_the_stage_of_the_rank_that_others_wait_for() -> None:
    run = judged.saved(
        (0, "serialize", 30), (0, "wait", 170), (0, "total", 200), (1, "write", 150), (1, "wait", 50), (1, "total", 200)
    )
    (found,) = BlockingCheckpoint().check(run)
    assert "(rank 1), the stage write takes 75.0%" in found.message
    assert "others wait 170 ms" in found.message
    assert "FileSystemWriter" in found.fix
    assert found.ranks == (0, 1)
    assert found.evidence.row(0, named=True)["rank"] == 1


@pytest.mark.parametrize(("step_ms", "severity"), [(100, Severity.WARNING), (500, Severity.INFO)])
def test_the_overhead_is_the_share_of_the_time_between_saves(step_ms: int, severity: Severity) -> None:
    (found,) = BlockingCheckpoint().check(judged.saved((0, "write", 200), (0, "total", 200), step_ms=step_ms))
    assert found.impact == pytest.approx(200 / (10 * step_ms + 200))
    assert found.severity is severity
    assert found.cost_ns == 200 * MS * 2 // 20


def test_a_save_seen_in_a_foreign_trace_is_information() -> None:
    rows = [("Trainer.save_checkpoint", 0, 9), ("torch/serialization.py(800): save", 1, 7), ("aten::copy_", 2, 1)]
    ops = [
        {"id": n, "lane": 0, "name": name, "kind": "python", "start_ns": at * MS, "dur_ns": dur * MS}
        for n, (name, at, dur) in enumerate(rows)
    ]
    run = drawn.run(drawn.trace("compute aaa", ops=pl.DataFrame(ops)))
    (found,) = BlockingCheckpoint().check(run)
    assert (found.severity, found.impact) == (Severity.INFO, 0)
    assert units.duration(9 * MS) in found.message
    assert found.evidence.height == 1


def test_a_foreign_trace_without_a_save_is_not_called_clean() -> None:
    assert "no checkpoint log" in str(BlockingCheckpoint().blind_spot(drawn.run(drawn.trace("compute aaa"))))
    assert BlockingCheckpoint().blind_spot(drawn.run(drawn.trace("compute aaa"), strategy="ddp")) is None

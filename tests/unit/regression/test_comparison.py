"""Runs are compared as jobs, by their worst ranks, if speed can be compared; noise exceeds no limit."""

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.support import drawn_traces
from tests.support.rule_examples import ops
from tests.support.wording import Wording
from tracekit.errors import ConfigError, NotComparableError
from tracekit.ingest.loader import load
from tracekit.model.run import Run
from tracekit.regression import baseline, gate
from tracekit.regression.comparison import RunSamples, compare
from tracekit.regression.metrics import metric_of
from tracekit.regression.samples import SAMPLE_COLUMNS, job_samples
from tracekit.regression.significance import compare_recordings
from tracekit.regression.thresholds import Change, Verdict, parse_limit
from tracekit.report import baseline_json, step_verdict
from tracekit.report import comparison as report
from tracekit.report import json as report_json
from tracekit.report.render import markdown as render_markdown
from tracekit.report.render import text as render_text
from tracekit.rules import engine

MANIFEST = {"model": {"name": "tiny", "layers": 2}, "world_size": 2, "device": "cpu", "strategy": "fsdp2"}


def side(name: str = "a", *, step_ns: float = 100.0, ranks: tuple[int, ...] = (0, 1), **manifest: object) -> RunSamples:
    """Return a side whose rank R takes R ns more than `step_ns` in each of eight steps."""
    rows = [(0, rank, step, "step_time_ns", step_ns + rank) for rank in ranks for step in range(8)]
    table = pl.DataFrame(rows, schema=SAMPLE_COLUMNS, orient="row")
    return RunSamples(name, MANIFEST | manifest, table)


def test_a_job_has_the_step_time_of_its_slowest_rank_and_the_mean_overlap() -> None:
    table = pl.DataFrame(
        {
            "window": 0,
            "rank": [0, 1, 0, 1, 0, 1],
            "step": [3, 3, 4, 4, 3, 3],
            "metric": ["step_time_ns"] * 4 + ["overlap_ratio"] * 2,
            "value": [10.0, 12.0, 30.0, 20.0, 0.2, 0.4],
        }
    )
    samples = job_samples(table)
    assert samples["step_time_ns"].tolist() == [12.0, 30.0]
    assert samples["overlap_ratio"].tolist() == pytest.approx([0.3])


def test_steps_of_two_windows_with_the_same_numbers_are_kept_apart(tmp_path: Path) -> None:
    drawn = [drawn_traces.trace(picture("aaaaaaaaa.", ".xxx......"), window=number) for number in (0, 1)]
    log = pl.DataFrame({"step": [0], "name": ["tokens_per_second"], "value": [5.0]})
    # The log of a rank is read with each of its windows.
    traces = [trace.replace(metrics=log.cast(trace.metrics.schema)) for trace in drawn]
    one, two = (drawn_traces.run(*traces[:count], path="runs/a", **MANIFEST) for count in (1, 2))
    single, both = (job_samples(RunSamples.of(run).samples) for run in (one, two))
    assert len(both["step_time_ns"]) == 2 * len(single["step_time_ns"])
    assert len(both["tokens_per_second"]) == len(single["tokens_per_second"]) == 1
    path = tmp_path / "report.json"
    path.write_text(report_json.render(engine.check(two), two), encoding="utf-8")
    assert job_samples(report_json.read(path).samples)["step_time_ns"].tolist() == both["step_time_ns"].tolist()


def test_runs_are_compared_by_every_metric_that_both_have() -> None:
    # Eight steps of 10 ns; in the candidate, communication that was hidden is exposed.
    before = drawn_traces.run(drawn_traces.trace(picture("aaaaaaaaa.", ".xxx......")), path="runs/before", **MANIFEST)
    after = drawn_traces.run(drawn_traces.trace(picture("aaaaaa....", "......xxx.")), path="runs/after", **MANIFEST)
    comparison = compare(RunSamples.of(before), RunSamples.of(after))
    verdicts = {change.metric: (change.verdict.value, change.change) for change in comparison.changes}
    assert (comparison.reference, comparison.candidate) == ("before", "after")
    assert verdicts["step_time_ns"] == ("inconclusive", 0.0)
    assert verdicts["communication_ns"] == ("inconclusive", 0.0)
    assert verdicts["overlap_ratio"] == ("worse", -1.0)
    assert verdicts["exposed_communication_ns"][0] == "worse"
    assert verdicts["exposed_communication_ratio"] == ("worse", pytest.approx(0.3))
    assert verdicts["compute_ns"] == ("better", pytest.approx(6 / 9 - 1))


def picture(compute: str, communication: str) -> str:
    """Return eight steps that all look the same."""
    steps = "".join(str(step) * 10 for step in range(8))
    return f"step {steps}\ncompute {compute * 8}\ncomm {communication * 8}"


@pytest.mark.parametrize(
    ("different", "field"),
    [
        ({"world_size": 4}, "world_size differs: 2 in a, 4 in b"),
        ({"device": "cuda"}, "device differs: cpu in a, cuda in b"),
        ({"model": {"name": "tiny", "layers": 3}}, "model.layers differs: 2 in a, 3 in b"),
    ],
)
def test_a_different_field_that_must_agree_is_named(different: dict[str, object], field: str, wording: Wording) -> None:
    with pytest.raises(NotComparableError) as caught:
        compare(side("a"), side("b", **different))
    wording(caught.value)
    assert field in compare(side("a"), side("b", **different), allow_different=True).notes


def test_samples_of_other_numbers_of_ranks_state_throughput_and_efficiency() -> None:
    def with_tokens(name: str, per_second: float, **manifest: object) -> RunSamples:
        table = side(name, **manifest).samples
        rates = table.with_columns(metric=pl.lit("tokens_per_second"), value=pl.lit(per_second))
        return dataclasses.replace(side(name, **manifest), samples=pl.concat([table, rates]))

    with pytest.raises(NotComparableError) as caught:
        compare(with_tokens("a", 100.0), with_tokens("b", 165.0, world_size=4))
    assert "1.65 times" in str(caught.value)
    assert "82.5%" in str(caught.value)
    with pytest.raises(NotComparableError) as without_tokens:
        compare(side("a"), side("b", world_size=4))
    assert "%" not in str(without_tokens.value)


def test_the_strategy_may_differ() -> None:
    assert compare(side("a"), side("b", strategy="yafsdp")).notes == ()


def test_a_different_field_that_may_differ_adds_a_note(wording: Wording) -> None:
    comparison = compare(side("a", arguments={"batch": 4}), side("b", arguments={"batch": 8, "seed": 1}))
    wording(*comparison.notes)


def test_groups_of_fields_that_one_run_does_not_state_are_one_note(wording: Wording) -> None:
    comparison = compare(side("a", arguments={"batch": 4, "seed": 1}, mesh={"pp": 2}), side("b"))
    wording(*comparison.notes)


def test_a_run_without_a_manifest_is_compared_with_a_note(wording: Wording) -> None:
    a = side("a")
    comparison = compare(a, RunSamples("b", {}, a.samples))
    wording(*comparison.notes)


def test_only_common_ranks_are_compared() -> None:
    comparison = compare(side("a", ranks=(0, 1, 2, 5)), side("b", ranks=(1, 2)))
    assert comparison.changes[0].reference == pytest.approx(102.0)
    assert comparison.notes == comparison.rank_notes == ("a has ranks 0–2, 5, b 1–2: only ranks 1–2 are compared",)


def test_without_a_common_rank_there_is_no_comparison(wording: Wording) -> None:
    with wording.raises(NotComparableError):
        compare(side("a", ranks=(0,)), side("b", ranks=(1,)))
    assert compare(side("a", ranks=(0,)), side("b", ranks=(1,)), allow_different=True).changes


def test_without_a_common_metric_there_is_no_comparison(wording: Wording) -> None:
    a = side("a")
    with wording.raises(NotComparableError):
        compare(a, RunSamples("b", MANIFEST, a.samples.clear()), allow_different=True)


def change(metric: str, before: float, after: float, *, count: int = 8, noise: float = 0.0) -> Change:
    wobble = 1 + noise * np.linspace(-1, 1, count)
    return compare_recordings(metric_of(metric), [before * wobble], [after * wobble[::-1]])


@pytest.mark.parametrize(
    ("text", "found", "crossed"),
    [
        ("step_time>3%", change("step_time_ns", 100, 120), True),
        ("step_time>30%", change("step_time_ns", 100, 120), False),
        ("step_time>3%", change("step_time_ns", 100, 90), False),
        ("step_time_ns > 3 %", change("step_time_ns", 100, 120), True),
        ("step_time>2ms", change("step_time_ns", 100e6, 120e6), True),
        ("step_time>25ms", change("step_time_ns", 100e6, 120e6), False),
        ("tokens_per_second>3%", change("tokens_per_second", 100, 80), True),
        ("tokens_per_second>3%", change("tokens_per_second", 100, 110), False),
        ("overlap_ratio>5%", change("overlap_ratio", 0.30, 0.20), True),
        ("overlap_ratio>5%", change("overlap_ratio", 0.30, 0.27), False),
        ("allocated>1MiB", change("allocated_bytes", 2**30, 2**30 + 2**21), True),
        ("allocations>10", change("allocations", 100, 109), False),
        ("allocations>5%", change("allocations", 0, 1), True),
    ],
)
def test_a_limit_is_exceeded_by_a_larger_regression(text: str, found: Change, crossed: bool) -> None:
    assert parse_limit(text).is_exceeded(found) is crossed


def test_noise_exceeds_no_limit() -> None:
    noisy = change("step_time_ns", 100, 106, noise=0.5)
    assert parse_limit("step_time>3%").is_past(noisy)
    assert not parse_limit("step_time>3%").is_exceeded(noisy)


def test_too_few_steps_exceed_no_limit() -> None:
    assert not parse_limit("step_time>3%").is_exceeded(change("step_time_ns", 100, 200, count=2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step_time", "expected METRIC>NUMBER"),
        ("step_time<3%", "expected METRIC>NUMBER"),
        ("step_time>-3%", "expected METRIC>NUMBER"),
        ("step_tim>3%", "step_tim is not a metric: did you mean step_time?"),
        ("step_time>3", "a bare number is ambiguous or unknown for step_time_ns: use %, ns"),
        ("step_time>3MiB", "the unit MiB is ambiguous or unknown for step_time_ns"),
        ("overlap_ratio>0.1", "a bare number is ambiguous or unknown for overlap_ratio: use %"),
        ("allocations>3ms", "the unit ms is ambiguous or unknown for allocations: use %, no unit"),
    ],
)
def test_an_invalid_limit_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_limit(text)
    assert expected in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("is_simulated", "notes"), [(False, 0), (True, 1)])
def test_a_run_without_the_simulated_flag_counts_as_recorded(is_simulated: bool, notes: int) -> None:
    comparison = compare(side("a"), side("b", simulated=is_simulated))
    assert len(comparison.notes) == notes
    assert all(note == "simulated differs: False in a, True in b" for note in comparison.notes)


def of_header(name: str, shapes: str | None = None, **header: object) -> Run:
    """Return a run of eight steps with a header, each with one product of matrices of these shapes."""
    products = ops(*(("aten::mm", "cpu_op", 10 * step, 1) for step in range(8) if shapes))
    table = products.with_columns(shapes=pl.lit(shapes, pl.String), step=pl.int_range(products.height, dtype=pl.Int64))
    trace = drawn_traces.trace(picture("aaaaaaaaa.", ".xxx......"), ops=table)
    return drawn_traces.run(dataclasses.replace(trace, header=header), path=f"runs/{name}", **MANIFEST)


def device(name: str) -> dict[str, object]:
    return {"deviceProperties": [{"name": name}], "cuda_runtime_version": 12060}


def test_devices_and_versions_of_the_headers_that_differ_are_stated_first(wording: Wording) -> None:
    sides = [RunSamples.of(of_header(name, **device(name))) for name in ("A100", "V100")]
    sides[1] = dataclasses.replace(sides[1], environment=sides[1].environment | {"cuda_runtime_version": "12080"})
    comparison = compare(*sides)
    wording(*comparison.differences)
    assert comparison.notes[:2] == comparison.differences
    shown = render_text.render(report.document(comparison), width=100)
    assert shown.index("device differs") < shown.index("step time")
    page = render_markdown.render(report.document(comparison))
    assert shown.count("device differs") == page.count("device differs") == 1
    assert page.index("V100") < page.index("device differs: A100 in A100") < page.index("|  | A100 | V100 | change |")


def test_equal_or_unstated_devices_are_no_difference() -> None:
    same = [RunSamples.of(of_header(name, **device("A100"))) for name in ("a", "b")]
    assert compare(*same).differences == ()
    assert compare(same[0], RunSamples.of(of_header("c"))).differences == ()


SMALL, LARGE = "[[8, 8], [8, 8]]", "[[8, 64], [64, 8]]"


@pytest.mark.parametrize(("shapes", "verdict"), [(SMALL, "inconclusive"), (LARGE, "same")])
def test_fewer_operations_are_not_better_if_the_work_differs(shapes: str, verdict: str) -> None:
    comparison = compare(RunSamples.of(of_header("before", LARGE)), RunSamples.of(of_header("after", shapes)))
    assert {change.metric: change.verdict.value for change in comparison.changes}["flops"] == verdict
    assert [text.startswith("The work differs: 0%") for text in comparison.differences] == [True] * (shapes == SMALL)


def test_other_work_that_takes_less_or_as_much_time_is_no_good_sign() -> None:
    same, other = (
        compare(RunSamples.of(of_header("before", LARGE)), RunSamples.of(of_header("after", shapes)))
        for shapes in (LARGE, SMALL)
    )
    assert (same.is_same_work, other.is_same_work) == (True, False)
    assert step_verdict.headline(other).startswith("The runs do different work")
    assert "different work" not in step_verdict.headline(same)
    colours = {verdict: step_verdict.colour_verdict(other, verdict) for verdict in Verdict}
    assert [verdict for verdict in Verdict if colours[verdict] is verdict] == [Verdict.WORSE, Verdict.INCONCLUSIVE]
    assert all(step_verdict.colour_verdict(same, verdict) is verdict for verdict in Verdict)


def test_fewer_operations_on_the_same_shapes_are_better() -> None:
    # Without recomputation, a step has fewer of the same products.
    twice = of_header("before", LARGE)
    (trace,) = twice.traces()
    double = trace.replace(ops=pl.concat([trace.ops, trace.ops]))
    before = drawn_traces.run(double, path="runs/before", **MANIFEST)
    comparison = compare(RunSamples.of(before), RunSamples.of(of_header("after", LARGE)))
    assert {change.metric: change.verdict.value for change in comparison.changes}["flops"] == "better"
    assert comparison.differences == ()


def test_saved_reports_and_baselines_state_that_the_work_differs(tmp_path: Path) -> None:
    before, after = of_header("before", LARGE), of_header("after", SMALL)
    documents = {"report.json": report_json.render(engine.check(before), before)}
    documents["baseline.json"] = baseline_json.render(baseline.of_reports([(engine.check(before), before)]))
    for name, text in documents.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    sides = [report_json.read(tmp_path / "report.json")]
    sides.append(RunSamples.of_baseline(baseline_json.read(tmp_path / "baseline.json")))
    for saved in sides:
        assert saved.work.equals(RunSamples.of(before).work)
        assert compare(saved, RunSamples.of(after)).differences[0].startswith("The work differs: 0%")
        assert compare(saved, RunSamples.of(before)).differences == ()
    checked = gate.judge(engine.check(after), None, baseline=baseline_json.read(tmp_path / "baseline.json"))
    assert checked.comparison is not None
    assert checked.comparison.notes[0].startswith("The work differs: 0%")


def test_operators_decide_where_shapes_were_not_recorded() -> None:
    def side_of(*names: str) -> RunSamples:
        called = ops(*((name, "cpu_op", 10 * step, 1) for step in range(8) for name in names))
        table = called.with_columns(step=pl.int_range(called.height, dtype=pl.Int64) // len(names))
        trace = drawn_traces.trace(picture("aaaaaaaaa.", ".xxx......"), ops=table)
        return RunSamples.of(drawn_traces.run(trace, path=f"runs/{names[-1]}", **MANIFEST))

    attention = side_of("aten::mm", "aten::bmm", "aten::softmax")
    for other, differs in (
        (side_of("aten::mm", "aten::bmm", "aten::softmax", "aten::copy_"), False),
        (side_of("aten::convolution", "aten::batch_norm", "aten::mm"), True),
    ):
        texts = compare(attention, other).differences
        assert [text.startswith("The work differs: 33%") for text in texts] == [True] * differs


TRACES = Path(__file__).parents[4] / "shared" / "traces"


def test_real_runs_on_other_devices_are_compared_with_the_difference_first() -> None:
    folders = [TRACES / name for name in ("tracelens_mi300_resnet_ddp", "kineto_resnet_v100_memory")]
    if not all(folder.is_dir() for folder in folders):
        pytest.skip("the shared traces are not installed")
    comparison = compare(*(RunSamples.of(load(folder)) for folder in folders))
    assert comparison.differences[0].startswith("device differs: AMD Instinct MI300X in")
    assert comparison.differences[1].startswith("The work differs: 0%")
    assert {change.metric: change.verdict.value for change in comparison.changes}["flops"] == "inconclusive"


def with_clock(name: str, clocks_mhz: tuple[float, float], *, idle: bool = False) -> RunSamples:
    """Return two ranks of eight steps whose GPUs have these clocks, at idle times half of them."""
    traces = []
    for rank, clock in enumerate(clocks_mhz):
        reading = {"sm_clock_mhz": clock / 2 if idle else clock, "max_sm_clock_mhz": clock, "throttle_reasons": idle}
        rows = [(step, key, float(value)) for step in range(8) for key, value in reading.items()]
        lanes = [("step", "01234567"), ("compute", "abcdabcd")]
        drawn = drawn_traces.trace("\n".join(f"{lane} {cells}" for lane, cells in lanes), rank=rank)
        traces.append(drawn.replace(metrics=pl.DataFrame(rows, schema=drawn.metrics.schema, orient="row")))
    return RunSamples.of(drawn_traces.run(*traces, path=f"runs/{name}", **MANIFEST))


def test_the_clock_of_the_slowest_gpu_is_compared(wording: Wording) -> None:
    compared = compare(with_clock("a", (1755, 1750)), with_clock("b", (1750, 1404)))
    change = next(change for change in compared.changes if change.metric == "sm_clock_mhz")
    assert (change.reference, change.candidate) == pytest.approx((1750, 1404))
    assert change.verdict is Verdict.WORSE
    (note,) = [note for note in compared.notes if "SM clock" in note]
    wording(note)


@pytest.mark.parametrize("after", [with_clock("b", (1750, 1745)), with_clock("b", (1755, 1750), idle=True)])
def test_clocks_that_differ_little_or_of_idle_gpus_are_not_stated(after: RunSamples) -> None:
    compared = compare(with_clock("a", (1755, 1750)), after)
    change = next(change for change in compared.changes if change.metric == "sm_clock_mhz")
    assert change.verdict in (Verdict.SAME, Verdict.INCONCLUSIVE)
    assert not [note for note in compared.notes if "SM clock" in note]

"""RANK001 and STEP003 by the counters of GPUs: a lower clock is a hardware fault, an equal one is not."""

from collections.abc import Mapping

import polars as pl

from tests.support import drawn_hosts, drawn_traces
from tests.support.wording import Wording
from tracekit.conventions import device_metrics as names
from tracekit.model.run import Run
from tracekit.rules.device_slowdowns import ClockDrop
from tracekit.rules.engine import check
from tracekit.rules.rule import Finding
from tracekit.rules.stragglers import Straggler

STEPS = "".join(str(step) * 40 for step in range(3))
HEALTHY: Mapping[str, float] = {names.SM_CLOCK: 1755, names.TEMPERATURE: 68, names.THROTTLE_REASONS: 0}


def run(counters: Mapping[int, Mapping[str, float]], *, launched_late: bool = False) -> Run:
    """Return a run of three ranks in which rank 1 is late at each collective, with these counters in every step."""
    early, late = ("aa" + "." * 8, "." * 2 + "yyyyyy.."), ("aaaaa.....", "." * 5 + "yyy..")
    if launched_late:
        late = ("...aa.....", "." * 5 + "yyy..")
    groups = pl.DataFrame({"group": ["0"], "ranks": [[0, 1, 2]]})
    traces = [
        drawn_hosts.trace(
            f"step {STEPS}\ncompute {compute * 12}\ncomm {communication * 12}", {"a": 0},
            rank=rank, groups=groups, ops={"y": "all_reduce"},
        ).replace(metrics=_metrics(counters.get(rank, {})))
        for rank, (compute, communication) in enumerate((early, late, early))
    ]  # fmt: skip
    return drawn_traces.run(*traces)


def _metrics(counters: Mapping[str, float]) -> pl.DataFrame:
    rows = [(step, name, float(value)) for step in range(3) for name, value in counters.items()]
    schema = {"step": pl.Int64, "name": pl.String, "value": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def straggler(late: Mapping[str, float], others: Mapping[str, float] = HEALTHY) -> Finding:
    (found,) = check(run({0: others, 1: late, 2: others}), [Straggler()]).findings
    return found


def test_a_hot_gpu_is_named_with_numbers(wording: Wording) -> None:
    found = straggler(
        {
            names.SM_CLOCK: 1095,
            names.TEMPERATURE: 91,
            names.THROTTLE_REASONS: names.HW_SLOWDOWN | names.HW_THERMAL,
        }
    )
    said = "Its GPU runs at 1,095 MHz against 1,755 MHz: thermal slowdown in 3 of 3 steps, 91 °C against 68 °C."
    assert said in found.message
    wording(found.fix)


def test_equal_clocks_point_to_the_data(wording: Wording) -> None:
    found = straggler({**HEALTHY, names.SM_CLOCK: 1740})
    wording(found.message)
    wording(found.fix)


def test_without_counters_the_fix_advises_to_record_them() -> None:
    for counters in ({}, {1: HEALTHY}, {0: HEALTHY, 2: HEALTHY}):
        (found,) = check(run(counters), [Straggler()]).findings
        assert "MHz" not in found.message
        assert found.fix.endswith("tracekit record --device-metrics.")


def test_a_lower_power_limit_is_named_though_all_gpus_are_at_their_limits(wording: Wording) -> None:
    capped = {names.THROTTLE_REASONS: names.POWER_CAP}
    found = straggler(
        {**capped, names.SM_CLOCK: 1300, names.POWER_LIMIT: 500}, {**HEALTHY, **capped, names.POWER_LIMIT: 700}
    )
    wording(found.message)
    assert "nvidia-smi -pl" in found.fix


def test_the_reason_is_one_that_the_others_do_not_have(wording: Wording) -> None:
    capped = {names.THROTTLE_REASONS: names.POWER_CAP}
    late = {names.SM_CLOCK: 1300, names.THROTTLE_REASONS: names.POWER_CAP | names.POWER_BRAKE}
    wording(straggler(late, {**HEALTHY, **capped}).message)


def test_a_lower_clock_without_a_reason_is_hardware_too(wording: Wording) -> None:
    found = straggler({names.SM_CLOCK: 1300})
    wording(found.message)
    wording(found.fix)


def test_the_clock_of_a_gpu_that_idles_is_the_highest_of_the_step(wording: Wording) -> None:
    idle = {
        names.SM_CLOCK: 900,
        names.most(names.SM_CLOCK): 1755,
        names.THROTTLE_REASONS: names.GPU_IDLE,
    }
    wording(straggler(idle).message)


def test_uncorrected_memory_errors_are_stated(wording: Wording) -> None:
    found = straggler({**HEALTHY, names.ECC_UNCORRECTED: 2, names.PENDING_ROW_REMAP: 1})
    wording(found.message)
    assert "nvidia-smi --gpu-reset" in found.fix


def slowing(*clocks_mhz: float, reasons: int = 0) -> Finding:
    """Return STEP003's finding on a rank whose kernels take longer from step 2 on, with these clocks by step."""
    rows = [(step, names.SM_CLOCK, mhz) for step, mhz in enumerate(clocks_mhz)]
    rows += [(step, names.THROTTLE_REASONS, float(reasons * (step > 2))) for step in range(len(clocks_mhz))]
    schema = {"step": pl.Int64, "name": pl.String, "value": pl.Float64}
    metrics = pl.DataFrame(rows, schema=schema, orient="row")
    trace = drawn_traces.slowing(dict.fromkeys("abcdefgh", 12)).replace(metrics=metrics)
    (found,) = check(drawn_traces.run(trace), [ClockDrop()]).findings
    return found


def test_a_clock_drop_is_confirmed_by_the_recorded_clock(wording: Wording) -> None:
    found = slowing(1755, 1755, 1600, 1410, reasons=names.HW_THERMAL)
    wording(found.message)
    assert found.confidence == 0.9


def test_without_a_lower_clock_another_process_is_suspected(wording: Wording) -> None:
    found = slowing(1755, 1755, 1755, 1740)
    wording(found.message)
    assert "nvidia-smi pmon" in found.fix
    assert found.confidence < slowing(1755, 1755).confidence == 0.7

"""Simulated stragglers with counters of the GPUs: a hot GPU is a hardware fault, more work is none."""

import json
from pathlib import Path

import tracekit
from tests.support.cli_runner import tracekit as command
from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.compute import device_counters
from tracekit.conventions import device_metrics
from tracekit.report import charts
from tracekit.rules.engine import check
from tracekit.rules.rule import Finding, Rule
from tracekit.rules.stragglers import LateGroup, Straggler

JOB = ("--model", "llama2-7b", "--layers", "2", "--gpus", "4", "--steps", "4")


def simulated(run: Path, *options: str) -> Path:
    done = command("simulate", *JOB, *options, "--out", run)
    assert done.returncode == 0, done.stderr
    return run


def finding(run: Path, rule: Rule) -> Finding:
    (found,) = check(tracekit.load(run), [rule]).findings
    return found


def test_a_throttled_gpu_is_hardware_and_the_table_shows_it(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", "--fault", "throttled-gpu:2:1.6")
    found = finding(run, Straggler())
    assert found.ranks == (2,)
    assert "thermal slowdown in 4 of 4 steps, 91 °C against" in found.message
    assert found.fix.startswith("Heat slows rank 2")
    (truth,) = [each for each in json.loads((run / "truth.json").read_text())["faults"] if each["code"] == "RANK001"]
    assert (truth["fault"], truth["ranks"]) == ("throttled-gpu", [2])
    columns = "rank, max(sm_clock_mhz) < 1000 AS slow, any_value(throttle_reasons)"
    query = f"SELECT {columns} FROM device_metrics GROUP BY rank ORDER BY rank"
    done = command("query", run, query, "--format", "json")
    assert [list(row.values())[:2] for row in json.loads(done.stdout)] == [[rank, rank == 2] for rank in range(4)]
    assert "hardware thermal slowdown" in done.stdout


def test_more_work_at_the_same_clock_is_no_hardware_fault(tmp_path: Path) -> None:
    found = finding(simulated(tmp_path / "run", "--fault", "slow-rank:2:1.6", "--device-metrics"), Straggler())
    assert "the hardware is not slower" in found.message
    assert found.fix.startswith("The clocks are equal, so check the work of rank 2")


def test_without_counters_the_fix_says_how_to_record_them(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", "--fault", "slow-rank:2:1.6")
    assert finding(run, Straggler()).fix.endswith("tracekit record --device-metrics.")
    assert "sm_clock_mhz" not in (run / "rank00002.metrics.jsonl").read_text()


def test_late_ranks_of_one_node_have_their_clocks_compared_together(tmp_path: Path) -> None:
    hot = ("--fault", "throttled-gpu:1:1.6", "--fault", "throttled-gpu:2:1.6")
    found = finding(simulated(tmp_path / "run", *hot, "--gpus", "8"), LateGroup())
    assert found.ranks == (1, 2)
    assert "Their GPUs run at" in found.message
    assert "thermal slowdown in 4 of 4 steps" in found.message


def test_a_summary_by_step_has_the_counters_of_each_step(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", "--fault", "throttled-gpu:2:1.6")
    rows = json.loads(command("summary", run, "--by", "step", "--format", "json").stdout)
    hot = [row for row in rows if row["throttle_reasons"]]
    assert {(row["rank"], row["step"]) for row in hot} == {(2, step) for step in range(4)}
    assert all(row["sm_clock_mhz"] < 1000 and row["temperature_c"] == 91 for row in hot)
    text = command("summary", run, "--by", "step", COLUMNS="220").stdout
    assert "876 MHz  1,593 MHz  219 W  91 °C  hardware slowdown, hardware thermal slowdown" in text


def test_a_summary_by_step_without_counters_has_nulls_and_no_columns_for_them(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run")
    (row, *_) = json.loads(command("summary", run, "--by", "step", "--format", "json").stdout)
    absent = ["sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "throttle_reasons"]
    assert [row[name] for name in absent] == [None] * 5
    assert "clock" not in command("summary", run, "--by", "step").stdout


def test_a_comparison_states_a_change_of_the_clock_and_what_it_does(tmp_path: Path) -> None:
    hot = simulated(tmp_path / "hot", "--fault", "throttled-gpu:2:1.6")
    cool, again = (simulated(tmp_path / f"cool{seed}", "--device-metrics", "--seed", str(seed)) for seed in (0, 1))
    changed = command("compare", cool, hot, "--allow-different", COLUMNS="300").stdout
    assert "the SM clock of the slowest GPU differs: 1,403 MHz in cool0, 877 MHz in hot" in changed
    assert "take 1.60 times as long in hot as in cool0" in changed
    by_operator = command("compare", hot, cool, "--allow-different", "--by", "operator", COLUMNS="300").stdout
    assert "take 1.60 times as long in hot as in cool0" in by_operator
    same = command("compare", cool, again, "-v", COLUMNS="300").stdout
    assert "SM clock" in same
    assert "differs: 1" not in same


def test_the_heatmap_of_ranks_shows_recorded_clocks(tmp_path: Path) -> None:
    run = tracekit.load(simulated(tmp_path / "run", "--fault", "throttled-gpu:2:1.6"))
    table = run.table(exposed_communication.spread)
    assert device_metrics.SM_CLOCK not in charts.measures(table)
    counters = run.table(device_counters.device_counters)
    table = table.join(counters, on=["window", "rank", "step"], how="left", maintain_order="left")
    assert [charts.measures(table)[name] for name in ("sm_clock_mhz", "temperature_c", "power_w")] == [
        "SM clock", "temperature", "power",
    ]  # fmt: skip
    bars = charts.step_heatmap(table, device_metrics.SM_CLOCK).data[0]
    slow = [clock for (rank, *_), clock in zip(bars.customdata, bars.marker.color, strict=True) if rank == 2]
    assert max(slow) < 1000 < min(set(bars.marker.color) - set(slow))
    assert (bars.marker.cmin, bars.marker.cmax) == (min(bars.marker.color), max(bars.marker.color))
    hover = next(cell[2] for cell in bars.customdata if cell[0] == 2)
    assert "MHz, 91 °C" in hover
    assert "hardware thermal slowdown" in hover

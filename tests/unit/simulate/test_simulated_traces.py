"""What the simulator writes: traces that load without errors and say what the simulator itself says."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.unit.simulate.jobs import job, pipelined, written
from tracekit import conventions
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.plan.hardware import HARDWARE
from tracekit.rules.data_quality import DoubtfulTrace
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity
from tracekit.simulate.job import STRATEGIES, Job
from tracekit.simulate.kineto_writer import BASE_NS
from tracekit.simulate.run import Simulated

CASES = [
    *((strategy, ()) for strategy in STRATEGIES),
    ("fsdp1", ("slow-rank", "dataloader-stall", "checkpoint-stall")),
    ("fsdp2", ("host-sync", "allocator-retry", "small-collectives:2")),
    ("yafsdp", ("give-way", "starved-collectives", "serialized-communicators")),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join((case[0], *case[1])))
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Simulated, Run]:
    strategy, requests = request.param
    out = tmp_path_factory.mktemp("simulated") / "run"
    of = job(strategy, steps=2, layers=3)
    of = replace(of, hardware=HARDWARE["a100-80"], seed=len(requests))  # with jitter
    return written(of, out, *requests), tracekit.load(str(out), cache=False)


def test_the_breakdown_of_the_files_equals_the_simulators_account(simulated: tuple[Simulated, Run]) -> None:
    of, run = simulated
    for rank, record in of.recording.ranks.items():
        measured = run.table(breakdown.by_step).filter(pl.col("rank") == rank)
        for row in measured.iter_rows(named=True):
            start_ns, end_ns = record.account.windows[row["step"]]
            expected = {f"{name}_ns": ns for name, ns in record.account.terms[row["step"]].items()}
            expected |= {"start_ns": BASE_NS + start_ns, "duration_ns": end_ns - start_ns}
            assert {name: row[name] for name in expected} == expected
        assert measured["step"].to_list() == list(range(of.job.steps))


@pytest.mark.parametrize(
    ("of", "step_tokens"),
    [
        (job(gpus=16, batch=2, micro_batches=1), 16 * 2 * 2048),
        (job(gpus=8, micro_batches=3), 8 * 3 * 2048),
        (pipelined(4, pp=2, tp=2, micro_batches=4), 4 * 2048),  # one replica of the data
        (pipelined(8, pp=2, micro_batches=4), 4 * 4 * 2048),
    ],
    ids=lambda value: "" if isinstance(value, int) else f"{value.gpus}-gpus",
)
def test_tokens_per_second_are_those_of_all_ranks_over_the_ranks_time(
    of: Job, step_tokens: int, tmp_path: Path
) -> None:
    written(of, tmp_path / "run")
    run = tracekit.load(str(tmp_path / "run"), cache=False)
    for rank in run.ranks:
        logged = run.trace(rank).metrics.pivot("name", index="step", values="value")
        total = logged["tokens_per_second"] * logged["step_time_ns"] / 1e9
        assert total.to_list() == pytest.approx([step_tokens] * of.steps)
        per_gpu = logged["tokens_per_second"] / logged["tokens_per_second_per_gpu"]
        assert per_gpu.to_list() == pytest.approx([of.gpus] * of.steps)


def test_logs_of_earlier_versions_state_the_speed_of_one_gpu(tmp_path: Path) -> None:
    written(job(), tmp_path / "run")
    log = tmp_path / "run" / conventions.rank_file(0, conventions.METRICS_SUFFIX)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    earlier = [{**line, "tokens_per_second": line["tokens_per_second_per_gpu"]} for line in lines]
    for line in earlier:
        del line["tokens_per_second_per_gpu"]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in earlier))
    read = tracekit.load(str(tmp_path / "run"), cache=False).trace(0).metrics
    assert "tokens_per_second" not in set(read["name"])
    per_gpu = read.filter(pl.col("name") == "tokens_per_second_per_gpu")["value"]
    assert per_gpu.to_list() == [line["tokens_per_second"] for line in earlier]


def test_the_data_quality_is_good(simulated: tuple[Simulated, Run]) -> None:
    of, run = simulated
    findings = check(run, [DoubtfulTrace()]).findings
    assert all(finding.severity < Severity.ERROR for finding in findings)
    # Ranks without a trace are missing, and a host with an injected fault makes the first step long.
    assert {finding.subject for finding in findings} <= {"missing_ranks", "warm_up_inside"}
    assert run.manifest["simulated"] is True
    assert len(run.ranks) == len(of.recording.ranks)


def test_every_kernel_and_collective_has_its_launch_step_and_phase(simulated: tuple[Simulated, Run]) -> None:
    of, run = simulated
    trace = run.trace(0)
    record = of.recording.ranks[0]
    work = trace.activities
    assert work.height == len(record.activities)
    assert work.select(pl.col("launch_id", "step", "phase").is_null().any()).row(0) == (False, False, False)
    kernels = [a for a in record.activities if a.kernel.collective]
    assert trace.collectives.height == len(kernels)
    assert trace.collectives["seq"].is_not_null().all()
    assert set(trace.collectives["op"]) == {a.kernel.collective.op for a in kernels if a.kernel.collective}
    assert trace.allocations["delta_bytes"].sum() == sum(a.delta_bytes for a in record.allocations)
    launched = trace.ops.select(pl.col("id").alias("launch_id"), (pl.col("start_ns") + pl.col("dur_ns")).alias("end"))
    assert work.join(launched, on="launch_id").select((pl.col("start_ns") >= pl.col("end")).all()).item()


def test_files_are_marked_as_simulated_and_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    of = replace(job(), hardware=HARDWARE["a100-80"], steps=1, seed=3)
    written(of, tmp_path / "a")
    written(of, tmp_path / "b")
    written(replace(of, seed=4), tmp_path / "c")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    trace = "rank00000.simulated.pt.trace.json.gz"
    assert names == [
        *("rank00000.metrics.jsonl", trace, "rank00001.metrics.jsonl"),
        *("rank00001.simulated.pt.trace.json.gz", "run.json", "truth.json"),
    ]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert (tmp_path / "a" / trace).read_bytes() != (tmp_path / "c" / trace).read_bytes()
    header = json.loads(gzip.decompress((tmp_path / "a" / trace).read_bytes()))
    assert header["simulated"] is True
    assert json.loads((tmp_path / "a" / "truth.json").read_text())["simulated"] is True
    with pytest.raises(InputError, match="not empty"):
        written(of, tmp_path / "a")
    written(replace(of, ranks_written=1), tmp_path / "a", force=True)
    assert not (tmp_path / "a" / "rank00001.metrics.jsonl").exists()

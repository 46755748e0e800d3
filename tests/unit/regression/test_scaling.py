"""Runs of different size: efficiency and what it lacks are right by the simulator's own account, and add up."""

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.cli_runner import tracekit as command
from tests.support.python_path import REPOSITORY
from tests.support.selection import others_in_accuracy
from tests.support.simulated_parts import parts_of_steps
from tests.unit.simulate.jobs import job, pipelined, written
from tracekit import conventions
from tracekit.analysis.parallelism import time_by_part
from tracekit.errors import NotComparableError
from tracekit.library.comparison import Comparison
from tracekit.model.run import Run
from tracekit.plan.hardware import HARDWARE
from tracekit.regression import scaling
from tracekit.regression.scaling import RunSize, ScaledRun, Scaling, ScalingComparison, ScalingSide, Work
from tracekit.regression.thresholds import Verdict
from tracekit.report import scaling as report
from tracekit.simulate.job import Job
from tracekit.simulate.run import Simulated

WITHIN = 0.03
HOST_PARTS = ("launch", "data", "idle")


def compare(runs: Sequence[Run], *, allow_different: bool = False) -> ScalingComparison:
    return scaling.compare_sizes([ScalingSide.of(run) for run in runs], allow_different=allow_different)


def jittered(of: Job) -> Job:
    return replace(of, hardware=HARDWARE["a100-80"], seed=3)


CASES = {
    "weak": ([job(gpus=gpus, layers=2) for gpus in (8, 16, 32)], ()),
    "strong": ([jittered(job(gpus=gpus, layers=2, batch=16 // gpus, steps=8)) for gpus in (8, 16)], ()),
    "late host": ([job(gpus=gpus, layers=2) for gpus in (8, 16)], ("late-launch",)),
    "slow rank": ([job(gpus=gpus, layers=2, ranks_written=4) for gpus in (8, 16)], ("slow-rank",)),
    "longer pipeline": (
        [pipelined(gpus, pp=gpus // 4, micro_batches=4, steps=3) for gpus in (8, 16)], (),
    ),
    "more replicas": (
        [pipelined(gpus, pp=2, micro_batches=32 // gpus, steps=3, strategy="zero1") for gpus in (8, 16)], (),
    ),
}  # fmt: skip


# Strong scaling and pipelines change the same parts as these three do.
@pytest.fixture(scope="module", params=others_in_accuracy(CASES, ["weak", "late host", "slow rank"]))
def simulated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Simulated], list[Run]]:
    """Simulated runs of one job at several sizes; all but the first have the faults."""
    jobs, faults = CASES[request.param]
    folder = tmp_path_factory.mktemp("scaling")
    of_jobs = [written(of, folder / str(of.gpus), *(faults if of.gpus > 8 else ())) for of in jobs]
    return of_jobs, [tracekit.load(str(folder / str(of.gpus)), cache=False) for of in jobs]


def true_gpu_ns(of: Simulated) -> Mapping[str, float]:
    """Return the GPU time of each part per token."""
    parts = parts_of_steps(of.job, of.recording)
    return {part: of.job.gpus * time_ns / of.job.step_tokens for part, time_ns in parts.items()}


def test_efficiency_and_contributions_are_the_simulators(simulated: tuple[list[Simulated], list[Run]]) -> None:
    of_jobs, runs = simulated
    compared = compare(runs)
    before = true_gpu_ns(of_jobs[0])
    for of, step in zip(of_jobs[1:], compared.steps, strict=True):
        after = true_gpu_ns(of)
        whole = sum(after.values())
        assert step.efficiency == pytest.approx(sum(before.values()) / whole, rel=WITHIN)
        assert step.run.step_work == of.job.step_tokens
        lost = {part.part: part.lost_ratio for part in step.contributions}
        lost["idle"] = sum(lost.pop(part, 0.0) for part in HOST_PARTS)
        for part in lost.keys() | before.keys() | after.keys():
            expected = (after.get(part, 0.0) - before.get(part, 0.0)) / whole
            # What adds less than a tenth of a percent of the step is not worth a percentage of its own.
            assert lost.get(part, 0.0) == pytest.approx(expected, rel=WITHIN, abs=0.002), part


def test_contributions_add_up_to_what_the_step_lacks(simulated: tuple[list[Simulated], list[Run]]) -> None:
    _, runs = simulated
    compared = compare(runs)
    for run in compared.runs:
        assert sum(run.parts_ns.values()) == pytest.approx(run.step_ns, abs=1)
        assert min(run.parts_ns.values()) >= 0
    for step in compared.steps:
        lost_ns = step.run.step_ns - step.ideal_step_ns
        assert sum(part.change_ns for part in step.contributions) == pytest.approx(lost_ns, abs=1)
        assert sum(part.lost_ratio for part in step.contributions) == pytest.approx(1 - step.efficiency, abs=1e-9)
        assert step.throughput_ratio == pytest.approx(step.efficiency * step.gpus_ratio)
        assert step.low is not None
        assert step.high is not None
        assert step.low < step.efficiency < step.high


@pytest.mark.parametrize("name", ["demo-fsdp2", "gpu/slow-rank", "parallelism/pipeline-1f1b", "faults/gil-save"])
def test_the_parts_of_a_recorded_step_sum_to_it(name: str) -> None:
    table = tracekit.load(str(REPOSITORY / "sample_traces" / name)).table(time_by_part.time_by_part)
    parts = [f"{part}_ns" for part in time_by_part.PARTS]
    assert table.height
    assert table.select((pl.sum_horizontal(parts) == pl.col("duration_ns")).all()).item()
    assert table.select(pl.min_horizontal(pl.col(parts).min())).item() >= 0
    assert (table["bubble_ns"].sum() > 0) == name.startswith("parallelism/")


def test_idle_time_in_a_pipeline_before_an_input_is_complete_is_a_bubble(tmp_path: Path) -> None:
    of = written(pipelined(4, pp=4, micro_batches=2, steps=3), tmp_path / "run")
    table = tracekit.load(str(tmp_path / "run"), cache=False).table(time_by_part.time_by_part)
    true_ns = parts_of_steps(of.job, of.recording)["bubble"]
    bubble_ns = table.filter(pl.col("step") == 1)["bubble_ns"].mean()
    assert bubble_ns == pytest.approx(true_ns, rel=WITHIN)


def scaled(gpus: int, tokens: float, *, step_ns: float = 1e9, nodes: int | None = None) -> ScaledRun:
    parts = {part: step_ns / len(time_by_part.PARTS) for part in time_by_part.PARTS}
    return ScaledRun("run", gpus, nodes, tokens, step_ns, parts, gpus, np.full(3, step_ns))


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        (Scaling.STRONG, scaled(16, 1000)),
        (Scaling.STRONG, scaled(4, 1020)),  # sequences of a job are not equally long
        (Scaling.WEAK, scaled(16, 2000)),
        (Scaling.WEAK, scaled(2, 250)),
        (Scaling.MIXED, scaled(16, 1500)),
        (Scaling.BATCH, scaled(8, 3000)),
        (Scaling.PLACES, scaled(8, 1000, nodes=2)),
    ],
)
def test_scaling_is_strong_or_weak_by_what_stays_the_same(kind: Scaling, run: ScaledRun) -> None:
    assert scaling.scaling_step(scaled(8, 1000, nodes=1), run).kind is kind


def test_perfect_scaling_has_no_losses_and_a_smaller_job_may_be_more_efficient() -> None:
    perfect = scaling.scaling_step(scaled(8, 1000), scaled(16, 1000, step_ns=5e8))
    assert perfect.efficiency == pytest.approx(1)
    assert all(part.change_ns == pytest.approx(0, abs=1e-3) for part in perfect.contributions)
    smaller = scaling.scaling_step(scaled(8, 1000), scaled(4, 1000, step_ns=1.6e9))
    assert (smaller.throughput_ratio, smaller.efficiency) == pytest.approx((0.625, 1.25))
    assert sum(part.lost_ratio for part in smaller.contributions) == pytest.approx(-0.25)


SIZES = list(itertools.product((8, 16, None), (1, 2, None), (1000.0, 1030.0, 2000.0, None)))


def test_a_collective_is_named_where_it_grew_by_most_of_the_exposed_communication() -> None:
    before = replace(scaled(8, 1000), exposed_ns={"all_gather": 6e7, "reduce_scatter": 5e7})
    larger = {**before.parts_ns, "communication": 3e8}
    after = replace(scaled(16, 2000), parts_ns=larger, step_ns=sum(larger.values()))
    for exposed_ns, op in (
        ({"all_gather": 2.2e8, "reduce_scatter": 8e7}, "all_gather"),
        ({"all_gather": 1.3e8, "reduce_scatter": 1.3e8, "all_reduce": 4e7}, ""),
        ({}, ""),
    ):
        step = scaling.scaling_step(before, replace(after, exposed_ns=exposed_ns))
        assert {part.part: part.op for part in step.contributions}["communication"] == op


def test_sizes_differ_only_where_they_are_known_to() -> None:
    for gpus, nodes, tokens in SIZES:
        differs = RunSize(8, 1, 1000.0).differs(RunSize(gpus, nodes, tokens))
        assert differs == (gpus == 16 or (tokens is not None and (nodes == 2 or tokens == 2000.0)))


def drawn(name: str, ranks: int, *, model: str = "m", tokens: float | None = 100.0) -> Run:
    """Return a run whose steps take 10 ns and whose log states these tokens of a step."""
    logged = [] if tokens is None else [("tokens_per_second", tokens * 1e8), ("step_time_ns", 10.0)]
    rows = [(step, *metric) for step in range(3) for metric in logged]
    log = pl.DataFrame(rows, schema=["step", "name", "value"], orient="row") if rows else pl.DataFrame()
    picture = """
        step     000000000011111111112222222222
        compute  aaaaaaaa..bbbbbbbb..cccccccc..
    """
    tables = {"metrics": log} if rows else {}
    traces = [drawn_traces.trace(picture, rank=rank, **tables) for rank in range(ranks)]
    return drawn_traces.run(*traces, path=name, world_size=ranks, model={"name": model}, device="cuda")


def test_runs_of_another_model_or_without_tokens_are_refused() -> None:
    others = [drawn("a", 2), drawn("b", 4, model="other")]
    for allow_different in (False, True):
        with pytest.raises(NotComparableError, match=r"model.name differs: m in a, other in b"):
            compare(others, allow_different=allow_different)
    assert not scaling.has_efficiency([ScalingSide.of(run) for run in others])
    assert scaling.has_efficiency([ScalingSide.of(run) for run in (drawn("a", 2), drawn("b", 4))])
    runs = [drawn("a", 2), drawn("b", 4, tokens=None)]
    assert not scaling.has_efficiency([ScalingSide.of(run) for run in runs])
    with pytest.raises(NotComparableError, match="world_size differs: 2 in a, 4 in b, and no log of b states"):
        compare(runs)


SAMPLES = REPOSITORY / "sample_traces"


@pytest.mark.parametrize("is_model_stated", [True, False])
def test_recorded_runs_of_different_models_have_no_efficiency(tmp_path: Path, *, is_model_stated: bool) -> None:
    # The tokens of their steps differ, as those of one model with another batch do.
    folders = []
    for name in ("demo-fsdp2", "faults/no-prefetch"):
        folder = shutil.copytree(SAMPLES / name, tmp_path / name)
        if not is_model_stated:
            manifest = json.loads((folder / conventions.MANIFEST_FILE).read_text("utf-8"))
            del manifest["model"]
            (folder / conventions.MANIFEST_FILE).write_text(json.dumps(manifest), "utf-8")
        folders.append(str(folder))
    runs = [tracekit.load(folder, cache=False) for folder in folders]
    assert scaling.differ_in_size(runs)
    with pytest.raises(NotComparableError):
        compare(runs, allow_different=True)
    compared = runs[1].compare(runs[0], allow_different=True)
    assert isinstance(compared, Comparison)
    assert not compared.compared.is_same_work


def test_one_model_under_another_strategy_has_an_efficiency_where_no_manifest_states_it(tmp_path: Path) -> None:
    runs = []
    for name in ("demo-fsdp2", "demo-yafsdp"):
        folder = shutil.copytree(SAMPLES / name, tmp_path / name)
        (folder / conventions.MANIFEST_FILE).unlink()
        runs.append(tracekit.load(str(folder), cache=False))
    assert scaling.has_efficiency([ScalingSide.of(run) for run in runs])


def test_without_tokens_work_is_counted_in_operations(tmp_path: Path) -> None:
    sample = REPOSITORY / "sample_traces" / "demo-fsdp2"
    for file in sample.iterdir():
        if not file.name.endswith(conventions.METRICS_SUFFIX):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    logged, unlogged = (ScalingSide.of(tracekit.load(str(path), cache=False)) for path in (sample, tmp_path))
    assert (set(logged.by_work), set(unlogged.by_work)) == ({Work.TOKENS, Work.FLOPS}, {Work.FLOPS})
    compared = scaling.compare_sizes([logged, unlogged])
    assert (compared.work, compared.is_on_host) == (Work.FLOPS, True)
    assert compared.steps[0].efficiency == pytest.approx(1)
    assert compared.reference.step_work > 1e6
    (note,) = compared.notes
    assert "floating-point" in note


def test_throughput_is_that_of_all_ranks() -> None:
    compared = compare([drawn("a", 2), drawn("b", 4)])
    assert compared.work is Work.TOKENS
    assert [run.work_per_second for run in compared.runs] == pytest.approx([1e10, 1e10], rel=0.3)
    assert [run.gpu_ns_per_work for run in compared.runs] == pytest.approx([0.2, 0.4], rel=0.3)
    assert compared.steps[0].efficiency == pytest.approx(0.5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("sizes")
    paths = {gpus: folder / f"gpus{gpus}" for gpus in (8, 16, 32)}
    for gpus, path in paths.items():
        written(job(gpus=gpus, layers=2), path)
    return paths


def test_logs_of_one_gpus_speed_are_multiplied_by_the_ranks(folders: dict[int, Path], tmp_path: Path) -> None:
    run = tracekit.load(str(folders[16]), cache=False)
    tokens = RunSize.of(run).tokens
    for rank in run.ranks:
        log = folders[16] / conventions.rank_file(rank, conventions.METRICS_SUFFIX)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for line in lines:
            line["tokens_per_second"] = line.pop("tokens_per_second_per_gpu")
        (tmp_path / log.name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for file in folders[16].iterdir():
        if not (tmp_path / file.name).exists():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert RunSize.of(tracekit.load(str(tmp_path), cache=False)).tokens == pytest.approx(tokens)


def test_a_run_on_more_gpus_is_compared_by_efficiency_and_never_called_worse(folders: dict[int, Path]) -> None:
    done = command("compare", folders[8], folders[16], COLUMNS="200")
    assert done.returncode == 0, done.stderr
    step = compare([tracekit.load(str(folders[gpus]), cache=False) for gpus in (8, 16)]).steps[0]
    first = done.stdout.splitlines()[0]
    for number in (f"{step.throughput_ratio:.2f} times", "2 times the GPUs", f"{step.efficiency:.1%}", "weak scaling"):
        assert number in first
    assert Verdict.WORSE.value not in done.stdout.split()


def test_several_sizes_are_one_table_with_a_column_of_contributions_each(folders: dict[int, Path]) -> None:
    done = command("compare", *folders.values(), "--format", "json")
    values = json.loads(done.stdout)
    assert [run["gpus"] for run in values["runs"]] == [8, 16, 32]
    assert [run["scaling"] for run in values["runs"]] == [None, "weak", "weak"]
    for run in values["runs"][1:]:
        changes = [part["change_ns"] for part in values["contributions"] if part["run"] == run["run"]]
        assert sum(changes) == pytest.approx(run["step_time_ns"] - run["ideal_step_ns"], abs=1)
    rows = pl.read_csv(command("compare", *folders.values(), "--format", "csv").stdout.encode())
    assert rows["efficiency"].to_list() == pytest.approx([run["efficiency"] for run in values["runs"]])
    compared = compare([tracekit.load(str(path), cache=False) for path in folders.values()])
    assert len(report.contribution_cells(compared).header) == 3


def test_several_runs_of_one_size_are_refused(folders: dict[int, Path]) -> None:
    done = command("compare", folders[8], folders[8], folders[8])
    assert done.returncode == 2
    assert "3 runs" in done.stderr
    assert command("compare", folders[8], folders[16], folders[32], "--by", "operator").returncode == 2


def test_limits_hold_for_runs_of_different_size(folders: dict[int, Path]) -> None:
    assert command("compare", folders[8], folders[16], "--fail-if", "tokens_per_second>3%").returncode == 0
    assert command("compare", folders[8], folders[16], "--fail-if", "tokens_per_second_per_gpu>3%").returncode == 1


@pytest.mark.parametrize("width", others_in_accuracy([40, 60, 80, 120], [40, 80]))
def test_no_digit_is_cut_at_any_width(folders: dict[int, Path], width: int) -> None:
    assert "…" not in command("compare", *folders.values(), COLUMNS=str(width)).stdout
    assert "…" not in command("compare", folders[8], folders[16], COLUMNS=str(width)).stdout

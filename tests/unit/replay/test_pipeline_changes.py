"""Predictions of other pipelines against a simulation of each: what whatif says of a run, and what happens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tracekit
from tests.support.wording import Wording
from tests.unit.simulate.jobs import pipelined, written
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.plan import models
from tracekit.replay.graph import pipeline_changes, pipeline_timing
from tracekit.replay.graph.pipeline_changes import PipelineChange
from tracekit.simulate import engine, faults
from tracekit.simulate.job import Impairments, Job, equal_stages

CLOSE = 0.03  # of the step


@pytest.fixture(scope="module")
def job() -> Job:
    """Return four stages of unequal size under 1f1b, two sequences in each micro-batch."""
    of = pipelined(4, pp=4, layers=9, micro_batches=8, steps=2)
    assert of.hybrid is not None
    return replace(of, seq=1024, batch=2, hybrid=replace(of.hybrid, stage_layers=(2, 4, 2, 1)))


@pytest.fixture(scope="module")
def run(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pipeline")
    written(job, folder)
    return tracekit.load(str(folder), cache=False)


def _simulated_ns(job: Job, **changes: object) -> float:
    assert job.hybrid is not None
    return engine.simulate(replace(job, hybrid=replace(job.hybrid, **changes))).total_ns / job.steps  # type: ignore[arg-type]


def test_more_micro_batches_of_fewer_tokens_are_predicted(job: Job, run: Run) -> None:
    found = pipeline_changes.predict(run, PipelineChange(micro_batches=16))
    true_ns = _simulated_ns(replace(job, micro_batches=16, batch=1))
    assert found.predicted_ns == pytest.approx(true_ns, rel=CLOSE)
    assert found.saved_ratio > 0.03
    assert found.name == "16 micro-batches"
    assert any("same tokens per step" in each for each in found.assumptions)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("gpipe", 1),
        ("interleaved", 2),
        *(pytest.param(*other, marks=pytest.mark.accuracy) for other in (("zb-h1", 1), ("zbv", 2), ("dualpipev", 2))),
    ],
)
def test_another_schedule_is_predicted(job: Job, run: Run, schedule: str, stages: int) -> None:
    found = pipeline_changes.predict(run, PipelineChange(schedule=schedule))
    assert job.hybrid is not None
    layers = job.hybrid.stage_layers if stages == 1 else equal_stages(9, 8)
    true_ns = _simulated_ns(job, schedule=schedule, virtual_stages=stages, stage_layers=layers)
    assert found.predicted_ns == pytest.approx(true_ns, rel=CLOSE)


def test_moving_layers_between_stages_is_predicted(job: Job, run: Run) -> None:
    found = pipeline_changes.predict(run, PipelineChange(stage_layers="3,3,2,1"))
    assert found.name == "stages of 3, 3, 2, 1 layers"
    assert found.predicted_ns == pytest.approx(_simulated_ns(job, stage_layers=(3, 3, 2, 1)), rel=CLOSE)


def test_balanced_stages_have_equal_numbers_of_equal_layers(job: Job, run: Run) -> None:
    layers = pipeline_timing.recorded_timing(run).balanced_layers()
    assert sorted(layers) == [2, 2, 2, 3]
    found = pipeline_changes.predict(run, PipelineChange(stage_layers="balanced"))
    assert found.predicted_ns == pytest.approx(_simulated_ns(job, stage_layers=layers), rel=CLOSE)
    assert found.saved_ratio > 0.1


@pytest.mark.accuracy  # test_hybrid judges such a host
def test_a_host_that_reads_each_result_delays_every_action_of_another_pipeline(tmp_path: Path) -> None:
    # The read takes as long with twice the micro-batches, and there are twice as many.
    healthy = replace(pipelined(4, pp=4, layers=8, micro_batches=8), seq=1024, batch=2)
    job = faults.inject(healthy, [faults.parse("read-each-action")])
    written(healthy, tmp_path, "read-each-action")
    run = tracekit.load(str(tmp_path), cache=False)
    for change, of in (
        (PipelineChange(micro_batches=16), replace(job, micro_batches=16, batch=1)),
        (PipelineChange(schedule="gpipe"), job),
        (PipelineChange(schedule="interleaved"), job),
    ):
        stages = 2 if change.schedule == "interleaved" else 1
        changes = {"schedule": change.schedule or "1f1b", "virtual_stages": stages}
        true_ns = _simulated_ns(of, **changes, stage_layers=equal_stages(8, 4 * stages))
        assert pipeline_changes.predict(run, change).predicted_ns == pytest.approx(true_ns, rel=CLOSE)


@pytest.fixture(
    scope="module",
    params=[pytest.param(("1f1b", 1), marks=pytest.mark.accuracy), ("interleaved", 2)],
    ids=["1f1b", "interleaved"],
)
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Run]:
    """Return a pipeline of FSDP2 stages that gathers weights for each action and scatters gradients after it."""
    schedule, stages = request.param
    healthy = pipelined(
        4, pp=2, layers=4, schedule=schedule, stages=stages, micro_batches=8, strategy="fsdp2", shards_data=True
    )
    often = Impairments(gathers_every_micro_batch=True, reduces_every_micro_batch=True)
    of = replace(healthy, seq=1024, impairments=often)
    folder = tmp_path_factory.mktemp("sharded")
    written(of, folder)
    return of, tracekit.load(str(folder), cache=False)


def test_fewer_micro_batches_gather_fewer_times(sharded: tuple[Job, Run]) -> None:
    job, run = sharded
    found = pipeline_changes.predict(run, PipelineChange(micro_batches=4))
    true_ns = _simulated_ns(replace(job, micro_batches=4, batch=2))
    assert found.predicted_ns == pytest.approx(true_ns, rel=CLOSE)


def test_weights_are_gathered_while_a_rank_waits_under_another_schedule(sharded: tuple[Job, Run]) -> None:
    job, run = sharded
    assert job.hybrid is not None
    for schedule in {"gpipe", "1f1b"} - {job.hybrid.schedule}:
        found = pipeline_changes.predict(run, PipelineChange(schedule=schedule))
        true_ns = _simulated_ns(job, schedule=schedule, virtual_stages=1, stage_layers=(2, 2))
        assert found.predicted_ns == pytest.approx(true_ns, rel=CLOSE)


@pytest.mark.parametrize(
    ("axes", "slow", "other"),
    [
        pytest.param({"tp": 4}, Impairments(slow_axes={"tp": 4.0}), Impairments(), marks=pytest.mark.accuracy),
        ({"pp": 60}, Impairments(slow_boundaries={0: 60.0}), Impairments()),
        pytest.param(
            {"dp": 10}, Impairments(slow_axes={"dp_replicate": 10.0}), Impairments(), marks=pytest.mark.accuracy
        ),
        (
            {"tp": 4, "dp": 0.1},
            Impairments(slow_axes={"tp": 4.0}),
            Impairments(slow_axes={"dp_replicate": 10.0}),
        ),
        pytest.param(
            {"tp": 4, "pp": 1 / 30},
            Impairments(slow_axes={"tp": 4.0}),
            Impairments(slow_boundaries={0: 30.0}),
            marks=pytest.mark.accuracy,
        ),
    ],
    ids=["tp", "pp", "dp", "tp instead of dp inside a node", "tp instead of pp inside a node"],
)
def test_other_links_of_axes_are_predicted(
    axes: dict[str, float], slow: Impairments, other: Impairments, tmp_path: Path, wording: Wording
) -> None:
    healthy = pipelined(4, pp=1 if "dp" in axes else 2, tp=2)
    written(replace(healthy, impairments=slow), tmp_path)
    run = tracekit.load(str(tmp_path), cache=False)
    found = pipeline_changes.predict_axes(run, axes)
    changed = replace(healthy, impairments=other)
    assert found.predicted_ns == pytest.approx(engine.simulate(changed).total_ns / healthy.steps, rel=CLOSE)
    assert abs(found.saved_ratio) > 0.05
    assert found.name == ", ".join(f"axis {axis} {times:g} times as fast" for axis, times in axes.items())
    with wording.raises(InputError):
        pipeline_changes.predict_axes(run, axes | {"cp": 2})
    with pytest.raises(InputError, match="--axis-times is 0"):
        pipeline_changes.predict_axes(run, axes | {"tp": 0})


def test_a_manifest_that_contradicts_the_traces_is_refused(job: Job, tmp_path: Path) -> None:
    written(job, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    layers = manifest["pipeline"]["stage_layers"]
    for change, message in (
        ({"schedule": "zbv"}, "zbv has 2 stages on each rank, not 1"),
        ({"stage_layers": [[layer] for of in layers for layer in of]}, "states 9 stages; the traces have 4 ranks"),
        ({"stage_layers": layers * 2, "schedule": "interleaved"}, "no forward and backward of stage 4–7"),
    ):
        changed = manifest | {"pipeline": manifest["pipeline"] | change}
        (tmp_path / "run" / "run.json").write_text(json.dumps(changed))
        with pytest.raises(InputError, match=message):
            pipeline_changes.predict(tracekit.load(tmp_path / "run", cache=False), PipelineChange(micro_batches=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (PipelineChange(schedule="loop"), "'loop'; one of gpipe, 1f1b"),
        (PipelineChange(virtual_stages=2), "1f1b has 1 stage on each rank, not 2"),
        (PipelineChange(schedule="interleaved", virtual_stages=3), "12 stages need a layer each; there are 9 layers"),
        (PipelineChange(schedule="interleaved", micro_batches=6), "needs a multiple of 4 micro-batches"),
        (PipelineChange(schedule="zbv", micro_batches=4), "zbv on 4 ranks needs 7 micro-batches or more"),
        (PipelineChange(micro_batches=0), "--micro-batches is 0"),
        (PipelineChange(stage_layers="3,3,3"), "the run has 4 stages with 9 layers in all"),
        (PipelineChange(stage_layers="many"), "numbers such as 3,3,2, or balanced"),
    ],
)
def test_an_impossible_pipeline_is_refused(run: Run, change: PipelineChange, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipeline_changes.predict(run, change)


def test_a_run_without_a_pipeline_is_refused(tmp_path: Path, wording: Wording) -> None:
    of = pipelined(2, tp=2, layers=1, micro_batches=1, steps=1)
    written(replace(of, model=models.find("llama2-7b", layers=1)), tmp_path)
    with wording.raises(InputError):
        pipeline_changes.predict(tracekit.load(str(tmp_path), cache=False), PipelineChange(schedule="gpipe"))


@pytest.mark.accuracy  # links of a whole axis are predicted every day
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1f1b", 1),
        ("interleaved", 2),
        ("dualpipev", 2),
    ],
)
def test_one_slow_link_of_several_is_predicted(tmp_path: Path, schedule: str, stages: int) -> None:
    healthy = pipelined(4, pp=4, layers=8, schedule=schedule, stages=stages, micro_batches=12, steps=2)
    slow = replace(healthy, impairments=Impairments(slow_boundaries={1: 400.0}))
    written(slow, tmp_path / "run")
    run = tracekit.load(tmp_path / "run", cache=False)
    faster = replace(healthy, impairments=Impairments(slow_boundaries={0: 0.25, 1: 100.0, 2: 0.25}))
    found = pipeline_changes.predict_axes(run, {"pp": 4})
    assert found.predicted_ns == pytest.approx(_simulated_ns(faster), rel=CLOSE)
    assert found.saved_ratio > 0.3
    for other in {"gpipe", "zb-h1", "zbv"}:
        found = pipeline_changes.predict(run, PipelineChange(schedule=other))
        per_rank = 2 if other == "zbv" else 1
        layers = equal_stages(8, 4 * per_rank)
        true_ns = _simulated_ns(slow, schedule=other, virtual_stages=per_rank, stage_layers=layers)
        assert found.predicted_ns == pytest.approx(true_ns, rel=0.05)


def test_gradients_of_fewer_layers_are_reduced_sooner(tmp_path: Path) -> None:
    # Replicas on nodes of their own with a slow network: the stage with three layers reduces their gradients last.
    healthy = pipelined(4, pp=2, layers=4, micro_batches=6, steps=2)
    assert healthy.hybrid is not None
    machine = replace(healthy.hardware, gpus_per_node=1)
    slow = Impairments(slow_axes={"dp_replicate": 8.0})
    unequal = replace(healthy.hybrid, stage_layers=(1, 3))
    job = replace(healthy, hardware=machine, hybrid=unequal, impairments=slow)
    written(job, tmp_path / "run")
    run = tracekit.load(tmp_path / "run", cache=False)
    timing = pipeline_timing.recorded_timing(run)
    assert timing.reduction_ns[1] > 0.1 * engine.simulate(job).total_ns / job.steps
    found = pipeline_changes.predict(run, PipelineChange(stage_layers="2,2"))
    assert found.predicted_ns == pytest.approx(_simulated_ns(job, stage_layers=(2, 2)), rel=CLOSE)

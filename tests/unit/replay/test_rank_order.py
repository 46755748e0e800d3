"""Predictions of ranks on other nodes against a simulation of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tracekit
from tests.support.wording import Wording
from tests.unit.simulate.jobs import pipelined, written
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.replay.graph import pipeline_changes
from tracekit.simulate import engine
from tracekit.simulate.job import Job

CLOSE = 0.07  # of the step: where a group has messages of one size, their latency scales with the bandwidth


def _job(node: int, **layout: int) -> Job:
    of = pipelined(8, layers=4, steps=2, **layout)  # type: ignore[arg-type]
    return replace(of, hardware=replace(of.hardware, gpus_per_node=node))


def _run(job: Job, out: Path) -> Run:
    written(job, out)
    return tracekit.load(out, cache=False)


def _placed_ns(job: Job, axes: Sequence[str]) -> float:
    assert job.hybrid is not None
    return engine.total_ns(replace(job, hybrid=replace(job.hybrid, rank_order=tuple(axes)))) / job.steps


@pytest.mark.parametrize(
    ("node", "layout", "text", "axes", "moved"),
    [
        pytest.param(
            4,
            {"tp": 4},
            "dp-tp",
            ["dp_replicate"],
            "dp_replicate inside nodes, tp across nodes",
            marks=pytest.mark.accuracy,
        ),
        pytest.param(
            2,
            {"tp": 2, "pp": 2},
            "dp-tp-pp",
            ["dp_replicate"],
            "dp_replicate inside nodes, tp across nodes",
            marks=pytest.mark.accuracy,
        ),
        (2, {"tp": 2, "pp": 2}, "pp,tp,dp", ["pp", "tp"], "pp inside nodes, tp across nodes"),
        pytest.param(
            4,
            {"tp": 2, "pp": 2},
            "tp-pp-dp",
            ["tp", "pp"],
            "pp inside nodes, dp_replicate across nodes",
            marks=pytest.mark.accuracy,
        ),
    ],
    ids=["tensor and data", "data inside", "pipeline inside", "data across"],
)
def test_ranks_on_other_nodes_are_predicted(
    tmp_path: Path, node: int, layout: dict[str, int], text: str, axes: list[str], moved: str
) -> None:
    job = _job(node, **layout)
    found = pipeline_changes.predict_rank_order(_run(job, tmp_path / "run"), text)
    assert sorted(found.name.partition("(")[2].rstrip(")").split(", ")) == sorted(moved.split(", "))
    assert abs(found.saved_ratio) > 0.01
    assert found.predicted_ns == pytest.approx(_placed_ns(job, axes), rel=CLOSE)


def test_without_a_group_inside_a_node_its_bandwidth_must_be_given(tmp_path: Path, wording: Wording) -> None:
    job = _job(2, tp=4)
    run = _run(job, tmp_path / "run")
    with wording.raises(InputError):
        pipeline_changes.predict_rank_order(run, "tp-dp")
    # Data-parallel groups of two fit into nodes of two; the device's links are known by its name.
    by_device = pipeline_changes.predict_rank_order(run, "dp-tp")
    given = pipeline_changes.predict_rank_order(run, "dp-tp", job.hardware.node_bytes_per_s)
    assert given.predicted_ns == pytest.approx(_placed_ns(job, ["dp_replicate"]), rel=CLOSE)
    assert by_device.predicted_ns == pytest.approx(given.predicted_ns, rel=CLOSE)


@pytest.mark.parametrize(
    ("text", "message"),
    [("tp", "must name each axis of the mesh once, such as tp-dp-pp"), ("tp-dp-pp-up", "is 'tp-dp-pp-up'")],
)
def test_an_order_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    run = _run(_job(4, tp=2, pp=2), tmp_path / "run")
    with pytest.raises(InputError, match=message):
        pipeline_changes.predict_rank_order(run, text)


@pytest.mark.accuracy  # the order of axes is checked above
def test_groups_of_other_axes_in_the_manifest_are_left_out(tmp_path: Path) -> None:
    job = _job(4, tp=4)
    run = _run(job, tmp_path / "run")
    expected = pipeline_changes.predict_rank_order(run, "dp-tp")
    for more in ({"rows": [[0, 1]]}, {"cp": [[]]}, {"ep": [[], [0, 1]]}):
        run.manifest["groups"] |= more  # type: ignore[index]
    assert pipeline_changes.predict_rank_order(run, "dp-tp") == expected


def test_ranks_of_one_node_have_no_other_order(tmp_path: Path, wording: Wording) -> None:
    with wording.raises(InputError):
        pipeline_changes.predict_rank_order(_run(_job(8, tp=2, pp=2), tmp_path / "run"), "tp-dp-pp")


def test_a_job_with_another_order_is_not_written(tmp_path: Path) -> None:
    job = _job(4, tp=2, pp=2)
    assert job.hybrid is not None
    with pytest.raises(InputError, match="not written"):
        written(replace(job, hybrid=replace(job.hybrid, rank_order=("pp",))), tmp_path / "run")

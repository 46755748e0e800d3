"""The bandwidth of transfers between stages, on simulated links of known speed."""

from dataclasses import replace
from pathlib import Path

import pytest

import tracekit
from tests.unit.simulate.jobs import pipelined, written
from tracekit.analysis.parallelism import pipeline_links
from tracekit.rules.engine import check
from tracekit.rules.pipeline import PipelineBubble
from tracekit.rules.rule import Finding
from tracekit.simulate.job import Job


def across_nodes() -> Job:
    """Return a pipeline of two nodes with one GPU each; a message of 16 MiB takes 0.2 ms."""
    job = pipelined(2, pp=2, steps=1)
    return replace(job, hardware=replace(job.hardware, gpus_per_node=1))


def judged(out: Path) -> tuple[Finding, ...]:
    return check(tracekit.load(out, cache=False), [PipelineBubble()]).findings


@pytest.mark.parametrize(("job", "is_inside"), [(pipelined(2, pp=2, steps=1), True), (across_nodes(), False)])
def test_the_rate_of_transfers_is_that_of_their_links(job: Job, is_inside: bool, tmp_path: Path) -> None:
    written(job, tmp_path, "slow-pipeline-links:4")
    rates = pipeline_links.transfer_rates(tracekit.load(tmp_path, cache=False))
    of = job.hardware.node_bytes_per_s if is_inside else job.hardware.network_bytes_per_s
    assert rates == {is_inside: pytest.approx(of / 4, rel=0.15)}


def test_slow_links_between_all_stages_are_a_warning_that_names_their_rate(tmp_path: Path) -> None:
    written(across_nodes(), tmp_path, "slow-pipeline-links:40")
    (found,) = judged(tmp_path)
    assert "GB/s only" in found.message
    assert "NCCL_DEBUG" in found.fix


def test_links_as_fast_as_usual_are_none(tmp_path: Path) -> None:
    written(across_nodes(), tmp_path)
    assert judged(tmp_path) == ()

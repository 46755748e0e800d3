"""Transfers between stages: bandwidth on simulated links of known speed, and delays on drawn timelines."""

import warnings
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import drawn_pipelines, drawn_traces
from tests.unit.simulate.jobs import pipelined, written
from tracekit.analysis.parallelism import pipeline_communication
from tracekit.ingest import loader
from tracekit.model import schema
from tracekit.rules.engine import check
from tracekit.rules.pipeline import PipelineBubble
from tracekit.rules.rule import Finding
from tracekit.simulate.job import Job

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "demo-fsdp2"


def test_collectives_of_saves_have_no_spans_and_the_others_lie_in_the_recording():
    run = loader.load(SAMPLE)
    calls = run.table(pipeline_communication.data_parallel_calls)
    assert calls["dur_ns"].null_count()  # calls of the save are not part of the transfers of steps
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy warns where it casts a missing time
        spans = pipeline_communication.exposed_spans(run)
    for (_, rank), exposed in spans.items():
        own = calls.filter(rank=rank)
        assert exposed.size
        assert own["start_ns"].min() <= exposed.min() < exposed.max() <= own["end_ns"].max()


def across_nodes() -> Job:
    """Return a pipeline of two nodes with one GPU each; a message of 16 MiB takes 0.2 ms."""
    job = pipelined(2, pp=2, steps=1)
    return replace(job, hardware=replace(job.hardware, gpus_per_node=1))


def judged(out: Path) -> tuple[Finding, ...]:
    return check(tracekit.load(out, cache=False), [PipelineBubble()]).findings


@pytest.mark.parametrize(("job", "is_inside"), [(pipelined(2, pp=2, steps=1), True), (across_nodes(), False)])
def test_the_rate_of_transfers_is_that_of_their_links(job: Job, is_inside: bool, tmp_path: Path) -> None:
    written(job, tmp_path, "slow-pipeline-links:4")
    rates = pipeline_communication.transfer_rates(tracekit.load(tmp_path, cache=False))
    of = job.hardware.node_bytes_per_s if is_inside else job.hardware.network_bytes_per_s
    assert rates == {is_inside: pytest.approx(of / 4, rel=0.15)}


def test_slow_links_between_all_stages_are_a_warning_that_names_their_rate(tmp_path: Path) -> None:
    written(across_nodes(), tmp_path, "slow-pipeline-links:40")
    (found,) = judged(tmp_path)
    assert "only reach" in found.message
    assert "NCCL_DEBUG" in found.fix


def test_links_as_fast_as_usual_are_none(tmp_path: Path) -> None:
    written(across_nodes(), tmp_path)
    assert judged(tmp_path) == ()


def arrivals(run):
    rows = run.table(pipeline_communication.arrivals).filter(action="forward", micro_batch=0)
    return rows.select("source_rank", "rank", "delay_ns").rows()


def with_compute(trace, start_ns, dur_ns):
    """Return a trace with more compute outside of the pipeline's actions."""
    more = {"id": 900, "launch_id": 1, "lane": 0, "name": "adam", "kind": "compute", "step": 0}
    more |= {"start_ns": start_ns, "dur_ns": dur_ns}
    return trace.replace(activities=pl.concat([trace.activities, schema.ACTIVITIES.conform(pl.DataFrame([more]))]))


# rank 1 waits from 0 to 6; its input is complete at 2
PICTURE = """
    0 0  00..............aa
    1 1  ......0000aaaa....
"""


def test_from_the_input_to_the_action_a_waiting_rank_waits_for_the_transfer():
    assert arrivals(drawn_pipelines.run(PICTURE)) == [(0, 1, 4000)]


def test_a_rank_that_computes_outside_of_the_pipeline_does_not_wait_for_the_transfer():
    first, second = drawn_pipelines.traces(PICTURE)
    assert arrivals(drawn_traces.run(first, with_compute(second, 1000, 5000))) == []
    assert arrivals(drawn_traces.run(first, with_compute(second, 2000, 300))) == [(0, 1, 4000)]
    assert arrivals(drawn_traces.run(first, with_compute(second, 0, 2000))) == [(0, 1, 4000)]

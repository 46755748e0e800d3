"""The rules of streams on simulated runs with each fault: each found with its simulated slowdown, and nothing else."""

from functools import cache
from pathlib import Path

import polars as pl
import pytest

from tests.unit.simulate.jobs import job, written
from tracekit.analysis.compute import collective_contention, compute_gap_causes, contention
from tracekit.analysis.compute.contention import COMMUNICATION, COMPUTE, PREPARATION
from tracekit.ingest.loader import load
from tracekit.model.run import Run
from tracekit.report import summary_tables
from tracekit.report.render import text
from tracekit.rules.contention import ContendedCompute, StarvedCollectives
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity
from tracekit.rules.streams import GiveWay, SerializedStreams

FAULTS = {
    "STREAM001": ("give-way", {"strategy": "yafsdp", "machine": "h100-80", "gpus": 32}),
    "STREAM002": ("serialized-communicators", {"strategy": "fsdp2"}),
    "STREAM003": ("sm-contention", {"strategy": "ddp", "machine": "v100-32", "gpus": 64, "seq": 4096}),
    "STREAM004": ("starved-collectives", {"strategy": "fsdp2", "machine": "v100-32", "gpus": 64}),
    "": ("", {"strategy": "fsdp2", "machine": "v100-32"}),
}
RULES = (GiveWay, SerializedStreams, ContendedCompute, StarvedCollectives)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Return a function that gives the run with a fault and its true cost as a share of the run."""

    @cache
    def of(code: str) -> tuple[Run, float]:
        fault, changes = FAULTS[code]
        out: Path = tmp_path_factory.mktemp("runs") / (fault or "healthy")
        done = written(job(layers=4, steps=3, **changes), out, *([fault] if fault else []))
        cost_ns = sum(known.cost_ns * len(known.steps) for known in done.known_faults if known.code == code)
        return load(out), cost_ns / done.recording.total_ns

    return of


@pytest.mark.parametrize("code", FAULTS)
def test_each_fault_fires_exactly_its_rule(simulated, code):
    run, share = simulated(code)
    found = {f.code: f for f in check(run, [rule() for rule in RULES]).findings if f.severity >= Severity.WARNING}
    assert set(found) == ({code} if code else set())
    if code:
        assert share >= 0.03
        assert found[code].impact >= 0.8 * share


def between(table, kind, concurrent_kind):
    return table.filter(pl.col("kind") == kind, pl.col("concurrent_kind") == concurrent_kind).row(0, named=True)


def test_slowdowns_equal_the_simulated_ones(simulated):
    crawling = between(simulated("STREAM001")[0].table(contention.pairs), PREPARATION, COMPUTE)
    assert crawling["slowdown"] == pytest.approx(1 + 1.74, rel=0.02)
    contended = between(simulated("STREAM003")[0].table(contention.pairs), COMPUTE, COMMUNICATION)
    assert contended["slowdown"] == pytest.approx(1.6, rel=0.02)
    starved = contention.pool_pairs(simulated("STREAM004")[0].table(collective_contention.by_step))
    assert between(starved, COMMUNICATION, COMPUTE)["slowdown"] == pytest.approx(2.0, rel=0.02)
    healthy = between(simulated("")[0].table(contention.pairs), COMPUTE, COMMUNICATION)
    assert healthy["slowdown"] == pytest.approx(1.03, rel=0.02)
    assert healthy["low"] <= healthy["slowdown"] <= healthy["high"]


def test_all_pairs_are_shown_in_one_table(simulated):
    rows = collective_contention.all_pairs(simulated("")[0])
    assert {(COMPUTE, COMMUNICATION), (COMMUNICATION, COMPUTE)} <= set(rows.select("kind", "concurrent_kind").rows())
    shown = text.render(summary_tables.document(rows), width=120)
    assert "slowdown" in shown
    assert (
        text.render(summary_tables.document(rows.clear()), width=120)
        == "The traces contain no work of two kinds that run concurrently on a device.\n"
    )


def test_chains_pass_through_the_next_all_gather_and_their_causes_sum_to_the_gap(simulated):
    run, share = simulated("STREAM001")
    (found,) = check(run, [GiveWay()]).findings
    assert found.impact == pytest.approx(share, rel=0.15)
    chains = run.table(compute_gap_causes.chains).filter(pl.col("rank") == 0, pl.col("step") == 1)
    delayed = chains.filter(pl.col("contention_ns") > 0)
    assert set(delayed["unit"]) == {"layers.1", "layers.2", "layers.3"}
    causes = ("host_ns", "preparation_ns", "contention_ns", "compute_ns", "copy_ns", "unknown_ns")
    assert chains.select(pl.sum_horizontal(causes)).to_series().to_list() == chains["dur_ns"].to_list()
    # Compute waits for the reduce-scatter too, but most of it for the all-gather behind it.
    waits = run.trace(0).collectives.join(
        compute_gap_causes.compute_gap_causes(run.trace(0)).filter(cause="collective", step=1, phase="backward"),
        left_on="activity_id", right_on="collective_id",
    )  # fmt: skip
    assert "all_gather" in waits["op"].to_list()

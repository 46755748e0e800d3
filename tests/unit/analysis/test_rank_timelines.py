"""Rank timelines: states and awaited ranks, which add up to the breakdown."""

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces, rule_examples
from tests.support.cli_runner import tracekit
from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.parallelism import rank_timelines
from tracekit.analysis.time import breakdown
from tracekit.ingest import loader
from tracekit.report import charts
from tracekit.rules import engine
from tracekit.sync import alignment

RUNS = {
    "one is late": lambda: rule_examples.straggler_run(0, 3),
    "they take turns": lambda: rule_examples.straggler_run(0, 2, 3, turns=True),
    "together": lambda: rule_examples.straggler_run(1, 1),
    "alone": lambda: drawn_traces.run(drawn_traces.trace(rule_examples.EXPOSED)),
}


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_rank_states_are_the_breakdown_with_exposed_communication_split_in_two(make):
    run = make()
    states = run.table(rank_timelines.states)
    by_rank = {row["rank"]: row for row in run.table(breakdown.by_rank).iter_rows(named=True)}
    for rank, row in by_rank.items():
        rank_ns = dict(states.filter(pl.col("rank") == rank).group_by("state").agg(pl.col("dur_ns").sum()).iter_rows())
        assert rank_ns.get("compute", 0) == row["compute_ns"]
        assert rank_ns.get("transfer", 0) + rank_ns.get("waiting", 0) == row["exposed_communication_ns"]
    split = run.table(exposed_communication.exposed_by_step)
    waited = states.filter(pl.col("state") == "waiting")["dur_ns"].sum()
    assert split["waited_ns"].sum() == waited


def test_waiting_lasts_until_the_last_rank_arrives():
    states = rule_examples.straggler_run(0, 3).table(rank_timelines.states)
    waits = states.filter(pl.col("state") == "waiting")
    assert waits.select("rank", "peer_rank", "dur_ns").unique().rows() == [(0, 1, 3 * drawn_hosts.UNIT_NS)]
    assert waits.height == 12
    assert set(states.filter(pl.col("state") == "transfer")["dur_ns"]) == {2 * drawn_hosts.UNIT_NS}


def test_totals_of_a_window_sum_to_its_length_on_every_rank():
    states = rule_examples.straggler_run(0, 3).table(rank_timelines.states)
    start = states["start_ns"].min()
    window = (start + drawn_hosts.UNIT_NS, start + 19 * drawn_hosts.UNIT_NS)
    table = rank_timelines.totals(states, window)
    assert table["rank"].to_list() == [0, 1]
    parts = [f"{doing}_ns" for doing in rank_timelines.STATES] + ["idle_ns"]
    assert table.select(pl.sum_horizontal(parts)).to_series().to_list() == [18 * drawn_hosts.UNIT_NS] * 2
    assert table["waiting_for_1_ns"].to_list() == [table["waiting_ns"][0], 0]


def test_a_figure_has_a_row_per_rank_and_names_the_awaited_rank():
    states = rule_examples.straggler_run(0, 3).table(rank_timelines.states)
    window = (states["start_ns"].min(), (states["start_ns"] + states["dur_ns"]).max())
    figure = charts.rank_activity(states, window)
    assert list(figure.layout.yaxis.ticktext) == ["rank 0", "rank 1"]
    waits = next(bar for bar in figure.data if bar.name == "waiting for a late rank")
    assert set(waits.y) == {0}
    assert all("rank 1 arrives last" in words for words in waits.hovertext)
    assert sum(waits.x) == pytest.approx(12 * 3 * drawn_hosts.UNIT_NS / 1e6)


def test_a_crowded_figure_drops_short_spans_first():
    cells = "a." * 6500 + "c" * 4000
    run = drawn_traces.run(drawn_traces.trace(f"step {'0' * len(cells)}\ncompute {cells}"))
    states = run.table(rank_timelines.states)
    assert states.height > 6000
    window = (states["start_ns"].min(), (states["start_ns"] + states["dur_ns"]).max())
    bars = charts.rank_activity(states, window).data[0]
    assert len(bars.x) <= 6000
    assert max(bars.x) >= 4000 / 1e6


@pytest.mark.parametrize("run_name", ["one is late", "they take turns"])
def test_others_lose_to_a_rank_at_least_the_longest_wait_for_it(run_name):
    run = RUNS[run_name]()
    spread, states = run.table(rank_timelines.spread), run.table(rank_timelines.states)
    placed_steps = alignment.on_run_clock(spread, run.offsets, ("start_ns",))
    for rank, step, lost_ns, awaited_ns in spread.select("rank", "step", "lost_ns", "awaited_ns").iter_rows():
        waits_ns = []
        for other, begin_ns, dur_ns in (
            placed_steps.filter(pl.col("rank") != rank, step=step).select("rank", "start_ns", "duration_ns").iter_rows()
        ):
            waits = states.filter(state="waiting", rank=other, peer_rank=rank)
            in_step = waits.filter(pl.col("start_ns").is_between(begin_ns, begin_ns + dur_ns - 1))
            waits_ns.append(in_step["dur_ns"].sum())
        assert awaited_ns == max(waits_ns)
        assert lost_ns >= awaited_ns
    assert spread["lost_ratio"].sum() > 0


def test_others_lose_to_a_rank_what_its_finding_says_also_where_compute_hides_the_wait(tmp_path):
    layout = ("--gpus", "12", "--ranks-written", "12", "--layers", "2", "--steps", "3", "--fault", "slow-rank:7")
    assert tracekit("simulate", *layout, "--out", tmp_path / "run").returncode == 0
    run = loader.load(str(tmp_path / "run"), cache=False)
    report = engine.check(run)
    (straggler,) = [finding for finding in report.findings if finding.code == "RANK001"]
    spread = run.table(rank_timelines.spread)
    late = spread.filter(rank=7)
    assert straggler.ranks == (7,)
    assert straggler.measured_ns in late["lost_ns"]
    assert late["lost_ns"].sum() > late["awaited_ns"].sum()
    assert spread.filter(pl.col("rank") != 7)["lost_ns"].sum() == 0

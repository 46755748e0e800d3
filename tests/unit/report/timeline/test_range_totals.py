"""The totals of a range against a mask of every ns, against SQL over the tables, and against the breakdown of steps."""

import random
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import drawn_traces
from tracekit.analysis.compute import efficiency
from tracekit.analysis.time import breakdown
from tracekit.ingest.loader import load
from tracekit.report import timeline
from tracekit.report.export import perfetto

SAMPLES = Path(__file__).parents[4] / "sample_traces"
KINDS = ("compute", "communication", "memcpy", "memset")
LANES = ("compute a", "comm a", "copy a")
LANE_OF = {"compute": 0, "communication": 1, "memcpy": 2, "memset": 2}
SLICES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 90), st.integers(0, 30), st.sampled_from("ab")), max_size=25
)


def drawn(rank, rows):
    """A trace of (kind, start_ns, dur_ns, name) on one device, with a lane each for compute, communication, copies."""
    rows = sorted(rows, key=lambda row: row[1]) or [("compute", 0, 1, "a")]
    activities = pl.DataFrame(
        [
            {"id": n, "name": name, "kind": kind, "start_ns": start, "dur_ns": dur, "lane": LANE_OF[kind]}
            for n, (kind, start, dur, name) in enumerate(rows)
        ]
    )
    return drawn_traces.trace("\n".join(LANES), rank=rank, activities=activities)


@given(st.lists(SLICES, min_size=1, max_size=3), st.integers(-5, 100), st.integers(1, 80))
@settings(max_examples=15, deadline=None)
def test_times_are_those_of_a_mask_of_every_ns(ranks, begin, length):
    scene = timeline.open_scene(drawn_traces.run(*(drawn(rank, rows) for rank, rows in enumerate(ranks))))
    origin = scene.span[0]
    window = (origin + begin, origin + begin + length)
    totals = timeline.range_totals(scene, window)
    every = _slices(scene)
    for row in totals.by_rank.iter_rows(named=True):
        own = [each for each in every if each["rank"] == row["rank"]]
        compute, communication, copy = (
            _mask(own, window, kinds) for kinds in (("compute",), ("communication",), ("memcpy", "memset"))
        )
        assert row["compute_ns"] == compute.sum()
        assert row["exposed_communication_ns"] == (communication & ~compute).sum()
        assert row["exposed_copy_ns"] == (copy & ~compute & ~communication).sum()
        assert row["idle_ns"] == (~(compute | communication | copy)).sum()
        assert (row["communication_ns"], row["copy_ns"]) == (communication.sum(), copy.sum())
    for row in totals.by_kind.iter_rows(named=True):
        masks = [_mask([e for e in every if e["rank"] == rank], window, (row["kind"],)) for rank in range(len(ranks))]
        assert row["busy_ns"] == sum(mask.sum() for mask in masks)
    names = timeline.names(scene, totals.by_name["name_id"])
    found = {
        (kind, name): (count, total)
        for kind, name, count, total in zip(
            totals.by_name["kind"], names, totals.by_name["count"], totals.by_name["total_ns"], strict=True
        )
    }
    expected = {}
    for each in every:
        start, end = each["start_ns"], each["start_ns"] + each["dur_ns"]
        if start < window[1] and (end > window[0] or start >= window[0]):
            count, total = expected.get((each["kind"], each["name"]), (0, 0))
            inside = min(end, window[1]) - max(start, window[0])
            expected[each["kind"], each["name"]] = (count + 1, total + inside)
    assert found == expected


def _slices(scene):
    begin, end = scene.span
    view = timeline.view(scene, (begin, end + 1), max(end - begin + 1, 1))
    rank = dict(scene.tracks.select("track", "rank").iter_rows())
    names = timeline.names(scene, view["name_id"])
    return [
        row | {"rank": rank[row["track"]], "kind": timeline.KINDS[row["kind"]], "name": name}
        for row, name in zip(view.to_dicts(), names, strict=True)
    ]


def _mask(slices, window, kinds):
    mask = np.zeros(window[1] - window[0], bool)
    for each in slices:
        if each["kind"] in kinds:
            edges = (each["start_ns"], each["start_ns"] + each["dur_ns"])
            start, end = (min(max(at - window[0], 0), len(mask)) for at in edges)
            mask[start:end] = True
    return mask


@pytest.fixture(scope="module", params=["gpu/slow-rank", "demo-fsdp2"])
def sample(request):
    run = load(SAMPLES / request.param)
    return run, timeline.open_scene(run)


def test_times_of_names_are_those_of_sql_over_the_activities(sample):
    run, scene = sample
    random.seed(5)
    database = duckdb.connect()
    activities = pl.concat(
        _on_run_clock(run, scene, rank).with_columns(pl.lit(rank, pl.Int64).alias("rank")) for rank in run.ranks
    )
    database.register("activities", activities.to_arrow())
    for _ in range(5):
        begin, end = sorted(random.sample(range(*scene.span), 2))
        rows = database.sql(
            f"""SELECT kind, name, count(*), sum(least(end_ns, {end}) - greatest(start_ns, {begin}))::BIGINT,
            count(DISTINCT rank) FROM activities
            WHERE start_ns < {end} AND (end_ns > {begin} OR start_ns >= {begin}) GROUP BY kind, name"""
        ).fetchall()
        totals = timeline.range_totals(scene, (begin, end)).by_name
        names = timeline.names(scene, totals["name_id"])
        found = zip(totals["kind"], names, totals["count"], totals["total_ns"], totals["ranks"], strict=True)
        assert sorted(found) == sorted(rows)


def _on_run_clock(run, scene, rank):
    clock = perfetto.clocks(run)[scene.window, rank]
    rows = run.trace(rank, scene.window).activities.select("kind", "name", "start_ns", "dur_ns").drop_nulls()
    start = clock.to_run(rows["start_ns"].to_numpy())
    end = clock.to_run((rows["start_ns"] + rows["dur_ns"]).to_numpy())
    return rows.with_columns(start_ns=pl.Series(start), end_ns=pl.Series(end))


def test_the_range_of_a_step_has_the_breakdown_of_the_step():
    run = load(SAMPLES / "gpu/compiled")  # one rank: its clock is that of the run
    scene = timeline.open_scene(run)
    for step in run.table(breakdown.by_step).iter_rows(named=True):
        window = (step["start_ns"], step["start_ns"] + step["duration_ns"])
        (row,) = timeline.range_totals(scene, window).by_rank.to_dicts()
        for name in ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns", "communication_ns"):
            assert row[name] == step[name], name


@pytest.mark.parametrize("name", ["gpu/compiled", "demo-fsdp2"])
def test_flops_of_the_whole_run_are_those_of_its_steps(name):
    run = load(SAMPLES / name)
    scene = timeline.open_scene(run)
    steps = run.table(efficiency.by_step)
    rates = timeline.range_rates(run, scene, (scene.span[0], scene.span[1] + 1))
    for rank, flops in rates.select("rank", "flops").iter_rows():
        assert flops == pytest.approx(steps.filter(rank=rank)["flops"].sum(), rel=1e-9)
        assert flops > 0


def test_halves_of_a_range_add_up_to_the_range(sample):
    run, scene = sample
    begin, end = scene.span
    middle = (begin + end) // 2
    whole, *halves = (timeline.range_rates(run, scene, part) for part in ((begin, end), (begin, middle), (middle, end)))
    for name in ("bus_bytes", "copied_bytes", "flops"):
        parts = [half[name].sum() for half in halves]
        assert sum(parts) == pytest.approx(whole[name].sum(), rel=1e-9)
    assert whole["bus_bytes"].sum() > 0


def test_an_empty_range_is_refused(sample):
    _, scene = sample
    with pytest.raises(ValueError, match="empty"):
        timeline.range_totals(scene, (scene.span[0], scene.span[0]))

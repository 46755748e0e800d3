"""What a view shows against what is there, slice by slice, and searches against a plain scan."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests.support import drawn_traces
from tracekit.model import schema
from tracekit.report import timeline
from tracekit.report.export import perfetto
from tracekit.report.export.perfetto import Clock
from tracekit.report.timeline import Scene

ROOT = Path(__file__).parents[4]
NAMES = ("aa", "bb", "Gemm <b>")
TIMES = st.one_of(st.integers(0, 60), st.integers(0, 5000))
SLICES = st.lists(st.tuples(st.sampled_from(NAMES), TIMES, st.one_of(st.integers(0, 9), TIMES)), max_size=40)
EPOCH_NS = 1_790_000_000_000_000_000
BASES = st.sampled_from([0, -2500, EPOCH_NS])
VIEWS = st.lists(st.tuples(st.integers(-10, 6000), st.integers(1, 11_000), st.integers(1, 60)), min_size=1, max_size=6)


def host(*rows: tuple[str, int, int], lane: int = 9) -> pl.DataFrame:
    """Return an ops table of (name, start_ns, dur_ns) on one thread."""
    table = pl.DataFrame(rows, schema={"name": str, "start_ns": int, "dur_ns": int}, orient="row").with_row_index("id")
    return schema.OPS.conform(table.with_columns(kind=pl.lit("cpu_op"), lane=pl.lit(lane)))


def scene_of(*traces) -> Scene:
    return timeline.open_scene(drawn_traces.run(*traces))


def whole(scene: Scene) -> list[dict]:
    """Return every slice of the scene, as the finest view gives it."""
    begin, end = scene.span
    found = timeline.view(scene, (begin, end + 1), end - begin + 1)
    assert found["count"].eq(1).all()
    assert found["id"].null_count() == 0
    return found.to_dicts()


def end_of(each: dict) -> int:
    return each["start_ns"] + each["dur_ns"]


def is_touching(each: dict, begin: int, end: int) -> bool:
    return each["start_ns"] < end and (end_of(each) > begin or each["start_ns"] >= begin)


def row_of(each: dict) -> tuple[int, int]:
    return each["track"], each["row"]


def table_rows(trace, name: str, clock: Clock = Clock()) -> list[tuple[str, int, int, int]]:  # noqa: B008  # frozen
    table = getattr(trace, name)
    ids = table["id"] if "id" in table.columns else pl.Series(range(table.height))
    start = clock.to_run(table["start_ns"].to_numpy())
    end = clock.to_run((table["start_ns"] + table["dur_ns"]).to_numpy())
    return [(name, *row) for row in zip(ids, start.tolist(), (end - start).tolist(), strict=True)]


# Nothing is lost -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=8)
@given(SLICES, SLICES)
def test_the_finest_view_has_every_slice_of_the_tables_and_none_overlaps_another_in_its_row(ops, work):
    activities = pl.DataFrame(work, schema=["name", "start_ns", "dur_ns"], orient="row", strict=False)
    activities = activities.with_row_index("id").with_columns(lane=pl.lit(0), kind=pl.lit("compute"))
    trace = drawn_traces.trace("compute a", activities=activities, ops=host(*ops))
    scene = scene_of(trace)
    found = whole(scene)
    source = dict(scene.tracks.select("track", "source").iter_rows())
    back = Counter((source[s["track"]], s["id"], s["start_ns"], s["dur_ns"]) for s in found)
    assert back == Counter(table_rows(trace, "ops") + table_rows(trace, "activities"))
    for one, other in pairwise(found):
        assert row_of(one) != row_of(other) or end_of(one) <= other["start_ns"]


SHARED = ROOT.parent / "shared" / "traces"
REAL = [
    *(ROOT / "sample_traces" / name for name in ("demo-yafsdp", "faults/churn")),
    *(SHARED / name for name in ("tracelens_h100_memory_stacks", "hta_cpu_gloo")),
]


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_recorded_traces_have_as_many_slices_as_their_tables_and_the_same_time_at_every_zoom(path):
    if not path.is_dir():
        pytest.skip(f"{path.name} is not here")
    run = tracekit.load(path)
    scene = timeline.open_scene(run)
    begin, end = scene.span
    clocks = perfetto.clocks(run)
    there = [
        dur_ns
        for trace in run.traces()
        for name in ("ops", "activities", "checkpoints")
        for _, _, _, dur_ns in table_rows(trace, name, clocks[0, trace.rank])
    ]
    for pixels in (10**6, 10**4, 1400, 1):
        found = timeline.view(scene, (begin, end + 1), pixels)
        assert (found["count"].sum(), found["busy_ns"].sum()) == (len(there), sum(there))
    assert scene.tracks["track"].to_list() == list(range(scene.tracks.height))
    assert set(scene.bands["kind"]) <= {"step", "unit"}
    assert scene.bands.filter(kind="step").height == sum(
        trace.steps.drop_nulls(["start_ns", "end_ns"]).height for trace in run.traces()
    )


# What is seen --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(SLICES, SLICES, VIEWS, BASES)
def test_a_view_has_what_is_a_pixel_wide_as_it_is_and_of_the_rest_the_exact_time(first, second, views, base_ns):
    ranks = [host(*((name, base_ns + start, dur) for name, start, dur in ops)) for ops in (first, second)]
    scene = scene_of(*(drawn_traces.trace("compute .", rank=rank, ops=ops) for rank, ops in enumerate(ranks)))
    slices = whole(scene)
    for first_ns, length, pixels in views:
        begin = base_ns + first_ns
        found = timeline.view(scene, (begin, begin + length), pixels).to_dicts()
        check_rectangles(found, slices, (begin, begin + length), length / pixels)
        most = max(Counter(map(row_of, found)).values(), default=0)
        assert most <= 5 * pixels + 5


def check_rectangles(found: list[dict], slices: list[dict], part: tuple[int, int], pixel_ns: float) -> None:
    covered: Counter = Counter()
    exact = {(row_of(s), s["id"], s["start_ns"], s["dur_ns"]) for s in slices}
    for each in found:
        assert is_touching(each, *part)
        merged = [s for s in slices if holds(each, s)]
        if each["count"] == 1:
            assert (row_of(each), each["id"], each["start_ns"], each["dur_ns"]) in exact
        else:
            assert each["id"] is None
            assert each["dur_ns"] <= 3 * pixel_ns
        assert len(merged) == each["count"]
        assert sum(s["dur_ns"] for s in merged) == each["busy_ns"]
        assert (each["start_ns"], end_of(each)) == (merged[0]["start_ns"], end_of(merged[-1]))
        assert each["name_id"] == longest_name(merged)
        covered.update((s["track"], s["id"]) for s in merged)
    assert set(covered.values()) <= {1}
    alone = {(f["track"], f["id"]) for f in found}
    for each in slices:
        if is_touching(each, *part):
            assert covered[each["track"], each["id"]] == 1
            assert each["dur_ns"] < pixel_ns or (each["track"], each["id"]) in alone


def holds(rectangle: dict, each: dict) -> bool:
    if row_of(rectangle) != row_of(each):
        return False
    if rectangle["count"] == 1:
        return rectangle["id"] == each["id"]
    return rectangle["start_ns"] <= each["start_ns"] and end_of(each) <= end_of(rectangle)


def longest_name(merged: list[dict]) -> int:
    busy: Counter = Counter()
    for each in merged:
        busy[each["name_id"]] += each["dur_ns"]
    return min(busy, key=lambda name: (-busy[name], name))


def test_slices_too_short_to_see_become_one_that_says_how_full_it_is():
    # time   0         10        20        30
    # host   aabbb.bb..cccccccccc..........dd....
    scene = scene_of(
        drawn_traces.trace("compute .", ops=host(("a", 0, 2), ("b", 2, 3), ("b", 6, 2), ("c", 10, 10), ("d", 30, 2)))
    )
    found = timeline.view(scene, (0, 40), 4)
    assert found.select("start_ns", "dur_ns", "id", "count", "busy_ns").rows() == [
        (0, 8, None, 3, 7),
        (10, 10, 3, 1, 10),
        (30, 2, 4, 1, 2),
    ]
    assert timeline.names(scene, found["name_id"]) == ["b", "c", "d"]
    assert [timeline.KINDS[kind] for kind in found["kind"]] == ["cpu_op"] * 3
    assert found.schema == pl.Schema(timeline.VIEW)


def test_a_view_of_some_tracks_has_those_and_no_others():
    traces = [drawn_traces.trace("compute aa.bb\ncomm .cc", rank=rank) for rank in (0, 1)]
    scene = scene_of(*traces)
    assert scene.tracks.select("rank", "group", "role").rows() == [
        (rank, "GPU 0", role) for rank in (0, 1) for role in ("compute", "communication")
    ]
    everything = timeline.view(scene, scene.span, 1000)
    for chosen in ([], [1], [2, 1], [99, -1, 3]):
        found = timeline.view(scene, scene.span, 1000, chosen)
        assert found.equals(everything.filter(pl.col("track").is_in(chosen)))


def test_a_part_of_no_length_shows_nothing():
    scene = scene_of(drawn_traces.trace("compute aa"))
    assert timeline.view(scene, (1, 1), 100).is_empty()
    assert timeline.view(scene, (5, 3), 100).is_empty()


def test_a_run_without_slices_is_an_empty_scene():
    scene = scene_of(drawn_traces.trace("compute ..."))
    assert timeline.view(scene, scene.span, 100).is_empty()
    assert timeline.find_by_name(scene, "a").count == 0


def test_ranks_are_on_the_clock_of_the_run():
    # Rank 1's clock shows 1000 ns more; both leave the same three all-reduces together.
    rows = [(op, 100 * i, 50) for i, op in enumerate("xyz")]
    traces = []
    for rank, behind in ((0, 0), (1, 1000)):
        trace = drawn_traces.trace("comm xx.yy.zz", rank=rank, start_ns=behind, scale_ns=100)
        known = pl.DataFrame({"activity_id": [0, 1, 2], "op": ["all_reduce"] * 3, "group": ["0"] * 3, "seq": [0, 1, 2]})
        known = known.with_columns(group_size=pl.lit(2))
        object.__setattr__(trace, "collectives", schema.COLLECTIVES.conform(known))
        traces.append(trace)
    scene = scene_of(*traces)
    found = timeline.view(scene, scene.span, 10_000)
    assert len(rows) == 3
    assert found.filter(track=0)["start_ns"].to_list() == found.filter(track=1)["start_ns"].to_list() == [0, 300, 600]


# Searches ------------------------------------------------------------------------------------------------------------

HOSTILE = (
    "<img src=x onerror=alert(1)>", "x" * 10_000 + "END", "\u202eevil", "🎉 Straße", "", "a\nb", "STRASSE", "\x00nul",
)  # fmt: skip


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.tuples(st.sampled_from(HOSTILE + NAMES), TIMES, st.integers(0, 90)), max_size=60),
    st.lists(st.tuples(st.sampled_from(["gemm", "AA", "b", "strasse", "END", "\ud800", "", "<img", "🎉"]),
                       st.integers(0, 70)), min_size=4, max_size=4),
)  # fmt: skip
def test_a_search_finds_what_a_plain_scan_finds(ops, searches):
    half = len(ops) // 2
    traces = [
        drawn_traces.trace("compute .", rank=r, ops=host(*part)) for r, part in enumerate((ops[:half], ops[half:]))
    ]
    scene = scene_of(*traces)
    slices = whole(scene)
    names = timeline.names(scene, [each["name_id"] for each in slices])
    for text, limit in searches:
        for ranks in (None, {1}):
            there = [
                (each["start_ns"], *row_of(each), each["id"], each["dur_ns"], name)
                for each, name in zip(slices, names, strict=True)
                if text and text.casefold() in name.casefold()
                if ranks is None or scene.tracks["rank"][each["track"]] in ranks
            ]
            found = timeline.find_by_name(scene, text, ranks=ranks, limit=limit)
            assert (found.count, found.total_ns) == (len(there), sum(each[4] for each in there))
            order = ("start_ns", "track", "row", "id", "dur_ns", "name")
            assert found.table.select(order).rows() == sorted(there)[:limit]


def test_the_first_of_very_many_are_found_among_names_of_few():
    many = [("common", 10 * i, 5) for i in range(5000)]
    scene = scene_of(
        drawn_traces.trace("compute .", ops=host(*many, *((f"common {i}", 60_000 - i, 1) for i in range(300))))
    )
    found = timeline.find_by_name(scene, "COMMON", limit=100)
    assert (found.count, found.total_ns) == (5300, 25_300)
    assert found.table["start_ns"].to_list() == [10 * i for i in range(100)]


def test_names_come_back_whatever_they_hold():
    scene = scene_of(drawn_traces.trace("compute .", ops=host(*((name, i, 1) for i, name in enumerate(HOSTILE)))))
    assert timeline.names(scene, timeline.view(scene, (0, 8), 8)["name_id"]) == list(HOSTILE)

"""What a view shows against what is there, slice by slice."""

from collections import Counter
from itertools import pairwise

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import drawn
from tracekit import schema, tiles
from tracekit.tiles import Scene

NAMES = ("aa", "bb", "cc")
TIMES = st.one_of(st.integers(0, 60), st.integers(0, 5000))
SLICES = st.lists(st.tuples(st.sampled_from(NAMES), TIMES, st.one_of(st.integers(0, 9), TIMES)), max_size=60)
VIEWS = st.tuples(st.integers(-10, 6000), st.integers(1, 11_000), st.integers(1, 60))


def host(*rows: tuple[str, int, int], lane: int = 9) -> pl.DataFrame:
    """Return an ops table of (name, start_ns, dur_ns) on one thread."""
    table = pl.DataFrame(rows, schema={"name": str, "start_ns": int, "dur_ns": int}, orient="row").with_row_index("id")
    return schema.OPS.conform(table.with_columns(kind=pl.lit("cpu_op"), lane=pl.lit(lane)))


def scene_of(*traces) -> Scene:
    return tiles.open_scene(drawn.run(*traces))


def whole(scene: Scene) -> list[dict]:
    """Return every slice of the scene as the finest view gives it."""
    begin, end = scene.span
    found = tiles.view(scene, (begin, end + 1), end - begin + 1)
    assert found["count"].eq(1).all()
    assert found["id"].null_count() == 0
    return found.to_dicts()


def is_touching(each: dict, begin: int, end: int) -> bool:
    past = each["start_ns"] + each["dur_ns"]
    return each["start_ns"] < end and (past > begin or each["start_ns"] >= begin)


@settings(deadline=None, max_examples=60)
@given(SLICES, SLICES)
def test_the_finest_view_has_every_slice_of_the_tables_and_none_beside_in_its_row(ops, work):
    activities = pl.DataFrame(work, schema=["name", "start_ns", "dur_ns"], orient="row", strict=False)
    activities = activities.with_row_index("id").with_columns(lane=pl.lit(0), kind=pl.lit("compute"))
    trace = drawn.trace("compute a", activities=activities, ops=host(*ops))
    scene = scene_of(trace)
    found = whole(scene)
    source = dict(scene.tracks.select("track", "source").iter_rows())
    back = Counter((source[s["track"]], s["id"], s["start_ns"], s["dur_ns"]) for s in found)
    there = [(name, *row) for name in ("ops", "activities") for row in _rows(trace, name)]
    assert back == Counter(there)
    for one, other in pairwise(found):
        if (one["track"], one["row"]) == (other["track"], other["row"]):
            assert one["start_ns"] + one["dur_ns"] <= other["start_ns"]


def _rows(trace, name: str) -> list[tuple]:
    return getattr(trace, name).select("id", "start_ns", "dur_ns").rows()


@settings(deadline=None, max_examples=150)
@given(SLICES, SLICES, VIEWS)
def test_a_view_has_what_is_a_pixel_wide_as_it_is_and_of_the_rest_the_exact_time(first, second, how):
    begin, length, pixels = how
    end, pixel_ns = begin + length, length / pixels
    scene = scene_of(*(drawn.trace("compute a", rank=r, ops=host(*ops)) for r, ops in enumerate((first, second))))
    slices = whole(scene)
    found = tiles.view(scene, (begin, end), pixels).to_dicts()
    exact = {(s["track"], s["row"], s["id"], s["start_ns"], s["dur_ns"]) for s in slices}
    covered = Counter()
    for each in found:
        assert is_touching(each, begin, end)
        if each["count"] == 1:
            assert (each["track"], each["row"], each["id"], each["start_ns"], each["dur_ns"]) in exact
            assert each["busy_ns"] == each["dur_ns"]
        else:
            assert each["id"] is None
            assert each["dur_ns"] <= 3 * pixel_ns
        held = [s for s in slices if _holds(each, s)]
        assert len(held) == each["count"]
        assert sum(s["dur_ns"] for s in held) == each["busy_ns"]
        assert each["start_ns"] == held[0]["start_ns"]
        assert each["start_ns"] + each["dur_ns"] == held[-1]["start_ns"] + held[-1]["dur_ns"]
        assert each["name_id"] == _most(held)
        covered.update((s["track"], s["id"]) for s in held)
    assert all(number == 1 for number in covered.values())
    for each in slices:
        if is_touching(each, begin, end):
            assert covered[each["track"], each["id"]] == 1
            if each["dur_ns"] >= pixel_ns:
                assert any(f["id"] == each["id"] and f["track"] == each["track"] for f in found)
    of_rows = Counter((each["track"], each["row"]) for each in found)
    assert max(of_rows.values(), default=0) <= 5 * pixels + 5


def _holds(rectangle: dict, each: dict) -> bool:
    if (rectangle["track"], rectangle["row"]) != (each["track"], each["row"]):
        return False
    if rectangle["count"] == 1:
        return rectangle["id"] == each["id"]
    past, own_past = (x["start_ns"] + x["dur_ns"] for x in (rectangle, each))
    # A slice without length at the end of a run is not in it, unless it is its last.
    return rectangle["start_ns"] <= each["start_ns"] and own_past <= past and each["start_ns"] <= past


def _most(held: list[dict]) -> int:
    busy = Counter()
    for each in held:
        busy[each["name_id"]] += each["dur_ns"]
    return min(busy, key=lambda name: (-busy[name], name))

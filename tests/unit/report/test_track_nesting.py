import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.report import track_nesting

SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 8)), max_size=40)


def columns(spans):
    table = np.array(spans, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


@settings(deadline=None)
@given(SPANS)
def test_within_a_layer_slices_nest(spans):
    found = track_nesting.layers(*columns(spans))
    for i, (track, start, dur) in enumerate(spans):
        for j, (other_track, other_start, other_dur) in enumerate(spans):
            if track == other_track and found[i] == found[j]:
                assert not start < other_start < start + dur < other_start + other_dur, (i, j)


@settings(deadline=None)
@given(SPANS)
def test_a_stack_that_reads_the_events_of_a_layer_gets_every_slice_back(spans):
    track, start, dur = columns(spans)
    layered = track * 100 + track_nesting.layers(track, start, dur)
    rows, kinds, at = track_nesting.events(layered, start, dur)
    assert (np.diff(layered[rows]) >= 0).all()
    stacks: dict[int, list[tuple[int, int]]] = {}
    last: dict[int, int] = {}
    read = []
    for row, kind, at_ns in zip(rows.tolist(), kinds.tolist(), at.tolist(), strict=True):
        number = int(layered[row])
        assert at_ns >= last.get(number, at_ns)
        last[number] = at_ns
        if kind == track_nesting.BEGIN:
            stacks.setdefault(number, []).append((row, at_ns))
        else:
            begun, began_ns = stacks[number].pop()
            assert begun == row
            read.append((int(track[row]), began_ns, at_ns - began_ns))
    assert not any(stacks.values())
    assert sorted(read) == sorted(spans)


@settings(deadline=None)
@given(SPANS)
def test_in_a_row_slices_follow_each_other_and_all_but_the_top_of_a_layer_lie_below_what_encloses_them(spans):
    track, start, dur = columns(spans)
    row, layer = track_nesting.rows(track, start, dur), track_nesting.layers(track, start, dur)
    for i, (own, begin, length) in enumerate(spans):
        same = [j for j in range(len(spans)) if track[j] == own and j != i]
        for j in same:
            assert row[i] != row[j] or begin + length <= start[j] or start[j] + dur[j] <= begin
        around = [j for j in same if start[j] <= begin and begin + length <= start[j] + dur[j] and layer[j] == layer[i]]
        top = min(row[track == own][layer[track == own] == layer[i]])
        assert row[i] == top or any(row[j] == row[i] - 1 for j in around)
    assert sorted(set(row[track == 1])) == list(range(len(set(row[track == 1]))))


def test_slices_that_nest_need_one_layer():
    # time   0 1 2 3 4 5 6 7
    #        # # # # # # # #
    #        . # # # . # # #
    #        . # . # . . . .
    spans = [(0, 0, 8), (0, 1, 3), (0, 5, 3), (0, 1, 1), (0, 3, 1), (0, 4, 0)]
    assert track_nesting.layers(*columns(spans)).tolist() == [0] * 6


def test_a_chain_in_which_each_overlaps_the_next_needs_two_layers_however_long():
    spans = [(0, 10 * i, 11) for i in range(1000)]
    assert track_nesting.layers(*columns(spans)).tolist() == [0, 1] * 500


def test_very_many_that_cross_need_a_layer_each_until_others_are_free():
    count = 2000
    spans = [(0, i, count) for i in range(count)] + [(0, 10 * count + i, 0) for i in range(5)]
    assert track_nesting.layers(*columns(spans)).tolist() == [*range(count), *([0] * 5)]
    spans += [(0, 20 * count + i, 100) for i in range(70)]
    found = track_nesting.layers(*columns(spans))[-70:]
    assert sorted(found.tolist()) == list(range(70))


def test_slices_that_all_cross_need_a_layer_each_and_disturb_no_other_track():
    spans = [(7, i, 100) for i in range(50)] + [(8, i, 1) for i in range(50)]
    assert track_nesting.layers(*columns(spans)).tolist() == [*range(50), *([0] * 50)]

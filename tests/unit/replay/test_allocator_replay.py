"""Histories played again: recorded ones to the block, and simulated ones from any moment on."""

import contextlib
import random

import pytest

from tests.support.sample_snapshots import MIB, Simulation, document, event, recorded, write
from tracekit.errors import InputError
from tracekit.ingest.readers.memory_snapshot import reader
from tracekit.replay.allocator import Allocator, Overlap, Settings, playback

WHOLE = ("from_empty_fwd_bf16", "from_empty_fwd_bwd_fp32", "from_empty_init_model_rank1")
CUT = ("steady_training_step", "expandable_segments_bf16")


def history(told: dict, tmp_path) -> playback.History:
    snapshot = reader.read(write(tmp_path / "simulated.memory.pickle", told))
    return playback.from_snapshot(snapshot, snapshot.devices[0])


def of_file(name: str) -> playback.History:
    snapshot = reader.read(recorded(f"{name}.pickle"))
    return playback.from_snapshot(snapshot, int(snapshot.events["device"][0]))


def sizes(events) -> list[tuple[str, int]]:
    return [(event.action, event.bytes) for event in events]


# What others recorded -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*WHOLE, *CUT])
def test_a_recorded_history_comes_to_its_segments_addresses_and_blocks(name):
    told = of_file(name)
    assert bool(told.start) is (name in CUT)
    played = playback.replay_as_recorded(told)
    assert sizes(played.segment_allocations) == sizes(told.segment_allocations)
    assert sizes(played.segment_frees) == sizes(told.segment_frees)
    assert played.address_mismatches == 0
    assert played.final == told.final
    assert played.peak_reserved_bytes == told.peak_reserved_bytes


@pytest.mark.parametrize("name", [*WHOLE, *CUT])
def test_segments_are_taken_and_given_back_alike_wherever_they_lie(name):
    told = of_file(name)
    played = playback.replay_as_recorded(told, at_recorded_addresses=False)
    assert (sizes(played.segment_allocations), sizes(played.segment_frees)) == (
        sizes(told.segment_allocations),
        sizes(told.segment_frees),
    )


# Simulated: the reading of histories agrees with the model ------------------------------------------------------------
def work(settings: Settings, seed: int, *, steps: int = 300) -> Simulation:
    """Simulate a program of several streams and pools that allocates and frees at random."""
    rng = random.Random(seed)
    made, held, waiting = Simulation(settings), [], []
    sizes = [512, 4000, 300_000, MIB, 2 * MIB, 6 * MIB, 12 * MIB, 40 * MIB]  # no large one leaves less than 2 MiB
    for _ in range(steps):
        chance = rng.random()
        if chance < 0.5 or not held:
            held.append(made.malloc(rng.choice(sizes), stream=rng.choice((0, 0, 7)), pool=rng.choice((0, 0, 0, 1))))
        elif chance < 0.98:
            block = held.pop(rng.randrange(len(held)))
            later = rng.random() < 0.1
            made.free(block, later=later)
            waiting += [block] if later else []
        elif waiting:
            made.complete(waiting.pop())
        else:
            made.empty_cache()
    return made


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_history_comes_to_its_own_end(seed, expandable, tmp_path):
    made = work(Settings(expandable=expandable), seed)
    told = history(made.document(), tmp_path)
    played = playback.replay_as_recorded(told)
    assert told.start == ()
    assert sizes(played.segment_allocations) == sizes(told.segment_allocations)
    assert sizes(played.segment_frees) == sizes(told.segment_frees)
    assert (played.address_mismatches, played.final) == (0, told.final)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_state_before_a_cut_history_is_found_by_running_it_backwards(seed, expandable, tmp_path):
    settings = Settings(expandable=expandable)
    whole = work(settings, seed)
    first = len(work(settings, seed, steps=170).events)
    truth = {s.address: (s.bytes, s.stream, s.small) for s in work(settings, seed, steps=170).allocator.segments()}
    told = history(whole.document(first), tmp_path)
    assert {s.address: (s.bytes, s.stream, s.small) for s in told.start} == truth
    played = playback.replay_as_recorded(told)
    assert sizes(played.segment_allocations) == sizes(told.segment_allocations)
    assert sizes(played.segment_frees) == sizes(told.segment_frees)
    assert (played.address_mismatches, played.final) == (0, told.final)


def test_a_block_that_was_never_split_is_found_by_the_room_it_had(tmp_path):
    made = Simulation()
    first = made.malloc(19 * MIB + 512)  # the rest of its 20 MiB is too little to split off
    later = made.malloc(30 * MIB)
    cut = len(made.events)
    made.free(first)
    made.malloc(5 * MIB)
    made.free(later)
    told = history(made.document(cut), tmp_path)
    assert [[block.bytes for block in segment.blocks] for segment in told.start] == [[20 * MIB], [30 * MIB]]


def test_a_block_whose_end_no_neighbour_tells_is_found_by_what_was_handed_out_behind_it(tmp_path):
    made = Simulation()
    front, back = made.malloc(4 * MIB), made.malloc(3 * MIB)
    made.free(front)
    unsplit = made.malloc(4 * MIB - 512 * 1024)  # keeps the 4 MiB
    made.free(back)
    assert unsplit.bytes == 4 * MIB
    cut = len(made.events)
    made.malloc(3 * MIB)  # right behind it, while it lives
    made.free(unsplit)
    told = history(made.document(cut), tmp_path)
    assert [block.bytes / MIB for block in told.start[0].blocks] == [4, 16]


def test_a_private_pool_is_told_by_the_segment_that_holds_the_address(tmp_path):
    made = Simulation()
    common, private = made.malloc(5 * MIB), made.malloc(5 * MIB, pool=1)
    made.free(common)
    made.free(private)
    made.malloc(5 * MIB, pool=1)
    told = history(made.document(), tmp_path)
    assert (told.pool > 0).tolist() == [False, True, False, False, True, True, True]


@pytest.mark.parametrize(
    ("frames", "then", "why"),
    [
        (["torch::empty_cache"], "segment_alloc", "empty_cache"),
        (["c10::cuda::CUDACachingAllocator::Native::emptyCache()"], "segment_alloc", "empty_cache"),
        (["DeviceCachingAllocator::garbage_collect_cached_blocks", "malloc"], "segment_alloc", "some"),
        (
            ["DeviceCachingAllocator::release_cached_blocks", "DeviceCachingAllocator::malloc(signed char)"],
            "alloc",
            "retry",
        ),
        ([], "segment_alloc", "retry"),
        ([], "oom", "retry"),
        ([], "alloc", "empty_cache"),
    ],
)
def test_frames_tell_an_emptied_cache_from_a_retry_and_else_what_follows(frames, then, why, tmp_path):
    stack = [{"name": name, "filename": "??", "line": 0} for name in frames]
    listed = [
        event("segment_alloc", 2 << 30, 20 * MIB),
        event("segment_free", 2 << 30, 20 * MIB, frames=stack),
        event("segment_free", 4 << 30, 20 * MIB, frames=stack),
        event(then, 5 << 30, 4 * MIB),
    ]
    assert history(document([], listed), tmp_path).releases == ((why, (2 << 30, 4 << 30)),)


# Predictions ----------------------------------------------------------------------------------------------------------
def fragmented() -> Simulation:
    """Simulate a program whose blocks leave holes that its next, larger ones don't fit: what expanding mends."""
    made = Simulation()
    for size in range(12, 60, 4):
        block, pin = made.malloc(size * MIB), made.malloc(size * MIB + 2 * MIB)
        made.free(block)
        made.free(pin)
    return made


def test_expandable_segments_are_predicted_to_take_less_where_memory_is_fragmented(tmp_path):
    told = history(fragmented().document(), tmp_path)
    recorded_bytes = told.peak_reserved_bytes
    expanded = playback.predict(told, Settings(expandable=True))
    assert recorded_bytes == sum(2 * size + 2 for size in range(12, 60, 4)) * MIB - _reused_bytes(told)
    assert expanded.peak_reserved_bytes == 120 * MIB  # the largest pair, 56 + 58, in pages of 20
    assert expanded.peak_reserved_bytes < recorded_bytes


def _reused_bytes(told: playback.History) -> int:
    """Return what the record did not take anew: requests less segments."""
    asked = sum(size for action, size in zip(told.action, told.bytes, strict=True) if action == 0)
    return int(asked) - sum(event.bytes for event in told.segment_allocations)


def test_the_same_settings_predict_what_was_recorded_of_a_whole_history(tmp_path):
    told = history(work(Settings(), 11).document(), tmp_path)
    again = playback.predict(told, told.settings)
    assert sizes(again.segment_allocations) == sizes(told.segment_allocations)
    assert again.peak_reserved_bytes == told.peak_reserved_bytes


def test_a_record_with_retries_bounds_what_a_prediction_may_take(tmp_path):
    made = Simulation(capacity_bytes=100 * MIB)
    made.free(made.malloc(60 * MIB))
    made.free(made.malloc(80 * MIB))
    told = history(made.document(), tmp_path)
    assert (told.retries, told.peak_reserved_bytes) == (1, 80 * MIB)
    assert playback.replay_as_recorded(told).retries == 1
    predicted = playback.predict(told, Settings())
    assert (predicted.retries, predicted.peak_reserved_bytes, predicted.out_of_memory) == (1, 80 * MIB, 0)
    assert playback.predict(told, Settings(), capacity_bytes=200 * MIB).retries == 0
    assert playback.predict(told, Settings(), capacity_bytes=70 * MIB).out_of_memory == 1
    assert playback.predict(told, Settings(expandable=True)).retries == 0


def test_a_cut_history_is_predicted_with_what_was_held_and_a_cache_that_it_filled_before(tmp_path):
    made = Simulation()
    kept, short = made.malloc(30 * MIB), made.malloc(14 * MIB)
    cut = len(made.events)
    made.free(made.malloc(50 * MIB))
    made.free(short)
    made.malloc(16 * MIB)
    assert kept.allocated
    told = history(made.document(cut), tmp_path)
    predicted = playback.predict(told, Settings(expandable=True))
    # 30 and 14 held, 50 behind them: 94 MiB in pages of 20. All of that is there when it is played again.
    assert (predicted.peak_reserved_bytes, predicted.segment_allocations) == (100 * MIB, ())
    assert sizes(playback.predict(told, Settings()).segment_allocations) == []
    assert sizes(playback.replay_as_recorded(told).segment_allocations) == sizes(told.segment_allocations) != []


def test_a_start_that_does_not_fit_is_counted_as_out_of_memory(tmp_path):
    made = Simulation()
    made.malloc(30 * MIB)
    cut = len(made.events)
    made.free(made.malloc(512))
    told = history(made.document(cut), tmp_path)
    assert playback.predict(told, Settings(), capacity_bytes=20 * MIB).out_of_memory == 0
    assert playback.predict(told, Settings(), capacity_bytes=1 * MIB).out_of_memory == 1


def test_a_block_that_a_shortage_gave_back_is_not_given_back_twice(tmp_path):
    made = Simulation()
    waiting = made.malloc(40 * MIB)
    made.free(waiting, later=True)
    again = made.malloc(60 * MIB)
    made.complete(waiting)
    made.free(again)
    told = history(made.document(), tmp_path)
    predicted = playback.predict(told, Settings(), capacity_bytes=60 * MIB)
    assert (predicted.retries, predicted.out_of_memory, sizes(predicted.segment_frees)) == (
        1,
        0,
        [("segment_free", 40 * MIB)],
    )
    assert [block.state for block in predicted.final[0].blocks] == ["free"]


def test_a_snapshot_without_history_says_so(tmp_path):
    made = Simulation()
    made.malloc(30 * MIB)
    told = history(made.document(len(made.events)), tmp_path)
    assert "no history" in str(told.not_replayable)


def test_what_a_split_limit_gave_back_of_the_cache_is_given_back_in_the_play(tmp_path):
    settings = Settings.parse("max_split_size_mb:30")
    made = Simulation(settings, capacity_bytes=200 * MIB)
    for block in [made.malloc(size * MIB) for size in (32, 40, 50, 20)]:
        made.free(block)
    made.malloc(90 * MIB)
    document = made.document()
    document["allocator_settings"] = {"max_split_size": 30 * MIB}
    told = history(document, tmp_path)
    played = playback.replay_as_recorded(told)
    assert (
        sizes(played.segment_frees)
        == sizes(told.segment_frees)
        == [("segment_free", 50 * MIB), ("segment_free", 40 * MIB)]
    )
    assert (played.address_mismatches, played.final) == (0, told.final)


# Records that are wrong -----------------------------------------------------------------------------------------------
def test_segments_that_contradict_the_history_are_not_played(tmp_path):
    made = Simulation()
    made.malloc(30 * MIB)
    told = made.document()
    told["device_traces"][0] = [event("segment_free", (1 << 40) + MIB, 20 * MIB), *told["device_traces"][0][1:]]
    assert "contradict" in str(history(told, tmp_path).not_replayable)


def test_where_the_model_differs_from_the_record_it_goes_on_elsewhere_and_says_where(tmp_path):
    made = Simulation()
    first = made.malloc(30 * MIB)
    made.free(first)
    made.malloc(20 * MIB)
    made.malloc(30 * MIB)
    told = made.document()
    del told["device_traces"][0][2:4]  # the first free goes missing
    played = playback.replay_as_recorded(history(told, tmp_path))
    assert played.address_mismatches == 2
    assert len({segment.address for segment in played.final}) == len(played.final) == 3


def test_a_request_for_more_than_a_segment_can_hold_finds_no_memory(tmp_path):
    made = Simulation(capacity_bytes=1 << 50)
    made.malloc(1 << 40)
    told = history(made.document(), tmp_path)
    assert playback.predict(told, Settings(expandable=True)).out_of_memory == 1


def spoiled(told: dict, rng: random.Random) -> dict:
    """Return a document in which events are missing, doubled, out of order or wrong."""
    trace = [dict(each) for each in told["device_traces"][0]]
    for _ in range(3):
        place, other = rng.randrange(len(trace)), rng.randrange(len(trace))
        kind = rng.randrange(5)
        if kind == 0:
            del trace[place]
        elif kind == 1:
            trace.insert(place, dict(trace[other]))
        elif kind == 2:
            trace[place]["addr"] += rng.choice((512, -512, MIB, 1 << 45))
        elif kind == 3:
            trace[place]["size"] = rng.choice((0, 1, 20 * MIB, 1 << 40, -5))
        else:
            trace[place], trace[other] = trace[other], trace[place]
    return told | {"device_traces": [trace]}


@pytest.mark.parametrize("expandable", [False, True])
def test_wrong_records_are_played_to_some_end_or_refused(expandable, tmp_path):
    rng = random.Random(5)
    whole = work(Settings(expandable=expandable), 3, steps=60)
    for number in range(20):
        told = history(spoiled(whole.document(0 if number % 2 else 25), rng), tmp_path)
        if told.not_replayable is None:
            with contextlib.suppress(InputError):
                assert playback.replay_as_recorded(told).peak_reserved_bytes >= 0
            assert playback.predict(told, Settings(expandable=not expandable)).peak_reserved_bytes > 0


def test_two_blocks_at_one_address_are_no_play():
    allocator = Allocator(place=lambda size, pool: 1 << 40)
    allocator.malloc(30 * MIB)
    with pytest.raises(Overlap, match="two blocks at 0x10000000000"):
        allocator.malloc(30 * MIB)

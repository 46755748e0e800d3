"""Replayed histories: recorded ones block for block, simulated ones from any starting point."""

import contextlib
import random

import pytest

from tests.support.sample_snapshots import MIB, Simulation, document, event, recorded, write
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest.readers.memory_snapshot import reader
from tracekit.replay.allocator import Allocator, Overlap, Settings, playback

WHOLE = ("from_empty_fwd_bf16", "from_empty_fwd_bwd_fp32", "from_empty_init_model_rank1")
CUT = ("steady_training_step", "expandable_segments_bf16")


def history(document: dict, tmp_path) -> playback.History:
    snapshot = reader.read(write(tmp_path / "simulated.memory.pickle", document))
    return playback.from_snapshot(snapshot, snapshot.devices[0])


def of_file(name: str) -> playback.History:
    snapshot = reader.read(recorded(f"{name}.pickle"))
    return playback.from_snapshot(snapshot, int(snapshot.events["device"][0]))


def sizes(events) -> list[tuple[str, int]]:
    return [(event.action, event.bytes) for event in events]


# Recorded by others ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*WHOLE, *CUT])
def test_a_replayed_history_reproduces_its_segments_addresses_and_blocks(name):
    recording = of_file(name)
    assert bool(recording.start) is (name in CUT)
    replayed = playback.replay_as_recorded(recording)
    assert sizes(replayed.segment_allocations) == sizes(recording.segment_allocations)
    assert sizes(replayed.segment_frees) == sizes(recording.segment_frees)
    assert replayed.address_mismatches == 0
    assert replayed.final == recording.final
    assert replayed.peak_reserved_bytes == recording.peak_reserved_bytes


@pytest.mark.parametrize("name", [*WHOLE, *CUT])
def test_segment_allocations_and_releases_do_not_depend_on_addresses(name):
    recording = of_file(name)
    replayed = playback.replay_as_recorded(recording, at_recorded_addresses=False)
    assert (sizes(replayed.segment_allocations), sizes(replayed.segment_frees)) == (
        sizes(recording.segment_allocations),
        sizes(recording.segment_frees),
    )


# Simulated: the reading of histories agrees with the model ------------------------------------------------------------
def work(settings: Settings, seed: int, *, steps: int = 300) -> Simulation:
    """Simulate a program of several streams and pools that allocates and frees at random."""
    rng = random.Random(seed)
    simulation, allocated, pending = Simulation(settings), [], []
    sizes = [512, 4000, 300_000, MIB, 2 * MIB, 6 * MIB, 12 * MIB, 40 * MIB]  # no large one leaves less than 2 MiB
    for _ in range(steps):
        chance = rng.random()
        if chance < 0.5 or not allocated:
            allocated.append(
                simulation.malloc(rng.choice(sizes), stream=rng.choice((0, 0, 7)), pool=rng.choice((0, 0, 0, 1)))
            )
        elif chance < 0.98:
            block = allocated.pop(rng.randrange(len(allocated)))
            later = rng.random() < 0.1
            simulation.free(block, later=later)
            pending += [block] if later else []
        elif pending:
            simulation.complete(pending.pop())
        else:
            simulation.empty_cache()
    return simulation


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_history_is_reproduced(seed, expandable, tmp_path):
    simulation = work(Settings(expandable=expandable), seed)
    recording = history(simulation.document(), tmp_path)
    replayed = playback.replay_as_recorded(recording)
    assert recording.start == ()
    assert sizes(replayed.segment_allocations) == sizes(recording.segment_allocations)
    assert sizes(replayed.segment_frees) == sizes(recording.segment_frees)
    assert (replayed.address_mismatches, replayed.final) == (0, recording.final)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_state_before_a_truncated_history_is_reconstructed_backwards(seed, expandable, tmp_path):
    settings = Settings(expandable=expandable)
    whole = work(settings, seed)
    first = len(work(settings, seed, steps=170).events)
    truth = {s.address: (s.bytes, s.stream, s.small) for s in work(settings, seed, steps=170).allocator.segments()}
    recording = history(whole.document(first), tmp_path)
    assert {s.address: (s.bytes, s.stream, s.small) for s in recording.start} == truth
    replayed = playback.replay_as_recorded(recording)
    assert sizes(replayed.segment_allocations) == sizes(recording.segment_allocations)
    assert sizes(replayed.segment_frees) == sizes(recording.segment_frees)
    assert (replayed.address_mismatches, replayed.final) == (0, recording.final)


def test_the_size_of_an_unsplit_block_follows_from_the_room_behind_it(tmp_path):
    simulation = Simulation()
    first = simulation.malloc(19 * MIB + 512)  # the rest of its 20 MiB is too small to be split off
    later = simulation.malloc(30 * MIB)
    cut = len(simulation.events)
    simulation.free(first)
    simulation.malloc(5 * MIB)
    simulation.free(later)
    recording = history(simulation.document(cut), tmp_path)
    assert [[block.bytes for block in segment.blocks] for segment in recording.start] == [[20 * MIB], [30 * MIB]]


def test_the_size_of_a_block_without_neighbours_follows_from_an_allocation_behind_it(tmp_path):
    simulation = Simulation()
    front, back = simulation.malloc(4 * MIB), simulation.malloc(3 * MIB)
    simulation.free(front)
    unsplit = simulation.malloc(4 * MIB - 512 * 1024)  # is not split: uses the whole 4 MiB
    simulation.free(back)
    assert unsplit.bytes == 4 * MIB
    cut = len(simulation.events)
    simulation.malloc(3 * MIB)  # directly behind it, while it is allocated
    simulation.free(unsplit)
    recording = history(simulation.document(cut), tmp_path)
    assert [block.bytes / MIB for block in recording.start[0].blocks] == [4, 16]


def test_a_private_pool_is_identified_by_the_segment_that_contains_the_address(tmp_path):
    simulation = Simulation()
    common, private = simulation.malloc(5 * MIB), simulation.malloc(5 * MIB, pool=1)
    simulation.free(common)
    simulation.free(private)
    simulation.malloc(5 * MIB, pool=1)
    recording = history(simulation.document(), tmp_path)
    assert (recording.pool > 0).tolist() == [False, True, False, False, True, True, True]


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
def test_the_reason_of_a_release_follows_from_its_stack_or_else_from_the_next_event(frames, then, why, tmp_path):
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
    """Simulate a program with fragmentation: each freed block is too small for the next request."""
    simulation = Simulation()
    for size in range(12, 60, 4):
        block, pin = simulation.malloc(size * MIB), simulation.malloc(size * MIB + 2 * MIB)
        simulation.free(block)
        simulation.free(pin)
    return simulation


def test_expandable_segments_are_predicted_to_reserve_less_where_memory_is_fragmented(tmp_path):
    recording = history(fragmented().document(), tmp_path)
    recorded_bytes = recording.peak_reserved_bytes
    expanded = playback.predict(recording, Settings(expandable=True))
    assert recorded_bytes == sum(2 * size + 2 for size in range(12, 60, 4)) * MIB - _reused_bytes(recording)
    assert expanded.peak_reserved_bytes == 120 * MIB  # the largest pair, 56 + 58, in pages of 20
    assert expanded.peak_reserved_bytes < recorded_bytes


def _reused_bytes(recording: playback.History) -> int:
    """Return the requested bytes that were served from the cache."""
    requested_bytes = sum(size for action, size in zip(recording.action, recording.bytes, strict=True) if action == 0)
    return int(requested_bytes) - sum(event.bytes for event in recording.segment_allocations)


def test_a_prediction_under_the_recorded_settings_equals_the_recording(tmp_path):
    recording = history(work(Settings(), 11).document(), tmp_path)
    again = playback.predict(recording, recording.settings)
    assert sizes(again.segment_allocations) == sizes(recording.segment_allocations)
    assert again.peak_reserved_bytes == recording.peak_reserved_bytes


def test_a_recording_with_retries_limits_the_memory_of_a_prediction(tmp_path):
    simulation = Simulation(capacity_bytes=100 * MIB)
    simulation.free(simulation.malloc(60 * MIB))
    simulation.free(simulation.malloc(80 * MIB))
    recording = history(simulation.document(), tmp_path)
    assert (recording.retries, recording.peak_reserved_bytes) == (1, 80 * MIB)
    assert playback.replay_as_recorded(recording).retries == 1
    predicted = playback.predict(recording, Settings())
    assert (predicted.retries, predicted.peak_reserved_bytes, predicted.out_of_memory) == (1, 80 * MIB, 0)
    assert playback.predict(recording, Settings(), capacity_bytes=200 * MIB).retries == 0
    assert playback.predict(recording, Settings(), capacity_bytes=70 * MIB).out_of_memory == 1
    assert playback.predict(recording, Settings(expandable=True)).retries == 0


def test_a_truncated_history_is_predicted_with_its_initial_blocks_and_a_filled_cache(tmp_path):
    simulation = Simulation()
    stays, short = simulation.malloc(30 * MIB), simulation.malloc(14 * MIB)
    cut = len(simulation.events)
    simulation.free(simulation.malloc(50 * MIB))
    simulation.free(short)
    simulation.malloc(16 * MIB)
    assert stays.allocated
    recording = history(simulation.document(cut), tmp_path)
    predicted = playback.predict(recording, Settings(expandable=True))
    # 30 and 14 MiB at the start, 50 behind them: 94 MiB in pages of 20, all mapped before the second pass.
    assert (predicted.peak_reserved_bytes, predicted.segment_allocations) == (100 * MIB, ())
    assert sizes(playback.predict(recording, Settings()).segment_allocations) == []
    assert (
        sizes(playback.replay_as_recorded(recording).segment_allocations) == sizes(recording.segment_allocations) != []
    )


def test_initial_blocks_that_do_not_fit_count_as_out_of_memory(tmp_path):
    simulation = Simulation()
    simulation.malloc(30 * MIB)
    cut = len(simulation.events)
    simulation.free(simulation.malloc(512))
    recording = history(simulation.document(cut), tmp_path)
    assert playback.predict(recording, Settings(), capacity_bytes=20 * MIB).out_of_memory == 0
    assert playback.predict(recording, Settings(), capacity_bytes=1 * MIB).out_of_memory == 1


def test_a_block_that_a_retry_released_is_not_freed_twice(tmp_path):
    simulation = Simulation()
    waiting = simulation.malloc(40 * MIB)
    simulation.free(waiting, later=True)
    again = simulation.malloc(60 * MIB)
    simulation.complete(waiting)
    simulation.free(again)
    recording = history(simulation.document(), tmp_path)
    predicted = playback.predict(recording, Settings(), capacity_bytes=60 * MIB)
    assert (predicted.retries, predicted.out_of_memory, sizes(predicted.segment_frees)) == (
        1,
        0,
        [("segment_free", 40 * MIB)],
    )
    assert [block.state for block in predicted.final[0].blocks] == ["free"]


def test_a_snapshot_without_history_is_not_replayable(tmp_path):
    simulation = Simulation()
    simulation.malloc(30 * MIB)
    recording = history(simulation.document(len(simulation.events)), tmp_path)
    assert "no history" in str(recording.not_replayable)


def test_a_partial_release_under_a_split_limit_is_replayed(tmp_path):
    settings = Settings.parse("max_split_size_mb:30")
    simulation = Simulation(settings, capacity_bytes=200 * MIB)
    for block in [simulation.malloc(size * MIB) for size in (32, 40, 50, 20)]:
        simulation.free(block)
    simulation.malloc(90 * MIB)
    document = simulation.document()
    document["allocator_settings"] = {"max_split_size": 30 * MIB}
    recording = history(document, tmp_path)
    replayed = playback.replay_as_recorded(recording)
    assert (
        sizes(replayed.segment_frees)
        == sizes(recording.segment_frees)
        == [("segment_free", 50 * MIB), ("segment_free", 40 * MIB)]
    )
    assert (replayed.address_mismatches, replayed.final) == (0, recording.final)


# Corrupted recordings -------------------------------------------------------------------------------------------------
def test_segments_that_contradict_the_history_are_not_replayed(tmp_path):
    simulation = Simulation()
    simulation.malloc(30 * MIB)
    document = simulation.document()
    document["device_traces"][0] = [event("segment_free", (1 << 40) + MIB, 20 * MIB), *document["device_traces"][0][1:]]
    assert "contradict" in str(history(document, tmp_path).not_replayable)


def test_deviations_from_recorded_addresses_are_counted_and_the_replay_continues(tmp_path):
    simulation = Simulation()
    first = simulation.malloc(30 * MIB)
    simulation.free(first)
    simulation.malloc(20 * MIB)
    simulation.malloc(30 * MIB)
    document = simulation.document()
    del document["device_traces"][0][2:4]  # without the first free
    replayed = playback.replay_as_recorded(history(document, tmp_path))
    assert replayed.address_mismatches == 2
    assert len({segment.address for segment in replayed.final}) == len(replayed.final) == 3


def test_a_request_larger_than_a_segment_counts_as_out_of_memory(tmp_path):
    simulation = Simulation(capacity_bytes=1 << 50)
    simulation.malloc(1 << 40)
    recording = history(simulation.document(), tmp_path)
    assert playback.predict(recording, Settings(expandable=True)).out_of_memory == 1


def corrupted(document: dict, rng: random.Random) -> dict:
    """Return a document in which events are missing, doubled, out of order or wrong."""
    trace = [dict(each) for each in document["device_traces"][0]]
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
    return document | {"device_traces": [trace]}


@pytest.mark.parametrize("expandable", [False, True])
def test_corrupted_recordings_are_replayed_or_rejected(expandable, tmp_path):
    rng = random.Random(5)
    whole = work(Settings(expandable=expandable), 3, steps=60)
    refused = 0
    for number in range(20):
        try:
            recording = history(corrupted(whole.document(0 if number % 2 else 25), rng), tmp_path)
        except BadTraceError:
            refused += 1
            continue
        if recording.not_replayable is None:
            with contextlib.suppress(InputError):
                assert playback.replay_as_recorded(recording).peak_reserved_bytes >= 0
            assert playback.predict(recording, Settings(expandable=not expandable)).peak_reserved_bytes > 0
    assert refused < 10


def test_two_blocks_at_one_address_are_rejected(wording):
    allocator = Allocator(place=lambda size, pool: 1 << 40)
    allocator.malloc(30 * MIB)
    with wording.raises(Overlap):
        allocator.malloc(30 * MIB)

"""The rules of the caching allocator, each by itself: sizes in MiB where not said otherwise."""

import pytest

from tracekit.errors import InputError
from tracekit.replay.allocator import Allocator, OutOfMemory, Settings
from tracekit.replay.allocator.settings import MIB

BASE = 1 << 40


def taken(allocator: Allocator) -> list[float]:
    """Return the sizes taken of the device, in order."""
    return [event.bytes / MIB for event in allocator.events if event.action in ("segment_alloc", "segment_map")]


def given(allocator: Allocator) -> list[float]:
    return [event.bytes / MIB for event in allocator.events if event.action in ("segment_free", "segment_unmap")]


def at(block) -> float:
    """Return how far from the first segment's start a block lies."""
    return (block.address - BASE) / MIB


def layout(allocator: Allocator) -> list[list[tuple[float, str]]]:
    return [[(block.bytes / MIB, block.state) for block in segment.blocks] for segment in allocator.segments()]


def settings(text: str) -> Settings:
    return Settings.parse(text)


# Sizes ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("asked", "got"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20)])
def test_a_block_is_a_multiple_of_512_bytes(asked, got):
    assert Allocator().malloc(asked).bytes == got


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB - 511, 10),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (12 * MIB, 12),
        (12 * MIB + 1, 14),
    ],
)
def test_a_segment_is_of_2_or_20_mib_and_from_10_mib_of_the_requests_own_size(asked, segment):
    allocator = Allocator()
    allocator.malloc(asked)
    assert taken(allocator) == [segment]


@pytest.mark.parametrize(
    ("divisions", "asked", "got"),
    [
        ("4", 1200 * 1024, 1280 * 1024),  # 1 MiB and quarters of it
        ("4", 1280 * 1024, 1280 * 1024),
        ("4", MIB, MIB),  # a power of two stays
        ("4", 1100, 1536),  # too small: at least 512 bytes for each division
        ("4", 2049, 2560),
        ("1", 2049, 2560),
        ("[1:8,4:2,>:1]", 1100 * 1024, 1152 * 1024),
        ("[1:8,4:2,>:1]", 5 * MIB, 6 * MIB),
        ("[1:8,4:2,>:1]", 2100 * 1024, 2100 * 1024),  # not told: multiples of 512 bytes
        ("[1:8,4:2,>:1]", 17 * MIB + 5, 17 * MIB + 512),
        ("[4:2,>:1]", 600 * 1024, 768 * 1024),  # what comes before the first is as the first
    ],
)
def test_power_of_two_divisions_round_further_up(divisions, asked, got):
    assert settings(f"roundup_power2_divisions:{divisions}").rounded(asked) == got


# Splits and best fit --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "blocks"),
    [
        (MIB - 512, [(1 - 1 / 2048, "allocated"), (1 + 1 / 2048, "free")]),
        (18 * MIB, [(18, "allocated")]),
        (5 * MIB, [(5, "allocated"), (15, "free")]),
    ],
)
def test_a_block_is_split_and_the_front_is_handed_out(asked, blocks):
    allocator = Allocator()
    assert at(allocator.malloc(asked)) == 0
    assert layout(allocator) == [blocks]


@pytest.mark.parametrize(("rest", "split"), [(MIB, False), (MIB + 512, True)])
def test_a_large_block_is_split_only_where_more_than_1_mib_is_left(rest, split):
    allocator = Allocator()
    whole = allocator.malloc(9 * MIB)
    rest_of_segment = allocator.malloc(11 * MIB)  # leaves no other block of the segment
    assert at(rest_of_segment) == 9
    allocator.free(whole)
    assert (allocator.malloc(9 * MIB - rest).bytes != 9 * MIB) is split


def test_a_small_block_is_split_to_the_last_512_bytes():
    allocator = Allocator()
    blocks = [allocator.malloc(MIB), allocator.malloc(MIB)]
    allocator.free(blocks[0])
    assert allocator.malloc(MIB - 512).bytes == MIB - 512
    assert allocator.malloc(512).address == BASE + MIB - 512


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest():
    allocator = Allocator()
    held = [allocator.malloc(size * MIB) for size in (40, 30, 50, 30)]
    for block in (held[3], held[0], held[1], held[2]):
        allocator.free(block)
    assert [at(allocator.malloc(size * MIB)) for size in (30, 30, 29, 50)] == [40, 120, 0, 70]


def test_a_request_of_exactly_a_blocks_size_takes_it():
    allocator = Allocator()
    allocator.free(allocator.malloc(30 * MIB))
    assert at(allocator.malloc(30 * MIB)) == 0
    assert taken(allocator) == [30]


def test_streams_small_and_large_and_private_pools_do_not_share():
    allocator = Allocator()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(5 * MIB, stream=1)
    allocator.malloc(5 * MIB, pool=1)
    allocator.malloc(5)
    allocator.malloc(5 * MIB)
    assert taken(allocator) == [20, 20, 20, 2]


# Frees ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_a_free_block_is_joined_with_both_neighbours(order):
    allocator = Allocator()
    blocks = [allocator.malloc(4 * MIB) for _ in range(3)]
    for number in order:
        allocator.free(blocks[number])
    assert layout(allocator) == [[(20, "free")]]
    assert at(allocator.malloc(19 * MIB)) == 0


def test_a_block_that_another_stream_uses_serves_again_only_after_that():
    allocator = Allocator()
    block, neighbour = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert allocator.allocated_bytes == 4 * MIB
    assert at(allocator.malloc(4 * MIB)) == 8
    allocator.free(neighbour)
    assert layout(allocator)[0][0] == (4, "pending")  # not joined either
    allocator.complete_free(block)
    assert layout(allocator)[0][0] == (8, "free")


def test_use_by_its_own_stream_holds_nothing_back():
    allocator = Allocator()
    block = allocator.malloc(4 * MIB, stream=7)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert layout(allocator) == [[(20, "free")]]


# What is given back ---------------------------------------------------------------------------------------------------
def test_emptying_the_cache_gives_back_whole_free_segments_large_ones_first():
    allocator = Allocator()
    small = allocator.malloc(512)
    held = [allocator.malloc(size * MIB, stream) for size, stream in ((30, 0), (12, 0), (14, 5), (12, 0))]
    kept = allocator.malloc(4 * MIB)
    for block in (small, *held):
        allocator.free(block)
    allocator.release_cached()
    # by stream, then size, then address
    assert given(allocator) == [12, 12, 30, 14, 2]
    assert [event.address for event in allocator.events if event.action == "segment_free"][:2] == [
        held[1].address,
        held[3].address,
    ]
    assert allocator.reserved_bytes == 20 * MIB
    assert kept.allocated


def test_private_pools_keep_their_memory_until_nobody_uses_them():
    allocator = Allocator()
    allocator.free(allocator.malloc(30 * MIB, pool=1))
    allocator.release_cached()
    assert given(allocator) == []
    allocator.freeable_pools.add(1)
    allocator.release_cached()
    assert given(allocator) == [30]


def test_without_memory_the_cache_is_given_back_and_the_request_tried_again():
    allocator = Allocator(capacity_bytes=64 * MIB)
    waiting, idle = allocator.malloc(20 * MIB), allocator.malloc(40 * MIB)
    allocator.request_free(waiting)
    allocator.free(idle)
    allocator.malloc(50 * MIB)  # waits for the stream that uses `waiting`, too
    assert (given(allocator), allocator.retries) == ([20, 40], 1)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (50 * MIB, 60 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(30 * MIB)
    assert allocator.retries == 2


def test_a_memory_fraction_is_a_limit_of_its_own():
    allocator = Allocator(settings("per_process_memory_fraction:0.5"), capacity_bytes=100 * MIB)
    allocator.malloc(50 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(2 * MIB)


def test_blocks_from_the_split_limit_on_are_not_split_and_not_for_small_requests():
    allocator = Allocator(settings("max_split_size_mb:30"))
    allocator.free(allocator.malloc(60 * MIB))
    assert at(allocator.malloc(5 * MIB)) == 60  # the 60 MiB are not for it
    assert allocator.malloc(41 * MIB).bytes == 60 * MIB  # less than 20 MiB more than asked for: whole
    allocator = Allocator(settings("max_split_size_mb:30"))
    allocator.free(allocator.malloc(60 * MIB))
    assert at(allocator.malloc(40 * MIB)) == 60  # 20 MiB more: too much
    allocator = Allocator(settings("max_split_size_mb:30,max_non_split_rounding_mb:25"))
    allocator.free(allocator.malloc(60 * MIB))
    assert allocator.malloc(40 * MIB).bytes == 60 * MIB
    allocator = Allocator(settings("max_split_size_mb:30"))
    allocator.free(allocator.malloc(29 * MIB))
    assert allocator.malloc(5 * MIB).bytes == 5 * MIB


def test_short_of_memory_with_a_split_limit_only_what_is_needed_is_given_back():
    allocator = Allocator(settings("max_split_size_mb:30"), capacity_bytes=200 * MIB)
    held = [allocator.malloc(size * MIB) for size in (32, 40, 50, 20)]
    for block in held:
        allocator.free(block)
    allocator.malloc(90 * MIB)  # none is large enough: from the largest on
    assert (given(allocator), allocator.retries) == ([50, 40], 0)
    allocator = Allocator(settings("max_split_size_mb:30"), capacity_bytes=130 * MIB)
    held = [allocator.malloc(size * MIB) for size in (80, 32)]
    for block in held:
        allocator.free(block)
    allocator.malloc(28 * MIB)  # the smallest that is oversized does
    assert (given(allocator), allocator.retries) == ([32], 0)


def test_garbage_is_collected_by_age_from_a_share_of_the_allowed_memory():
    allocator = Allocator(
        settings("garbage_collection_threshold:0.5,per_process_memory_fraction:1"), capacity_bytes=200 * MIB
    )
    old, new = allocator.malloc(40 * MIB), allocator.malloc(44 * MIB)
    allocator.free(old)
    allocator.free(allocator.malloc(30 * MIB, stream=9))
    for _ in range(3):  # time, to the allocator, is how often it was asked
        allocator.free(new)
        new = allocator.malloc(44 * MIB)
    allocator.free(new)
    allocator.malloc(60 * MIB)
    assert given(allocator) == [40]  # 114 MiB are 14 over the half: what lay idle longest goes
    unlimited = Allocator(settings("garbage_collection_threshold:0.5"), capacity_bytes=200 * MIB)
    for size in (40, 44, 60):
        unlimited.free(unlimited.malloc(size * MIB))
    assert given(unlimited) == []  # torch collects only under a memory fraction


def test_small_segments_and_private_pools_are_not_garbage():
    text = "garbage_collection_threshold:0.1,per_process_memory_fraction:1"
    allocator = Allocator(settings(text), capacity_bytes=200 * MIB)
    for block in (allocator.malloc(512), allocator.malloc(40 * MIB, pool=1)):
        allocator.free(block)
    allocator.malloc(30 * MIB)
    assert given(allocator) == []


# Expandable segments --------------------------------------------------------------------------------------------------
def growing(**options) -> Allocator:
    return Allocator(settings("expandable_segments:True"), **options)


def test_an_expandable_segment_grows_in_place_by_pages():
    allocator = growing()
    blocks = [allocator.malloc(size * MIB) for size in (15, 15, 45)]
    assert [at(block) for block in blocks] == [0, 15, 30]
    assert taken(allocator) == [20, 20, 40]
    assert layout(allocator) == [[(15, "allocated"), (15, "allocated"), (45, "allocated"), (5, "free")]]
    allocator.malloc(512)
    assert taken(allocator)[-1] == 2


def test_expandable_segments_split_to_the_last_512_bytes():
    allocator = growing()
    held = [allocator.malloc(size) for size in (5 * MIB, 15 * MIB)]
    allocator.free(held[0])
    assert allocator.malloc(5 * MIB - 512).bytes == 5 * MIB - 512


def test_the_end_that_can_grow_is_taken_last():
    allocator = growing()
    held = [allocator.malloc(size * MIB) for size in (8, 2, 6)]  # leaves 4 MiB mapped at the end
    allocator.free(held[0])
    assert at(allocator.malloc(3 * MIB)) == 0  # not the 4 MiB, which fit better but can grow


def test_of_ends_that_can_grow_as_far_the_first_is_taken():
    allocator = growing(address_space_bytes=60 * MIB)
    assert [at(allocator.malloc(35 * MIB)) for _ in range(2)] == [0, 60]
    assert at(allocator.malloc(4 * MIB)) == 35


def test_of_blocks_that_cannot_grow_the_best_fit_is_taken():
    allocator = growing()
    held = [allocator.malloc(size * MIB) for size in (8, 2, 6, 2, 2)]
    for number in (0, 2):
        allocator.free(held[number])
    assert at(allocator.malloc(5 * MIB)) == 10


def test_a_free_block_before_the_end_is_grown():
    allocator = growing()
    held = [allocator.malloc(size * MIB) for size in (12, 8)]
    allocator.free(held[1])
    assert at(allocator.malloc(30 * MIB)) == 12
    assert taken(allocator) == [20, 40]


def test_whole_pages_are_given_back_and_mapped_again():
    allocator = growing()
    held = [allocator.malloc(size * MIB) for size in (15, 50, 15)]
    allocator.free(held[1])
    allocator.release_cached()
    assert layout(allocator) == [[(15, "allocated"), (5, "free")], [(5, "free"), (15, "allocated")]]
    assert given(allocator) == [40]
    allocator.release_cached()  # less than a page is left at either side: that stays
    assert layout(allocator) == [[(15, "allocated"), (5, "free")], [(5, "free"), (15, "allocated")]]
    assert at(allocator.malloc(50 * MIB)) == 15
    assert taken(allocator)[-1] == 40
    assert layout(allocator) == [[(15, "allocated"), (50, "allocated"), (15, "allocated")]]


def test_a_segment_without_memory_is_forgotten():
    allocator = growing()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.release_cached()
    assert (allocator.segments(), allocator.reserved_bytes, given(allocator)) == ([], 0, [40])
    assert at(allocator.malloc(5 * MIB)) > 0
    assert taken(allocator) == [40, 20]


def test_space_given_back_in_pieces_is_mapped_again_in_one():
    allocator = growing()
    held = [allocator.malloc(20 * MIB) for _ in range(3)]
    for block in held[:2]:
        allocator.free(block)
        allocator.release_cached()
    assert given(allocator) == [20, 20]
    assert at(allocator.malloc(35 * MIB)) == 0
    assert taken(allocator) == [20, 20, 20, 40]


def test_an_expandable_segment_runs_out_of_memory_too():
    allocator = growing(capacity_bytes=50 * MIB)
    allocator.malloc(30 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(15 * MIB)
    assert allocator.malloc(9 * MIB).bytes == 9 * MIB


def test_another_segment_begins_where_the_first_can_grow_no_further():
    allocator = growing(address_space_bytes=40 * MIB)
    allocator.malloc(30 * MIB)
    assert at(allocator.malloc(15 * MIB)) == 40


def test_turned_off_again_no_expandable_block_is_taken():
    grown = growing()
    grown.free(grown.malloc(30 * MIB))
    allocator = Allocator()
    allocator.adopt(grown.segments())
    assert allocator.malloc(30 * MIB).address != BASE
    assert taken(allocator) == [30]


def test_an_adopted_state_goes_on_as_the_one_it_was_taken_from():
    for made in (Allocator(), growing()):
        held = [made.malloc(size * MIB, stream) for size, stream in ((15, 0), (50, 0), (15, 0), (1, 0), (3, 4))]
        made.free(held[1])
        made.release_cached()
        made.request_free(held[0])
        again = Allocator(made.settings)
        again.adopt(made.segments())
        assert again.segments() == made.segments()
        for asked in ((45 * MIB, 0), (512, 0), (20 * MIB, 4), (7 * MIB, 0)):
            again.malloc(*asked)
            made.malloc(*asked)
        assert layout(again) == layout(made)
        assert again.reserved_bytes == made.reserved_bytes
        assert again.allocated_bytes == made.allocated_bytes


# Settings -------------------------------------------------------------------------------------------------------------
def test_settings_are_read_as_the_environment_variable_writes_them():
    told = settings(
        "backend:native, expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],pinned_use_background_threads:True"
    )
    assert told == Settings(
        expandable=True, max_split_bytes=128 * MIB, gc_threshold=0.8, roundup_divisions=(1,) * 9 + (2, 4) + (8,) * 5
    )
    assert settings("default") == settings("") == Settings()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max_split_size:128", "did you mean max_split_size_mb"),
        ("max_split_size_mb:20", "more than 20"),
        ("max_split_size_mb:many", "must be a number"),
        ("max_split_size_mb:nan", "must be a number"),
        ("garbage_collection_threshold:1", "between 0 and 1"),
        ("expandable_segments:true", "True or False"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[300:2]", "power of two"),
        ("expandable_segments", "key:value"),
        ("expandable_segments:True;max_split_size_mb:30", "True or False"),
        ("max_split_size_mb:128,,", "key:value"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_right(text, why):
    with pytest.raises(InputError, match=why):
        settings(text)


def test_the_settings_of_a_snapshot_are_those_it_was_taken_under():
    told = {"expandable_segments": True, "max_split_size": 30 * MIB, "garbage_collection_threshold": 0.5}
    told |= {"roundup_power2_divisions": {"1": 4, "2": 0, "32768": 8}}
    told |= {"PYTORCH_CUDA_ALLOC_CONF": "max_non_split_rounding_mb:40,per_process_memory_fraction:0.5"}
    expected = Settings(
        expandable=True,
        max_split_bytes=30 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        gc_threshold=0.5,
        roundup_divisions=(4, *(0,) * 14, 8),
        memory_fraction=0.5,
    )
    assert Settings.of_snapshot(told) == expected
    assert Settings.of_snapshot({"PYTORCH_CUDA_ALLOC_CONF": "a_setting_of_tomorrow:7"}) == Settings()
    assert Settings.of_snapshot({"max_split_size": -1}) == Settings.of_snapshot({}) == Settings()

"""The rules of the caching allocator, one by one. Sizes are in MiB unless the name says otherwise."""

import pytest

from tracekit.errors import InputError
from tracekit.replay.allocator.model import Allocator, OutOfMemory
from tracekit.replay.allocator.settings import MIB, Settings

BASE = 1 << 40


def allocated_mib(allocator: Allocator) -> list[float]:
    """Return the sizes of device allocations, in order."""
    return [event.bytes / MIB for event in allocator.events if event.action in ("segment_alloc", "segment_map")]


def released_mib(allocator: Allocator) -> list[float]:
    return [event.bytes / MIB for event in allocator.events if event.action in ("segment_free", "segment_unmap")]


def offset_mib(block) -> float:
    """Return the offset of a block from the start of the first segment."""
    return (block.address - BASE) / MIB


def layout(allocator: Allocator) -> list[list[tuple[float, str]]]:
    return [[(block.bytes / MIB, block.state) for block in segment.blocks] for segment in allocator.segments()]


def settings(text: str) -> Settings:
    return Settings.parse(text)


# Sizes ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("requested", "block_bytes"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20)]
)
def test_a_block_is_a_multiple_of_512_bytes(requested, block_bytes):
    assert Allocator().malloc(requested).bytes == block_bytes


@pytest.mark.parametrize(
    ("requested", "segment"),
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
def test_a_segment_is_of_2_or_20_mib_and_from_10_mib_of_the_requests_own_size(requested, segment):
    allocator = Allocator()
    allocator.malloc(requested)
    assert allocated_mib(allocator) == [segment]


@pytest.mark.parametrize(
    ("divisions", "requested", "block_bytes"),
    [
        ("4", 1200 * 1024, 1280 * 1024),  # 1 MiB and quarters of it
        ("4", 1280 * 1024, 1280 * 1024),
        ("4", MIB, MIB),  # a power of two is not rounded
        ("4", 1100, 1536),  # too small: at least 512 bytes for each division
        ("4", 2049, 2560),
        ("1", 2049, 2560),
        ("[1:8,4:2,>:1]", 1100 * 1024, 1152 * 1024),
        ("[1:8,4:2,>:1]", 5 * MIB, 6 * MIB),
        ("[1:8,4:2,>:1]", 2100 * 1024, 2100 * 1024),  # not listed: multiples of 512 bytes
        ("[1:8,4:2,>:1]", 17 * MIB + 5, 17 * MIB + 512),
        ("[4:2,>:1]", 600 * 1024, 768 * 1024),  # sizes below the first interval use its divisions
    ],
)
def test_power_of_two_divisions_round_up_to_a_division(divisions, requested, block_bytes):
    assert settings(f"roundup_power2_divisions:{divisions}").round_up(requested) == block_bytes


# Splits and best fit --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("requested", "blocks"),
    [
        (MIB - 512, [(1 - 1 / 2048, "allocated"), (1 + 1 / 2048, "free")]),
        (18 * MIB, [(18, "allocated")]),
        (5 * MIB, [(5, "allocated"), (15, "free")]),
    ],
)
def test_a_block_is_split_and_its_front_is_returned(requested, blocks):
    allocator = Allocator()
    assert offset_mib(allocator.malloc(requested)) == 0
    assert layout(allocator) == [blocks]


@pytest.mark.parametrize(("rest", "split"), [(MIB, False), (MIB + 512, True)])
def test_a_large_block_is_split_only_if_more_than_1_mib_remains(rest, split):
    allocator = Allocator()
    whole = allocator.malloc(9 * MIB)
    rest_of_segment = allocator.malloc(11 * MIB)  # leaves no other block of the segment
    assert offset_mib(rest_of_segment) == 9
    allocator.free(whole)
    assert (allocator.malloc(9 * MIB - rest).bytes != 9 * MIB) is split


def test_a_small_block_is_split_to_the_last_512_bytes():
    allocator = Allocator()
    blocks = [allocator.malloc(MIB), allocator.malloc(MIB)]
    allocator.free(blocks[0])
    assert allocator.malloc(MIB - 512).bytes == MIB - 512
    assert allocator.malloc(512).address == BASE + MIB - 512


def test_the_smallest_block_that_fits_is_used_and_among_equal_ones_the_lowest_address():
    allocator = Allocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 30, 50, 30)]
    for block in (blocks[3], blocks[0], blocks[1], blocks[2]):
        allocator.free(block)
    assert [offset_mib(allocator.malloc(size * MIB)) for size in (30, 30, 29, 50)] == [40, 120, 0, 70]


def test_a_block_of_exactly_the_requested_size_is_used():
    allocator = Allocator()
    allocator.free(allocator.malloc(30 * MIB))
    assert offset_mib(allocator.malloc(30 * MIB)) == 0
    assert allocated_mib(allocator) == [30]


def test_streams_size_classes_and_private_pools_do_not_share_blocks():
    allocator = Allocator()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(5 * MIB, stream=1)
    allocator.malloc(5 * MIB, pool=1)
    allocator.malloc(5)
    allocator.malloc(5 * MIB)
    assert allocated_mib(allocator) == [20, 20, 20, 2]


# Frees ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_a_freed_block_is_merged_with_both_free_neighbours(order):
    allocator = Allocator()
    blocks = [allocator.malloc(4 * MIB) for _ in range(3)]
    for number in order:
        allocator.free(blocks[number])
    assert layout(allocator) == [[(20, "free")]]
    assert offset_mib(allocator.malloc(19 * MIB)) == 0


def test_a_block_that_another_stream_uses_is_reused_only_after_that_stream_has_finished():
    allocator = Allocator()
    block, neighbour = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert allocator.allocated_bytes == 4 * MIB
    assert offset_mib(allocator.malloc(4 * MIB)) == 8
    allocator.free(neighbour)
    assert layout(allocator)[0][0] == (4, "pending")  # not merged either
    allocator.complete_free(block)
    assert layout(allocator)[0][0] == (8, "free")


def test_use_by_its_own_stream_does_not_delay_reuse():
    allocator = Allocator()
    block = allocator.malloc(4 * MIB, stream=7)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert layout(allocator) == [[(20, "free")]]


# Released memory ------------------------------------------------------------------------------------------------------
def test_emptying_the_cache_releases_whole_free_segments_large_ones_first():
    allocator = Allocator()
    small = allocator.malloc(512)
    blocks = [allocator.malloc(size * MIB, stream) for size, stream in ((30, 0), (12, 0), (14, 5), (12, 0))]
    in_use = allocator.malloc(4 * MIB)
    for block in (small, *blocks):
        allocator.free(block)
    allocator.release_cached()
    # by stream, then size, then address
    assert released_mib(allocator) == [12, 12, 30, 14, 2]
    assert [event.address for event in allocator.events if event.action == "segment_free"][:2] == [
        blocks[1].address,
        blocks[3].address,
    ]
    assert allocator.reserved_bytes == 20 * MIB
    assert in_use.allocated


def test_private_pools_keep_their_memory_until_they_have_no_users():
    allocator = Allocator()
    allocator.free(allocator.malloc(30 * MIB, pool=1))
    allocator.release_cached()
    assert released_mib(allocator) == []
    allocator.freeable_pools.add(1)
    allocator.release_cached()
    assert released_mib(allocator) == [30]


def test_when_the_device_has_no_memory_the_cache_is_released_and_the_request_retried():
    allocator = Allocator(capacity_bytes=64 * MIB)
    waiting, idle = allocator.malloc(20 * MIB), allocator.malloc(40 * MIB)
    allocator.request_free(waiting)
    allocator.free(idle)
    allocator.malloc(50 * MIB)  # waits for the stream that uses `waiting`, too
    assert (released_mib(allocator), allocator.retries) == ([20, 40], 1)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (50 * MIB, 60 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(30 * MIB)
    assert allocator.retries == 2


def test_a_memory_fraction_limits_reserved_memory():
    allocator = Allocator(settings("per_process_memory_fraction:0.5"), capacity_bytes=100 * MIB)
    allocator.malloc(50 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(2 * MIB)


def test_blocks_above_the_split_limit_are_not_split_and_do_not_serve_small_requests():
    allocator = Allocator(settings("max_split_size_mb:30"))
    allocator.free(allocator.malloc(60 * MIB))
    assert offset_mib(allocator.malloc(5 * MIB)) == 60  # the block of 60 MiB is not used
    assert allocator.malloc(41 * MIB).bytes == 60 * MIB  # less than 20 MiB larger than the request: used whole
    allocator = Allocator(settings("max_split_size_mb:30"))
    allocator.free(allocator.malloc(60 * MIB))
    assert offset_mib(allocator.malloc(40 * MIB)) == 60  # 20 MiB larger: too much
    allocator = Allocator(settings("max_split_size_mb:30,max_non_split_rounding_mb:25"))
    allocator.free(allocator.malloc(60 * MIB))
    assert allocator.malloc(40 * MIB).bytes == 60 * MIB
    allocator = Allocator(settings("max_split_size_mb:30"))
    allocator.free(allocator.malloc(29 * MIB))
    assert allocator.malloc(5 * MIB).bytes == 5 * MIB


def test_with_a_split_limit_an_allocation_failure_releases_only_what_is_needed():
    allocator = Allocator(settings("max_split_size_mb:30"), capacity_bytes=200 * MIB)
    blocks = [allocator.malloc(size * MIB) for size in (32, 40, 50, 20)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(90 * MIB)  # no block is large enough: the largest are released first
    assert (released_mib(allocator), allocator.retries) == ([50, 40], 0)
    allocator = Allocator(settings("max_split_size_mb:30"), capacity_bytes=130 * MIB)
    blocks = [allocator.malloc(size * MIB) for size in (80, 32)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(28 * MIB)  # the smallest oversized block suffices
    assert (released_mib(allocator), allocator.retries) == ([32], 0)


def test_garbage_is_collected_by_age_above_a_share_of_the_allowed_memory():
    allocator = Allocator(
        settings("garbage_collection_threshold:0.5,per_process_memory_fraction:1"), capacity_bytes=200 * MIB
    )
    old, new = allocator.malloc(40 * MIB), allocator.malloc(44 * MIB)
    allocator.free(old)
    allocator.free(allocator.malloc(30 * MIB, stream=9))
    for _ in range(3):  # the allocator measures age in requests
        allocator.free(new)
        new = allocator.malloc(44 * MIB)
    allocator.free(new)
    allocator.malloc(60 * MIB)
    assert released_mib(allocator) == [
        40
    ]  # 114 MiB are 14 above the threshold: the block unused for longest is released
    unlimited = Allocator(settings("garbage_collection_threshold:0.5"), capacity_bytes=200 * MIB)
    for size in (40, 44, 60):
        unlimited.free(unlimited.malloc(size * MIB))
    assert released_mib(unlimited) == []  # torch collects only under a memory fraction


def test_small_segments_and_private_pools_are_not_collected():
    text = "garbage_collection_threshold:0.1,per_process_memory_fraction:1"
    allocator = Allocator(settings(text), capacity_bytes=200 * MIB)
    for block in (allocator.malloc(512), allocator.malloc(40 * MIB, pool=1)):
        allocator.free(block)
    allocator.malloc(30 * MIB)
    assert released_mib(allocator) == []


# Expandable segments --------------------------------------------------------------------------------------------------
def growing(**options) -> Allocator:
    return Allocator(settings("expandable_segments:True"), **options)


def test_an_expandable_segment_grows_in_place_by_pages():
    allocator = growing()
    blocks = [allocator.malloc(size * MIB) for size in (15, 15, 45)]
    assert [offset_mib(block) for block in blocks] == [0, 15, 30]
    assert allocated_mib(allocator) == [20, 20, 40]
    assert layout(allocator) == [[(15, "allocated"), (15, "allocated"), (45, "allocated"), (5, "free")]]
    allocator.malloc(512)
    assert allocated_mib(allocator)[-1] == 2


def test_expandable_segments_split_to_the_last_512_bytes():
    allocator = growing()
    blocks = [allocator.malloc(size) for size in (5 * MIB, 15 * MIB)]
    allocator.free(blocks[0])
    assert allocator.malloc(5 * MIB - 512).bytes == 5 * MIB - 512


def test_the_end_that_can_grow_is_used_last():
    allocator = growing()
    blocks = [allocator.malloc(size * MIB) for size in (8, 2, 6)]  # leaves 4 MiB mapped at the end
    allocator.free(blocks[0])
    assert offset_mib(allocator.malloc(3 * MIB)) == 0  # not the 4 MiB, which fit better but can grow


def test_among_ends_that_can_grow_equally_far_the_first_is_used():
    allocator = growing(address_space_bytes=60 * MIB)
    assert [offset_mib(allocator.malloc(35 * MIB)) for _ in range(2)] == [0, 60]
    assert offset_mib(allocator.malloc(4 * MIB)) == 35


def test_among_blocks_that_cannot_grow_the_best_fit_is_used():
    allocator = growing()
    blocks = [allocator.malloc(size * MIB) for size in (8, 2, 6, 2, 2)]
    for number in (0, 2):
        allocator.free(blocks[number])
    assert offset_mib(allocator.malloc(5 * MIB)) == 10


def test_a_free_block_at_the_end_grows():
    allocator = growing()
    blocks = [allocator.malloc(size * MIB) for size in (12, 8)]
    allocator.free(blocks[1])
    assert offset_mib(allocator.malloc(30 * MIB)) == 12
    assert allocated_mib(allocator) == [20, 40]


def test_whole_pages_are_unmapped_and_mapped_again():
    allocator = growing()
    blocks = [allocator.malloc(size * MIB) for size in (15, 50, 15)]
    allocator.free(blocks[1])
    allocator.release_cached()
    assert layout(allocator) == [[(15, "allocated"), (5, "free")], [(5, "free"), (15, "allocated")]]
    assert released_mib(allocator) == [40]
    allocator.release_cached()  # less than a page remains on either side: it stays mapped
    assert layout(allocator) == [[(15, "allocated"), (5, "free")], [(5, "free"), (15, "allocated")]]
    assert offset_mib(allocator.malloc(50 * MIB)) == 15
    assert allocated_mib(allocator)[-1] == 40
    assert layout(allocator) == [[(15, "allocated"), (50, "allocated"), (15, "allocated")]]


def test_a_segment_without_mapped_memory_is_dropped():
    allocator = growing()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.release_cached()
    assert (allocator.segments(), allocator.reserved_bytes, released_mib(allocator)) == ([], 0, [40])
    assert offset_mib(allocator.malloc(5 * MIB)) > 0
    assert allocated_mib(allocator) == [40, 20]


def test_space_unmapped_in_pieces_is_mapped_again_as_one():
    allocator = growing()
    blocks = [allocator.malloc(20 * MIB) for _ in range(3)]
    for block in blocks[:2]:
        allocator.free(block)
        allocator.release_cached()
    assert released_mib(allocator) == [20, 20]
    assert offset_mib(allocator.malloc(35 * MIB)) == 0
    assert allocated_mib(allocator) == [20, 20, 20, 40]


def test_an_expandable_segment_can_run_out_of_memory():
    allocator = growing(capacity_bytes=50 * MIB)
    allocator.malloc(30 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(15 * MIB)
    assert allocator.malloc(9 * MIB).bytes == 9 * MIB


def test_another_segment_begins_when_the_first_cannot_grow_further():
    allocator = growing(address_space_bytes=40 * MIB)
    allocator.malloc(30 * MIB)
    assert offset_mib(allocator.malloc(15 * MIB)) == 40


def test_expandable_blocks_are_not_used_after_the_setting_is_turned_off():
    grown = growing()
    grown.free(grown.malloc(30 * MIB))
    allocator = Allocator()
    allocator.adopt(grown.segments())
    assert allocator.malloc(30 * MIB).address != BASE
    assert allocated_mib(allocator) == [30]


def test_an_adopted_state_behaves_as_the_original():
    for made in (Allocator(), growing()):
        blocks = [made.malloc(size * MIB, stream) for size, stream in ((15, 0), (50, 0), (15, 0), (1, 0), (3, 4))]
        made.free(blocks[1])
        made.release_cached()
        made.request_free(blocks[0])
        again = Allocator(made.settings)
        again.adopt(made.segments())
        assert again.segments() == made.segments()
        for request in ((45 * MIB, 0), (512, 0), (20 * MIB, 4), (7 * MIB, 0)):
            again.malloc(*request)
            made.malloc(*request)
        assert layout(again) == layout(made)
        assert again.reserved_bytes == made.reserved_bytes
        assert again.allocated_bytes == made.allocated_bytes


# Settings -------------------------------------------------------------------------------------------------------------
def test_settings_are_parsed_from_the_syntax_of_the_environment_variable():
    recorded = settings(
        "backend:native, expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],pinned_use_background_threads:True"
    )
    assert recorded == Settings(
        expandable=True, max_split_bytes=128 * MIB, gc_threshold=0.8, roundup_divisions=(1,) * 9 + (2, 4) + (8,) * 5
    )
    assert settings("default") == settings("") == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_invalid_settings_are_rejected_with_the_valid_values(text, message):
    with pytest.raises(InputError, match=message):
        settings(text)


def test_the_settings_of_a_snapshot_are_those_of_the_recorded_process():
    recorded = {"expandable_segments": True, "max_split_size": 30 * MIB, "garbage_collection_threshold": 0.5}
    recorded |= {"roundup_power2_divisions": {"1": 4, "2": 0, "32768": 8}}
    recorded |= {"PYTORCH_CUDA_ALLOC_CONF": "max_non_split_rounding_mb:40,per_process_memory_fraction:0.5"}
    expected = Settings(
        expandable=True,
        max_split_bytes=30 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        gc_threshold=0.5,
        roundup_divisions=(4, *(0,) * 14, 8),
        memory_fraction=0.5,
    )
    assert Settings.of_snapshot(recorded) == expected
    assert Settings.of_snapshot({"PYTORCH_CUDA_ALLOC_CONF": "a_setting_of_tomorrow:7"}) == Settings()
    assert Settings.of_snapshot({"max_split_size": -1}) == Settings.of_snapshot({}) == Settings()
    for impossible in (10**400, -1, 1.5, float("nan"), float("inf"), "0.5"):
        assert Settings.of_snapshot({"garbage_collection_threshold": impossible}) == Settings()

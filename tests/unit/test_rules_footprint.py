"""Growth, headroom, idle reserve and the peak's owner: what is said, and from where on."""

from pathlib import Path

import pytest

import tracekit
from tests.proofs import GIB, holding, leaking
from tracekit.checking import check
from tracekit.rules.footprint import GrowingMemory, IdleReserve, LittleHeadroom, PeakOwner

OTHERS = Path(__file__).parents[2].parent / "shared" / "traces"


def judge(run, rule):
    return check(run, [rule]).findings


def test_a_leak_is_told_by_its_slope_and_from_the_threshold_on():
    (found,) = judge(leaking(1 << 20), GrowingMemory())
    assert found.cost_bytes == 1 << 20
    assert "Rank 0 holds 1 MiB more after each step (1 MiB to 1 MiB, 99% confidence)" in found.message
    assert "1 GiB after step 0 and 1.01 GiB after step 7" in found.message
    assert judge(leaking(1 << 20), GrowingMemory(min_bytes=(1 << 20) + 1)) == ()


def test_memory_that_fills_in_the_first_step_is_no_leak():
    assert judge(holding(GIB, *[4 * GIB] * 7), GrowingMemory()) == ()


def test_headroom_is_what_was_never_reserved_of_the_device():
    (found,) = judge(holding(GIB, reserved_bytes=96 * GIB), LittleHeadroom())
    assert found.message == "Of the 100 GiB of device 0, 4 GiB (4.0%) were never reserved on rank 0."
    assert judge(holding(GIB, reserved_bytes=96 * GIB), LittleHeadroom(min_headroom_ratio=0.04)) == ()


def test_idle_reserve_is_what_is_not_held_at_the_peak_not_at_another_time():
    (found,) = judge(holding(GIB, 6 * GIB, GIB), IdleReserve())
    assert found.message == "On rank 0, 4 GiB of the 10 GiB reserved (40.0%) are idle even when most is held."
    assert found.cost_bytes == 4 * GIB
    assert judge(holding(GIB, 8 * GIB, GIB), IdleReserve()) == ()
    assert judge(holding(GIB >> 4, reserved_bytes=GIB >> 1), IdleReserve()) == ()  # a share, but little


def test_the_owner_of_the_peak_is_named_with_what_would_save_it():
    (found,) = judge(holding(GIB), PeakOwner())
    assert found.message == "aten::_softmax holds 1 GiB in 1 block, 100.0% of the 1 GiB held at most on rank 0."
    assert "scaled_dot_product_attention" in found.fix


@pytest.mark.parametrize(
    ("name", "rule", "told"),
    [
        ("tracelens_h100_memory_stacks", PeakOwner(), "aten::_softmax holds 820 MiB in 1 block, 31.8%"),
        ("hta_ddp_v100_memory", IdleReserve(), "5.73 GiB of the 11.9 GiB reserved (48.1%)"),
    ],
)
def test_recorded_traces_are_judged_by_their_own_totals(name, rule, told):
    if not OTHERS.is_dir():
        pytest.skip("the traces of others are not beside this checkout")
    (found,) = judge(tracekit.load(str(OTHERS / name)), rule)
    assert told in found.message

"""Devices: what a driver calls them, and the bandwidth of their links."""

import pytest

from tracekit.conventions import devices

# Names as the driver writes them; rates in GB/s, in both directions, as the data sheets state them.
_NAMED = [
    ("AMD Instinct MI250X", 400.0, 100.0),  # one of two devices of a module of 800
    ("AMD Instinct MI300X", 896.0, 128.0),
    ("AMD Instinct MI325X", 896.0, 128.0),
    ("AMD Instinct MI350X", 1075.2, 153.6),
    ("AMD Instinct MI355X", 1075.2, 153.6),
    ("NVIDIA H100 80GB HBM3", 900.0, None),
    ("Tesla V100-SXM2-16GB", 300.0, 50.0),
]


@pytest.mark.parametrize(("name", "links", "peer"), _NAMED, ids=[name for name, *_ in _NAMED])
def test_links_carry_half_of_what_data_sheets_state_for_both_directions(name, links, peer):
    device = devices.find(name)
    assert device is not None
    assert device.link_bytes_per_s == pytest.approx(links * 1e9 / 2)
    assert device.peer_bytes_per_s == (None if peer is None else pytest.approx(peer * 1e9 / 2))


def test_seven_links_reach_the_other_devices_of_a_platform():
    meshed = [each for each in devices.DEVICES if each.name.startswith(("mi3",))]
    assert [each.link_bytes_per_s for each in meshed] == pytest.approx([7 * each.peer_bytes_per_s for each in meshed])


def test_a_stated_bandwidth_of_links_replaces_that_of_direct_links():
    override = devices.DeviceOverride("MI300X", {}, link_bytes_per_s=3e11)
    device = devices.find_overridden("AMD Instinct MI300X", [override])
    assert (device.link_bytes_per_s, device.peer_bytes_per_s) == (3e11, None)
    kept = devices.find_overridden("AMD Instinct MI300X", [devices.DeviceOverride("MI300X", {})])
    assert (kept.link_bytes_per_s, kept.peer_bytes_per_s) == (448e9, 64e9)

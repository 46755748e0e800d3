"""A manifest of any content: valid values are used, others are ignored."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.model.manifest import MAX_RANKS, Manifest, Model, OutlierReason, ProfiledWindow

NAMES = st.sampled_from([*Manifest.__struct_fields__, *Model.__struct_fields__, "schema", "first_step"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6),
)


@given(st.dictionaries(NAMES, JSON))
def test_a_manifest_of_any_values_is_read(document):
    assert isinstance(Manifest.of(json.loads(json.dumps(document))), Manifest)


@pytest.mark.parametrize("value", [None, True, 4.5, "x", [], {}, -1, 10**400, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["created_ns", "world_size", "windows"])
def test_an_invalid_value_is_as_if_absent(name, value):
    assert Manifest.of({name: value, "strategy": "ddp"}) == Manifest(strategy="ddp")


@pytest.mark.parametrize(("size", "expected"), [(0, None), (1, 1), (MAX_RANKS, MAX_RANKS), (MAX_RANKS + 1, None)])
def test_an_impossible_world_size_is_ignored(size, expected):
    assert Manifest.of({"world_size": size}).world_size == expected


@pytest.mark.parametrize(("time_ns", "expected"), [(0, None), (5, 5), (4_102_444_800 * 10**9, None)])
def test_a_creation_time_outside_1970_to_2100_is_ignored(time_ns, expected):
    assert Manifest.of({"created_ns": time_ns}).created_ns == expected


def test_a_manifest_model_is_an_object_or_a_name():
    assert Manifest.of({"model": "tiny"}).model == Model("tiny")
    assert Manifest.of({"model": {"name": "tiny", "parameters": 3, "width": 256}}).model == Model("tiny", 3.0)
    assert Manifest.of({"model": {"name": "tiny", "parameters": "many"}}).model == Model("tiny")


def test_windows_are_read_one_by_one():
    window = {"window": 2, "first_step": 40, "steps": 4}
    rows = [1, {}, window, window | {"steps": -4}, window | {"steps": 1 << 63}, window | {"of": "a later version"}]
    assert Manifest.of({"windows": rows}).windows == (ProfiledWindow(2, 40, 4), ProfiledWindow(2, 40, 4))


def test_an_invalid_reason_of_a_window_is_left_out():
    window = {"window": 2, "first_step": 40, "steps": 4}
    reason = {"step": 12, "rank": 3, "ratio": 3.1, "median_ns": 100}
    invalid = [None, 1, {}, reason | {"ratio": 0}, reason | {"step": -1}, reason | {"rank": "3"}]
    rows = [window | {"outlier": value} for value in [reason, *invalid]]
    read = Manifest.of({"windows": rows}).windows
    assert read == (ProfiledWindow(2, 40, 4, OutlierReason(12, 3, 3.1)), *[ProfiledWindow(2, 40, 4)] * len(invalid))

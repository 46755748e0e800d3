"""Kernels and their product calls where lanes are not described, or twice, as in damaged exports."""

import polars as pl

from tests.support import drawn_traces
from tracekit.analysis.compute import product_kernels

TRACE = drawn_traces.trace("compute aab.cc\ncomm ..xxx.")


def kernels_with(lanes: pl.DataFrame) -> list[int]:
    return product_kernels.with_calls(TRACE.replace(lanes=lanes))["activity_id"].to_list()


def test_kernels_on_lanes_that_are_not_described_are_of_no_device():
    assert kernels_with(TRACE.lanes.head(0)) == []


def test_lanes_that_are_described_twice_repeat_no_kernel():
    assert kernels_with(pl.concat([TRACE.lanes, TRACE.lanes])) == kernels_with(TRACE.lanes) == [0, 1, 2]

"""The host's state on drawn timelines: saves that spans name, and pauses between the allocator's calls."""

import numpy as np
import polars as pl
import pytest

from tests.support import drawn_traces
from tracekit.analysis.time import host_state

UNIT_NS = 1_000


def states(*rows, at):
    """Return the host's states at some moments; rows are a name, a kind, a start and an end. The first one launches."""
    ops = pl.DataFrame(
        [
            {"id": number, "lane": 9, "name": name, "kind": kind, "step": 0}
            | {"start_ns": start * UNIT_NS, "dur_ns": (end - start) * UNIT_NS}
            for number, (name, kind, start, end) in enumerate(rows)
        ]
    )
    drawn = drawn_traces.trace("step     .0000000000\ncompute  .aaaaaaaaaa", scale_ns=UNIT_NS, ops=ops)
    found = host_state.state_at(drawn, np.array(at) * UNIT_NS)
    return [host_state.HOST_STATES[each] for each in found.tolist()]


LAUNCH = ("cudaLaunchKernel", "runtime", 0, 1)


@pytest.mark.parametrize("name", ["DistributedCheckpoint.save_checkpoint", "## checkpoint ##", "dcp.save"])
def test_a_span_that_is_named_like_a_save_is_one_whatever_its_phase(name):
    # host     l.SSSSS..
    assert states(LAUNCH, (name, "annotation", 2, 7), at=(1, 4, 8)) == ["python", "checkpoint", "python"]


def test_a_short_pause_between_two_allocator_calls_belongs_to_the_allocator():
    # host     l.ff.ff...ff     a pause of one, then one that is longer than the calls
    calls = [("cudaFree", "runtime", start, start + 2) for start in (2, 5, 10)]
    assert states(LAUNCH, *calls, at=(3, 4, 6, 8, 11)) == ["allocator", "allocator", "allocator", "python", "allocator"]


def test_a_pause_between_two_allocations_in_which_an_op_begins_is_not_the_allocators():
    # host     l.oooOOO       each op allocates for two
    calls = [("cudaMalloc", "runtime", 2, 4), ("cudaMalloc", "runtime", 5, 7)]
    ops = [("aten::empty", "cpu_op", 2, 4), ("aten::empty", "cpu_op", 5, 7)]
    assert states(LAUNCH, *calls, *ops, at=(3, 4, 6)) == ["allocator", "python", "allocator"]

"""Overlap of a ring of context parallelism, on drawn timelines."""

import polars as pl

from tests.support import drawn_traces as drawn
from tracekit.analysis.parallelism import axis_communication, group_axes
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace

# Two ranks with a block of keys each. s sends a block on, r receives one (each has a stream of its own). Rank 1 begins
# 2 later, so rank 0 waits: for 1 of it, it computes.
PICTURES = (
    """
    step     00000000000000000000
    compute  ..aaa...bbb.........
    comm     .sssssss............
    comm     .rrrrrrr............
    """,
    """
    step     00000000000000000000
    compute  ....aaaa..bb........
    comm     ...sssss............
    comm     ...rrrrr............
    """,
)
ROUNDS = 4
"""How often each picture is repeated: fewer sends between two ranks are not matched."""
ALIGNING = 40
"""All-reduces before the ring, which both ranks leave together: they align the clocks."""


def trace(rank: int, *, description: str | None) -> Trace:
    before = "x." * ALIGNING
    rows = [line.split() for line in PICTURES[rank].strip().splitlines()]
    for row in rows:
        row[1] *= ROUNDS
    rows[0][1] = "0" * len(before) + rows[0][1]
    rows[1][1] = "." * len(before) + rows[1][1]
    for number, row in enumerate(rows[2:]):
        row[0], row[1] = f"comm{number}", ("." * len(before) if number else before) + row[1]
    plain = drawn.trace("\n".join(" ".join(row) for row in rows), rank=rank)
    calls = []
    for number, name in plain.activities.filter(kind="communication").select("id", "name").rows():
        op = {"s": "send", "r": "recv"}.get(name, "all_reduce")
        peer = None if op == "all_reduce" else 1 - rank
        group = "0" if op == "all_reduce" else "7"
        calls.append({"activity_id": number, "op": op, "peer": peer, "group": group, "group_size": 2, "sent_bytes": 64})
    groups = [
        {"group": "0", "description": "", "ranks": [0, 1]},
        {"group": "7", "description": description, "ranks": [0, 1]},
    ]
    return plain.replace(
        collectives=schema.COLLECTIVES.conform(pl.DataFrame(calls, infer_schema_length=None)),
        groups=schema.GROUPS.conform(pl.DataFrame(groups)),
    )


def run(description: str | None = "mesh_cp", **manifest: object) -> Run:
    return drawn.run(*(trace(rank, description=description) for rank in range(2)), **manifest)


def test_hidden_is_what_the_rank_computes_meanwhile():
    rows = run().table(axis_communication.ring_overlap)
    assert rows.select(
        "rank", "calls", "bytes", "communication_ns", "hidden_ns", "exposed_communication_ns"
    ).rows() == [
        (0, 2 * ROUNDS, 128 * ROUNDS, 7 * ROUNDS, 3 * ROUNDS, 4 * ROUNDS),
        (1, 2 * ROUNDS, 128 * ROUNDS, 5 * ROUNDS, 4 * ROUNDS, ROUNDS),
    ]
    assert rows["hidden_ratio"].to_list() == [3 / 7, 4 / 5]


def test_waiting_for_the_peer_is_apart_from_the_transfer():
    # Rank 0 begins at 1, rank 1 at 3: of the 2 between, rank 0 computes in 1.
    assert run().table(axis_communication.ring_overlap)["waited_ns"].to_list() == [ROUNDS, 0]


def test_the_sums_are_those_of_the_axis():
    drawn_run = run()
    rows = drawn_run.table(axis_communication.ring_overlap)
    of_axis = axis_communication.by_axis(drawn_run).filter(axis="cp").sort("rank")
    both = ["communication_ns", "exposed_communication_ns", "bytes"]
    assert rows.select(both).rows() == of_axis.select(both).rows()


def test_sends_between_ranks_of_a_context_group_of_the_manifest_are_not_of_a_pipeline():
    with_cp = run(None, groups={"cp": [[0, 1]]}).table(group_axes.group_axes)
    with_pp = run(None, groups={"pp": [[0, 1]]}).table(group_axes.group_axes)
    assert {row["axis"] for row in with_cp.to_dicts() if ">" in row["members"]} == {"cp"}
    assert {row["axis"] for row in with_pp.to_dicts() if ">" in row["members"]} == {"pp"}


def test_a_run_without_a_ring_has_no_rows():
    assert run("mesh_pp").table(axis_communication.ring_overlap).is_empty()

"""Traffic of experts between ranks, on drawn timelines."""

import polars as pl

from tests.support import drawn_traces as drawn
from tracekit.analysis.parallelism import expert_load
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace

MICROSECOND_NS = 1000
ALIGNING = 40
"""All-reduces before the exchange, which all ranks leave together: they align the clocks."""

# Three ranks exchange tokens of 100 bytes twice: x brings them to the experts, y returns them. From the last arrival in
# x, at 3, ranks 1 and 2 need 6 for what they send each other; rank 0 has all of its own after 2. In y they need 5, and
# rank 0 needs 1.
PICTURES = (
    """
    compute  c........ccccc.........c
    comm     .xxxx.........yy........
    """,
    """
    compute  cc.......ccccc.........c
    comm     ..xxxxxxx.....yyyyyy....
    """,
    """
    compute  ccc......cccccc........c
    comm     ...xxxxxx......yyyyy....
    """,
)
ROWS = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
"""Tokens that rank i sends to rank j."""


def exchange(places: list[int], rank: int, ranks: int) -> list[dict[str, object]]:
    """Return the collectives x and y of a rank that is at `rank` of the group, as its trace records them."""
    sent = [100 * ROWS[rank][peer] for peer in range(ranks)]
    received = [100 * ROWS[peer][rank] for peer in range(ranks)]
    return [
        {
            "activity_id": place, "op": "all_to_all", "group": "7", "group_size": ranks, "sent_bytes": sum(out),
            "received_bytes": sum(back), "splits": out, "row_bytes": 100,
        }
        for place, out, back in zip(places, (sent, received), (received, sent), strict=True)
    ]  # fmt: skip


def trace(rank: int, picture: str) -> Trace:
    compute, comm = (line.split()[1] for line in picture.strip().splitlines())
    before = "a.b." * (ALIGNING // 2)
    drawing = f"step {'0' * (len(before) + len(comm))}\ncompute {'.' * len(before)}{compute}\ncomm {before}{comm}"
    plain = drawn.trace(drawing, rank=rank, scale_ns=MICROSECOND_NS)
    places = plain.activities.filter(kind="communication").sort("start_ns")["id"].to_list()
    aligning = [{"activity_id": at, "op": "all_reduce", "group": "0", "sent_bytes": 8} for at in places[:ALIGNING]]
    calls = aligning + exchange(places[ALIGNING:], rank, len(ROWS))
    groups = [
        {"group": group, "description": text, "ranks": [0, 1, 2]} for group, text in (("0", ""), ("7", "mesh_ep"))
    ]
    return plain.replace(
        collectives=schema.COLLECTIVES.conform(pl.DataFrame(calls, infer_schema_length=None)),
        groups=schema.GROUPS.conform(pl.DataFrame(groups)),
    )


def run(pictures: tuple[str, ...] = PICTURES) -> Run:
    return drawn.run(*(trace(rank, picture) for rank, picture in enumerate(pictures)), world_size=len(pictures))


def test_the_load_of_experts_counts_tokens():
    loads = run().table(expert_load.expert_load)
    assert loads.select("rank", "load_tokens", "load_bytes").rows() == [(0, 12, 1200), (1, 15, 1500), (2, 18, 1800)]


def test_the_matrix_has_the_tokens_of_each_pair():
    pairs = run().table(expert_load.expert_pairs)
    expected = [(rank, peer, ROWS[rank][peer]) for rank in range(3) for peer in range(3)]
    assert pairs.select("rank", "peer", "tokens").rows() == expected
    assert pairs["bytes"].to_list() == [100 * tokens for *_, tokens in expected]
    assert pairs["load_ratio"].to_list() == [tokens / 5 for *_, tokens in expected]


def test_a_transfer_ends_when_the_first_of_two_ranks_leaves():
    drawn_run = run()
    pairs = drawn_run.table(expert_load.expert_pairs)
    expected_us = {(0, 1): 2 + 1, (0, 2): 2 + 1, (1, 2): 6 + 5}
    # In x rank 0 leaves 2 after the last arrival, in y 1; ranks 1 and 2 leave 6 and 5 after it.
    assert {
        (rank, peer): transfer_ns // MICROSECOND_NS
        for rank, peer, transfer_ns in pairs.select("rank", "peer", "transfer_ns").drop_nulls().rows()
        if rank < peer
    } == expected_us
    slowest = expert_load.by_pair(drawn_run).row(0, named=True)
    assert (slowest["rank"], slowest["peer"], slowest["transfer_ns"]) == (2, 1, 11 * MICROSECOND_NS)
    assert slowest["bytes_per_s"] == 2 * 800 / 11e-6

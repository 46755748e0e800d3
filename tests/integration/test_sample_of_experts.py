"""The recorded run with divided experts: its all-to-alls carry the tokens that spans and split sizes say."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from instrumented_trainers.parallelism.expert import COMBINE, DISPATCH
from tracekit.conventions import TRACE_SUFFIX, rank_file

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "parallelism" / "moe-ep2"
STEPS, LAYERS = 3, 2


def events(rank: int) -> list[dict[str, Any]]:
    path = SAMPLE / rank_file(rank, TRACE_SUFFIX)
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted((event for event in found if event.get("ph") == "X"), key=lambda event: event["ts"])


def exchanges(rank: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens that a rank received and sent in each exchange of tokens, by rank of its group."""
    inputs = [event["args"]["Concrete Inputs"] for event in events(rank) if event["name"] == "c10d::alltoall_base_"]
    pairs = [(json.loads(each[3]), json.loads(each[4])) for each in inputs]
    return [(received, sent) for received, sent in pairs if sent]


@pytest.mark.parametrize("group", [(0, 1), (2, 3)])
def test_what_one_rank_sends_the_other_receives(group: tuple[int, int]) -> None:
    one, other = (exchanges(rank) for rank in group)
    assert len(one) == len(other) == 4 * STEPS * LAYERS  # dispatch and combine, and back
    for (received, sent), (other_received, other_sent) in zip(one, other, strict=True):
        assert (received[0], received[1]) == (sent[0], other_sent[0])
        assert (other_received[0], other_received[1]) == (sent[1], other_sent[1])


@pytest.mark.parametrize("name", [DISPATCH, COMBINE, f"{DISPATCH} backward", f"{COMBINE} backward"])
def test_each_exchange_has_a_span(name: str) -> None:
    spans = [event for event in events(0) if event["name"] == name and event["cat"] == "user_annotation"]
    assert len(spans) == STEPS * LAYERS


def test_the_manifest_names_the_groups() -> None:
    groups = json.loads((SAMPLE / "run.json").read_text(encoding="utf-8"))["groups"]
    assert groups == {"dp_shard": [[0, 1, 2, 3]], "ep": [[0, 1], [2, 3]]}

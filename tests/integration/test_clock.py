"""One clock on recorded runs: artificial shifts are recovered, and matched calls are the same collective."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from tracekit.ingest.loader import load
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.sync import alignment, collective_matching

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "traces"
SAMPLES = ROOT / "sample_traces"
EIGHT_RANKS = ("nanogpt_h100_8ranks", "megatron_tp8_a100_8ranks")
MS, US = 1_000_000, 1_000
SHIFTS_NS = (0, 3_000 * MS, -77 * MS, 12_345, -1_800_000 * MS, 999_999_999, 5 * US, -1)

needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not installed")


def recorded(name):
    run = load(TRACES / name)
    run.measure((collective_matching.calls,))
    return run


@pytest.fixture(scope="module", params=EIGHT_RANKS)
def eight(request):
    if not TRACES.is_dir():
        pytest.skip("the shared traces are not installed")
    return recorded(request.param)


def shifted(run):
    """The same run with each rank's clock put off by SHIFTS_NS."""

    def read(source, shift_ns):
        trace = source.read()
        return replace(trace, activities=trace.activities.with_columns(pl.col("start_ns") - shift_ns))

    sources = [Source(s.rank, s.window, s.path, s.size_bytes, partial(read, s, SHIFTS_NS[s.rank])) for s in run.sources]
    return Run(run.path, sources, align=alignment.offsets)


@pytest.mark.accuracy  # unit/sync/test_alignment shifts any clocks
def test_artificial_clock_shifts_of_eight_recorded_ranks_are_recovered(eight):
    before, after = eight.offsets, shifted(eight).offsets
    assert before["residual_ns"].null_count() == 0
    found = (after["offset_ns"] - before["offset_ns"]).to_list()
    for rank, shift_ns in enumerate(SHIFTS_NS):
        assert abs(found[rank] - shift_ns) <= max(5 * US, after["residual_ns"][rank])


def test_ranks_of_one_host_need_no_offset(eight):
    # These ranks share one host's clock, so any offset is an error of the alignment.
    rows = eight.offsets
    assert rows["offset_ns"].abs().max() <= rows["residual_ns"].max() < 50 * US


def test_each_instance_is_the_same_collective_on_every_rank(eight):
    rows = (
        eight.table(collective_matching.matched_calls)
        .drop_nulls("instance")
        .with_columns((pl.col("start_ns").rank("ordinal").over("rank", "op")).alias("place"))
    )
    of = rows.group_by("instance").agg(
        pl.col("rank").is_unique().all().alias("one_each"),
        pl.col("op").n_unique().alias("ops"),
        pl.col("bytes").drop_nulls().n_unique().alias("sizes"),
        pl.col("dtype").drop_nulls().n_unique().alias("types"),
    )
    assert of["one_each"].all()
    assert of["ops"].max() == 1
    assert of["sizes"].max() <= 1
    assert of["types"].max() <= 1
    # One stream of collectives: all ranks run them in one order.
    for rank in eight.ranks:
        ordered = rows.filter(pl.col("rank") == rank).sort("start_ns")["instance"]
        for other in eight.ranks:
            theirs = rows.filter(pl.col("rank") == other).sort("start_ns")["instance"]
            common = set(ordered) & set(theirs)
            assert [i for i in ordered if i in common] == [i for i in theirs if i in common]


def kernels(path):
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
    return sorted(found, key=lambda e: e["ts"])


@pytest.mark.accuracy
@needs_traces
def test_sizes_in_kernel_names_equal_a_plain_python_count():
    run = recorded("nanogpt_h100_8ranks")
    rows = run.table(collective_matching.matched_calls)
    raw = {s.rank: kernels(s.path) for s in run.sources}
    members = defaultdict(list)
    for rank in run.ranks:
        rank_rows = rows.filter(pl.col("rank") == rank).sort("start_ns")
        assert rank_rows.height == len(raw[rank])
        for instance, event in zip(rank_rows["instance"], raw[rank], strict=True):
            members[instance].append((event["name"], event["args"].get("In msg nelems")))
    for calls in members.values():
        assert len({name for name, _ in calls}) == 1
        assert len({size for _, size in calls if size is not None}) <= 1
    # Ranks 4 to 7 began earlier: their first collectives are theirs alone, all others are of all eight.
    sizes = sorted(len(calls) for calls in members.values())
    assert sizes == [3] * 3 + [4] * 5 + [8] * 76


@pytest.mark.parametrize("name", ["demo-fsdp2", "demo-yafsdp"])
def test_gloo_ranks_of_one_host_stay_on_its_clock_to_within_the_residual(name):
    run = load(SAMPLES / name)
    rows = run.offsets
    assert rows["matched_by"].to_list() == ["order", "order"]
    assert abs(rows["offset_ns"][1]) < rows["residual_ns"].max() < 1_000_000
    calls = run.table(collective_matching.matched_calls)
    assert calls["instance"].null_count() == 0
    facts = pl.col("op", "unit", "step").n_unique(), pl.col("bytes").drop_nulls().n_unique()
    pairs = calls.group_by("instance").agg("rank", *facts)
    assert pairs["rank"].list.sort().to_list() == [[0, 1]] * pairs.height
    assert pairs.select(pl.col("op", "unit", "step", "bytes").max()).row(0) == (1, 1, 1, 1)

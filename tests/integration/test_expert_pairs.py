"""What ranks send to the experts of ranks: recorded and simulated all-to-alls, against what their files say."""

import gzip
import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support.cli_runner import tracekit as tracekit_command
from tracekit.analysis.parallelism import expert_load, pipeline_balance
from tracekit.ingest.loader import load
from tracekit.rules.model_parallel import OverloadedExperts

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "parallelism" / "moe-ep2"


def sent_rows(rank: int) -> Counter[int]:
    """Return the rows that a rank's file says it sends to each place of its group, in the first of two all-to-alls."""
    with gzip.open(SAMPLE / f"rank{rank:05d}.pt.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    calls = [event for event in events if event.get("name") == "c10d::alltoall_base_"]
    inputs = [json.loads(event["args"]["Concrete Inputs"][4]) for event in sorted(calls, key=lambda event: event["ts"])]
    rows: Counter[int] = Counter()
    for splits in [each for each in inputs if each][::2]:  # every other one returns the tokens
        rows.update(dict(enumerate(splits)))
    return rows


def test_a_recorded_mixture_has_what_each_rank_sends_to_each():
    pairs = load(SAMPLE).table(expert_load.expert_pairs)
    of_pair = pairs.group_by("rank", "peer").agg(pl.col("tokens", "bytes").sum()).sort("rank", "peer")
    row_bytes = 64 * 4  # width of the model, fp32
    expected = [
        (rank, rank // 2 * 2 + place, rows, rows * row_bytes)
        for rank in range(4)
        for place, rows in sorted(sent_rows(rank).items())
    ]
    assert of_pair.rows() == expected
    assert pairs.group_by("step", pl.col("rank") // 2).agg(pl.col("load_ratio").mean())["load_ratio"].to_list() == (
        pytest.approx([1.0] * 6)
    )


def test_what_pairs_send_is_what_the_experts_get():
    run = load(SAMPLE)
    pairs, loads = run.table(expert_load.expert_pairs), run.table(expert_load.expert_load)
    received = pairs.group_by("step", rank="peer").agg(pl.col("bytes").sum()).sort("step", "rank")
    assert received.rows() == loads.group_by("step", "rank").agg(pl.col("load_bytes").sum()).sort("step", "rank").rows()


def test_a_hot_expert_shows_in_the_pairs_of_a_simulated_job(tmp_path):
    sizes = ("--model", "8x7b", "--layers", "1", "--gpus", "4", "--ep", "4", "--seq", "1024", "--steps", "1")
    done = tracekit_command("simulate", *sizes, "--fault", "hot-expert:5:4", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    run = tracekit.load(tmp_path / "run", cache=False)
    pairs = run.table(expert_load.expert_pairs)
    assert pairs.height == 16
    # The experts of rank 2 are 4 and 5: they get 5 of 11 tokens.
    assert pairs.filter(pl.col("peer") == 2)["load_ratio"].to_list() == pytest.approx([4 * 5 / 11] * 4, rel=0.15)
    # All ranks of the simulator leave an all-to-all together: the pair that moves most is the slowest.
    assert expert_load.by_pair(run)["peer"][0] == 2


def test_the_command_shows_tokens_by_expert_and_by_pair():
    of_rank, of_pair = (
        json.loads(tracekit_command("summary", SAMPLE, "--by", by, "--format", "json").stdout)
        for by in ("expert", "expert-pair")
    )
    sent = {rank: sent_rows(rank) for rank in range(4)}
    received = [sum(sent[rank // 2 * 2 + sender][rank % 2] for sender in range(2)) for rank in range(4)]
    assert [row["tokens"] for row in of_rank] == received
    assert [row["tokens"] for row in of_pair] == [sent[rank][place] for rank in range(4) for place in range(2)]
    # gloo on a shared machine: no transfer is longer than the error of the clocks.
    assert {row["bytes_per_s"] for row in of_pair} == {None}


def test_a_run_without_experts_has_no_pairs():
    sample = SAMPLE.parents[1] / "demo-fsdp2"
    assert load(sample).table(expert_load.expert_pairs).is_empty()


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        pytest.param(("--schedule", "gpipe", "--tp", "2", "--ep", "2", "--gpus", "8"), 3, marks=pytest.mark.accuracy),
        (("--ep", "4", "--gpus", "8"), 4),
    ],
    ids=["tensor parallel, half of the replicas", "one replica of four"],
)
def test_overloaded_experts_make_no_stage_look_slow(tmp_path, options, factor):
    sizes = ("--model", "8x7b", "--layers", "2", "--pp", "2", "--micro-batches", "6", "--seq", "2048", "--steps", "2")
    ratios = []
    for name, faults in (("healthy", ()), ("hot", ("--fault", f"hot-expert:1:{factor}"))):
        done = tracekit_command("simulate", *sizes, *options, "--seed", "3", *faults, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        run = tracekit.load(tmp_path / name, cache=False)
        found = pipeline_balance.balance(run)
        assert found is not None
        ratios.append(found.ratio(0))
    assert list(OverloadedExperts().check(run))
    assert ratios[1] == pytest.approx(ratios[0], rel=0.03)

"""Each claim of a rule on a recorded run, counted again from the raw files in plain Python."""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl
import pytest

import tracekit
from tracekit import units
from tracekit.rule import Finding

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "sample_traces" / "demo-fsdp2"
SHARED = ROOT.parent / "shared" / "traces"


def findings(run: Path, code: str) -> list[Finding]:
    return [found for found in tracekit.check(tracekit.load(run)).findings if found.code == code]


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") in ("X", "i")]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def others(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip("the traces of others are not beside this checkout")
    return folder


def test_the_checkpoint_claim_is_what_the_logs_say() -> None:
    (found,) = findings(SAMPLE, "CKPT001")
    logs = [row for path in sorted(SAMPLE.glob("*.checkpoint.jsonl")) for row in lines(path)]
    saves = [row for row in logs if row["operation"] == "save" and row["blocking"]]
    totals: dict[str, list[int]] = defaultdict(list)
    for row in saves:
        if row["stage"] == "total":
            totals[row["checkpoint"]].append(row["dur_ns"])
    blocked_ns = median(max(of_ranks) for of_ranks in totals.values())
    assert units.duration(blocked_ns) in found.message

    times: dict[int, float] = defaultdict(float)
    for path in SAMPLE.glob("*.metrics.jsonl"):
        for row in lines(path):
            times[row["step"]] = max(times[row["step"]], row["step_time_ns"])
    done = sorted({row["step"] for row in saves})
    between_ns = (done[1] - done[0]) * median(ns for step, ns in times.items() if step + 1 not in done)
    assert found.impact == pytest.approx(blocked_ns / (between_ns + blocked_ns))

    work: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for row in saves:
        work[row["checkpoint"], row["rank"]][row["stage"]] = row["dur_ns"]
    slowest = {
        name: max((of for of in work if of[0] == name), key=lambda of: work[of]["total"] - work[of].get("wait", 0))
        for name in totals
    }
    stages: dict[str, int] = defaultdict(int)
    for of in slowest.values():
        for stage, ns in work[of].items():
            stages[stage] += ns * (stage not in ("wait", "total"))
    longest = max(stages, key=lambda stage: stages[stage])
    share = stages[longest] / sum(max(of_ranks) for of_ranks in totals.values())
    assert f"the stage {longest} takes {units.share(share)}" in found.message


def test_unit_buffers_are_those_one_counts_in_the_raw_trace() -> None:
    (found,) = findings(SAMPLE, "MEM001")
    per_step = []
    for path in sorted(SAMPLE.glob("rank*.json.gz")):
        rows = events(path)
        spans = [e for e in rows if re.match(r"FSDP::(all_gather |all_gather$|.*reduce|pre_|post_)", e["name"])]
        calls = [e for e in rows if e["name"].startswith("c10d::")]
        steps = [e for e in rows if e["name"].startswith("ProfilerStep#")]
        taken = [
            e
            for e in rows
            if e["name"] == "[memory]"
            and e["args"]["Bytes"] >= 1 << 20
            and any(encloses(span, e) for span in spans)
            and not any(encloses(call, e, any_thread=True) for call in calls)
            and any(encloses(step, e, any_thread=True) for step in steps)
        ]
        per_step.append(sum(e["args"]["Bytes"] for e in taken) / len(steps))
    assert found.cost_bytes == int(max(per_step))
    assert set(found.evidence["unit"]) <= {"", *(f"layers.{n}" for n in range(64))}


def encloses(span: dict[str, Any], event: dict[str, Any], *, any_thread: bool = False) -> bool:
    same = any_thread or (span["pid"], span["tid"]) == (event["pid"], event["tid"])
    return same and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]


def test_evidence_of_exposed_communication_is_in_the_raw_trace_and_in_no_save() -> None:
    (found,) = findings(SAMPLE, "COMM001")
    run = tracekit.load(SAMPLE)
    for rank in found.ranks:
        path = SAMPLE / f"rank{rank:05d}.pt.trace.json.gz"
        with gzip.open(path) as file:
            base_ns = json.load(file)["baseTimeNanoseconds"]
        rows = events(path)
        sent = {(base_ns + round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in rows if e["name"][:5] == "gloo:"}
        saves = [e for e in rows if e["name"] == "tracekit::checkpoint"]
        for start_ns, dur_ns in found.evidence.filter(pl.col("rank") == rank).select("start_ns", "dur_ns").iter_rows():
            assert (start_ns, dur_ns) in sent
            at_us = (start_ns - base_ns) / 1000
            assert not any(save["ts"] <= at_us <= save["ts"] + save["dur"] for save in saves)
    assert run.manifest["strategy"] == "fsdp2"
    assert "unshard(async_op=True)" in found.fix


def test_device_mallocs_of_a_job_without_a_caching_allocator_are_what_its_steps_are_spent_on() -> None:
    folder = others("tracelens_mi300_resnet_ddp")
    (found,) = findings(folder, "MEM001")
    rows = [e for e in events(next(folder.iterdir())) if e["ph"] == "X"]
    ends = sorted(e["ts"] + e["dur"] for e in rows if e["name"].startswith("Optimizer.step#") and e["tid"] == 1)
    calls = [
        e for e in rows if e["name"] in ("hipMalloc", "hipFree", "hipHostMalloc") and ends[1] <= e["ts"] < ends[-1]
    ]
    steps = len(ends) - 2  # the first two are warm-up
    assert f"{len(calls) / steps:,.0f} device malloc and free calls" in found.message
    assert units.duration(sum(e["dur"] for e in calls) / steps * 1000) in found.message
    work = [e for e in rows if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    stalled_us = sum(e["dur"] - covered_us(e, work) for e in calls) / steps
    assert found.cost_ns / 1000 == pytest.approx(stalled_us, rel=1e-5)
    assert found.impact > 0.9


def covered_us(call: dict[str, Any], work: list[dict[str, Any]]) -> float:
    """Return how much of a call's time some device work covers."""
    start, end = call["ts"], call["ts"] + call["dur"]
    spans = sorted((max(start, e["ts"]), min(end, e["ts"] + e["dur"])) for e in work)
    covered, reached = 0.0, start
    for first, past in spans:
        if past > max(first, reached):
            covered += past - max(first, reached)
            reached = past
    return covered


def test_a_job_whose_allocator_caches_has_no_device_mallocs() -> None:
    assert findings(others("hta_ddp_v100_memory"), "MEM001") == []

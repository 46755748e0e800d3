"""Simulated histories: reports as `tracekit check` saves them, of runs that were never recorded. Not a test."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DAY_NS = 86_400 * 10**9
FIRST_NS = 1_788_000_000 * 10**9
RUN = {
    "strategy": "fsdp2",
    "world_size": 2,
    "mesh": None,
    "model": {"name": "tiny", "layers": 2},
    "arguments": {"batch_size": 4},
    "versions": {"torch": "2.12.0", "cuda": None},
    "device": "cuda",
    "device_name": "Simulated GPU",
}
COMM = {
    "id": "COMM001",
    "code": "COMM001",
    "name": "exposed-communication",
    "severity": "error",
    "impact": 0.2,
    "cost_ns": 2_000_000,
    "cost_bytes": 0,
    "confidence": 0.9,
    "message": "20.0% of step time is communication that no compute hides.",
    "fix": "Prefetch.",
    "subject": "",
    "ranks": [0],
    "steps": [0],
    "evidence": [],
    "evidence_rows_left_out": 0,
}


def report(
    number: int,
    *,
    step_ms: float = 10.0,
    exposed: float = 0.1,
    findings: Sequence[Mapping[str, Any]] = (),
    noise: float = 0.02,
    **run: Any,
) -> dict[str, Any]:
    """Return the report on a simulated run of 12 steps on two ranks, recorded on its own day."""
    random = np.random.default_rng(number)
    samples = []
    for metric, typical in (
        ("step_time_ns", step_ms * 1e6),
        ("exposed_communication_ratio", exposed),
        ("allocations", 100.0 * (1 + (step_ms > 11))),
    ):
        for rank in (0, 1):
            values = typical * (1 + (0 if metric == "allocations" else noise) * random.normal(size=12))
            samples.append({"metric": metric, "rank": rank, "steps": list(range(3, 15)), "values": values.tolist()})
    digest = hashlib.sha256(f"simulated {number} {sorted(run.items())}".encode()).hexdigest()
    described = {"name": f"run-{number:02d}", "path": f"runs/run-{number:02d}", "ranks": [0, 1], **RUN, **run}
    described |= {"created_ns": FIRST_NS + number * DAY_NS, "simulated": True}
    return {
        "schema": "tracekit.report/2",
        "tool_version": "0.1.0",
        "run": described,
        "summary": [],
        "findings": [dict(each) for each in findings],
        "ignored": [],
        "notes": [],
        "samples": samples,
        "inputs": [{"path": "rank00000.pt.trace.json.gz", "size_bytes": 1, "sha256": digest}],
    }


def slower_from(first: int, count: int) -> list[dict[str, Any]]:
    """Return the reports on so many runs, 20% slower from one on, with a finding and another torch."""
    return [
        report(
            number,
            step_ms=10.0 if number < first else 12.0,
            findings=() if number < first else (COMM,),
            versions={"torch": "2.12.0" if number < first else "2.13.0"},
        )
        for number in range(count)
    ]


def write(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write a report as a file of its own."""
    path = folder / f"{document['run']['name']}.json"
    path.write_text(json.dumps(document))
    return path

"""Recorded faults of the trainers and their healthy twins, judged by all rules."""

import json
from dataclasses import dataclass
from pathlib import Path

import tracekit
from tracekit.rules.engine import check

FOLDER = Path(__file__).parents[1] / "sample_traces" / "faults"
_NO_DATA = "DATA"


@dataclass(frozen=True)
class Pair:
    """A recorded fault, the codes that should report it, and the findings on it and its twin: "CODE (severity)"."""

    fault: str
    code: str
    findings: tuple[str, ...]
    twin: tuple[str, ...]


def judge_pairs() -> list[Pair]:
    """Return all recorded pairs, judged."""
    samples = json.loads((FOLDER / "truth.json").read_text())["samples"]
    twins = {name: _findings_on(name) for name in sorted({sample["twin"] for sample in samples})}
    return [
        Pair(sample["fault"], ", ".join(sample["seen_by"]), _findings_on(sample["sample"]), twins[sample["twin"]])
        for sample in samples
    ]


def _findings_on(name: str) -> tuple[str, ...]:
    findings = check(tracekit.load(FOLDER / name, cache=False)).findings
    labels = {
        f"{finding.code} ({finding.severity.label})" for finding in findings if not finding.code.startswith(_NO_DATA)
    }
    return tuple(sorted(labels))

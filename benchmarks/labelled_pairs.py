"""The recorded faults of the trainers beside their healthy twins, judged by all rules."""

import json
from dataclasses import dataclass
from pathlib import Path

import tracekit
from tracekit.rules.engine import check

FOLDER = Path(__file__).parents[1] / "sample_traces" / "faults"
_NO_DATA = "DATA"


@dataclass(frozen=True)
class Pair:
    """A recorded fault: what should see it, and what rules said of it and of its twin, as "CODE severity"."""

    fault: str
    code: str
    told: tuple[str, ...]
    twin: tuple[str, ...]

    @property
    def is_found(self) -> bool:
        """Whether a rule that should see it speaks of it more often than of the twin."""
        return any(each.startswith(code) for each in set(self.told) - set(self.twin) for code in self.code.split(", "))


def judged() -> list[Pair]:
    """Return all recorded pairs, judged."""
    samples = json.loads((FOLDER / "truth.json").read_text())["samples"]
    twins = {name: _told(name) for name in sorted({sample["twin"] for sample in samples})}
    return [
        Pair(sample["fault"], ", ".join(sample["seen_by"]), _told(sample["sample"]), twins[sample["twin"]])
        for sample in samples
    ]


def _told(name: str) -> tuple[str, ...]:
    findings = check(tracekit.load(FOLDER / name, cache=False)).findings
    told = {f"{each.code} ({each.severity.label})" for each in findings if not each.code.startswith(_NO_DATA)}
    return tuple(sorted(told))

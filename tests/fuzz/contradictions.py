"""What no report may state, whatever the trace: parts longer than their step, costs below zero, NaN."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

_NO_NUMBER = re.compile(
    r"\bnan\b|\binf\b|(?<!hook\()\bNone\b|(?<!\d) -\d[\d.]* (?:ns|µs|ms|s|B|KiB|MiB|GiB|GB)\b|-\d[\d.]*%|\de\+\d"
)
"""In a message: a number that is none, a size, time or share below zero, a number in scientific notation.

None is a word of Python in one piece of advice, register_comm_hook(None, …).
"""


def of_report(report: dict[str, Any]) -> str:
    """Return the first contradiction of a report (`check --format json`), "" if there is none."""
    return next(itertools.chain(_of_steps(report), _of_findings(report)), "")


def _of_steps(report: dict[str, Any]) -> Iterator[str]:
    for step in report["summary"]:
        whole_ns = step["duration_ns"]
        times = {name: value for name, value in step.items() if name.endswith("_ns")}
        if not all(0 <= value <= whole_ns for value in times.values()):
            yield f"a part of a step is longer than the step, or below zero: {step}"
        if step["exposed_communication_ns"] + step["overlapped_ns"] != step["communication_ns"]:
            yield f"exposed and overlapped communication do not add up: {step}"
        parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
        if sum(step[name] for name in parts) != whole_ns:
            yield f"the parts of a step do not add up: {step}"


def _of_findings(report: dict[str, Any]) -> Iterator[str]:
    ranks = set(report["run"]["ranks"])
    for finding in report["findings"]:
        code, message = finding["code"], f"{finding['message']} {finding['fix']}"
        if not (0 <= finding["impact"] <= 1 and 0 <= finding["confidence"] <= 1):
            yield f"{code}: impact {finding['impact']}, confidence {finding['confidence']}"
        if finding["cost_ns"] < 0 or finding["cost_bytes"] < 0:
            yield f"{code}: cost below zero: {message}"
        if code.startswith("DATA"):
            continue  # quotes what the files state
        if not set(finding["ranks"]) <= ranks:
            yield f"{code}: ranks {finding['ranks']} of {sorted(ranks)}"
        if _NO_NUMBER.search(message):
            yield f"{code}: {message}"

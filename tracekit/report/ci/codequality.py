"""Gates -> GitLab's Code Quality report, which a merge request shows at its lines.

GitLab documents the form in "Code Quality report format": description, check_name, fingerprint, severity (info, minor,
major, critical or blocker), and a path relative to the repository with the line where it begins.
"""

from collections.abc import Sequence

from tracekit.model import escaping
from tracekit.regression.gate import CheckResult, FindingStatus
from tracekit.report.ci import results, sarif
from tracekit.report.ci.code_locations import Checkout
from tracekit.report.ci.results import CheckItem
from tracekit.rules.rule import Severity

_SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "major", Severity.INFO: "info"}
_MAX_TEXT = 1000


def render(gates: Sequence[CheckResult], checkout: Checkout) -> str:
    """Return the JSON array: one entry per finding, metric that regressed and budget that is not met."""
    entries = []
    for name, gate in results.gates_by_name(gates):
        run = name if len(gates) > 1 else ""
        for item in results.items(gate):
            location = checkout.locate(gate.report.run, item.finding)
            description = f"{run}: {item.message}" if run else item.message
            entry = {
                "description": escaping.inert(description, _MAX_TEXT),
                "check_name": item.own_finding.code if item.own_finding else item.kind.value,
                "fingerprint": sarif.fingerprint(item, run),
                "severity": _severity(item),
                "location": {"path": location.path, "lines": {"begin": location.line}},
            }
            entries.append(entry)
    return escaping.json_text(entries)


def _severity(item: CheckItem) -> str:
    if item.fails:
        return "blocker"
    if item.own_finding is None or item.status is FindingStatus.KNOWN:
        return "info"
    return _SEVERITIES[item.own_finding.severity]

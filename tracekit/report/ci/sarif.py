"""Gates -> SARIF 2.1.0 (OASIS standard of 27 March 2020), as far as GitHub's code scanning takes it.

What GitHub requires is in its "SARIF support for code scanning": of a rule id, shortDescription, fullDescription and
help; of a result a message, a location with a relative URI and a whole region, and the fingerprint
`primaryLocationLineHash`, by which alerts are matched. Ours is made from what a finding is about, not from its line, so
that an alert survives edits. GitHub opens an alert for every result whatever its kind, its suppressions or its
baselineState. Ignored and fixed findings are therefore notifications of the invocation, not results. One run
of the tool is one SARIF run, for any number of training runs; GitHub shows 5,000 results of a run.
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from tracekit.model import escaping
from tracekit.regression.gate import CheckResult, FindingStatus
from tracekit.report import phrases
from tracekit.report.ci import results
from tracekit.report.ci.code_locations import Checkout, Location
from tracekit.report.ci.results import CheckItem, ItemKind, Level
from tracekit.report.explanations import SECTIONS
from tracekit.rules.registry import all_rules
from tracekit.rules.rule import Rule, Severity

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MAX_RESULTS = 5000
_MAX_TEXT = 4000
_MAX_NAME = 200
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_STATES = {FindingStatus.NEW: "new", FindingStatus.WORSE: "updated", FindingStatus.KNOWN: "unchanged"}
# Items that can fail a check without being a rule: code, name, description, help.
_EXTRA_RULES = {
    ItemKind.METRIC: (
        "REGRESSION",
        "regression",
        "A metric that got worse than in the baseline.",
        "The samples of each step are compared with those of the baseline; `tracekit compare` shows all metrics.",
    ),
    ItemKind.BUDGET: (
        "BUDGET",
        "budget",
        "A budget of the settings that is exceeded.",
        "Budgets stand in [tool.tracekit.budget] of pyproject.toml, or in tracekit.toml.",
    ),
    ItemKind.NUMBERS: (
        "NUMBERS",
        "numbers",
        "Loss, gradient norm or checksums that differ from the baseline's beyond rounding.",
        "`tracekit compare` names the first step, rank and module that differ.",
    ),
}


def render(gates: Sequence[CheckResult], checkout: Checkout) -> str:
    """Return the SARIF log. Results have a baselineState where a baseline was given."""
    named_gates = results.gates_by_name(gates)
    items = [(name, gate, item) for name, gate in named_gates for item in results.items(gate)]
    items.sort(key=lambda entry: list(Level).index(entry[2].level))
    rules = _rules(gates)
    indices = {rule["id"]: number for number, rule in enumerate(rules)}
    several = len(gates) > 1
    entries = [
        _result(item, gate, checkout.locate(gate.report.run, item.finding), name if several else "", indices)
        for name, gate, item in items[:MAX_RESULTS]
    ]
    driver = {"name": "tracekit", "rules": rules}
    driver |= {"version": gates[0].report.tool_version} if gates else {}
    notes = [note for name, gate in named_gates for note in _notifications(gate, name)]
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": "tracekit/"},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "results": entries,
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return escaping.json_text(log)


def fingerprint(item: CheckItem, run: str = "") -> str:
    """Return an identifier of an item's subject that is the same in every check; `run` distinguishes several runs."""
    return hashlib.sha256(f"{item.kind}:{item.id}:{run}".encode()).hexdigest()[:16]


def _result(
    item: CheckItem, gate: CheckResult, location: Location, run: str, indices: Mapping[str, int]
) -> dict[str, Any]:
    rule = item.own_finding.code if item.own_finding else _EXTRA_RULES[item.kind][0]
    message = f"{run}: {item.message}" if run else item.message
    result: dict[str, Any] = {
        "ruleId": rule,
        "ruleIndex": indices[rule],
        "level": _level(item),
        "message": {"text": escaping.inert(message, _MAX_TEXT)},
        "locations": [_location(item, gate, location)],
        "partialFingerprints": {
            # GitHub's own are a hash of the line and the number of its occurrence.
            "primaryLocationLineHash": f"{fingerprint(item, run)}:1",
            "tracekitFinding/v1": escaping.inert(item.id, _MAX_NAME),
        },
        "properties": {
            "fails": item.fails,
            "placedBy": location.kind.value,
            "run": escaping.inert(gate.report.run.name),
        },
    }
    if item.own_finding is not None:
        result["rank"] = round(100 * min(max(item.own_finding.impact, 0.0), 1.0), 3)
    if gate.baseline or gate.comparison is not None:
        result["baselineState"] = _STATES[item.status] if item.status else "new"
    return result


def _location(item: CheckItem, gate: CheckResult, location: Location) -> dict[str, Any]:
    start = {"startLine": location.line, "startColumn": location.start_column}
    region = start | {"endLine": location.line, "endColumn": location.end_column}
    return {
        "physicalLocation": {"artifactLocation": {"uri": quote(location.path)}, "region": region},
        "logicalLocations": list(_logical(item, gate, location)),
    }


def _logical(item: CheckItem, gate: CheckResult, location: Location) -> Sequence[dict[str, str]]:
    run = escaping.inert(gate.report.run.name)
    locations = [{"name": run, "kind": "run", "fullyQualifiedName": run}]
    if location.function:
        locations.append({"name": location.function, "kind": "function"})
    finding = item.own_finding
    if finding is not None:
        parts = [("unit", finding.subject)] if finding.subject else []
        parts += [("rank", str(rank)) for rank in finding.ranks[:8]]
        parts += [("step", str(step)) for step in finding.steps[:8]]
        for kind, name in parts:
            text = escaping.inert(name)
            locations.append({"name": text, "kind": kind, "fullyQualifiedName": f"{run}/{kind}/{text}"})
    return locations


def _level(item: CheckItem) -> str:
    if item.own_finding is not None:
        return _LEVELS[item.own_finding.severity]
    return {"notice": "note"}.get(item.level, item.level)


def _rules(gates: Sequence[CheckResult]) -> list[dict[str, Any]]:
    """Return descriptors of the rules that were run or fired, and of other items that can fail."""
    requested = [code for gate in gates for code in gate.report.rules]
    fired = [verdict.finding.code for gate in gates for verdict in gate.findings]
    rules = {rule.code: rule for rule in all_rules()}
    descriptors = [_descriptor(code, rules.get(code)) for code in dict.fromkeys([*requested, *fired])]
    used = {item.kind for gate in gates for item in results.items(gate)}
    return descriptors + [_extra_descriptor(*_EXTRA_RULES[kind]) for kind in _EXTRA_RULES if kind in used]


def _descriptor(code: str, rule: type[Rule] | None) -> dict[str, Any]:
    if rule is None:
        return _extra_descriptor(code, code, f"Rule {code}.", "A rule of another distribution.")
    documentation = inspect.cleandoc(rule.__doc__ or rule.name())
    first = " ".join(documentation.partition("\n\n")[0].split())
    does = next((part for part in documentation.split("\n\n") if part.startswith(SECTIONS[0])), first)
    return _extra_descriptor(code, rule.__name__, first, documentation) | {
        "fullDescription": {"text": " ".join(does.removeprefix(f"{SECTIONS[0]}: ").split())[:1000]},
        "help": {"text": documentation, "markdown": _help(documentation, code)},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"tags": ["performance", phrases.rule_name(code)], "precision": "high"},
    }


def _extra_descriptor(code: str, name: str, what: str, more: str) -> dict[str, Any]:
    return {
        "id": code,
        "name": name,
        "shortDescription": {"text": what},
        "fullDescription": {"text": what},
        "help": {"text": more, "markdown": more},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["performance"], "precision": "high"},
    }


def _help(documentation: str, code: str) -> str:
    paragraphs = []
    for part in documentation.split("\n\n"):
        section = next((heading for heading in SECTIONS if part.startswith(f"{heading}:")), None)
        paragraphs.append(part.replace(f"{section}:", f"**{section}**", 1) if section else part)
    return "\n\n".join([*paragraphs, f"`tracekit explain {code}` shows this text and the thresholds."])


def _notifications(gate: CheckResult, run: str) -> list[dict[str, Any]]:
    ignored = [f"{aside.finding.id} is ignored: {aside.reason}" for aside in gate.report.ignored]
    fixed = [f"{gone.id} is in {gate.baseline or 'the baseline'} and not in this run any more" for gone in gate.fixed]
    blind = [f"{code} could not judge: {why}" for code, why in gate.report.blind_spots.items()]
    return [
        {"level": "note", "message": {"text": escaping.inert(f"{run}: {text}", _MAX_TEXT)}}
        for text in (*ignored, *fixed, *blind)
    ]

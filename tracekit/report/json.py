"""Report -> JSON (schema ``tracekit.report/2``, in report.schema.json), and back for a comparison.

Versions only add keys: a reader may ignore keys that it does not know.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import polars as pl

from tracekit import conventions
from tracekit.analysis.quality import contents
from tracekit.analysis.time import breakdown
from tracekit.conventions import regular_files
from tracekit.errors import InputError
from tracekit.ingest import untrusted_json
from tracekit.model import escaping
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.regression import baseline
from tracekit.regression.comparison import RunSamples
from tracekit.regression.gate import CheckResult
from tracekit.regression.samples import SAMPLE_COLUMNS, run_samples
from tracekit.report import comparison, phrases
from tracekit.report.render.json import to_json_value
from tracekit.rules.rule import Finding, Report

MAX_EVIDENCE_ROWS = 100
MAX_REPORT_BYTES = 256 << 20
SEVERAL_SCHEMA = "tracekit.reports/1"

# The keys of the manifest that describe the run. Host and command are left out: reports are shared.
_MANIFEST_KEYS = (
    "role",
    "strategy",
    "world_size",
    "mesh",
    "model",
    "arguments",
    "versions",
    "device",
    "device_name",
    "created_ns",
)
_FINDING_FIELDS = (
    "impact", "cost_ns", "cost_bytes", "measured_ns", "confidence", "sentence", "message", "fix", "subject",
    "ranks", "steps", "is_upper_bound", "is_priced", "consequence_of",
)  # fmt: skip


def render(report: Report, run: Run, gate: CheckResult | None = None) -> str:
    """Return the report, and the verdict on it, as strict JSON."""
    return escaping.json_text(document(report, run, gate))


def render_several(reports: Sequence[tuple[Report, Run]], gates: Sequence[CheckResult] = ()) -> str:
    """Return several reports, and the verdict on each, in one JSON object."""
    checks: Sequence[CheckResult | None] = gates or [None] * len(reports)
    documents = [document(report, run, gate) for (report, run), gate in zip(reports, checks, strict=True)]
    return escaping.json_text({"schema": SEVERAL_SCHEMA, "reports": documents})


def document(report: Report, run: Run, gate: CheckResult | None = None) -> dict[str, Any]:
    """Return the report, and the verdict on it, as JSON values."""
    verdict = {} if gate is None else {"gate": gate_document(gate)}
    return {
        "schema": conventions.REPORT_SCHEMA,
        "tool_version": report.tool_version,
        "run": _run(run),
        "summary": summary_rows(run),
        "findings": [_finding(finding) for finding in report.findings],
        "ignored": [
            {"reason": aside.reason, "until": aside.until and str(aside.until), "finding": _finding(aside.finding)}
            for aside in report.ignored
        ],
        "notes": list(report.notes),
        "not_recorded": run.table(contents.missing).to_dicts(),
        "samples": _samples(run_samples(run)),
        "inputs": [{"path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in report.inputs],
        **verdict,
    }


def gate_document(gate: CheckResult) -> dict[str, Any]:
    """Return the verdict on a report as JSON values: findings by id, metrics in their own units."""
    changes = gate.comparison.changes if gate.comparison else ()
    failing = {change.metric for change in gate.regressions}
    return {
        "passed": not gate.failures,
        "failures": list(gate.failures),
        "fail_on": gate.fail_on.label if gate.fail_on is not None else None,
        "baseline": gate.baseline or None,
        "findings": [
            {
                "id": verdict.finding.id,
                "standing": verdict.status.value,
                "fails": verdict.fails,
                "impact_before": to_json_value(verdict.impact_before),
            }
            for verdict in gate.findings
        ],
        "fixed": [
            {"id": gone.id, "code": gone.code, "severity": gone.severity.label, "impact": to_json_value(gone.impact),
             "subject": gone.subject}
            for gone in gate.fixed
        ],
        "metrics": [
            to_json_value(dataclasses.asdict(change))
            | {"verdict": change.verdict.value, "fails": change.metric in failing}
            for change in changes
        ],
        "comparison": comparison.verdict_values(gate.comparison) if gate.comparison else None,
        "numbers": comparison.number_values(gate.comparison) if gate.comparison else None,
        "confidence": gate.comparison.confidence if gate.comparison else None,
        "causes": [
            {"name": cause.name, "message": cause.message, "metrics": list(cause.metrics)} for cause in gate.causes
        ],
        "budgets": [
            {
                "budget": budget.budget,
                "metric": budget.metric,
                "limit": to_json_value(budget.limit),
                "measured": to_json_value(budget.measured),
                "outcome": budget.outcome.value,
                "fails": gate.fails_budget(budget),
                "message": budget.message,
            }
            for budget in gate.budgets
        ],
        "notes": list(gate.comparison.notes) if gate.comparison else [],
    }  # fmt: skip


def summary_rows(run: Run) -> list[dict[str, Any]]:
    """Return the breakdown's rows: one per rank and step, then one per rank with step null: of its marked steps."""
    by_step = breakdown.slowest_device_by_step(run).drop_nulls("step")
    return [*by_step.to_dicts(), *breakdown.slowest_device_in_steps(run).to_dicts()]


def schema() -> str:
    """Return the JSON Schema that reports obey."""
    return resources.files("tracekit.report").joinpath("report.schema.json").read_text(encoding="utf-8")


def is_report(path: Path) -> bool:
    """Return whether a file is a saved report, or several of them in one."""
    if not path.is_file() or path.stat().st_size > MAX_REPORT_BYTES:
        return False
    with regular_files.open_to_read(path) as file:
        start = file.read(1 << 16)
        # Some tools sort keys, and then the schema stands near the end.
        return b'"traceEvents"' not in start and (b'"tracekit.report' in start or b'"tracekit.report' in file.read())


def read(path: Path) -> RunSamples:
    """Return a saved report as the samples of a run. Raises InputError if it is not one report."""
    reports = read_reports(path)
    if len(reports) != 1:
        raise InputError(f"{path}: holds several reports; save each run's by itself")
    with report_errors(path):
        return comparison_side(reports[0])


def read_reports(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the reports that a file holds, one or several. Raises InputError if it holds none."""
    try:
        document = untrusted_json.parse(regular_files.read_bytes(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON: {error}") from None
    several = isinstance(document, dict) and document.get("schema") == SEVERAL_SCHEMA
    reports = document.get("reports") if several else [document]
    if not isinstance(reports, list):
        raise InputError(f"{path}: is not a complete report; save it again")
    for report in reports:
        if not isinstance(report, dict) or report.get("schema") not in conventions.READABLE_REPORT_SCHEMAS:
            raise InputError(f"{path}: is not a report of schema {conventions.REPORT_SCHEMA}")
    return tuple(reports)


@contextlib.contextmanager
def report_errors(path: Path) -> Iterator[None]:
    """Raise InputError where reading a saved report fails because a part of it is missing."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{path}: is not a complete report ({type(error).__name__}: {error}); save it again") from None


def comparison_side(saved: Mapping[str, Any]) -> RunSamples:
    """Return a report, as JSON has it, as a side of a comparison."""
    run = saved["run"]
    rows = [
        (series.get("window", 0), series["rank"], step, series["metric"], value)
        for series in saved["samples"]
        for step, value in zip(series["steps"], series["values"], strict=True)
    ]
    table = pl.DataFrame(rows, schema=SAMPLE_COLUMNS, orient="row", strict=True)
    manifest = {key: run.get(key) for key in _MANIFEST_KEYS} | ({"simulated": True} if run.get("simulated") else {})
    environment = {str(name): str(value) for name, value in dict(run.get("environment") or {}).items()}
    work = pl.DataFrame(run.get("work") or [], schema=baseline.WORK_COLUMNS, strict=True)
    return RunSamples(str(run["name"]), manifest, table.drop_nulls("value"), environment=environment, work=work)


def _run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": run.path,
        "ranks": list(run.ranks),
        **{key: to_json_value(run.manifest.get(key)) for key in _MANIFEST_KEYS},
        "created_ns": Manifest.of(run.manifest).created_ns,
        "simulated": bool(run.manifest.get("simulated", False)),
        "environment": baseline.environment(run),
        "work": baseline.work_shares(run).to_dicts(),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    rows = finding.evidence.head(MAX_EVIDENCE_ROWS)
    return {
        "id": finding.id,
        "code": finding.code,
        "name": phrases.rule_name(finding.code),
        "severity": finding.severity.label,
        **{name: to_json_value(getattr(finding, name)) for name in _FINDING_FIELDS},
        "evidence": to_json_value(rows.to_dicts()),
        "evidence_rows_left_out": finding.evidence.height - rows.height,
    }


def _samples(table: pl.DataFrame) -> list[dict[str, Any]]:
    """Return one series per metric, window and rank: far shorter than a row per sample."""
    series = table.group_by("metric", "window", "rank", maintain_order=True).agg("step", "value")
    return [
        {"metric": metric, "window": window, "rank": rank, "steps": steps, "values": to_json_value(values)}
        for metric, window, rank, steps, values in series.iter_rows()
    ]

"""Baseline -> JSON (schema ``tracekit.baseline/1``, in baseline.schema.json), and back, trusting nothing in the file.

To keep the file at kilobytes, samples have five digits, a unit's samples three digits relative to their largest, and
each list of step numbers is stored once. Loss, gradient norm and checksums have all their digits.
"""

import math
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import polars as pl
from msgspec import Meta, Struct

from tracekit.analysis.compute import step_charges
from tracekit.conventions import regular_files
from tracekit.errors import InputError
from tracekit.model import units
from tracekit.regression.baseline import (
    MAX_RECORDINGS,
    SCHEMA,
    UNIT_COLUMNS,
    WORK_COLUMNS,
    Baseline,
    KnownFinding,
    Plain,
    Recording,
)
from tracekit.regression.metrics import compared_metrics
from tracekit.regression.numbers import NUMBER_COLUMNS
from tracekit.regression.samples import SAMPLE_COLUMNS, job_samples
from tracekit.report import phrases
from tracekit.report.document import Cells, Document, Emphasis, heading, line
from tracekit.rules.rule import Severity

MAX_BASELINE_BYTES = 64 << 20
_START_BYTES = 4096
_TRACE_MARKS = (b'"traceEvents"', b'"deviceProperties"', b'"ph"')
_DIGITS, _UNIT_DIGITS = 5, 3
_SEVERITIES = {severity.label: severity for severity in Severity}

_Text = Annotated[str, Meta(max_length=10_000)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Amount = Annotated[float, Meta(ge=0)]


class _Named(Struct):
    schema: str | None = None


class _Finding(Struct):
    id: Annotated[str, Meta(min_length=1, max_length=200)]
    code: Annotated[str, Meta(pattern="^[A-Z]+[0-9]+$", max_length=20)]
    severity: Annotated[str, Meta(pattern="^(info|warning|error)$")]
    impact: Annotated[float, Meta(ge=0, le=1)]
    cost_ns: _Count
    cost_bytes: _Count
    subject: _Text


class _Series(Struct, omit_defaults=True):
    metric: Annotated[str, Meta(min_length=1, max_length=1000)]
    ranks: list[_Count]
    steps: _Count
    values: list[list[float]]
    unit: _Text | None = None
    window: _Count = 0
    scale: Annotated[float, Meta(gt=0)] = 1


class _Work(Struct):
    kind: _Text
    phase: _Text | None
    name: _Text
    amount: _Amount


class _Share(Struct, omit_defaults=True):
    kind: _Text
    name: _Text
    share: Annotated[float, Meta(ge=0, le=1)]
    shapes: _Text | None = None


class _Recording(Struct):
    name: _Text
    created_ns: _Integer | None
    steps: list[list[_Integer | None]]
    findings: list[_Finding]
    work: list[_Work]
    series: list[_Series]
    units: list[_Series]
    shares: list[_Share] = []
    numbers: list[_Series] = []


class _Document(Struct):
    schema: str
    tool_version: _Text
    name: _Text
    fingerprint: dict[str, bool | _Integer | float | str | list[bool | _Integer | float | str | None]]
    recordings: Annotated[list[_Recording], Meta(min_length=1, max_length=MAX_RECORDINGS)]


def render(baseline: Baseline) -> str:
    """Return a baseline as strict JSON, one line per series."""
    head = {
        "schema": SCHEMA,
        "tool_version": baseline.tool_version,
        "name": baseline.name,
        "fingerprint": baseline.fingerprint,
    }
    lines = [f"{_json(key)}:{_json(value)}" for key, value in head.items()]
    recordings = ",\n".join(_recording(recording) for recording in baseline.recordings)
    return "{\n" + ",\n".join([*lines, f'"recordings":[\n{recordings}\n]']) + "\n}\n"


def schema() -> str:
    """Return the JSON Schema that baselines obey."""
    return resources.files("tracekit.report").joinpath("baseline.schema.json").read_text(encoding="utf-8")


def is_baseline(path: Path) -> bool:
    """Return whether a file is meant as a baseline, complete or not: it names the schema, or is JSON but no trace."""
    if not path.is_file():
        return False
    with regular_files.open_to_read(path) as file:
        start = file.read(_START_BYTES)
    if b'"tracekit.baseline/' in start:
        return True
    return path.suffix == ".json" and not any(mark in start for mark in _TRACE_MARKS)


def read(path: Path) -> Baseline:
    """Return the baseline in a file. Raises InputError where the file is not a valid baseline."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_BASELINE_BYTES:
            raise InputError(f"{path}: is too large for a baseline ({size_bytes:,} bytes); save it again")
        text = regular_files.read_bytes(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        schema = msgspec.json.decode(text, type=_Named).schema
        if schema != SCHEMA:
            stated = f"of schema {schema[:_START_BYTES]!r}" if schema else "of no schema"
            raise InputError(f"{path}: is {stated}, not {SCHEMA}; save one with tracekit baseline save RUN --out FILE")
        document = msgspec.json.decode(text, type=_Document)
        recordings = tuple(_read_recording(saved, f"recordings[{n}]") for n, saved in enumerate(document.recordings))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: is not a complete baseline: {error}; save it again with tracekit baseline save"
        ) from None
    fingerprint: dict[str, Plain] = {
        key: list(value) if isinstance(value, list) else value for key, value in document.fingerprint.items()
    }
    return Baseline(document.name, fingerprint, recordings, document.tool_version)


def document(baseline: Baseline) -> Document:
    """What ran, the findings and the metrics of a baseline's recordings."""
    recordings = units.count(len(baseline.recordings), "recording")
    facts = tuple((name, str(value)) for name, value in baseline.fingerprint.items())
    findings = Cells(("", "", "", "of time"), _findings(baseline), indent=2)
    return Document(
        (
            [line((baseline.name, Emphasis.STRONG), f"  {recordings}")],
            [heading("What ran"), Cells(("", ""), facts, indent=2)],
            [heading("Findings"), findings],
            [
                heading("Metrics", "  the median of each recording"),
                Cells(("", "mean", "least", "most"), _metrics(baseline), (1, 2, 3), indent=2),
            ],
        )
    )


# To JSON -------------------------------------------------------------------------------------------------------------


def _recording(recording: Recording) -> str:
    steps: dict[tuple[int | None, ...], int] = {}
    series = [_json(item) for item in _series(recording.samples, ["metric", "window"], steps)]
    units = [_json(item) for item in _series(recording.units, ["metric", "unit"], steps)]
    logged = [_json(item) for item in _numbers(recording.numbers, steps)]
    work = [
        _json(_Work(kind, phase, name, _round(amount)))
        for kind, phase, name, amount in recording.work.select(*step_charges.WORK_COLUMNS).iter_rows()
    ]
    findings = [
        _json(_Finding(f.id, f.code, f.severity.label, f.impact, f.cost_ns, f.cost_bytes, f.subject))
        for f in recording.findings
    ]
    shares = [
        _json(_Share(kind, name, _round(share), shapes))
        for kind, name, shapes, share in recording.shares.select(*WORK_COLUMNS).iter_rows()
    ]
    lists = {"findings": findings, "work": work, "shares": shares, "series": series, "units": units, "numbers": logged}
    fields = [f'"name":{_json(recording.name)}', f'"created_ns":{_json(recording.created_ns)}']
    fields.append(f'"steps":{_json([list(item) for item in steps])}')
    fields += [f'"{key}":[' + ",\n".join(item) + "]" for key, item in lists.items()]
    return "{" + ",\n".join(fields) + "}"


def _series(table: pl.DataFrame, by: Sequence[str], steps: dict[tuple[int | None, ...], int]) -> Iterator[_Series]:
    """Yield a table's series. New lists of steps are numbered and added to `steps`."""
    finite = table.filter(pl.col("value").is_finite()).sort(*by, "rank", "step", nulls_last=False)
    by_rank = finite.group_by(*by, "rank", maintain_order=True).agg("step", "value")
    for row in by_rank.group_by(*by, "step", maintain_order=True).agg("rank", "value").iter_rows(named=True):
        number = steps.setdefault(tuple(row["step"]), len(steps))
        unit = row.get("unit")
        scale = 1 if unit is None else _scale([value for values in row["value"] for value in values])
        samples = [
            [_round(value) if unit is None else round(value / scale) for value in values] for values in row["value"]
        ]
        yield _Series(row["metric"], row["rank"], number, samples, unit, row.get("window", 0), scale)


def _numbers(table: pl.DataFrame, steps: dict[tuple[int | None, ...], int]) -> Iterator[_Series]:
    """Yield the series of loss, gradient norm and checksums, modules in the order of their calls, with all digits."""
    finite = table.filter(pl.col("value").is_finite()).sort("order", "rank", "step")
    by_rank = finite.group_by("name", "rank", maintain_order=True).agg("step", "value")
    for name, listed, ranks, values in (
        by_rank.group_by("name", "step", maintain_order=True).agg("rank", "value").iter_rows()
    ):
        yield _Series(name, ranks, steps.setdefault(tuple(listed), len(steps)), values)


def _scale(values: Sequence[float]) -> int:
    """Return the power of ten that leaves _UNIT_DIGITS digits of a unit's largest sample."""
    largest = max(map(abs, values), default=0.0)
    return 10 ** max(0, math.floor(math.log10(largest)) - _UNIT_DIGITS + 1) if largest > 0 else 1


def _round(value: float) -> float:
    if value == 0:
        return 0
    decimals = _DIGITS - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    return int(rounded) if rounded == int(rounded) else rounded


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# From JSON -----------------------------------------------------------------------------------------------------------


def _read_recording(saved: _Recording, where: str) -> Recording:
    work = [(row.kind, row.phase, row.name, row.amount) for row in saved.work]
    return Recording(
        saved.name,
        saved.created_ns,
        _read_series(saved.series, saved.steps, f"{where}.series", is_unit=False),
        _read_series(saved.units, saved.steps, f"{where}.units", is_unit=True),
        pl.DataFrame(work, schema=step_charges.WORK_COLUMNS, orient="row"),
        tuple(
            KnownFinding(f.id, f.code, _SEVERITIES[f.severity], f.impact, f.cost_ns, f.cost_bytes, f.subject)
            for f in saved.findings
        ),
        pl.DataFrame(
            [(row.kind, row.name, row.shapes, row.share) for row in saved.shares], schema=WORK_COLUMNS, orient="row"
        ),
        _read_numbers(saved.numbers, saved.steps, f"{where}.numbers"),
    )


def _read_numbers(series: Sequence[_Series], steps: Sequence[list[int | None]], where: str) -> pl.DataFrame:
    samples = _read_series(series, steps, where, is_unit=False)
    order = {name: place for place, name in enumerate(dict.fromkeys(saved.metric for saved in series))}
    named = samples.with_columns(order=pl.col("metric").replace_strict(order, default=0, return_dtype=pl.Int64))
    return named.rename({"metric": "name"}).drop_nulls("step").select(*NUMBER_COLUMNS)


def _read_series(
    series: Sequence[_Series], steps: Sequence[list[int | None]], where: str, *, is_unit: bool
) -> pl.DataFrame:
    columns = UNIT_COLUMNS if is_unit else SAMPLE_COLUMNS
    rows: dict[str, list[object]] = {name: [] for name in columns}
    for number, saved in enumerate(series):
        if saved.steps >= len(steps):
            raise ValueError(f"{where}[{number}] refers to steps that the recording does not have")
        if len(saved.ranks) != len(saved.values):
            raise ValueError(f"{where}[{number}] has {len(saved.values)} lists of values for {len(saved.ranks)} ranks")
        if (saved.unit is not None) is not is_unit:
            raise ValueError(f"{where}[{number}] has {'no' if is_unit else 'a'} unit")
        own_steps = steps[saved.steps]
        for rank, values in zip(saved.ranks, saved.values, strict=True):
            if len(own_steps) != len(values):
                raise ValueError(f"{where}[{number}] has {len(values)} values for {len(own_steps)} steps")
            samples = [value * saved.scale for value in values]
            if not all(map(math.isfinite, samples)):
                raise ValueError(f"{where}[{number}] has a value that is not a finite number")
            rows["step"] += own_steps
            rows["value"] += samples
            keys = {"window": saved.window, "rank": rank, "metric": saved.metric, "unit": saved.unit}
            for name, key in keys.items():
                if name in rows:
                    rows[name] += [key] * len(own_steps)
    return pl.DataFrame([pl.Series(name, rows[name], dtype) for name, dtype in columns.items()])


def _findings(baseline: Baseline) -> tuple[tuple[str, ...], ...]:
    rows = []
    for name, findings in baseline.known_findings.items():
        worst = max(findings, key=lambda finding: (finding.severity, finding.impact))
        rows.append((worst.severity.label, phrases.rule_name(worst.code), name, phrases.share_or_size(worst)))
    return tuple(rows) or (("none", "", "", ""),)


def _metrics(baseline: Baseline) -> tuple[tuple[str, ...], ...]:
    recordings = [job_samples(recording.samples) for recording in baseline.recordings]
    rows = []
    for metric in compared_metrics():
        medians = [float(np.median(samples[metric.key])) for samples in recordings if metric.key in samples]
        if medians:
            values = [float(np.mean(medians)), min(medians), max(medians)]
            rows.append((metric.label, *(metric.text(value) for value in values)))
    return tuple(rows)

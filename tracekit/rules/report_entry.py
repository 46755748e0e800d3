"""The bytes of a cached report: its summary as a line of JSON, then a zip archive of JSON and Arrow files; no code.

The summary comes first, so that a list of hundreds of runs reads only one line of each.
"""

import dataclasses
import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import msgspec
import polars as pl

from tracekit.analysis.checkpoint import saves
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import breakdown
from tracekit.model import escaping
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.model.trace import Trace
from tracekit.replay.graph import causes
from tracekit.replay.graph.causes.stalls import Removal
from tracekit.rules.rule import (
    Finding,
    Input,
    Report,
    Severity,
    WhatIf,
    doubtful_data_issue,
    first_to_read,
    is_data_quality,
    warnings,
)
from tracekit.sync import alignment

MAX_BYTES = 64 << 20
"""Limit for all facts of a run together, compressed; the others are measured again when a page needs them."""
UNSERIALIZABLE = (TypeError, ValueError, pl.exceptions.PolarsError)
"""Errors for content of a manifest or a table that JSON or Arrow cannot represent."""
_REPORT, _DATA_QUALITY = "report.json", "data_quality.arrow"
_FACT, _PART, _TABLE = "fact {}.arrow", "part{}.parquet", "table.arrow"
_MAX_LINE_BYTES = 1 << 16

MAX_STEPS = 60
MAX_FIRST_FINDING = 300
Reader = Callable[[Source], Trace]
"""Returns the trace of a source of a stored report, whose own `read` cannot be stored."""


@dataclass(frozen=True)
class Summary:
    """The summary of a report."""

    findings: Mapping[str, int]
    """How many there are of each severity, by label; without those of doubtful data."""
    quality_issues: int
    """How many findings of doubtful data there are that are more than information."""
    ranks: int
    step_time_ns: float | None
    steps_ns: tuple[int, ...]
    """The slowest rank's time of each step, in order; at most the last `MAX_STEPS`."""
    exposed_communication_ratio: float | None
    impact: float
    """Share of the step that the finding to read first costs; 0 for an upper bound."""
    first_finding: str = ""
    """The code and the sentence of the finding to read first."""
    is_doubtful: bool = False
    """Whether no finding is known because most of the data is doubtful, or no rule could judge the run."""
    impacts: Mapping[str, float] = field(default_factory=dict)
    """The largest share of the step that one warning of a rule costs, by its code; without warnings, one information.

    Upper bounds aside.
    """
    has_work: bool = True
    """Whether the traces contain kernels, or operators on a CPU run."""
    has_memory: bool = True
    """Whether the traces contain memory events, or the run has saves of checkpoints."""
    role: str = ""
    """The role of the run in a job of several programs; '' in other jobs."""
    roles: int = 0
    """How many roles the job has; 0 where it has one program, or its other roles are no part of the run's files."""
    has_comparisons: bool = True
    """Whether the facts by which runs are compared were measured, too, not only those that a check needs."""


def summarize(report: Report, *, has_comparisons: bool = True) -> Summary:
    """Return the summary of a report; its run's facts have been measured, also those of comparisons where stated."""
    findings = [finding for finding in report.findings if not is_data_quality(finding.code)]
    issues = [issue for issue in report.findings if is_data_quality(issue.code) and issue.severity > Severity.INFO]
    steps, first = breakdown.step_times(report.run), first_to_read(findings)
    impacts: dict[str, float] = {}
    for finding in list(warnings(findings)) or findings:
        if not finding.is_upper_bound:
            impacts[finding.code] = max(finding.impact, impacts.get(finding.code, 0.0))
    memory_tables = (report.run.table(allocations.peaks), report.run.table(saves.by_save))
    return Summary(
        {severity.label: sum(finding.severity is severity for finding in findings) for severity in Severity},
        len(issues),
        len(report.run.ranks),
        breakdown.step_time_ns(report.run),
        tuple(steps["duration_ns"].tail(MAX_STEPS).to_list()),
        breakdown.exposed_communication_ratio(report.run),
        first.impact if first and not first.is_upper_bound else 0.0,
        escaping.inert(f"{first.code}: {first.sentence}", MAX_FIRST_FINDING) if first else "",
        report.cannot_judge is not None or doubtful_data_issue(report.findings) is not None,
        impacts,
        not report.run.table(breakdown.by_rank).is_empty(),
        not all(table.is_empty() for table in memory_tables),
        report.run.role,
        len(report.run.roles),
        has_comparisons,
    )


def write(report: Report, file: BinaryIO, *, has_comparisons: bool = True) -> None:
    """Write a report, its summary, and the facts of its run, as many as fit into `MAX_BYTES`, the smallest first."""
    line = json.dumps(dataclasses.asdict(summarize(report, has_comparisons=has_comparisons))).encode()
    file.write(b"%08x %s\n" % (zlib.crc32(line), line))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        names = _write_facts(report.run.measured_tables, archive)
        archive.writestr(_REPORT, json.dumps(_content(report, names)))
        archive.writestr(_DATA_QUALITY, _pack(report.run.data_quality))
        for number, finding in enumerate(report.findings):
            archive.writestr(f"evidence{number}.arrow", _pack(finding.evidence))


def _write_facts(tables: Mapping[str, pl.DataFrame], archive: zipfile.ZipFile) -> list[str]:
    """Write tables, the smallest first, as many as fit into `MAX_BYTES`; return their names in this order."""
    names: list[str] = []
    left_bytes = MAX_BYTES
    for name, table in sorted(tables.items(), key=lambda item: int(item[1].estimated_size())):
        packed = _pack(table)
        left_bytes -= len(packed)
        if left_bytes < 0:
            break
        archive.writestr(_FACT.format(name), packed)
        names.append(name)
    return names


def _content(report: Report, fact_names: Sequence[str]) -> dict[str, Any]:
    return {
        "path": report.run.path,
        "role": report.run.role,
        "manifest": report.run.manifest,
        "sources": [
            [source.rank, source.window, source.path, source.size_bytes, source.companions]
            for source in report.run.sources
        ],
        "findings": [_as_dict(finding) for finding in report.findings],
        "notes": report.notes,
        "inputs": [dataclasses.asdict(input_file) for input_file in report.inputs],
        "tool_version": report.tool_version,
        "rules": report.rules,
        "blind_spots": dict(report.blind_spots),
        "facts": fact_names,
    }


def write_table(table: pl.DataFrame, file: BinaryIO) -> None:
    """Write an entry with a single table."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_TABLE, _pack(table))


def write_parts(parts: Sequence[Path], file: BinaryIO) -> None:
    """Write an entry with the Parquet files of a single table, which `read_parts` reads."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for number, part in enumerate(parts):
            archive.write(part, _PART.format(number))


def read_parts(file: BinaryIO, new_part: Callable[[], Path]) -> tuple[Path, ...]:
    """Copy the Parquet files of an entry to paths of `new_part` and return these. Raises if the entry is damaged."""
    paths = []
    with zipfile.ZipFile(file) as archive:
        for number in range(len(archive.namelist())):
            path = new_part()
            with archive.open(_PART.format(number)) as packed, path.open("wb") as copy:
                shutil.copyfileobj(packed, copy)  # checks the checksum as it reads
            paths.append(path)
    return tuple(paths)


def read_summary(file: BinaryIO) -> Summary:
    """Return the summary of an entry. Raises if the entry is damaged."""
    checksum, _, line = file.readline(_MAX_LINE_BYTES).rstrip(b"\n").partition(b" ")
    if int(checksum, 16) != zlib.crc32(line):
        raise ValueError("the summary is damaged")
    return msgspec.convert(json.loads(line), Summary)


def read(file: BinaryIO, reader: Reader, path: str) -> tuple[Report, frozenset[str]]:
    """Return the report of an entry, and the names of its facts. Raises if the entry is damaged.

    Its run reads traces with `reader`. The run and its files are named as if it had been loaded from `path`, however
    that was written when the entry was.
    """
    with zipfile.ZipFile(file) as archive:
        content = json.loads(archive.read(_REPORT))
        data_quality = _table(archive, _DATA_QUALITY)
        evidence = [_table(archive, f"evidence{number}.arrow") for number in range(len(content["findings"]))]
    new_name = partial(_path_in_run, written=content["path"], now=path)
    sources = [
        Source(rank, window, new_name(file), size, _unread, companions=tuple(map(new_name, companions)))
        for rank, window, file, size, companions in content["sources"]
    ]
    names = {file: new_name(file) for file in data_quality["path"].drop_nulls().unique() if new_name(file) != file}
    run = Run(
        path,
        [dataclasses.replace(source, read=partial(reader, source)) for source in sources],
        manifest=content["manifest"],
        role=content["role"],
        data_quality=_issues_with_names(data_quality, names),
        align=alignment.offsets,
    )
    findings = [{name: _with_names(value, names) for name, value in fields.items()} for fields in content["findings"]]
    rows = [_issues_with_names(table, names) for table in evidence]
    report = Report(
        run,
        tuple(map(_finding, findings, rows)),
        tuple(content["notes"]),
        tuple(Input(**fields | {"path": new_name(fields["path"])}) for fields in content["inputs"]),
        content["tool_version"],
        rules=tuple(content["rules"]),
        blind_spots=content["blind_spots"],
    )
    return report, frozenset(content["facts"])


def _unread() -> Trace:
    raise AssertionError("the trace of a stored source is read by the reader of its report")


def read_fact(name: str, file: BinaryIO) -> pl.DataFrame | None:
    """Return the table of one fact of an entry; None if it has none. Raises if the entry is damaged.

    An entry may have been written again since its report was read, with other facts: a fact is found by its name.
    """
    with zipfile.ZipFile(file) as archive:
        member = _FACT.format(name)
        return _table(archive, member) if member in archive.namelist() else None


def read_table(file: BinaryIO) -> pl.DataFrame:
    """Return the table of an entry with a single one. Raises if the entry is damaged."""
    with zipfile.ZipFile(file) as archive:
        return _table(archive, _TABLE)


def _path_in_run(path: str, written: str, now: str) -> str:
    """Path of a file of the run `now`, whose path was `written` in another way when it was checked."""
    if written == now or not PurePath(path).is_relative_to(written):
        return path
    return str(PurePath(now) / PurePath(path).relative_to(written))


def _with_names(value: Any, names: Mapping[str, str]) -> Any:
    """Field of a finding; a text has the new names of files in place of the old ones."""
    if isinstance(value, str):
        for old, new in names.items():
            value = value.replace(old, new)
    return value


def _issues_with_names(table: pl.DataFrame, names: Mapping[str, str]) -> pl.DataFrame:
    """Issues of files with the new names of these; other tables are returned as they are."""
    if not names or not {"path", "message"} <= set(table.columns):
        return table
    return table.with_columns(pl.col("path").replace(names), pl.col("message").str.replace_many(names))


def _as_dict(finding: Finding) -> dict[str, Any]:
    removals = [_with_name(removal) for removal in finding.removals]
    fields = vars(finding) | {"removals": removals, "what_if": finding.what_if and _with_name(finding.what_if)}
    return {name: value for name, value in fields.items() if name != "evidence"}


def _finding(fields: dict[str, Any], evidence: pl.DataFrame) -> Finding:
    removals = [_with_cause(removal) for removal in fields["removals"]]
    what_if = fields["what_if"] and _with_cause(fields["what_if"])
    objects = {"evidence": evidence, "removals": removals, "what_if": what_if}
    return msgspec.convert(fields | objects, Finding, dec_hook=lambda _, table: table)


def _with_name(priced: WhatIf | Removal) -> dict[str, Any]:
    return vars(priced) | {"cause": priced.cause.name}


def _with_cause(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"cause": causes.find(fields["cause"])}


def _pack(table: pl.DataFrame) -> memoryview:
    out = io.BytesIO()
    table.write_ipc_stream(out, compression="zstd")  # for a small table four times as fast as the file format
    return out.getbuffer()


def _table(archive: zipfile.ZipFile, name: str) -> pl.DataFrame:
    return pl.read_ipc_stream(io.BytesIO(archive.read(name)))

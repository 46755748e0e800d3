"""The bytes of a cached report: its summary as a line of JSON, then a zip archive of JSON and Arrow files; no code.

The summary comes first, so that a list of hundreds of runs reads only one line of each.
"""

import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import polars as pl

from tracekit.model.run import Run, Source
from tracekit.model.trace import Trace
from tracekit.rules.report_cache.summary import Summary, summarize
from tracekit.rules.rule import Finding, Input, Report, Severity, WhatIf
from tracekit.sync import alignment

MAX_TABLE_BYTES = 16 << 20
MAX_BYTES = 64 << 20
"""Limit for all facts of a run together; the others are measured again when a page needs them."""
UNSERIALIZABLE = (TypeError, ValueError, pl.exceptions.PolarsError)
"""Errors for content of a manifest or a table that JSON or Arrow cannot represent."""
_REPORT, _DATA_QUALITY = "report.json", "data_quality.arrow"
_MAX_LINE_BYTES = 1 << 16

Reader = Callable[[int, int, str], Callable[[], Trace]]
"""Returns the function that reads a trace, by window, rank and path."""


def write(report: Report, file: BinaryIO) -> None:
    """Write a report, its summary, and the facts of its run."""
    facts = dict(_cacheable(report.run.measured_tables))
    run = {
        "path": report.run.path,
        "manifest": report.run.manifest,
        "sources": [[each.rank, each.window, each.path, each.size_bytes] for each in report.run.sources],
    }
    content = {
        "run": run,
        "findings": [_as_dict(found) for found in report.findings],
        "notes": report.notes,
        "inputs": [dataclasses.asdict(each) for each in report.inputs],
        "tool_version": report.tool_version,
        "rules": report.rules,
        "blind_spots": dict(report.blind_spots),
        "facts": list(facts),
    }
    line = json.dumps(dataclasses.asdict(summarize(report))).encode()
    file.write(b"%08x %s\n" % (zlib.crc32(line), line))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_REPORT, json.dumps(content))
        archive.writestr(_DATA_QUALITY, _packed(report.run.data_quality))
        for number, found in enumerate(report.findings):
            archive.writestr(f"evidence{number}.arrow", _packed(found.evidence))
        for number, table in enumerate(facts.values()):
            archive.writestr(f"fact{number}.arrow", _packed(table))


def read_summary(file: BinaryIO) -> Summary:
    """Return the summary of an entry. Raises if the entry is damaged."""
    checksum, _, line = file.readline(_MAX_LINE_BYTES).rstrip(b"\n").partition(b" ")
    if int(checksum, 16) != zlib.crc32(line):
        raise ValueError("the summary is damaged")
    content = json.loads(line)
    return Summary(**content | {"steps_ns": tuple(content["steps_ns"])})


def read(file: BinaryIO, reader: Reader, read_cached: Callable[[int], pl.DataFrame | None]) -> Report:
    """Return the report of an entry. Raises if the entry is damaged.

    Its run reads traces with `reader`, and facts by number with `read_cached`, as long as that returns them.
    """
    with zipfile.ZipFile(file) as archive:
        content = json.loads(archive.read(_REPORT))
        data_quality = _table(archive, _DATA_QUALITY)
        evidence = [_table(archive, f"evidence{number}.arrow") for number in range(len(content["findings"]))]
    sources = [Source(r, w, path, size, reader(w, r, path)) for r, w, path, size in content["run"]["sources"]]
    run = Run(
        content["run"]["path"],
        sources,
        manifest=content["run"]["manifest"],
        data_quality=data_quality,
        align=alignment.offsets,
    )
    numbers = {name: number for number, name in enumerate(content["facts"])}
    run.use_cached_tables(lambda name: read_cached(numbers[name]) if name in numbers else None)
    return Report(
        run,
        tuple(_finding(each, rows) for each, rows in zip(content["findings"], evidence, strict=True)),
        tuple(content["notes"]),
        tuple(Input(**each) for each in content["inputs"]),
        content["tool_version"],
        rules=tuple(content["rules"]),
        blind_spots=content["blind_spots"],
    )


def read_fact(number: int, file: BinaryIO) -> pl.DataFrame:
    """Return one fact of an entry. Raises if the entry is damaged."""
    with zipfile.ZipFile(file) as archive:
        return _table(archive, f"fact{number}.arrow")


def _cacheable(measured: Mapping[str, pl.DataFrame]) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the facts that are small enough, the smallest first."""
    left = MAX_BYTES
    for name, table in sorted(measured.items(), key=lambda item: int(item[1].estimated_size())):
        left -= int(table.estimated_size())
        if left < 0 or table.estimated_size() > MAX_TABLE_BYTES:
            return
        yield name, table


def _as_dict(finding: Finding) -> dict[str, Any]:
    fields = {field.name: getattr(finding, field.name) for field in dataclasses.fields(finding)}
    what_if = None if finding.what_if is None else dataclasses.asdict(finding.what_if)
    del fields["evidence"]
    return fields | {"severity": finding.severity.label, "what_if": what_if}


def _finding(fields: Mapping[str, Any], evidence: pl.DataFrame) -> Finding:
    what_if = None if fields["what_if"] is None else WhatIf(**fields["what_if"])
    parsed: dict[str, Any] = {name: tuple(fields[name]) for name in ("ranks", "steps")}
    parsed |= {"severity": Severity[fields["severity"].upper()], "what_if": what_if, "evidence": evidence}
    return Finding(**{**fields, **parsed})


def _packed(table: pl.DataFrame) -> memoryview:
    out = io.BytesIO()
    table.write_ipc(out, compression="zstd")
    return out.getbuffer()


def _table(archive: zipfile.ZipFile, name: str) -> pl.DataFrame:
    return pl.read_ipc(io.BytesIO(archive.read(name)))

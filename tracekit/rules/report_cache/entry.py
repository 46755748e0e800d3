"""One kept report as bytes: a line of JSON, its summary, and a zip archive of JSON and Arrow files. None holds code.

The summary stands before the archive so that a list of hundreds of runs reads a line of each.
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
"""Of all facts of a run together; what goes beyond is measured anew where a page asks for it."""
UNSERIALIZABLE = (TypeError, ValueError, pl.exceptions.PolarsError)
"""What is raised where a manifest or a table holds what JSON or Arrow cannot say."""
_REPORT, _DATA_QUALITY = "report.json", "data_quality.arrow"
_MAX_LINE_BYTES = 1 << 16

Reader = Callable[[int, int, str], Callable[[], Trace]]
"""From window, rank and path of a trace to what reads it."""


def write(report: Report, file: BinaryIO) -> None:
    """Write a report, its summary, and the facts of its run."""
    facts = dict(_cacheable(report.run.measured_tables))
    run = {
        "path": report.run.path,
        "manifest": report.run.manifest,
        "sources": [[each.rank, each.window, each.path, each.size_bytes] for each in report.run.sources],
    }
    told = {
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
        archive.writestr(_REPORT, json.dumps(told))
        archive.writestr(_DATA_QUALITY, _packed(report.run.data_quality))
        for number, found in enumerate(report.findings):
            archive.writestr(f"evidence{number}.arrow", _packed(found.evidence))
        for number, table in enumerate(facts.values()):
            archive.writestr(f"fact{number}.arrow", _packed(table))


def read_summary(file: BinaryIO) -> Summary:
    """Return the summary of an entry. Raises where it is none."""
    checksum, _, line = file.readline(_MAX_LINE_BYTES).rstrip(b"\n").partition(b" ")
    if int(checksum, 16) != zlib.crc32(line):
        raise ValueError("the summary is damaged")
    told = json.loads(line)
    return Summary(**told | {"steps_ns": tuple(told["steps_ns"])})


def read(file: BinaryIO, reader: Reader, recall: Callable[[int], pl.DataFrame | None]) -> Report:
    """Return the report of an entry. Raises where it is none.

    Its run reads a trace by `reader`, and takes the fact of a number from `recall` while that has it.
    """
    with zipfile.ZipFile(file) as archive:
        told = json.loads(archive.read(_REPORT))
        data_quality = _table(archive, _DATA_QUALITY)
        evidence = [_table(archive, f"evidence{number}.arrow") for number in range(len(told["findings"]))]
    sources = [Source(r, w, path, size, reader(w, r, path)) for r, w, path, size in told["run"]["sources"]]
    run = Run(
        told["run"]["path"],
        sources,
        manifest=told["run"]["manifest"],
        data_quality=data_quality,
        align=alignment.offsets,
    )
    numbers = {name: number for number, name in enumerate(told["facts"])}
    run.use_cached_tables(lambda name: recall(numbers[name]) if name in numbers else None)
    return Report(
        run,
        tuple(_finding(each, rows) for each, rows in zip(told["findings"], evidence, strict=True)),
        tuple(told["notes"]),
        tuple(Input(**each) for each in told["inputs"]),
        told["tool_version"],
        rules=tuple(told["rules"]),
        blind_spots=told["blind_spots"],
    )


def read_fact(number: int, file: BinaryIO) -> pl.DataFrame:
    """Return one fact of an entry. Raises where it is none."""
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


def _as_dict(found: Finding) -> dict[str, Any]:
    told = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "evidence"}
    what_if = None if found.what_if is None else dataclasses.asdict(found.what_if)
    return told | {"severity": found.severity.label, "what_if": what_if}


def _finding(told: Mapping[str, Any], evidence: pl.DataFrame) -> Finding:
    given = dict(told)
    given |= {name: tuple(given[name]) for name in ("ranks", "steps")}
    given["severity"] = Severity[given["severity"].upper()]
    given["what_if"] = None if given["what_if"] is None else WhatIf(**given["what_if"])
    return Finding(**given, evidence=evidence)


def _packed(table: pl.DataFrame) -> memoryview:
    out = io.BytesIO()
    table.write_ipc(out, compression="zstd")
    return out.getbuffer()


def _table(archive: zipfile.ZipFile, name: str) -> pl.DataFrame:
    return pl.read_ipc(io.BytesIO(archive.read(name)))

"""What is said of a recording by every fact and rule, and what is wrong with the answers where a part is missing."""

import functools
import hashlib
import importlib
import json
import pkgutil
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

import tracekit.analysis
import tracekit.replay
import tracekit.sync
from tests.support import cli_runner, missing_parts
from tracekit.errors import TracekitError
from tracekit.ingest import loader
from tracekit.model import schema
from tracekit.model.fact import Fact, Scope
from tracekit.model.run import Run
from tracekit.report import json as report_json
from tracekit.rules import engine, stated_savings

_ALONE = {
    "snapshot": (("memory",),), "hang dump": (("hang",),), "execution trace": (("check",),), "I/O log": (("check",),),
    "metrics log": (("check",),), "checkpoint log": (("check",),),
}  # fmt: skip
"""Commands on a folder without traces."""


@dataclass(frozen=True)
class Said:
    """What a recording leads to."""

    refusal: str = ""
    """The error of one line, where it cannot be read."""
    judgement: str = ""
    """Findings and numbers, without data quality."""
    reasons: frozenset[str] = frozenset()
    """Findings on data quality, notes, and what was not recorded."""
    faults: tuple[str, ...] = ()
    """Crashes, columns with another type than declared, and numbers that cannot be."""
    tables: frozenset[tuple[str, str]] = frozenset()
    """Hash of each table and other input of facts and rules: what is equal for two recordings is not read again."""


def said(files: Mapping[str, Any], folder: Path) -> Said:
    """Write a recording into a folder, and measure and judge it."""
    missing_parts.write(files, folder)
    try:
        if any(missing_parts.kind(name) in ("trace", "nsight") for name in files):
            return _of_run(folder)
        return _of_commands(files, folder)
    except TracekitError as error:
        return Said(refusal=str(error).replace(str(folder), "RUN"))
    except Exception as error:  # noqa: BLE001  what is looked for
        return Said(faults=(_place(error.__cause__ or error),))


def problem(intact: Said, without: Said, *, needs_reason: bool = True) -> str:
    """What is wrong with what is said of a recording without a part; "" if nothing is."""
    if without.faults:
        return "; ".join(without.faults)
    if not needs_reason or without.refusal or _is_alike(intact.judgement, without.judgement):
        return ""
    return "" if without.reasons - intact.reasons else "changed without a reason"


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_SAME = 0.05
"""Share by which a number may change: calls that are gone no longer divide what is around them."""


def _is_alike(one: str, other: str) -> bool:
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    sizes = ((float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs)
    return all(abs(a - b) <= _SAME * max(a, b) for a, b in sizes)


@functools.cache
def facts() -> tuple[Fact[Any], ...]:
    """Every fact of a trace or a run."""
    modules = [
        importlib.import_module(info.name)
        for package in (tracekit.analysis, tracekit.replay, tracekit.sync)
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return tuple({id(fact): fact for m in modules for fact in vars(m).values() if isinstance(fact, Fact)}.values())


_SHOWN = ("breakdown.by_clock",)
"""Tables for display, which lack columns that would be constant."""
_types: dict[str, pl.Schema] = {}
"""Columns of each fact, as the first recording with the fact has them."""


_said: dict[frozenset[tuple[str, str]], Said] = {}
"""What is said of runs, by their tables: many parts are not read."""


def _of_run(folder: Path) -> Said:
    run = loader.load(str(folder), cache=False)
    tables = frozenset(_hashes(run, folder).items())
    if tables not in _said:
        _said[tables] = replace(_report_values(run), tables=tables)
    return _said[tables]


def _hashes(run: Run, folder: Path) -> dict[str, str]:
    """Hash of all that facts and rules read of a run, by table."""
    digests: defaultdict[str, Any] = defaultdict(hashlib.sha256)
    for trace in run.traces():
        for name, rows in trace.tables.items():
            plain = rows.drop("path", strict=False)
            digests[name].update(repr(plain.schema).encode() + plain.hash_rows().to_numpy().tobytes())
        digests["header"].update(repr((trace.rank, trace.window, dict(trace.header))).encode())
    issues = run.data_quality.drop("path").rows()
    digests["run"].update(repr((run.manifest, issues)).replace(str(folder), "").encode())
    for path in sorted(folder.glob("*.pickle")):
        digests["snapshot"].update(path.read_bytes())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _report_values(run: Run) -> Said:
    report = engine.check(run)
    document = json.loads(report_json.render(report, run))
    faults = [*_faults_of_tables(run), *impossible(document)]
    stated_savings.answer(report)
    absent = (json.dumps(row) for row in document["not_recorded"])
    reasons = frozenset({*(f.message for f in report.findings if f.code == "DATA001"), *report.notes, *absent})
    judged = [(f["code"], f["subject"], f["ranks"], f["severity"], f["message"]) for f in document["findings"]
              if f["code"] != "DATA001"]  # fmt: skip
    return Said("", json.dumps([judged, document["summary"]], sort_keys=True), reasons, tuple(faults))


_PART_OF = re.compile(r"(\d[\d,.]*) (ns|µs|ms|s) of (\d[\d,.]*) (ns|µs|ms|s)\b")
_UNITS_NS = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}
_ROUNDING = 1.02
_PARTS = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")


def impossible(document: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be in a report: a part that exceeds its whole, a share beyond 1, a negative time."""
    for finding in document["findings"]:
        for text in (finding["sentence"], finding["message"]):
            for part, part_unit, whole, whole_unit in _PART_OF.findall(text):
                sizes = (float(part.rstrip(".,").replace(",", "")), float(whole.rstrip(".,").replace(",", "")))
                if sizes[0] * _UNITS_NS[part_unit] > _ROUNDING * sizes[1] * _UNITS_NS[whole_unit]:
                    yield f"{finding['id']}: {part} {part_unit} of {whole} {whole_unit}"
        yield from (
            f"{finding['id']}: {name} is {finding[name]}"
            for name in ("impact", "confidence")
            if finding[name] is not None and not 0 <= finding[name] <= 1
        )
    for row in document["summary"]:
        if min(row[name] for name in _PARTS) < 0 or sum(row[name] for name in _PARTS) != row["duration_ns"]:
            yield f"parts of {row}"


def _faults_of_tables(run: Run) -> Iterator[str]:
    for fact in facts():
        sources = [run] if fact.scope is Scope.RUN else list(run.traces())
        for source in sources:
            try:
                rows = fact.measure(source)
            except Exception as error:  # noqa: BLE001
                yield f"{fact.name}: {_place(error)}"
                continue
            declared = fact.table.schema if fact.table else _types.setdefault(fact.name, rows.schema)
            yield from _faults(fact.name, rows, declared, is_conformed=fact.table is not None)
    for trace in run.traces():
        for name, rows in trace.tables.items():
            yield from _faults(name, rows, schema.TABLES[name].schema)


def _faults(name: str, rows: pl.DataFrame, declared: pl.Schema, *, is_conformed: bool = False) -> Iterator[str]:
    for column, dtype in rows.schema.items():
        if dtype == pl.Object or (dtype == pl.Null and not rows.is_empty()):
            yield f"{name}.{column} is {dtype}"
        elif not is_conformed and name in _SHOWN and column not in declared:
            continue
        elif not is_conformed and declared.get(column) != dtype:
            yield f"{name}.{column} is {dtype}, not {declared.get(column)}"
        if dtype.is_float() and not rows[column].is_finite().fill_null(value=True).all():
            yield f"{name}.{column} has numbers that are not finite"
    if not is_conformed and name not in _SHOWN and (absent := set(declared) - set(rows.schema)):
        yield f"{name} lacks {sorted(absent)}"


def _of_commands(files: Mapping[str, Any], folder: Path) -> Said:
    shown, reasons, faults = [], set[str](), []
    kinds = {missing_parts.kind(name) for name in files}
    for command in dict.fromkeys(c for kind in sorted(kinds) for c in _ALONE.get(kind, ())):
        paths = [folder] if command == ("hang",) else sorted(folder.iterdir())
        for path in paths:
            done = cli_runner.tracekit(*command, path, "--format", "json")
            if done.returncode not in (0, 1, 2, 4):
                faults.append(f"{' '.join(command)}: {done.returncode} {done.stderr[-400:]}")
            document = json.loads(done.stdout or "{}")
            reasons |= {str(note) for note in document.pop("notes", ())} | set(done.stderr.splitlines())
            shown.append(document)
    reasons = {reason.replace(str(folder), "RUN") for reason in reasons}
    return Said("", json.dumps(shown).replace(str(folder), "RUN"), frozenset(reasons), tuple(faults))


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tracekit/" in frame.filename]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__} at {place}: {str(error)[:160]}"

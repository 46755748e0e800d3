"""Results as Markdown: what each subject took, and how many times more the others take than tracekit."""

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.runner import AGAIN, COMMAND, COMMAND_AGAIN, FLOORS, Result, Sample

_OURS = "tracekit"
_RIVALS = ("hta", "hta load")
_PACKAGES = ("polars", "msgspec", "isal", "traceinsight", "pandas", "pysimdjson", "orjson")
_COPIES = "copies_"


def markdown(results: Sequence[Result]) -> str:
    """Return all results as Markdown."""
    parts = [machine(), *_ratios(results), *_scaling(results), *(line for r in results for line in _case(r))]
    return "\n".join(parts) + "\n"


def machine() -> str:
    """Return in a sentence what the measurements were made on."""
    told = f"{os.cpu_count()} cores of {_processor()}, Python {platform.python_version()}"
    return f"Measured on {told}; {', '.join(_versions())}.\n"


def _ratios(results: Sequence[Result]) -> Iterator[str]:
    yield "| case | CPU, in process | wall, in process | CPU, whole command | peak RSS | share of the floor |"
    yield "|---|---|---|---|---|---|"
    for result in results:
        rival = next((name for name in _RIVALS if name in result.subjects), None)
        cells = ["—"] * 4 if rival is None else [
            _spread(result.ratios(rival, _OURS, "work_cpu_s")),
            _spread(result.ratios(rival, _OURS, "work_wall_s")),
            _spread(result.ratios(rival, COMMAND, "whole_cpu_s")),
            _spread(result.ratios(rival, COMMAND, "peak_mib")),
        ]  # fmt: skip
        floor = next((name for name in FLOORS if name in result.subjects), None)
        share = [] if floor is None else result.ratios(floor, _OURS, "work_cpu_s")
        told = f"{statistics.median(share):.0%} of {floor}" if share else "—"
        yield f"| {result.case.name} | {' | '.join(cells)} | {told} |"
    yield ""


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "—"
    middle = f"{statistics.median(ratios):.1f}x"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.1f} to {max(ratios):.1f})"


def _scaling(results: Sequence[Result]) -> Iterator[str]:
    copies = [r for r in results if r.case.name.startswith(_COPIES) and _OURS in r.subjects]
    if len(copies) < 2:
        return
    yield "| ranks | CPU s | CPU s a rank | wall s | peak MiB |"
    yield "|---|---|---|---|---|"
    for result in copies:
        ranks, took = int(result.case.name.removeprefix(_COPIES)), result.median(_OURS)
        each = (took.work_cpu_s or 0.0) / ranks
        yield f"| {ranks} | {took.work_cpu_s:.2f} | {each:.3f} | {took.work_wall_s:.2f} | {took.peak_mib:.0f} |"
    yield ""


def _case(result: Result) -> Iterator[str]:
    size_mb = result.size_bytes / 1e6
    yield f"### {result.case.name}\n"
    yield f"{result.case.what}; {size_mb:,.1f} MB of JSON. Medians of {len(result.rounds)} rounds.\n"
    columns = (
        "CPU s, in process",
        "wall s, in process",
        "CPU s, whole",
        "wall s, whole",
        "peak MiB",
        "MB a CPU second",
    )
    yield f"| subject | {' | '.join(columns)} |"
    yield f"|{'---|' * (len(columns) + 1)}"
    for subject in result.subjects:
        took = result.median(subject)
        yield f"| {subject} | {' | '.join(_cells(took))} | {_speed(subject, took, size_mb)} |"
    for subject, words in result.failures.items():
        yield f"| {subject} | failed: {words} | | | | | |"
    yield ""


def _cells(took: Sample) -> Iterator[str]:
    for value in (took.work_cpu_s, took.work_wall_s, took.whole_cpu_s, took.whole_wall_s):
        yield "—" if value is None else f"{value:.2f}"
    yield f"{took.peak_mib:.0f}"


def _speed(subject: str, took: Sample, size_mb: float) -> str:
    if subject in (AGAIN, COMMAND_AGAIN):
        return "—"  # these read tables, not JSON
    return f"{size_mb / (took.whole_cpu_s if took.work_cpu_s is None else took.work_cpu_s):.0f}"


def _processor() -> str:
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue

"""Results as Markdown: time and memory of each subject, and ratios to tracekit."""

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.runner import CACHED, COMMAND, COMMAND_CACHED, FLOORS, Result, Sample

_OURS = "tracekit"
_RIVALS = ("hta", "hta load")
_PACKAGES = ("polars", "msgspec", "isal", "traceinsight", "pandas", "pysimdjson", "orjson")
_COPIES = "copies_"


def markdown(results: Sequence[Result]) -> str:
    """Return all results as Markdown."""
    parts = [
        machine_description(),
        *_ratios(results),
        *_scaling(results),
        *(line for r in results for line in _case_section(r)),
    ]
    return "\n".join(parts) + "\n"


def machine_description() -> str:
    """Return a sentence that describes the machine."""
    cores = f"{os.cpu_count()} cores of {_cpu_name()}, Python {platform.python_version()}"
    return f"Measured on {cores}; {', '.join(_versions())}.\n"


def _ratios(results: Sequence[Result]) -> Iterator[str]:
    yield "| case | CPU, in process | wall, in process | CPU, whole command | peak RSS | share of the floor |"
    yield "|---|---|---|---|---|---|"
    for result in results:
        rival = next((name for name in _RIVALS if name in result.subjects), None)
        cells = ["—"] * 4 if rival is None else [
            _median_and_range(result.ratios(rival, _OURS, "work_cpu_s")),
            _median_and_range(result.ratios(rival, _OURS, "work_wall_s")),
            _median_and_range(result.ratios(rival, COMMAND, "whole_cpu_s")),
            _median_and_range(result.ratios(rival, COMMAND, "peak_mib")),
        ]  # fmt: skip
        floor = next((name for name in FLOORS if name in result.subjects), None)
        share = [] if floor is None else result.ratios(floor, _OURS, "work_cpu_s")
        share_text = f"{statistics.median(share):.0%} of {floor}" if share else "—"
        yield f"| {result.case.name} | {' | '.join(cells)} | {share_text} |"
    yield ""


def _median_and_range(ratios: list[float]) -> str:
    if not ratios:
        return "—"
    median = f"{statistics.median(ratios):.1f}x"
    return median if len(ratios) == 1 else f"{median} ({min(ratios):.1f} to {max(ratios):.1f})"


def _scaling(results: Sequence[Result]) -> Iterator[str]:
    copies = [r for r in results if r.case.name.startswith(_COPIES) and _OURS in r.subjects]
    if len(copies) < 2:
        return
    yield "| ranks | CPU s | CPU s a rank | wall s | peak MiB |"
    yield "|---|---|---|---|---|"
    for result in copies:
        ranks, sample = int(result.case.name.removeprefix(_COPIES)), result.median(_OURS)
        per_rank_s = (sample.work_cpu_s or 0.0) / ranks
        times = f"{sample.work_cpu_s:.2f} | {per_rank_s:.3f} | {sample.work_wall_s:.2f}"
        yield f"| {ranks} | {times} | {sample.peak_mib:.0f} |"
    yield ""


def _case_section(result: Result) -> Iterator[str]:
    size_mb = result.size_bytes / 1e6
    yield f"### {result.case.name}\n"
    yield f"{result.case.description}; {size_mb:,.1f} MB of JSON. Medians of {len(result.rounds)} rounds.\n"
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
        sample = result.median(subject)
        yield f"| {subject} | {' | '.join(_cells(sample))} | {_read_rate(subject, sample, size_mb)} |"
    for subject, error in result.failures.items():
        yield f"| {subject} | failed: {error} | | | | | |"
    yield ""


def _cells(sample: Sample) -> Iterator[str]:
    for value in (sample.work_cpu_s, sample.work_wall_s, sample.whole_cpu_s, sample.whole_wall_s):
        yield "—" if value is None else f"{value:.2f}"
    yield f"{sample.peak_mib:.0f}"


def _read_rate(subject: str, sample: Sample, size_mb: float) -> str:
    if subject in (CACHED, COMMAND_CACHED):
        return "—"  # these read tables, not JSON
    return f"{size_mb / (sample.whole_cpu_s if sample.work_cpu_s is None else sample.work_cpu_s):.0f}"


def _cpu_name() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue

"""What counters of GPUs say about late ranks, and I/O logs about slow files."""

from collections.abc import Collection
from dataclasses import dataclass

import polars as pl

from tracekit.analysis.host import host_stalls
from tracekit.analysis.parallelism import device_comparison
from tracekit.analysis.parallelism.device_comparison import DeviceComparison, MemoryErrors
from tracekit.model import escaping, intervals, units
from tracekit.model.run import Run

_FIXES = {
    device_comparison.THERMAL: (
        "Heat slows {ranks}: check fans, airflow and inlet temperature of the node "
        "(nvidia-smi -q -d TEMPERATURE,PERFORMANCE), and remove the node from the job until it is cool."
    ),
    device_comparison.POWER_BRAKE: (
        "The power supply slows {ranks}: check the power supplies and cables of the node "
        "(nvidia-smi -q -d POWER,PERFORMANCE), and remove the node from the job until it is repaired."
    ),
    device_comparison.POWER_CAP: (
        "The power limit slows {ranks}: compare the limits (nvidia-smi -q -d POWER), raise a limit that is lower than "
        "the others' (nvidia-smi -pl), or replace a GPU that needs more power for the same clock."
    ),
    device_comparison.HARDWARE: (
        "The GPU hardware lowers the clock of {ranks}: find out why (nvidia-smi -q -d "
        "PERFORMANCE,TEMPERATURE,POWER), and remove the node from the job until it is repaired."
    ),
    device_comparison.CLOCK_SETTING: (
        "The clock of {ranks} is set lower than that of the others: reset it (nvidia-smi -rgc, nvidia-smi -rac)."
    ),
    device_comparison.SYNC_BOOST: (
        "Another GPU of a sync boost group slows {ranks}: find out which (nvidia-smi -q -d PERFORMANCE)."
    ),
}
_UNEXPLAINED = (
    "See why the clock of {ranks} is lower (nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,TEMPERATURE), or use another node."
)
_MORE_WORK = (
    "The clocks are equal, so check the work of {ranks}: uneven batches (sequence lengths, experts), or other jobs on "
    "the same GPU."
)
_DATA_OR_HOST = (
    "The clocks are equal, so check the data and the host of {ranks}: uneven batches, a busy host (HOST001, HOST003), "
    "other jobs on the node."
)
_RECORD = " Or record the clocks of the GPUs: tracekit record --device-metrics."
_RESET = " Reset the GPU with memory errors (nvidia-smi --gpu-reset), and replace it if they return."
_MAX_PATH = 80


@dataclass(frozen=True)
class DeviceEvidence:
    """What is known of the GPUs of late ranks."""

    comparison: DeviceComparison | None
    errors: MemoryErrors

    def message(self, *, several: bool) -> str:
        """Return the sentences on the GPUs, each after a space; "" where nothing is known."""
        count = self.errors.uncorrected
        subject = "Their GPUs have" if several else "Its GPU has"
        said = f" {subject} {units.count(count, 'uncorrected memory error')} (ECC)." if count else ""
        errors = said + (" A memory row is to be replaced at the next reset." if self.errors.is_remap_pending else "")
        return f"{self._clocks(several=several)}{errors}"

    def fix(self, fix: str, *, is_compute: bool, is_host: bool) -> str:
        """Return the fix where a finding would advise `fix` without counters.

        `is_compute`, `is_host`: whether the late ranks' kernels, or their hosts, are known to take longer. A slow GPU
        does not explain a late host.
        """
        reset = _RESET if self.errors.uncorrected or self.errors.is_remap_pending else ""
        compared = self.comparison
        if compared is None:
            return fix + reset + ("" if is_host else _RECORD)
        if is_host:
            return fix + reset
        if compared.is_slower:
            return (_FIXES[compared.cause] if compared.cause else _UNEXPLAINED) + reset
        return (_MORE_WORK if is_compute else _DATA_OR_HOST) + reset

    def _clocks(self, *, several: bool) -> str:
        compared = self.comparison
        if compared is None:
            return ""
        subject = "Their GPUs run" if several else "Its GPU runs"
        peers = f"{compared.others_clock_mhz:,.0f} MHz"
        if not compared.is_slower:
            return f" {subject} at {compared.clock_mhz:,.0f} MHz, the others at {peers}: the hardware is not slower."
        parts = [
            f"{compared.cause} in {compared.cause_steps} of {compared.steps} steps"
            if compared.cause
            else "no throttle reason is reported"
        ]
        hot_c, peer_c = compared.temperature_c, compared.others_temperature_c
        if hot_c is not None and peer_c is not None:
            parts.append(f"{hot_c:.0f} °C against {peer_c:.0f} °C")
        limit_w, peer_limit_w = compared.power_limit_w, compared.others_power_limit_w
        if limit_w is not None and peer_limit_w is not None and limit_w < peer_limit_w:
            parts.append(f"power limit {limit_w:,.0f} W against {peer_limit_w:,.0f} W")
        why = ", ".join(parts)
        return f" {subject} at {compared.clock_mhz:,.0f} MHz against {peers}: {why}."


def sentence(run: Run, rank: int, spans: intervals.Spans, span_name: str, kinds: Collection[str] = ()) -> str:
    """Return a sentence on the file system calls of a rank during the spans, shape (n, 2) in ns.

    It names the function and file with most of that time; `span_name` is the name of that time, such as "the save".
    `kinds` limits it to calls of these kinds, if there are any. Empty where no I/O log has a call in the spans.
    """
    rank_calls = run.table(host_stalls.io_calls_of_run).filter(pl.col("rank") == rank)
    if rank_calls.is_empty():
        return ""
    overlapping = host_stalls.io_during(rank_calls, spans)
    of_kinds = overlapping.filter(pl.col("kind").is_in(list(kinds)))
    overlapping = overlapping if of_kinds.is_empty() else of_kinds
    if overlapping.is_empty():
        return ""
    longest = (
        overlapping.group_by("name", "file", maintain_order=True)
        .agg(pl.len().alias("calls"), pl.col("overlap_ns", "dur_ns", "bytes").sum())
        .sort("overlap_ns", descending=True, maintain_order=True)
        .row(0, named=True)
    )
    took = units.duration(host_stalls.io_covered_ns(overlapping, spans))
    what = f"{' and '.join(sorted(kinds))} calls" if not of_kinds.is_empty() else "calls"
    count, moved, dur_ns = (int(str(longest[name])) for name in ("calls", "bytes", "dur_ns"))
    calls = units.count(count, f"{longest['name']} call")
    path = "an unknown file" if longest["file"] is None else escaping.inert(str(longest["file"]), _MAX_PATH)
    rate = f", {units.size(moved)} at {units.rate(moved * 1e9 / dur_ns)}" if moved and dur_ns else ""
    of_file = f"in {calls} of {path} ({units.duration(dur_ns)}{rate})"
    return f" File system {what} take {took} of {span_name}, most of that {of_file}."

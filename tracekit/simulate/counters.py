"""Counters of simulated GPUs for the metrics log, as `record --device-metrics` writes them."""

import zlib
from types import MappingProxyType

from tracekit.conventions import device_metrics as names
from tracekit.simulate.job import Job

_CLOCKS_MHZ = MappingProxyType({"a100-80": (1410, 1593), "h100-80": (1755, 2619), "v100-32": (1530, 877)})
_LIMITS_W = MappingProxyType({"a100-80": 400, "h100-80": 700, "v100-32": 300})
_OTHERS_MHZ, _OTHERS_W = (1500, 1500), 400
_CLOCK_SPREAD = 0.01
_COOL_C, _SPREAD_C, _HOT_C = 60.0, 8.0, 91.0
_SAMPLE_NS = 1_000_000_000


def counters(job: Job, rank: int, step: int, *, start_ns: int, end_ns: int) -> dict[str, float]:
    """Return the counters of a rank's GPU in a step: of a hot GPU if it is throttled, else of a cool one."""
    draw = zlib.crc32(f"{job.seed}/{rank}/{step}".encode()) / 2**32
    sm_mhz, memory_mhz = _CLOCKS_MHZ.get(job.hardware.name, _OTHERS_MHZ)
    limit_w = _LIMITS_W.get(job.hardware.name, _OTHERS_W)
    is_throttled = rank in job.impairments.throttled_ranks
    slower = job.impairments.slow_ranks[rank][0] if is_throttled else 1.0
    averaged = {
        names.SM_CLOCK: sm_mhz / slower * (1 - _CLOCK_SPREAD * draw),
        names.MEMORY_CLOCK: float(memory_mhz),
        names.POWER: limit_w * (0.85 + 0.05 * draw) / slower,
        names.TEMPERATURE: _HOT_C if is_throttled else round(_COOL_C + _SPREAD_C * draw),
        names.UTILIZATION: 0.99,
        names.MEMORY_UTILIZATION: 0.4,
    }
    throttled_by = names.HW_SLOWDOWN | names.HW_THERMAL if is_throttled else 0
    values = {form: round(value, 3) for name, value in averaged.items() for form in _forms(name)}
    return values | {
        names.POWER_LIMIT: limit_w,
        names.ECC_CORRECTED: 0,
        names.ECC_UNCORRECTED: 0,
        names.REMAPPED_ROWS: 0,
        names.PENDING_ROW_REMAP: 0,
        names.THROTTLE_REASONS: throttled_by,
        names.SAMPLES: end_ns // _SAMPLE_NS - start_ns // _SAMPLE_NS,
    }


def _forms(name: str) -> tuple[str, str, str]:
    return name, names.least(name), names.most(name)

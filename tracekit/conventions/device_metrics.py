"""Counters of a GPU in the metrics log: what `record --device-metrics` adds to the line of a step.

Of the AVERAGED counters a line has the mean over the samples of the step, and the smallest and largest value under
``min_`` and ``max_`` and the name. Of the LATEST a line has the last value. A counter that cannot be read is null.
"""

from collections.abc import Mapping
from types import MappingProxyType

SM_CLOCK, MEMORY_CLOCK, POWER, TEMPERATURE, UTILIZATION, MEMORY_UTILIZATION = AVERAGED = (
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_w",
    "temperature_c",
    "device_utilization_ratio",  # share of the driver's last sampling period in which a kernel ran
    "device_memory_utilization_ratio",  # … in which device memory was read or written
)
POWER_LIMIT, ECC_CORRECTED, ECC_UNCORRECTED, REMAPPED_ROWS, PENDING_ROW_REMAP = LATEST = (
    "power_limit_w",
    "ecc_corrected_errors",  # volatile: since the driver was loaded
    "ecc_uncorrected_errors",
    "remapped_rows",
    "pending_row_remap",  # 1 where a row is remapped at the next reset of the GPU
)
THROTTLE_REASONS = "throttle_reasons"
"""All reasons of the step's samples together: a sum of the bits below."""
SAMPLES = "device_samples"
"""Samples taken in the step. A step with 0 has the values of the last sample before its end."""


def least(name: str) -> str:
    """Return the name of the smallest value of a counter in a step."""
    return f"min_{name}"


def most(name: str) -> str:
    """Return the name of the largest value of a counter in a step."""
    return f"max_{name}"


NAMES = (*(form for name in AVERAGED for form in (name, least(name), most(name))), *LATEST, THROTTLE_REASONS, SAMPLES)

# The bits are those of NVML's clocks event reasons.
GPU_IDLE, CLOCK_SETTING, POWER_CAP, HW_SLOWDOWN, SYNC_BOOST, SW_THERMAL, HW_THERMAL, POWER_BRAKE, DISPLAY_CLOCK = (
    1 << bit for bit in range(9)
)
REASONS: Mapping[int, str] = MappingProxyType(
    {
        GPU_IDLE: "idle",
        CLOCK_SETTING: "clock setting",
        POWER_CAP: "power cap",
        HW_SLOWDOWN: "hardware slowdown",
        SYNC_BOOST: "sync boost",
        SW_THERMAL: "software thermal slowdown",
        HW_THERMAL: "hardware thermal slowdown",
        POWER_BRAKE: "power brake",
        DISPLAY_CLOCK: "display clock",
    }
)
"""By bit: a throttle reason in words."""

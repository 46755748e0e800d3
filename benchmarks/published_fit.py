"""Fit a machine to published step times: many fits at once, each on rows of its own.

A fit minimises squared errors of step times and speedups, with a log-normal prior on every constant that keeps what the
rows do not determine near its guess. Levenberg-Marquardt, all fits side by side in arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.closed_form import Setting, step_s
from tracekit.simulate.job import FSDP1, YAFSDP_V1
from tracekit.simulate.kernels import Rates

Floats = npt.NDArray[np.float64]

TIME_ERROR, SPEEDUP_ERROR = 0.02, 0.01
"""What the published numbers are taken to be good for: 2% of a time, 1 point of a speedup."""
_ROUNDS, _STEP = 30, 1e-4
_CONVERGED = 1e-3  # of the sum of squared errors


@dataclass(frozen=True)
class Row:
    """One row of the published table: times in seconds, the speedup as a ratio."""

    setting: Setting
    speedup: float
    yafsdp_s: float
    fsdp_s: float


@dataclass(frozen=True)
class Prior:
    """What one would guess of a constant before seeing any row: its median, and how sure one is (sigma of its log)."""

    median: float
    spread: float


# Guesses for an A100 80GB: 60% of 312 TFLOP/s, 69% of 2,039 GB/s, a network of 100 GB/s a ring, 5 µs a hop; the
# slowdown of small kernels during the main compute is to be fitted; the guess is their own duration.
PRIORS: dict[str, Prior] = {
    "flops_per_s": Prior(187e12, 0.3),
    "memory_bytes_per_s": Prior(1.4e12, 0.3),
    "elementwise_bytes": Prior(100.0, 1.0),
    "bus_bytes_per_s": Prior(100e9, 1.0),
    "hop_s": Prior(5e-6, 1.0),
    "overhead_s": Prior(0.05, 1.0),
    "give_way": Prior(1.0, 1.0),
    "give_way_high_priority": Prior(0.3, 1.0),
}
GIVE_WAY = ("give_way", "give_way_high_priority")


def fit(rows: Sequence[Row], subsets: npt.NDArray[np.int64], *, without: Sequence[str] = ()) -> Rates:
    """Return the machines fitted to `subsets` of the rows, shape (fits, rows of a fit): each constant of shape (fits,).

    The constants named in `without` are fixed at 0.
    """
    free = [name for name in PRIORS if name not in without]
    x = np.zeros((len(subsets), len(free)))
    damping = np.full(len(subsets), 1e-2)
    guesses = _STEP * np.concatenate((np.zeros((1, len(free))), np.eye(len(free))))
    residuals = _residuals(rows, subsets, x[:, None] + guesses, free)
    for _ in range(_ROUNDS):
        errors, slopes = residuals[:, 0], ((residuals[:, 1:] - residuals[:, :1]) / _STEP).transpose(0, 2, 1)
        normal = slopes.transpose(0, 2, 1) @ slopes
        damped = normal + damping[:, None, None] * np.eye(len(free)) * np.einsum("nii->ni", normal)[:, :, None]
        step = np.linalg.solve(damped, slopes.transpose(0, 2, 1) @ errors[:, :, None])[:, :, 0]
        tried = x - np.clip(step, -2, 2)
        new = _residuals(rows, subsets, tried[:, None] + guesses, free)
        gained = (errors**2).sum(1) - (new[:, 0] ** 2).sum(1)
        better = gained > 0
        x, residuals = np.where(better[:, None], tried, x), np.where(better[:, None, None], new, residuals)
        damping = np.where(better, damping / 5, np.minimum(damping * 8, 1e6))
        if (np.abs(gained) < _CONVERGED).all():
            break
    return _machine(x, free)


def predict(rows: Sequence[Row], machines: Rates) -> tuple[Floats, Floats]:
    """Return YaFSDP's and FSDP's step times in seconds on each machine, shape (machines, rows)."""
    times = [[step_s(strategy, row.setting, machines) for row in rows] for strategy in (YAFSDP_V1, FSDP1)]
    return np.stack(times[0], axis=-1), np.stack(times[1], axis=-1)


def _machine(x: Floats, free: Sequence[str]) -> Rates:
    constants = {name: np.zeros(x.shape[:-1]) for name in PRIORS}
    for index, name in enumerate(free):
        constants[name] = PRIORS[name].median * np.exp(PRIORS[name].spread * x[..., index])
    return Rates(**constants)


def _residuals(rows: Sequence[Row], subsets: npt.NDArray[np.int64], x: Floats, free: Sequence[str]) -> Floats:
    """Return errors in their own units, shape (fits, guesses, 3 × rows of a fit + constants)."""
    count, size = subsets.shape
    residuals = np.zeros((count, x.shape[1], 3 * size))
    for index, row in enumerate(rows):
        fits, places = np.nonzero(subsets == index)
        if not len(fits):
            continue
        machines = _machine(x[fits], free)
        yafsdp, fsdp = (step_s(strategy, row.setting, machines) for strategy in (YAFSDP_V1, FSDP1))
        parts = (
            np.log(yafsdp / row.yafsdp_s) / TIME_ERROR,
            np.log(fsdp / row.fsdp_s) / TIME_ERROR,
            (1 - yafsdp / fsdp - row.speedup) / SPEEDUP_ERROR,
        )
        for offset, part in enumerate(parts):
            residuals[fits, :, 3 * places + offset] = part
    return np.concatenate((residuals, x), axis=2)

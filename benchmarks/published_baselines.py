"""Two predictions of the published table that know nothing of schedules, to be beaten."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.published_fit import Floats, Row

INDICATORS, ROOFLINE = "three indicators", "max(compute, communication) + t0"
_SHORT, _LARGE_PARAMETERS = 2048, 20e9
_GUESS = np.log([160e12, 80e9, 0.1])
_SPREAD, _TIME_ERROR = 0.7, 0.02
_ROUNDS, _STEP = 40, 1e-5


def predictions(rows: Sequence[Row], subsets: npt.NDArray[np.int64]) -> dict[str, tuple[Floats, Floats]]:
    """Return YaFSDP's and FSDP's step times by each baseline, shape (fits, rows)."""
    speedups = _indicators(rows, subsets)
    fits = [_roofline(rows, subsets, np.array([getattr(row, name) for row in rows])) for name in ("yafsdp_s", "fsdp_s")]
    return {INDICATORS: (1 - speedups, np.ones_like(speedups)), ROOFLINE: (fits[0], fits[1])}


def _indicators(rows: Sequence[Row], subsets: npt.NDArray[np.int64]) -> Floats:
    """Predict the mean speedup of the fitted rows of the same class; of all fitted rows where there is none.

    The classes: short sequences and a small model, short and large, longer sequences.
    """
    kind = np.array([_kind(row) for row in rows])
    measured = np.array([row.speedup for row in rows])
    of_fit = measured[subsets]
    speedups = np.repeat(of_fit.mean(axis=1)[:, None], len(rows), axis=1)
    for label in set(kind.tolist()):
        alike = kind[subsets] == label
        count = alike.sum(axis=1)
        mean = np.where(alike, of_fit, 0).sum(axis=1) / np.maximum(count, 1)
        speedups = np.where((count > 0)[:, None] & (kind == label), mean[:, None], speedups)
    return speedups


def _kind(row: Row) -> int:
    if row.setting.seq > _SHORT:
        return 2
    return int(row.setting.model.parameters > _LARGE_PARAMETERS)


def _roofline(rows: Sequence[Row], subsets: npt.NDArray[np.int64], measured: Floats) -> Floats:
    """Fit operations per second, bytes per second and a fixed time, all of one strategy, and predict all rows."""
    work = np.array([_work(row) for row in rows])
    x = np.repeat(_GUESS[None], len(subsets), axis=0)
    damping = np.full(len(subsets), 1e-2)
    errors = _errors(x[:, None], work[subsets], measured[subsets])[:, 0]
    for _ in range(_ROUNDS):
        nudged = x[:, None] + _STEP * np.eye(3)
        slopes = (_errors(nudged, work[subsets], measured[subsets]) - errors[:, None]).transpose(0, 2, 1) / _STEP
        normal = slopes.transpose(0, 2, 1) @ slopes + damping[:, None, None] * np.eye(3)
        tried = x - np.linalg.solve(normal, slopes.transpose(0, 2, 1) @ errors[:, :, None])[:, :, 0]
        new = _errors(tried[:, None], work[subsets], measured[subsets])[:, 0]
        better = (new**2).sum(1) < (errors**2).sum(1)
        x, errors = np.where(better[:, None], tried, x), np.where(better[:, None], new, errors)
        damping = np.where(better, damping / 5, damping * 8)
    return _time_s(x[:, None], work[None])[:, 0]


def _work(row: Row) -> tuple[float, float]:
    """Return the operations and the gathered and reduced bytes of a step on one GPU."""
    setting, model = row.setting, row.setting.model
    weights = model.layers * model.layer_parameters + model.outer_parameters
    attention = 7 * setting.seq**2 * model.width * model.layers
    recomputed = 2 * setting.seq * model.layer_parameters * setting.checkpoint_layers
    return 6 * setting.seq * weights + attention + recomputed, 8 * model.layers * model.layer_parameters


def _time_s(x: Floats, work: Floats) -> Floats:
    """Return times of constants (fits, guesses, 3) and work (fits, rows, 2), shape (fits, guesses, rows)."""
    rate = np.exp(x)[:, :, None, :]
    share = work[:, None]
    time: Floats = np.maximum(share[..., 0] / rate[..., 0], share[..., 1] / rate[..., 1]) + rate[..., 2]
    return time


def _errors(x: Floats, work: Floats, measured: Floats) -> Floats:
    off = np.log(_time_s(x, work) / measured[:, None]) / _TIME_ERROR
    return np.concatenate((off, (x - _GUESS) / _SPREAD), axis=2)

"""The published FSDP / YaFSDP step times, predicted by the simulator's model from four of their sixteen rows.

    python -m benchmarks.published_table [--out docs/lab/published_table.md]

Everything predicted is simulated; nothing here was measured by us.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import published_baselines, published_events, published_report
from benchmarks.closed_form import Setting
from benchmarks.published_events import Layer
from benchmarks.published_fit import GIVE_WAY, Floats, Row, fit, predict
from tracekit.plan import models
from tracekit.simulate.job import FSDP1, YAFSDP_V1
from tracekit.simulate.kernels import Rates


def _row(model: str, gpus: int, seq: int, checkpoint_layers: int, published: tuple[float, float, float]) -> Row:
    speedup_percent, yafsdp_s, fsdp_s = published
    return Row(Setting(models.find(model), gpus, seq, checkpoint_layers), speedup_percent / 100, yafsdp_s, fsdp_s)


# https://github.com/yandex/YaFSDP, README: A100 80 GB, one sequence per GPU, against FSDP of PyTorch of late 2023.
ROWS: tuple[Row, ...] = (
    _row("llama2-7b", 64, 2048, 0, (9.92, 0.81, 0.90)),
    _row("llama2-7b", 64, 4096, 0, (3.43, 1.16, 1.21)),
    _row("llama2-7b", 64, 8192, 0, (2.68, 2.23, 2.29)),
    _row("llama2-7b", 128, 2048, 0, (9.57, 0.87, 0.97)),
    _row("llama2-7b", 128, 4096, 0, (2.42, 1.19, 1.22)),
    _row("llama2-7b", 128, 8192, 0, (2.32, 2.25, 2.31)),
    _row("llama2-13b", 128, 2048, 0, (12.10, 1.55, 1.76)),
    _row("llama2-13b", 128, 4096, 0, (3.49, 2.06, 2.14)),
    _row("llama2-34b", 128, 2048, 0, (20.70, 3.39, 4.27)),
    _row("llama2-34b", 256, 2048, 0, (21.99, 3.51, 4.50)),
    _row("llama2-34b", 256, 4096, 5, (8.35, 5.33, 5.81)),
    _row("llama2-70b", 256, 2048, 10, (21.48, 6.97, 8.87)),
    _row("llama2-70b", 256, 4096, 50, (7.17, 11.07, 11.93)),
    _row("llama3-8b", 64, 2048, 0, (11.91, 0.97, 1.10)),
    _row("llama3-8b", 64, 4096, 0, (7.86, 1.36, 1.48)),
    _row("llama3-70b", 256, 2048, 20, (26.60, 7.17, 9.76)),
)
FITTED = (0, 4, 9, 12)
"""The rows that the constants are fitted on: 7B/64/2048, 7B/128/4096, 34B/256/2048, 70B/256/4096."""
_SUBSET = 4
_PICTURED = 8


@dataclass(frozen=True)
class Errors:
    """How far predictions are off on rows that were not fitted, per fit: points of speedup, and shares of step time."""

    speedup_mean: Floats
    speedup_max: Floats
    time_mean: Floats
    time_max: Floats


@dataclass(frozen=True)
class Result:
    """All that the table shows."""

    machine: Rates
    yafsdp_s: Floats
    fsdp_s: Floats
    of_named_rows: Errors
    of_all_fits: Errors
    without_give_way: Errors
    baselines: dict[str, Errors]
    event_difference: float
    """By how much the simulation, event by event, differs at most from the closed form that the fit uses."""
    layers: dict[str, Layer]
    """Of the row that the published pictures seem to show, by strategy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, predict, print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_table", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there instead of to stdout")
    options = parser.parse_args(arguments)
    text = published_report.markdown(ROWS, FITTED, result())
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def result() -> Result:
    """Fit the named rows and all subsets of four, with give-way and without, and the baselines."""
    named_rows, quads = np.array([FITTED]), subsets()
    machine = fit(ROWS, named_rows)
    yafsdp_s, fsdp_s = predict(ROWS, machine)
    return Result(
        machine,
        yafsdp_s[0],
        fsdp_s[0],
        errors(named_rows, yafsdp_s, fsdp_s),
        errors(quads, *predict(ROWS, fit(ROWS, quads))),
        errors(quads, *predict(ROWS, fit(ROWS, quads, without=GIVE_WAY))),
        {name: errors(quads, *times) for name, times in published_baselines.predictions(ROWS, quads).items()},
        published_events.largest_difference(ROWS, machine, {YAFSDP_V1: yafsdp_s[0], FSDP1: fsdp_s[0]}),
        {name: published_events.layer(name, ROWS[_PICTURED].setting, machine) for name in (YAFSDP_V1, FSDP1)},
    )


def subsets() -> npt.NDArray[np.int64]:
    """Return all choices of four rows, shape (1820, 4)."""
    return np.array(list(itertools.combinations(range(len(ROWS)), _SUBSET)))


def errors(fitted: npt.NDArray[np.int64], yafsdp_s: Floats, fsdp_s: Floats) -> Errors:
    """Errors of times of shape (fits, rows) on the rows that a fit has not seen.

    A prediction of the speedup alone gives FSDP's times as 1: its errors of time mean nothing then.
    """
    seen = (fitted[:, :, None] == np.arange(len(ROWS))).any(axis=1)
    published = [np.array([getattr(row, name) for row in ROWS]) for name in ("speedup", "yafsdp_s", "fsdp_s")]
    points = np.where(seen, np.nan, 100 * np.abs(1 - yafsdp_s / fsdp_s - published[0]))
    off = [
        np.where(seen, np.nan, np.abs(times / true - 1))
        for times, true in zip((yafsdp_s, fsdp_s), published[1:], strict=True)
    ]
    both = np.concatenate(off, axis=1)
    return Errors(np.nanmean(points, 1), np.nanmax(points, 1), np.nanmean(both, 1), np.nanmax(both, 1))


if __name__ == "__main__":
    sys.exit(main())

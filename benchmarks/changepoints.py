"""``python -m benchmarks.changepoints``: how often a history shows changes that are there, and that are not.

Simulated series of run medians, level 100: noise of 3% (normal; Student's t with 3 degrees of freedom at the same
standard deviation; normal with one run in 14 far slower; Cauchy). Prints Markdown.
"""

import argparse
import sys
from collections.abc import Callable

import numpy as np

from tracekit.regression.history import change_points
from tracekit.regression.history.change_points import Trend, Values

NOISE = 0.03
Noise = Callable[[np.random.Generator, int], Values]
KINDS: dict[str, Noise] = {
    "normal": lambda random, count: random.normal(0, NOISE, count),
    "heavy tails (t, 3)": lambda random, count: random.standard_t(3, count) * NOISE / np.sqrt(3),
    "1 run in 14 far slower": lambda random, count: (
        random.normal(0, NOISE, count) + np.where(random.random(count) < 0.07, random.exponential(0.3, count), 0)
    ),
    "Cauchy": lambda random, count: random.standard_cauchy(count) * NOISE / 2,
}
LENGTHS = (10, 20, 40, 80)
DRIFTS = ((0.1, 60), (0.2, 30), (0.2, 60), (0.4, 40))
SHIFT = 0.1
PLACES = ((5, 5), (10, 5), (20, 5), (40, 5), (30, 10))


def trend_of(values: Values) -> Trend:
    """Trend of a series around 1."""
    return change_points.trend(100 * values, min_change=1.0)


def stationary(random: np.random.Generator, series: int) -> list[str]:
    lines = [
        "| no change | " + " | ".join(f"{count} runs" for count in LENGTHS) + " |",
        "|---|" + "---|" * len(LENGTHS),
    ]
    for name, kind in KINDS.items():
        shares = [np.mean([bool(trend_of(1 + kind(random, count)).shifts) for _ in range(series)]) for count in LENGTHS]
        lines.append(f"| {name} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    return lines


def drifting(random: np.random.Generator, series: int) -> list[str]:
    lines = ["| drift | called drift | called a change |", "|---|---|---|"]
    for total, count in DRIFTS:
        trends = [trend_of(1 + KINDS["normal"](random, count) + np.linspace(0, total, count)) for _ in range(series)]
        drift, change = (np.mean([bool(getattr(trend, name)) for trend in trends]) for name in ("drifts", "steps"))
        lines.append(f"| {total:.0%} over {count} runs | {drift:.0%} | {change:.0%} |")
    return lines


def shift_table(random: np.random.Generator, series: int) -> list[str]:
    header = [f"{before} + {after} runs" for before, after in PLACES]
    lines = [f"| {SHIFT:.0%} more | " + " | ".join(header) + " |", "|---|" + "---|" * len(PLACES)]
    for name, kind in list(KINDS.items())[:3]:
        cells = []
        for before, after in PLACES:
            near = close = 0
            for _ in range(series):
                values = 1 + kind(random, before + after)
                values[before:] *= 1 + SHIFT
                nearest = min((abs(step.index - before) for step in trend_of(values).shifts), default=before + after)
                near, close = near + int(nearest <= 2), close + int(nearest <= 1)
            cells.append(f"{near / series:.0%} ({close / series:.0%})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.changepoints", description=__doc__)
    parser.add_argument("--series", type=int, default=400, metavar="N", help="series a cell (default: 400)")
    series = parser.parse_args().series
    random = np.random.default_rng(20260801)
    for table in (stationary, drifting, shift_table):
        sys.stdout.write("\n".join(table(random, series)) + "\n\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""`compare` and `check --baseline` give one verdict for the same recordings, on every metric."""

import numpy as np
import polars as pl

from tests.support import sample_baselines
from tracekit.regression import gate as checks
from tracekit.regression.comparison import RunSamples, compare
from tracekit.regression.metrics import COUNT, Scope, compared_metrics
from tracekit.regression.samples import SAMPLE_COLUMNS
from tracekit.regression.thresholds import Verdict

PAIRS = 30
MANIFEST = {"device": "cpu", "world_size": 2, "model": {"layers": 2}}
SPREADS = (0.0, 0.01, 0.05, 0.2, 0.5)
SHIFTS = (1.0, 1.0, 1.02, 1.1, 1.5, 0.8)


def random_recordings(
    random: np.random.Generator, levels: dict[str, float], count: int, *, spread: float
) -> list[pl.DataFrame]:
    """Return the samples of `count` recordings of two ranks, whose levels and steps both vary by `spread`."""
    recordings = []
    for _ in range(count):
        parts = []
        steps = int(random.integers(2, 16))
        for metric in compared_metrics():
            level = levels[metric.key] * np.exp(random.normal(0, spread / 2))
            shown = min(steps, 3) if metric.scope is Scope.SAVE else steps
            values = level * np.exp(random.normal(0, spread, 2 * shown))
            values = np.minimum(1.0, values) if metric.is_share else values.round() if metric.unit is COUNT else values
            parts.append((np.repeat([0, 1], shown), np.tile(np.arange(shown), 2), [metric.key] * 2 * shown, values))
        rank, step, key, value = (np.concatenate(column) for column in zip(*parts, strict=True))
        columns = {"window": 0, "rank": rank, "step": step, "metric": key, "value": value}
        recordings.append(pl.DataFrame(columns, schema=SAMPLE_COLUMNS))
    return recordings


def random_levels(random: np.random.Generator) -> tuple[dict[str, float], dict[str, float]]:
    """Return the level of each metric on either side; some are 0."""
    before, after = {}, {}
    for metric in compared_metrics():
        level = random.uniform(0, 0.6) if metric.is_share else 10 ** random.uniform(2, 8)
        before[metric.key] = 0.0 if random.random() < 0.05 else level
        after[metric.key] = 0.0 if random.random() < 0.03 else level * random.choice(SHIFTS)
    return before, after


def test_compare_and_check_agree_on_every_verdict_of_random_recordings() -> None:
    random = np.random.default_rng(18)
    verdicts: set[Verdict] = set()
    for _ in range(PAIRS):
        levels = random_levels(random)
        spread = float(random.choice(SPREADS))
        counts = [int(random.choice((1, 1, 3, 5))) for _ in levels]
        a, b = (
            random_recordings(random, side, count, spread=spread) for side, count in zip(levels, counts, strict=True)
        )
        baseline = sample_baselines.baseline(*(sample_baselines.of_samples(table) for table in a))
        checked = checks.compare(baseline, [sample_baselines.of_samples(table) for table in b])
        compared = compare(*(RunSamples("main", MANIFEST, tables[0], tuple(tables[1:])) for tables in (a, b)))
        assert compared.changes == checked.changes
        assert len(compared.changes) == len(compared_metrics())
        verdicts |= {change.verdict for change in compared.changes}
    assert verdicts == set(Verdict)

"""`benchmarks.always_on` compares the same steps with and without the recorder, and states an interval."""

import random
from pathlib import Path

from benchmarks import always_on
from tracekit import conventions


def test_the_interval_contains_the_ratio_of_steps_that_differ_by_one_percent() -> None:
    draw = random.Random(3)
    plain_ns = [round(60e6 * draw.lognormvariate(0, 0.03)) for _ in range(400)]
    recorded_ns = [round(1.01 * 60e6 * draw.lognormvariate(0, 0.03)) for _ in range(400)]
    low, high = always_on.bootstrap_interval(plain_ns, recorded_ns)
    assert low < 0.01 < high
    assert 0.005 < high - low < 0.02  # 4 standard errors of a ratio: 0.03 * sqrt(2 / 400) each


def test_pairs_of_steps_are_measured_and_each_recorded_step_is_in_the_log(tmp_path: Path) -> None:
    plain_ns, recorded_ns, calls_ns = always_on.measure(tmp_path, 2, steps=3)
    assert (len(plain_ns), len(recorded_ns), len(calls_ns)) == (2, 2, 6)
    assert sum(calls_ns) < sum(recorded_ns)
    log = tmp_path / conventions.rank_file(0, conventions.METRICS_SUFFIX)
    assert len(log.read_text().splitlines()) == 9
    assert always_on.bytes_per_step(tmp_path) > log.stat().st_size / 9


def test_the_table_states_the_share_of_a_step() -> None:
    rows = "\n".join(always_on.table([600_000_000] * 4, [600_600_000] * 4, [90_000] * 40, 300.0))
    for words in ("4 pairs", "60.0 ms", "+0.10%", "90 µs (0.15% of a step)", "300 a step"):
        assert words in rows

"""The closed form agrees with the simulation, and predicts the published table as accurately as the guide says."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import closed_form, published_events, published_report, published_table
from benchmarks.published_baselines import INDICATORS, ROOFLINE, predictions
from benchmarks.published_fit import GIVE_WAY, fit, predict
from tracekit.plan import hardware
from tracekit.simulate import kernels
from tracekit.simulate.job import FSDP1, YAFSDP_V1

ROWS = published_table.ROWS


@pytest.mark.parametrize("strategy", [FSDP1, YAFSDP_V1])
@pytest.mark.parametrize("row", [0, 5, 8, 13], ids=lambda i: f"{ROWS[i].setting.model.name}-{ROWS[i].setting.seq}")
def test_closed_form_and_simulation_agree(strategy: str, row: int) -> None:
    rates = kernels.rates(hardware.find("a100-80"), spans_nodes=True, overhead_s=0.05)
    of = ROWS[row].setting
    simulated_s = published_events.step_s(strategy, of, rates)
    assert closed_form.step_s(strategy, of, rates) == pytest.approx(simulated_s, rel=0.005)


def test_twelve_rows_are_predicted_from_four() -> None:
    named = np.array([published_table.FITTED])
    found = published_table.errors(named, *predict(ROWS, fit(ROWS, named)))
    assert found.speedup_mean.item() <= 2.5
    assert found.speedup_max.item() <= 7
    assert found.time_mean.item() <= 0.06
    assert found.time_max.item() <= 0.12


@pytest.mark.accuracy  # all rows are predicted above
def test_any_four_rows_predict_the_others_and_only_with_the_give_way_effect() -> None:
    some = published_table.subsets()[::90]
    found = published_table.errors(some, *predict(ROWS, fit(ROWS, some)))
    without = published_table.errors(some, *predict(ROWS, fit(ROWS, some, without=GIVE_WAY)))
    baselines = {name: published_table.errors(some, *times) for name, times in predictions(ROWS, some).items()}
    assert np.median(found.speedup_mean) <= 3
    assert np.median(found.time_mean) <= 0.07
    assert np.median(without.speedup_mean) > 5
    assert np.median(found.speedup_mean) < min(np.median(of.speedup_mean) for of in baselines.values())
    assert np.median(found.time_mean) < np.median(baselines[ROOFLINE].time_mean)
    assert set(baselines) == {INDICATORS, ROOFLINE}


def test_the_guide_shows_what_the_fit_predicts() -> None:
    guide = Path(published_table.__file__).parents[1] / "docs" / "lab" / "published_table.md"
    lines = [line.split("|")[1:-1] for line in guide.read_text(encoding="utf-8").splitlines() if " points |" in line]
    shown = np.array([[float(cells[i]) for i in (4, 5, 6, 7)] for cells in lines if len(cells) == 11])
    yafsdp_s, fsdp_s = predict(ROWS, fit(ROWS, np.array([published_table.FITTED])))
    predicted = [
        (row.yafsdp_s, found, row.fsdp_s, other) for row, found, other in zip(ROWS, yafsdp_s[0], fsdp_s[0], strict=True)
    ]
    np.testing.assert_allclose(shown, np.array(predicted), atol=0.0101)


def test_times_of_jobs_near_the_memory_s_limit_are_the_ones_far_off() -> None:
    yafsdp_s, fsdp_s = (times[0] for times in predict(ROWS, fit(ROWS, np.array([published_table.FITTED]))))
    losses = published_report.near_limit(ROWS, yafsdp_s, fsdp_s)
    assert (len(losses.near_s), len(losses.others_s)) == (3, 29)
    assert min(losses.near_s) > 0.4
    assert max(map(abs, losses.others_s)) < 0.2
    assert 1 - yafsdp_s[-1] / (fsdp_s[-1] + losses.mean_s) == pytest.approx(ROWS[-1].speedup, abs=0.015)

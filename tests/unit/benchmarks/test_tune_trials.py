"""Faulty configurations of `benchmarks.tune_trials` can be trained, and the changes that mend them apply to them."""

import shlex
from pathlib import Path

import pytest

from benchmarks import tune_trials
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.tune import changes
from tracekit.tune.changes.change import TunedRun

config = pytest.importorskip("instrumented_trainers.config")


@pytest.mark.parametrize("name", tune_trials.CONFIGURATIONS)
def test_the_best_change_applies(name: str, tmp_path: Path) -> None:
    configuration = tune_trials.CONFIGURATIONS[name]
    words = shlex.split(f"{tune_trials._RANKS} {configuration.options} --out {tmp_path / 'run'}")
    settings = config.parse(words)
    manifest = Manifest(strategy=settings.strategy, world_size=2, arguments=vars(settings))
    run = Run.__new__(Run)
    run.manifest = {"device": "cpu", "strategy": settings.strategy}
    (best,) = [change for change in changes.CHANGES if change.name == configuration.best]
    values = best.values(TunedRun(run, manifest, is_of_trainers=True))
    assert values
    if best.option:
        from tracekit.tune.changes.change import fill_template

        config.parse([*words, *shlex.split(fill_template(best.option, values[0]))])


def test_a_row_states_what_was_measured() -> None:
    trial = {
        "text": "--x", "code": "COMM001", "saved_ratio": 0.2, "is_upper_bound": True, "measured_ratio": 0.1,
        "interval": [0.05, 0.15], "reference_runs": ["a"], "candidate_runs": ["b"], "outcome": "kept",
    }  # fmt: skip
    configuration = tune_trials.Configuration("", "best")
    assert list(tune_trials.rows("name", configuration, {"trials": [trial]})) == [
        "| name | `best` | `--x` | COMM001 | ≤ 20.0% | 10.0% | 5.0% to 15.0% | 2 | kept |"
    ]
    assert [row.count("|") for row in tune_trials.rows("name", configuration, None)] == [10]

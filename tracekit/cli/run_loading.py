"""Runs as the command line names them: loaded, measured and judged, with a progress bar."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.cli import output
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.model.run import Run
    from tracekit.model.trace import Fact
    from tracekit.regression.baseline import Baseline
    from tracekit.regression.comparison import RunSamples
    from tracekit.rules.rule import Report, Rule

SAMPLE = "sample_run"
CHECKOUT_SAMPLES = "sample_traces"


def sample_run() -> Path:
    """Return the sample run: the one in the installed package, or the smallest of the checkout's."""
    package = Path(str(resources.files("tracekit")))
    if (package / SAMPLE).is_dir():
        return package / SAMPLE
    runs = [path.parent for path in (package.parent / CHECKOUT_SAMPLES).glob("*/run.json")]
    if not runs:
        raise InputError("this installation holds no sample run; name a run of your own")
    return min(runs, key=lambda run: sum(file.stat().st_size for file in run.rglob("*") if file.is_file()))


def check_runs(
    paths: Sequence[str], rules: "Sequence[Rule]", *, facts: "Sequence[Fact]" = (), cache: bool = True
) -> "list[tuple[Report, Run]]":
    """Return each run with its report, costs by replay, in the order named. Raises InputError if one is unusable.

    `facts` are measured in the same pass, to be asked for later.
    """
    from tracekit.ingest import loader
    from tracekit.rules import engine

    found = []
    with output.progress() as bar:
        for path in paths:
            run = loader.load(path, on_progress=bar.on_file, cache=cache)
            measured = bar.trace_callback(len(run.sources))
            found.append((engine.check(run, rules, facts=facts, on_progress=measured), run))
    return found


def open_measured(path: str, facts: "Sequence[Fact]", *, cache: bool = True) -> "Run":
    """Return a run with facts measured, and not judged. Raises InputError where it cannot be used."""
    run = open_run(path, cache=cache)
    with output.progress() as bar:
        run.measure(facts, bar.trace_callback(len(run.sources)))
    return run


def open_baseline(path: str, rules: "Sequence[Rule]", *, cache: bool = True) -> "Baseline":
    """Return what to hold a run against: a saved baseline, or a run. Raises InputError where it is neither."""
    from tracekit.regression import baseline as baselines
    from tracekit.report import baseline_json as saved

    if saved.is_baseline(Path(path)):
        return saved.read(Path(path))
    return baselines.of_reports(check_runs([path], rules, facts=baselines.FACTS, cache=cache))


def open_run(path: str, *, cache: bool = True) -> "Run":
    """Return a run. Raises InputError where it cannot be used."""
    from tracekit.ingest import loader

    with output.progress() as bar:
        return loader.load(path, on_progress=bar.on_file, cache=cache)


def comparison_side(path: str, *, cache: bool = True) -> "RunSamples":
    """Return a run or a saved report as a side of a comparison. Raises InputError where it is neither."""
    from tracekit.regression.comparison import RunSamples
    from tracekit.regression.samples import samples
    from tracekit.report import json

    if json.is_report(Path(path)):
        return json.read(Path(path))
    run = open_run(path, cache=cache)
    with output.progress() as bar:
        run.measure((samples,), bar.trace_callback(len(run.sources)))
    return RunSamples.of(run)

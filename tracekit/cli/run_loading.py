"""Load, measure and judge the runs of a command, with a progress bar."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.cli import output
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.conventions.devices import DeviceOverride
    from tracekit.model.executor import Executor
    from tracekit.model.run import Run
    from tracekit.model.trace import Fact
    from tracekit.regression.baseline import Baseline
    from tracekit.regression.comparison import RunSamples
    from tracekit.rules.rule import Report, Rule

SAMPLE = "sample_run"
CHECKOUT_SAMPLES = "sample_traces"


def sample_run() -> Path:
    """Return the sample run: the one in the installed package, or the smallest of the checkout's."""
    package = Path(__file__).parents[1]
    if (package / SAMPLE).is_dir():
        return package / SAMPLE
    runs = [path.parent for path in (package.parent / CHECKOUT_SAMPLES).glob("*/run.json")]
    if not runs:
        raise InputError("this installation has no sample run; name a run of your own")
    return min(runs, key=lambda run: sum(file.stat().st_size for file in run.rglob("*") if file.is_file()))


def check_runs(
    paths: Sequence[str],
    rules: "Sequence[Rule]",
    *,
    facts: "Sequence[Fact]" = (),
    cache: bool = True,
    devices: "Sequence[DeviceOverride]" = (),
    executor: "Executor | None" = None,
) -> "list[tuple[Report, Run]]":
    """Return each run with its report and costs by replay, in the given order. Raises InputError if one is unusable.

    `facts` are measured in the same pass. `devices` replace values of the table of devices. `executor` measures.
    """
    from tracekit.ingest import loader
    from tracekit.rules import engine

    reports = []
    with output.progress() as bar:
        for path in paths:
            run = loader.load(path, on_progress=bar.on_file, cache=cache, devices=devices, executor=executor)
            measured = bar.trace_callback(len(run.sources))
            reports.append((engine.check(run, rules, facts=facts, on_progress=measured), run))
    return reports


def open_measured(
    path: str, facts: "Sequence[Fact]", *, cache: bool = True, executor: "Executor | None" = None
) -> "Run":
    """Return a run with facts measured, by `executor`. Raises InputError if it cannot be used."""
    run = open_run(path, cache=cache, executor=executor)
    with output.progress() as bar:
        run.measure(facts, bar.trace_callback(len(run.sources)))
    return run


def open_baseline(
    path: str,
    rules: "Sequence[Rule]",
    *,
    cache: bool = True,
    devices: "Sequence[DeviceOverride]" = (),
    executor: "Executor | None" = None,
) -> "Baseline":
    """Return a saved baseline, or one of a run. Raises InputError if the path is neither."""
    from tracekit.regression import baseline as baselines
    from tracekit.report import baseline_json as saved

    if saved.is_baseline(Path(path)):
        return saved.read(Path(path))
    checked = check_runs([path], rules, facts=baselines.FACTS, cache=cache, devices=devices, executor=executor)
    return baselines.of_reports(checked)


def open_run(path: str, *, cache: bool = True, executor: "Executor | None" = None) -> "Run":
    """Return a run, with the devices of the nearest settings file. Raises InputError if it cannot be used."""
    from tracekit.cli import settings
    from tracekit.ingest import loader

    devices = settings.nearest_devices()
    with output.progress() as bar:
        return loader.load(path, on_progress=bar.on_file, cache=cache, devices=devices, executor=executor)


def comparison_side(path: str, *, cache: bool = True) -> "RunSamples":
    """Return the samples of a run, a saved report or a baseline. Raises InputError if the path is none of them."""
    from tracekit.regression import comparability
    from tracekit.regression.comparison import RunSamples
    from tracekit.regression.samples import samples
    from tracekit.report import baseline_json, json

    if json.is_report(Path(path)):
        return json.read(Path(path))
    if baseline_json.is_baseline(Path(path)):
        return RunSamples.of_baseline(baseline_json.read(Path(path)))
    return RunSamples.of(open_measured(path, (samples, *comparability.FACTS), cache=cache))


def open_compared_run(path: str, facts: "Sequence[Fact]", *, cache: bool = True) -> "Run":
    """Return a run with facts measured. Raises InputError if it cannot be used, or is a saved report or baseline."""
    from tracekit.report import baseline_json, json

    if json.is_report(Path(path)) or baseline_json.is_baseline(Path(path)):
        raise InputError(f"{path}: a saved report has no operators; compare --by needs the traces of both runs")
    return open_measured(path, facts, cache=cache)

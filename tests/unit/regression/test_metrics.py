"""The registry of metrics: documented, consistent, and open to metrics of other distributions everywhere."""

import json
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go
import polars as pl
import pytest

from tests.support import metrics_page, sample_baselines, sample_report
from tests.support.cli_runner import ROOT
from tests.support.wording import Wording
from tracekit.cli import settings
from tracekit.errors import ConfigError
from tracekit.regression import budgets, metrics
from tracekit.regression import gate as checks
from tracekit.regression.baseline import Recording
from tracekit.regression.comparison import RunSamples, compare
from tracekit.regression.history import store, trends
from tracekit.regression.history.entry import history_entry
from tracekit.regression.metrics import METRICS, all_metrics
from tracekit.regression.samples import run_samples
from tracekit.regression.thresholds import Thresholds, parse_limit
from tracekit.report import baseline_json, comparison, text
from tracekit.report import json as report_json
from tracekit.report.charts import many_runs
from tracekit.report.render import text as render_text
from tracekit.rules.registry import all_rules

PLUGIN = """
import polars as pl
from tracekit.regression.metrics import Metric
from tracekit.regression.metrics import COUNT

def launches(trace):
    rows = trace.activities.filter(pl.col("step").is_not_null())
    return rows.group_by("step").agg(pl.len().alias("value")).sort("step")

LAUNCHES = Metric(
    "activity_count", "activities per step", COUNT, "Activities of the step, on the device or a thread.",
    of_trace=launches, fails_check=True, is_drawn=True, cause="compute", phrase="the activities per step are",
)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install a metric of one file, as another distribution does, and return its key."""
    (tmp_path / "acme_metric.py").write_text(PLUGIN)
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tracekit.metrics]\nactivities = acme_metric:LAUNCHES\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    metrics.all_metrics.cache_clear()
    yield "activity_count"
    metrics.all_metrics.cache_clear()


def more_activities(table: pl.DataFrame, key: str) -> pl.DataFrame:
    """Return the samples with three times as many activities."""
    grown = pl.when(pl.col("metric") == key).then(3 * pl.col("value")).otherwise(pl.col("value"))
    return table.with_columns(grown.alias("value"))


def test_a_metric_of_a_plugin_appears_everywhere(plugin: str, tmp_path: Path) -> None:
    run = sample_report.run()
    assert plugin in run_samples(run)["metric"].to_list()

    before = RunSamples.of(run, "before")
    after = RunSamples("after", run.manifest, more_activities(before.samples, plugin))
    compared = compare(before, after)
    change = next(change for change in compared.changes if change.metric == plugin)
    assert (change.verdict.value, change.change) == ("worse", pytest.approx(2.0))
    assert "activities per step" in render_text.render(comparison.document(compared), width=120)
    assert parse_limit("activity_count>5").is_exceeded(change)

    report = sample_baselines.report(run)
    baseline = sample_baselines.baseline(Recording.of(run), fingerprint={"device": "cpu"})
    path = tmp_path / "main.json"
    path.write_text(baseline_json.render(baseline))
    assert "activities per step" in render_text.render(baseline_json.document(baseline_json.read(path)), width=120)
    result = checks.judge(report, None, baseline=baseline, allow_different=True)
    assert result.comparison is not None
    assert plugin in [each.metric for each in result.comparison.changes]
    worse = checks.compare(baseline, [sample_baselines.of_samples(after.samples)])
    assert [each.metric for each in worse.changes if each.verdict.value == "worse"] == [plugin]
    assert Thresholds().is_failing(plugin)

    (budget,) = budgets.check(run, budgets.parse({plugin: 1}).budgets)
    assert budget.outcome is budgets.BudgetOutcome.BROKEN
    assert budget.budget == plugin

    document = json.loads(report_json.render(report, run))
    assert plugin in [series["metric"] for series in document["samples"]]
    database = tmp_path / "history.duckdb"
    store.add(database, [history_entry(document, report_json.comparison_side(document))])
    (group,) = trends.groups(store.read(database))
    series = next(series for series in group.series if series.metric == plugin)
    assert isinstance(many_runs.of_series(group, series), go.Figure)

    assert "`activity_count`" in metrics_page.metrics_page()
    assert settings.read(settings_file(tmp_path, plugin), all_rules()).baseline.metrics == (plugin,)
    judged = checks.judge(report, None, budgets=budgets.parse({plugin: 1}))
    assert "Budgets" in render_text.render(text.gate_document(judged), width=100)


def settings_file(folder: Path, metric: str) -> Path:
    path = folder / "tracekit.toml"
    path.write_text(f'[baseline]\nmetrics = ["{metric}"]\n')
    return path


def test_a_plugin_may_not_take_the_key_of_a_metric(plugin: str, tmp_path: Path, wording: Wording) -> None:
    source = tmp_path / "acme_metric.py"
    source.write_text(PLUGIN.replace('"activity_count"', '"flops"').replace("LAUNCHES", "COUNTED"))
    (tmp_path / "acme-1.0.dist-info" / "entry_points.txt").write_text("[tracekit.metrics]\nx = taken_key:COUNTED\n")
    source.rename(tmp_path / "taken_key.py")
    with wording.raises(ConfigError):
        all_metrics()


def test_the_page_of_metrics_lists_the_registry(request: pytest.FixtureRequest) -> None:
    path = ROOT / "docs" / "metrics.md"
    if request.config.getoption("--update-golden"):
        path.write_text(metrics_page.metrics_page(), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == metrics_page.metrics_page()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.key)
def test_a_metric_is_complete(metric: metrics.Metric) -> None:
    assert bool(metric.of_trace) != bool(metric.of_run)
    assert metric.meaning.endswith(".")
    assert metric.part_of is None or metric.part_of in all_metrics()
    assert bool(metric.cause) == bool(metric.phrase)
    assert metric.cause or not metric.fails_check

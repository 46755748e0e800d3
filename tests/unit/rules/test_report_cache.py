"""Cached reports equal computed ones, are used only for unchanged runs, and may be damaged without harm."""

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from polars.testing.parametric import dataframes

from tests.browser import recorded
from tests.support.drawn_traces import trace as drawn_trace
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.compute import kernels
from tracekit.analysis.time import breakdown
from tracekit.conventions.devices import DeviceOverride
from tracekit.conventions.read_settings import ReadSettings
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import disk_cache, file_states, loader
from tracekit.model import environment
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.regression import samples
from tracekit.replay.graph.causes import CAUSES
from tracekit.replay.graph.causes.stalls import Removal
from tracekit.replay.graph.nodes import HostSpan
from tracekit.report import html
from tracekit.report import json as report_json
from tracekit.rules import engine, report_cache, report_entry
from tracekit.rules.communication import ExposedCommunication
from tracekit.rules.registry import RULES
from tracekit.rules.rule import Finding, Input, Report, Severity, WhatIf

FACTS = (breakdown.by_step, breakdown.by_rank, samples.samples)
SAMPLES = Path(__file__).parents[3] / "sample_traces"


@pytest.fixture(autouse=True)
def reports(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(disk_cache.MAX_BYTES_VARIABLE, raising=False)
    return tmp_path / "cache" / "store"


@pytest.fixture
def few_rules(monkeypatch):
    """Check with a few rules: what is cached of a report depends on none of them."""
    rules = tuple(rule for rule in RULES if rule.code in ("COMM001", "COMM002", "DATA001", "IDLE001", "MEM001"))
    for module in (engine, report_cache):
        monkeypatch.setattr(module, "all_rules", lambda: rules)


@pytest.fixture
def run(tmp_path, few_rules):
    folder = tmp_path / "run"
    recorded.write_run(folder, kernel="gemm")
    return folder


def _entries(reports):
    return sorted(reports.glob("*.report"))


def _is_cached(report):
    """Return whether a report came from the cache: its run loads traces lazily."""
    return "_LazyRun" in repr(report.run.sources[0].read)


def _same(report, other):
    for name in ("notes", "inputs", "tool_version", "rules", "blind_spots", "ignored"):
        assert getattr(report, name) == getattr(other, name)
    for a, b in zip(report.findings, other.findings, strict=True):
        _same_finding(a, b)
    assert_frame_equal(report.run.data_quality, other.run.data_quality)
    assert report.run.manifest == other.run.manifest
    assert [(s.rank, s.window, s.path, s.size_bytes) for s in report.run.sources] == [
        (s.rank, s.window, s.path, s.size_bytes) for s in other.run.sources
    ]


def _same_finding(a, b):
    for field in dataclasses.fields(Finding):
        if field.name == "evidence":
            assert_frame_equal(a.evidence, b.evidence)
        else:
            assert getattr(a, field.name) == getattr(b, field.name)
            assert type(getattr(a, field.name)) is type(getattr(b, field.name))


# Equal reports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["faults/small-tensors"])
def test_a_cached_report_equals_the_computed_one_in_every_format(name):
    path = str(SAMPLES / name)
    computed = engine.check(loader.load(path), facts=FACTS)
    report_cache.report(path, facts=FACTS)
    cached = report_cache.report(path, facts=FACTS)
    assert _is_cached(cached)
    _same(cached, computed)
    assert report_json.render(cached, cached.run) == report_json.render(computed, computed.run)
    assert html.render(cached, cached.run) == html.render(computed, computed.run)


@pytest.mark.parametrize("most_activities", [report_cache.MAX_ACTIVITIES, 0])
def test_a_report_has_the_kernels_by_name_unless_there_are_too_many(run, monkeypatch, most_activities):
    monkeypatch.setattr(report_cache, "MAX_ACTIVITIES", most_activities)
    report_cache.report(str(run), facts=FACTS)
    reads = []
    read = report_cache._LazyRun.read
    monkeypatch.setattr(report_cache._LazyRun, "read", lambda *arguments: reads.append(arguments) or read(*arguments))
    cached = report_cache.report(str(run), facts=FACTS).run
    assert_frame_equal(cached.table(kernels.by_name), kernels.with_launch_delays(loader.load(str(run))))
    assert bool(reads) == (most_activities == 0)


def test_a_cached_report_reads_no_trace_until_a_new_fact_is_needed(run, monkeypatch):
    report_cache.report(str(run), facts=FACTS)
    reads = []
    read = report_cache._LazyRun.read
    monkeypatch.setattr(
        report_cache._LazyRun,
        "read",
        lambda *arguments: reads.append((arguments[1].window, arguments[1].rank)) or read(*arguments),
    )
    cached = report_cache.report(str(run), facts=FACTS).run
    computed = loader.load(str(run))
    for fact in (*FACTS, *ExposedCommunication.facts):
        assert_frame_equal(cached.table(fact), computed.table(fact))
    assert_frame_equal(cached.table(collective_instances.instances), computed.table(collective_instances.instances))
    assert_frame_equal(cached.offsets, computed.offsets)
    assert reads == []
    assert_frame_equal(cached.table(_names), computed.table(_names))
    assert sorted(reads) == [(0, 0), (0, 1)]
    assert cached.trace(1).activities.equals(computed.trace(1).activities)


@pytest.mark.parametrize(
    "settings", [ReadSettings(), ReadSettings(step_name="ProfilerStep")], ids=["plain", "named steps"]
)
def test_the_headers_of_a_run_are_read_only_for_a_trace_that_is_not_cached(run, monkeypatch, settings):
    report_cache.report(str(run), settings=settings)
    computed = loader.load(str(run), settings=settings)
    loads = []
    monkeypatch.setattr(report_cache.loader, "load", lambda *_, **__: loads.append(1) or computed)
    stored = report_cache.report(str(run), settings=settings).run
    for rank in (0, 1):
        for name, table in computed.trace(rank).tables.items():
            assert_frame_equal(getattr(stored.trace(rank), name), table)
    assert loads == []
    disk_cache.DiskCache.of_user("traces").clear()
    assert stored.read(stored.sources[0]).activities.equals(computed.trace(0).activities)
    assert len(loads) <= 1


def _names(trace):
    return trace.activities.select("name")


@run_fact
def _count_names(run):
    return run.table(_names).group_by("rank", maintain_order=True).len()


@pytest.fixture
def later(reports, monkeypatch):
    """Return the function that lists the tables in the cache; every table is worth storing."""
    monkeypatch.setattr(report_cache, "MIN_MEASURED_S", 0.0)
    return lambda: sorted(reports.glob("*.table"))


def _measured_later(run):
    return run.table(_names), run.table(_count_names)


def test_a_table_measured_after_the_check_is_measured_once(run, later, monkeypatch):
    computed = _measured_later(loader.load(str(run)))
    report_cache.report(str(run))
    assert later() == []
    _measured_later(report_cache.report(str(run)).run)
    assert later()
    monkeypatch.setattr(report_cache._LazyRun, "read", _no_read)
    cached = report_cache.report(str(run)).run
    assert_frame_equal(cached.table(_count_names, [_other_names]), computed[1])  # what it reads is not measured
    assert_frame_equal(cached.table(_names), computed[0])


def test_a_page_opened_in_the_session_of_the_check_stores_its_tables_too(run, later, monkeypatch):
    computed = _measured_later(report_cache.report(str(run)).run)
    assert later()
    monkeypatch.setattr(report_cache._LazyRun, "read", _no_read)
    for table, expected in zip(_measured_later(report_cache.report(str(run)).run), computed, strict=True):
        assert_frame_equal(table, expected)


def test_tables_that_are_in_files_are_stored_at_the_check_and_when_measured_later(run, later, monkeypatch):
    computed = _measured_later(loader.load(str(run)))
    monkeypatch.setitem(Run.__init__.__kwdefaults__, "fact_bytes", 0)
    checked = report_cache.report(str(run), facts=FACTS)
    assert checked.run.parts(FACTS[0])
    assert later()
    _measured_later(report_cache.report(str(run)).run)
    monkeypatch.setattr(report_cache._LazyRun, "read", _no_read)
    cached = report_cache.report(str(run)).run
    for fact in FACTS:
        assert_frame_equal(cached.table(fact), checked.run.table(fact))
    for table, expected in zip(_measured_later(cached), computed, strict=True):
        assert_frame_equal(table, expected)
    assert cached.parts(_names)


def _other_names(trace):
    return _names(trace)


def _no_read(*_):
    raise AssertionError("a trace is read")


def test_a_run_that_is_open_reads_its_tables_after_another_check_stored_more_facts(run):
    """`tracekit check` stores few facts; the dashboard stores the report again with those of comparisons."""
    path, key = str(run), report_cache.run_key(str(run))
    report_cache.store(key, engine.check(loader.load(path)), path, has_comparisons=False)
    opened = report_cache.get(key, path)
    report_cache.report(path, facts=(*FACTS, _names))
    checked = loader.load(path)
    for fact in {fact for rule in engine.all_rules() for fact in rule.facts}:
        assert_frame_equal(opened.run.table(fact), checked.table(fact))


def test_a_table_that_takes_no_time_is_not_stored(run, later, monkeypatch):
    monkeypatch.setattr(report_cache, "MIN_MEASURED_S", 1e9)
    report_cache.report(str(run))
    _measured_later(report_cache.report(str(run)).run)
    assert later() == []


def test_a_large_table_is_not_stored(run, later, monkeypatch):
    monkeypatch.setattr(report_cache, "MAX_TABLE_BYTES", 1)
    report_cache.report(str(run))
    _measured_later(report_cache.report(str(run)).run)
    assert later() == []


def test_a_table_of_a_run_that_changed_meanwhile_is_not_stored(run, later):
    report_cache.report(str(run))
    cached = report_cache.report(str(run)).run
    cached.trace(0)  # from now on its files are known
    time.sleep(0.01)
    os.utime(run / "rank00000.pt.trace.json.gz", ns=(1, 1))
    _measured_later(cached)
    assert later() == []


def test_a_table_without_a_rank_that_could_not_be_read_is_not_stored(run, later, monkeypatch):
    report_cache.report(str(run))
    read = report_cache._LazyRun.read

    def fail(lazy, source):
        if source.rank == 1:
            raise BadTraceError("the connection was cut")
        return read(lazy, source)

    monkeypatch.setattr(report_cache._LazyRun, "read", fail)
    cached = report_cache.report(str(run)).run
    assert _measured_later(cached)[1]["rank"].to_list() == [0]
    assert later() == []


def test_a_damaged_table_is_measured_again(run, later):
    computed = _measured_later(loader.load(str(run)))
    report_cache.report(str(run))
    _measured_later(report_cache.report(str(run)).run)
    for path in later():
        path.write_bytes(_damaged(path.read_bytes(), 0.5, "flipped"))
    for table, expected in zip(_measured_later(report_cache.report(str(run)).run), computed, strict=True):
        assert_frame_equal(table, expected)


def test_an_unreadable_rank_is_also_missing_in_the_cached_report(run):
    whole = (run / "rank00001.pt.trace.json.gz").read_bytes()
    (run / "rank00001.pt.trace.json.gz").write_bytes(whole[:60])
    computed = report_cache.report(str(run), facts=FACTS)
    cached = report_cache.report(str(run), facts=FACTS)
    assert _is_cached(cached)
    assert cached.run.ranks == (0,)
    _same(cached, computed)


def test_the_summary_matches_the_report(run):
    assert report_cache.summary(str(run)) is None
    report = report_cache.report(str(run), facts=FACTS)
    summary = report_cache.summary(str(run))
    assert summary is not None
    assert (summary.ranks, summary.step_time_ns, len(summary.steps_ns)) == (2, 10_000_000, len(recorded.STEPS))
    assert sum(summary.findings.values()) + summary.quality_issues <= len(report.findings)
    assert summary.exposed_communication_ratio == pytest.approx(0.4, abs=0.05)


FINDINGS = st.builds(
    Finding,
    code=st.sampled_from(["COMM001", "X9"]),
    severity=st.sampled_from(list(Severity)),
    message=st.text(),
    fix=st.text(),
    impact=st.floats(allow_nan=False),
    cost_ns=st.integers(-(2**62), 2**62),
    confidence=st.floats(0, 1),
    ranks=st.lists(st.integers(0, 2**40)).map(tuple),
    steps=st.lists(st.integers(0, 2**40)).map(tuple),
    is_priced=st.booleans(),
    subject=st.text(),
    what_if=st.none() | st.builds(WhatIf, st.sampled_from(CAUSES), st.floats(0, 1), st.booleans()),
    removals=st.lists(
        st.builds(
            Removal,
            st.sampled_from(CAUSES),
            st.lists(st.integers(0, 2**40)).map(tuple),
            st.lists(st.builds(HostSpan, *[st.integers(0, 2**40)] * 4, st.text()), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    evidence=dataframes(
        max_cols=4, max_size=6, excluded_dtypes=[pl.Object, pl.Unknown, pl.Decimal, pl.Categorical, pl.Enum, pl.Null]
    ),
)


@given(
    findings=st.lists(FINDINGS, max_size=3), notes=st.lists(st.text()), manifest=st.dictionaries(st.text(), st.text())
)
@settings(max_examples=5, deadline=None)
def test_any_finding_is_restored_exactly(tmp_path_factory, findings, notes, manifest):
    trace = drawn_trace("step 0000\ncompute .aa.")
    run = Run("r", [Source(0, 0, "t", 5, lambda: trace)], manifest=manifest)
    run.measure(FACTS)
    report = Report(run, tuple(findings), tuple(notes), (Input("t", 5, "00"),), "1", rules=("COMM001",))
    path = tmp_path_factory.mktemp("entry") / "e"
    with path.open("wb") as file:
        report_entry.write(report, file)
    with path.open("rb") as file:
        _same(report_entry.read(file, lambda *_: lambda: trace, "r")[0], report)


# Changes --------------------------------------------------------------------------------------------------------------


def _same_size_and_time(run):
    path = run / "rank00000.pt.trace.json.gz"
    times, raw = path.stat(), bytearray(path.read_bytes())
    raw[-1] ^= 0xFF
    path.write_bytes(raw)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _a_log_above(run):
    (run.parent / "rank00000.metrics.jsonl").write_text('{"step": 3, "loss": 1.5}\n')


CHANGES = {
    "a trace": lambda run: os.utime(run / "rank00000.pt.trace.json.gz", ns=(1, 1)),
    "bytes, with the same size and time": _same_size_and_time,
    "the manifest": lambda run: (run / "run.json").write_text("{}"),
    "another rank": lambda run: shutil.copy(run / "rank00001.pt.trace.json.gz", run / "rank00002.pt.trace.json.gz"),
    "a removed rank": lambda run: (run / "rank00001.pt.trace.json.gz").unlink(),
    "a log": lambda run: (run / "rank00000.checkpoint.jsonl").write_text("{}\n"),
    "a log above": _a_log_above,
    "a memory snapshot": lambda run: (run / "rank00000.memory.pickle").write_bytes(b"N."),
    "a window": lambda run: shutil.copytree(run, run / "window001", ignore=shutil.ignore_patterns("window*")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_files_change_the_key(run, change):
    before = report_cache.run_key(str(run))
    assert report_cache.run_key(str(run)) == before
    time.sleep(0.01)  # timestamps of file systems have a resolution of milliseconds
    change(run)
    assert report_cache.run_key(str(run)) not in (before, None)


def test_a_report_cached_before_a_change_is_not_used_after_it(run):
    report_cache.report(str(run))
    time.sleep(0.01)
    _same_size_and_time(run)
    assert report_cache.summary(str(run)) is None
    assert not _is_cached(report_cache.report(str(run)))


def _spellings(run, monkeypatch):
    """Return ways to write the path of a run, by name; the current folder is changed for some."""
    (run.parent / "link").symlink_to(run)
    monkeypatch.chdir(run.parent)
    yield "absolute", str(run)
    yield "relative", run.name
    yield "with a dot", f"./{run.name}/"
    yield "up and down", f"../{run.parent.name}/{run.name}"
    yield "a link", "link"
    monkeypatch.chdir(run)
    yield "the current folder", "."


def test_a_report_is_stored_once_however_the_path_is_written_and_names_files_as_the_caller_does(run, monkeypatch):
    whole = (run / "rank00001.pt.trace.json.gz").read_bytes()
    (run / "rank00002.pt.trace.json.gz").write_bytes(whole[:60])  # its issue names the file
    report_cache.report(str(run), facts=FACTS)
    for name, path in _spellings(run, monkeypatch):
        cached = report_cache.report(path, facts=FACTS)
        assert _is_cached(cached), name
        _same(cached, engine.check(loader.load(path), facts=FACTS))
        assert cached.run.trace(1).activities.height, name


def test_a_report_written_by_a_relative_path_names_files_as_the_next_caller_does(run, monkeypatch):
    (run / "rank00002.pt.trace.json.gz").write_bytes((run / "rank00001.pt.trace.json.gz").read_bytes()[:60])
    monkeypatch.chdir(run.parent)
    report_cache.report(run.name, facts=FACTS)
    cached = report_cache.report(str(run), facts=FACTS)
    assert _is_cached(cached)
    _same(cached, engine.check(loader.load(str(run)), facts=FACTS))


def test_runs_with_other_files_have_other_keys(run):
    copy = shutil.copytree(run, run.with_name("copy"))
    names = [str(run), str(copy), str(run / "rank00000.pt.trace.json.gz")]
    assert len({report_cache.run_key(name) for name in names}) == len(names)


def test_what_a_user_states_of_devices_is_in_the_run_and_changes_the_key(run):
    stated = ReadSettings((DeviceOverride("a device", {"bf16": 8e14}, 3e12),))
    report_cache.report(str(run))
    computed = report_cache.report(str(run), settings=stated)
    cached = report_cache.report(str(run), settings=stated)
    assert [_is_cached(each) for each in (computed, cached)] == [False, True]
    for each in (computed, cached):
        assert each.run.trace(0).header[environment.DEVICE_OVERRIDES] == stated.devices
    assert report_cache.summary(str(run), settings=stated) is not None
    assert report_cache.summary(str(run), settings=ReadSettings(step_name="tracekit::forward")) is None
    assert environment.DEVICE_OVERRIDES not in report_cache.report(str(run)).run.trace(0).header


@pytest.mark.parametrize("what", ["threshold", "plugin", "code"])
def test_other_rules_change_the_key(run, monkeypatch, tmp_path, what):
    before = report_cache.run_key(str(run))
    report_cache._code_hash.cache_clear()
    if what == "threshold":
        fields = [("max_exposed_ratio", float, 0.9)]
        other = dataclasses.make_dataclass("ExposedCommunication", fields, bases=(ExposedCommunication,), frozen=True)
        other.__module__ = ExposedCommunication.__module__
        rules = tuple(other if rule is ExposedCommunication else rule for rule in report_cache.RULES)
        monkeypatch.setattr(report_cache, "all_rules", lambda: rules)
    elif what == "plugin":
        monkeypatch.setattr(report_cache, "all_rules", lambda: (*report_cache.RULES, _Plugin))
    else:
        shutil.copytree(
            Path(report_cache.conventions.__file__).parents[1],
            tmp_path / "tracekit",
            ignore=shutil.ignore_patterns("*.pyc"),
        )
        with (tmp_path / "tracekit" / "rules" / "communication.py").open("a") as code:
            code.write("# changed\n")
        monkeypatch.setattr(
            report_cache.conventions, "__file__", str(tmp_path / "tracekit" / "conventions" / "__init__.py")
        )
    assert report_cache.run_key(str(run)) != before
    monkeypatch.undo()
    report_cache._code_hash.cache_clear()


class _Plugin(ExposedCommunication):
    """A rule of another distribution."""

    code = "X001"


def test_the_source_of_a_plugin_is_part_of_the_key(tmp_path, monkeypatch):
    source = tmp_path / "plugin.py"
    source.write_text("class Rule:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import plugin

    before = disk_cache.plugin_hash(plugin.Rule)
    source.write_text("class Rule:\n    limit = 1\n")
    assert disk_cache.plugin_hash(plugin.Rule) != before


def test_traces_of_a_changed_run_are_not_combined_with_its_cached_report(run, wording):
    report_cache.report(str(run))
    cached = report_cache.report(str(run))
    time.sleep(0.01)
    os.utime(run / "rank00000.pt.trace.json.gz", ns=(1, 1))
    for read_again in (
        lambda: cached.run.trace(0),
        lambda: cached.run.table(_names),
        lambda: list(cached.run.traces()),
    ):
        with wording.raises(InputError):
            read_again()
    assert cached.run.ranks == (0, 1)  # the run is shared: no rank is marked as unreadable
    assert cached.run.data_quality.is_empty()


# Damage and limits ----------------------------------------------------------------------------------------------------


def _damaged(raw, at, how):
    place = int(len(raw) * at)
    damaged = bytearray(raw)
    if how == "cut":
        del damaged[place:]
    else:
        damaged[place : place + 64] = bytes(byte ^ 0xFF for byte in damaged[place : place + 64])
    return bytes(damaged)


def test_a_damaged_entry_is_computed_again(run, reports):
    computed = report_cache.report(str(run), facts=FACTS)
    (path,) = _entries(reports)
    raw, summary = path.read_bytes(), report_cache.summary(str(run))
    assert summary is not None
    for at in (0.0, 0.0002, 0.03, 0.3, 0.6, 0.97):
        for how in ("flipped", "cut"):
            path.write_bytes(_damaged(raw, at, how))
            assert report_cache.summary(str(run)) in (summary, None)
            path.write_bytes(_damaged(raw, at, how))  # if it was dropped
            found = report_cache.get(path.stem, str(run))
            if found is None:
                assert not path.exists()
                continue
            _same(found, computed)
            for fact in FACTS:
                assert_frame_equal(found.run.table(fact), computed.run.table(fact))
    path.write_bytes(_damaged(raw, 0.5, "cut"))
    _same(report_cache.report(str(run), facts=FACTS), computed)
    assert path.read_bytes()[-22:-18] == b"PK\5\6"


def test_an_entry_contains_no_code(run, reports):
    report_cache.report(str(run))
    import zipfile

    with zipfile.ZipFile(_entries(reports)[0]) as archive:
        names = archive.namelist()
        assert {Path(name).suffix for name in names} == {".json", ".arrow"}
        assert json.loads(archive.read("report.json"))["tool_version"]


def test_large_facts_are_not_cached_but_measured_again(run, monkeypatch):
    monkeypatch.setattr(report_entry, "MAX_BYTES", 1)
    computed = report_cache.report(str(run), facts=FACTS)
    cached = report_cache.report(str(run), facts=FACTS)
    assert _is_cached(cached)
    assert_frame_equal(cached.run.table(breakdown.by_step), computed.run.table(breakdown.by_step))


def test_the_cache_respects_its_size_limit(run, reports, monkeypatch):
    monkeypatch.setenv(disk_cache.MAX_BYTES_VARIABLE, "0")
    report_cache.report(str(run))
    assert not reports.exists()
    monkeypatch.setenv(disk_cache.MAX_BYTES_VARIABLE, "10000")
    report_cache.report(str(run))
    assert _entries(reports) == []


def test_a_report_with_an_unserializable_manifest_is_not_cached(run, reports):
    odd = engine.check(loader.load(str(run)), facts=FACTS)
    odd.run.manifest = {"odd": object()}
    report_cache.put("key", odd)
    assert _entries(reports) == []


def test_missing_paths_and_folders_with_too_many_files_have_no_key(run, monkeypatch, tmp_path):
    assert report_cache.run_key(str(tmp_path / "missing")) is None
    monkeypatch.setattr(file_states, "MAX_FILES", 1)
    assert report_cache.run_key(str(run)) is None
    assert not _is_cached(report_cache.report(str(run)))

"""What the dashboard lists, looks through and refuses, without a server."""

import contextlib
import gzip
import io
import json
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("streamlit", reason="needs the extra [dashboard]")

from dashboard import run_catalog, run_store, runs_table, settings, uploads, widgets
from dashboard.run_entry import SETTLED_S, RunEntry
from dashboard.runs_table import RunFilter
from tests.browser import recorded
from tests.support.dashboard_pages import testing
from tracekit.cli.commands.dashboard import dashboard as serve
from tracekit.errors import InputError
from tracekit.ingest import disk_cache
from tracekit.model import environment
from tracekit.rules import report_cache
from tracekit.rules.report_entry import Summary

HOSTILE_FOLDERS = (
    "<img src=x onerror=window.hacked=1>",
    "\u202egnp.exe",
    "😀" * 60,
    "a" * 255,
    "![x](http:⁄⁄192.0.2.1⁄x)",
    "new\nline",
    "$(reboot);`id`",
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(disk_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "good"
    recorded.write_run(folder, kernel="gemm")
    return folder


@pytest.fixture
def runs(tmp_path, a_run):
    shutil.copytree(a_run, tmp_path / "runs" / "a")
    return tmp_path / "runs"


def _names(path):
    return [entry.name for entry in run_catalog.list_runs([str(path)]).entries]


# What is listed -------------------------------------------------------------------------------------------------------


def test_runs_are_found_three_folders_deep_in_natural_order(runs, a_run):
    for name in ("x10", "x9", "deep/er/b", "too/deep/for/us", ".hidden"):
        shutil.copytree(a_run, runs / name)
    assert _names(runs) == ["a", "deep/er/b", "x9", "x10"]


def test_a_json_file_next_to_runs_does_not_make_their_folder_a_run(runs):
    (runs / "baseline.json").write_text("{}")
    assert _names(runs) == ["a"]
    (runs / "only").mkdir()
    (runs / "only" / "other.json").write_text("{}")
    assert _names(runs) == ["a", "only"]


def test_of_too_many_runs_the_newest_are_listed_and_the_others_counted(runs, monkeypatch):
    monkeypatch.setattr(run_catalog, "MAX_ENTRIES", 3)
    for age_s, name in enumerate(("d", "b", "e", "c")):
        (runs / name).mkdir()
        (runs / name / "rank00000.pt.trace.json").write_text("")
        os.utime(runs / name, (2e9 - age_s, 2e9 - age_s))
    found = run_catalog.list_runs([str(runs)])
    assert ([entry.name for entry in found.entries], found.omitted) == (["b", "d", "e"], 2)


def test_what_takes_long_to_list_is_listed_less_often(runs, a_run):
    now_s = [0.0]

    def clock_s():
        now_s[0] += 1  # a listing takes a second
        return now_s[0]

    known = run_catalog.Catalog([str(runs)], clock_s)
    first = known.listing()
    shutil.copytree(a_run, runs / "b")
    now_s[0] += 10
    assert known.listing() is first
    now_s[0] += 10
    second = known.listing()
    assert [entry.name for entry in second.entries] == ["a", "b"]
    shutil.rmtree(runs / "b")
    known.forget()
    assert [entry.name for entry in known.listing().entries] == ["a"]


def test_a_run_of_a_machine_whose_clock_is_ahead_is_not_being_recorded(runs):
    for file in (runs / "a").iterdir():
        os.utime(file, (time.time() + 3600,) * 2)
    entries = {entry.name: entry for entry in run_catalog.list_runs([str(runs)]).entries}
    assert not entries["a"].is_live
    assert entries["a"].traces_stamp


def test_a_training_that_has_not_written_a_trace_yet_is_listed_as_live(runs):
    (runs / "new").mkdir()
    (runs / "new" / "rank00000.metrics.jsonl.partial").write_text('{"step": 0}\n')
    entries = {entry.name: entry for entry in run_catalog.list_runs([str(runs)]).entries}
    assert entries["new"].is_live
    assert "no trace yet" in entries["new"].problem
    assert not entries["a"].is_live
    assert [runs_table.verdict(entries[name]) for name in ("new", "a")] == [
        runs_table.NO_TRACE_YET,
        runs_table.UNCHECKED,
    ]


def test_the_stamp_of_traces_changes_once_they_are_complete_and_not_with_the_logs(runs):
    def stamp():
        return run_catalog.list_runs([str(runs)]).entries[0].traces_stamp

    trace, before = runs / "a" / "rank00001.pt.trace.json.gz", stamp()
    (runs / "a" / "rank00000.metrics.jsonl.partial").write_text('{"step": 0}\n')
    assert stamp() == before != ""
    trace.write_bytes(trace.read_bytes())
    assert stamp() == ""  # it may still be written
    os.utime(trace, (time.time() - SETTLED_S,) * 2)
    assert stamp() not in ("", before)


@pytest.mark.parametrize("name", HOSTILE_FOLDERS, ids=range(len(HOSTILE_FOLDERS)))
def test_a_folder_of_any_name_is_a_run(runs, a_run, name):
    if len(name.encode()) > 255:
        name = name.encode()[:252].decode()
    shutil.copytree(a_run, runs / name)
    (entry,) = (entry for entry in run_catalog.list_runs([str(runs)]).entries if entry.name != "a")
    assert entry.problem == ""
    shown = runs_table.table([entry])["run"][0]
    assert "\u202e" not in shown
    assert "\n" not in shown


def test_a_name_that_is_no_text_is_listed_under_one_that_is(runs, a_run):
    shutil.copytree(a_run, runs / os.fsdecode(b"\xff\xfe"))
    (entry,) = (entry for entry in run_catalog.list_runs([str(runs)]).entries if entry.name != "a")
    assert entry.name == "??"
    assert run_store.open_run(entry).report.findings


# Links ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path, a_run):
    return shutil.copytree(a_run, tmp_path / "outside")


@pytest.mark.parametrize("name", ["rank00001.pt.trace.json.gz", "rank00000.metrics.jsonl", "run.json", "window001"])
def test_a_run_with_a_link_that_leads_out_is_refused_and_says_which(runs, outside, name, wording):
    target = outside if name == "window001" else outside / "rank00001.pt.trace.json.gz"
    (runs / "a" / name).unlink(missing_ok=True)
    (runs / "a" / name).symlink_to(target)
    (entry,) = run_catalog.list_runs([str(runs)]).entries
    wording(entry.problem)
    assert str(outside) not in entry.problem
    with pytest.raises(InputError, match="is a link"):
        run_store.check(replace(entry, problem=""))
    (entry, _) = run_catalog.list_runs([str(runs), str(outside)]).entries
    assert entry.problem == ""


def test_a_folder_that_leads_out_is_not_followed_and_one_inside_is(runs, outside):
    (runs / "out").symlink_to(outside)
    (runs / "in").symlink_to(runs / "a")
    (runs / "a" / "up").symlink_to(runs)
    (runs / "round").symlink_to(runs)
    assert _names(runs) == ["a", "in"]


def test_a_run_that_becomes_a_link_after_it_was_listed_is_refused(runs, outside, wording):
    (entry,) = run_catalog.list_runs([str(runs)]).entries
    trace = runs / "a" / "rank00000.pt.trace.json.gz"
    trace.unlink()
    trace.symlink_to(outside / trace.name)
    with wording.raises(InputError):
        run_store.check(entry)


@pytest.fixture
def open_folder():
    """Give a folder that a user without rights can come to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextlib.contextmanager
def _without_rights():
    """Be a user who may not look into everything: root may."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_what_cannot_be_looked_into_costs_nothing_but_itself(open_folder, a_run, wording):
    runs, closed = open_folder / "runs", open_folder / "closed"
    shutil.copytree(a_run, runs / "good")
    shutil.copytree(a_run, closed / "run")
    (runs / "other" / "window000").mkdir(parents=True)
    (runs / "loop").symlink_to("loop")
    (runs / "latest").symlink_to(closed / "run")
    (runs / "latest.pt.trace.json").symlink_to("latest.pt.trace.json")
    for folder in (closed, runs / "other" / "window000"):
        folder.chmod(0)
    try:
        with _without_rights():
            assert _names(runs) == ["good"]
            (entry,) = run_catalog.list_runs([str(closed / "run")]).entries
            wording(entry.problem)
            assert run_catalog.history_file([str(closed / "run")]) is None
    finally:
        closed.chmod(0o700)
        (runs / "other" / "window000").chmod(0o700)


def test_a_history_that_is_a_link_is_not_opened(runs, outside):
    (outside / "history.duckdb").write_text("")
    (runs / "history.duckdb").symlink_to(outside / "history.duckdb")
    assert run_catalog.history_file([str(runs)]) is None


# The list as a table --------------------------------------------------------------------------------------------------


def _entry(name, *, step_ms=None, strategy="", age_s=0.0, **counts):
    summary = None
    if step_ms is not None:
        findings = {"error": 0, "warning": 0, "info": 0, **counts}
        quality_issues = findings.pop("quality_issues", 0)
        summary = Summary(findings, quality_issues, 2, step_ms * 1e6, (1, 2), 0.5, 0.1)
    created_ns = time.time_ns() - int(age_s * 1e9)
    return RunEntry(name, f"/{name}", strategy=strategy, created_ns=created_ns, summary=summary)


ENTRIES = (
    _entry("b", step_ms=20, strategy="ddp", error=1),
    _entry("a", step_ms=10, strategy="fsdp2", warning=2, info=1, age_s=3600),
    _entry("c", age_s=10 * runs_table.DAY_S),
    _entry("d", step_ms=30, info=3),
    _entry("e", step_ms=40, quality_issues=1),
    replace(_entry("f"), problem="gone"),
)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (RunFilter(), "bacdef"),
        (RunFilter(order="slowest step first"), "edbacf"),
        (RunFilter(order="worst verdict first"), "badecf"),
        (RunFilter(order="newest first", verdicts=("error", "warning")), "ba"),
        (RunFilter(order="strategy"), "bacdef"),
        (RunFilter(text="FSDP"), "a"),
        (RunFilter(text="fsdp2 error"), ""),
        (RunFilter(text="not checked"), "c"),
        (RunFilter(strategies=(runs_table.UNKNOWN,)), "cdef"),
        (RunFilter(verdicts=(runs_table.QUALITY_ISSUES, runs_table.BROKEN)), "ef"),
        (RunFilter(since_s=runs_table.PERIODS["last week"]), "badef"),
        (RunFilter(step_ns=(15e6, 30e6)), "bd"),
    ],
    ids=str,
)
def test_runs_are_found_and_put_in_order(wanted, expected):
    assert "".join(entry.name for entry in runs_table.filter_runs(ENTRIES, wanted)) == expected


def test_a_verdict_is_the_gravest_of_what_is_not_of_the_data():
    verdicts = [runs_table.verdict(entry) for entry in ENTRIES]
    assert verdicts == ["error", "warning", runs_table.UNCHECKED, "info", runs_table.QUALITY_ISSUES, runs_table.BROKEN]
    chips = [
        "1 error",
        "2 warnings",
        runs_table.UNCHECKED,
        "3 info",
        runs_table.QUALITY_ISSUES,
        runs_table.BROKEN,
    ]
    assert [runs_table.chip(entry) for entry in ENTRIES] == chips
    small = replace(ENTRIES[3], summary=replace(ENTRIES[3].summary, impact=0.01))
    assert runs_table.chip(small) == runs_table.GOOD
    doubtful = replace(ENTRIES[4], summary=replace(ENTRIES[4].summary, is_doubtful=True))
    assert runs_table.chip(doubtful) == runs_table.CANNOT_JUDGE
    assert runs_table.chip(replace(ENTRIES[2], check_error="out of memory")) == runs_table.FAILED


def test_the_table_of_a_checked_run_contains_its_steps(runs):
    report_cache.report(str(runs / "a"))
    row = runs_table.table(run_catalog.list_runs([str(runs)]).entries).row(0, named=True)
    assert (row["run"], row["strategy"], row["model"], row["ranks"]) == ("a", "ddp", "tiny", 2)
    assert row["step_ns"] == 10e6
    assert len(row["steps"]) == len(recorded.STEPS)
    assert "problem" not in row


def test_a_manifest_can_say_anything(runs):
    (runs / "a" / "run.json").write_text('{"created_ns": 1e300, "world_size": "x", "model": [1], "strategy": {"a": 1}}')
    assert runs_table.table(run_catalog.list_runs([str(runs)]).entries).height == 1
    changed_ns = max(file.stat().st_mtime_ns for file in (runs / "a").iterdir())
    for time_ns in (-99999999999999999999, 10**400, True):
        manifest = {"created_ns": time_ns, "world_size": 10**30, "model": "m" * 5000}
        (runs / "a" / "run.json").write_text(json.dumps(manifest))
        listed = run_catalog.list_runs([str(runs)]).entries
        assert runs_table.table(listed).row(0, named=True)["ranks"] is None
        assert listed[0].created_ns >= changed_ns  # that of the newest file
        assert runs_table.filter_runs(listed, RunFilter(since_s=runs_table.DAY_S)) == list(listed)
    (runs / "a" / "run.json").write_text("[" * 100_000)
    assert len(run_catalog.list_runs([str(runs)]).entries) == 1


# Uploaded traces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("rank00003.pt.trace.json.gz", "rank00003.pt.trace.json.gz"),
        ("../../etc/passwd.json", "passwd.json"),
        ("..\\..\\x.json.zst", "x.json.zst"),
        (".hidden.json", "hidden.json"),
        ("a" * 9000 + "7.json", "a" * 119 + "7.json"),
        ("<img src=x>.json", "_img_src_x_.json"),
        ("\u202e.json", "_.json"),
        ("../run.pftrace.gz", "run.pftrace.gz"),
        ("io-7.pfw.gz", "io-7.pfw.gz"),
        ("../rank00001.memory.pickle", "rank00001.memory.pickle"),
        ("oom.pkl", "oom.memory.pickle"),
    ],
)
def test_an_uploaded_file_gets_a_name_that_can_only_be_a_trace(given, expected):
    assert uploads.safe_name(given) == expected


@pytest.mark.parametrize("name", ["x", "x.json.exe", "x.gz", "x.pickle.gz", "x.json/..", ""])
def test_what_is_no_trace_by_its_name_is_refused(name, wording):
    with wording.raises(InputError):
        uploads.safe_name(name)


def test_a_bomb_is_refused_as_soon_as_it_shows(tmp_path, wording):
    member = gzip.compress(b" " * (64 << 20), 9)
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b'{"traceEvents": [') + member * (1 + uploads.MAX_UNPACKED_BYTES // (64 << 20)))
    assert bomb.stat().st_size < 5 << 20
    with wording.raises(InputError):
        uploads.refuse_decompression_bomb(bomb, 256 << 20)
    bomb.write_bytes(member)
    uploads.refuse_decompression_bomb(bomb)


# The command ---------------------------------------------------------------------------------------


def test_the_command_listens_to_this_machine_only_by_default(monkeypatch, runs, capsys, wording):
    started = []
    monkeypatch.setattr(os, "execve", lambda _, words, environment: started.append(words))
    serve([str(runs)], browser=False)
    wording(capsys.readouterr().err)
    serve([str(runs)], browser=False, host="0.0.0.0")
    warned = capsys.readouterr().err
    assert "without a password" in warned
    assert str(runs) in warned
    first, second = ({words[i]: words[i + 1] for i in range(3, words.index("--"), 2)} for words in started)
    assert first["--server.address"] == "127.0.0.1"
    assert second["--server.address"] == "0.0.0.0"
    assert set(second) - set(first) == {"--server.allowedHosts"}
    assert not any("Xsrf" in name or "CORS" in name for name in (*first, *second))


def test_the_dashboards_own_settings_keep_its_protections():
    import tomllib

    settings = tomllib.loads((Path(run_catalog.__file__).parent / "server" / ".streamlit" / "config.toml").read_text())
    server = settings["server"]
    assert server["enableXsrfProtection"]
    assert server["enableCORS"]
    assert server["address"] == "127.0.0.1"
    assert "*" not in server["allowedHosts"]
    assert server["maxUploadSize"] == uploads.MAX_MB


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([8, 58_632, 2_818_048, None], (1, widgets.BYTES)),
        ([192, 2_304, 150_994_944], (1, widgets.BYTES)),
        ([640, 91_905_589_248], (2**20, "%.3g MiB")),
        ([0, 2 << 20, 3 << 30], (2**30, "%.3g GiB")),
        ([4 << 10, 3 << 20], (2**20, "%.3g MiB")),
        ([273_900, 78_957_773, 315_831_091], (2**20, "%.3g MiB")),
        ([1, 900], (1, "%.0f B")),
        ([0, None], (1, "%.0f B")),
    ],
)
def test_sizes_of_a_column_share_a_unit_that_fits_the_smallest(sizes, expected):
    assert widgets._scale(pl.Series("sent_bytes", sizes, dtype=pl.Int64)) == expected


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("dur_ns", [0, 20_000_000, 247_390_705_000], (1e9, "%.3g s")),
        ("dur_ns", [1_500, 12_400_000], (1e6, "%.3g ms")),
        ("dur_ns", [2_500_000, 4_900_000, 23_196_000], (1e6, "%.3g ms")),
        ("dur_ns", [900, 1_100, 12_400_000_000], (1e6, "%.3g ms")),
        ("dur_ns", [681_002, 77_496, 1_436_460, 2_900], (1e6, "%.3g ms")),
        ("dur_ns", [485, 354, 117, 5_076_040], (1e3, "%.3g µs")),
        ("bus_bytes_per_s", [4.2e7, 3.1e11, 3.796e11], (1e9, "%.3g GB/s")),
        ("dur_ns", [0, None], (1, "%.0f ns")),
        ("bus_bytes_per_s", [379_591_530_000.0], (1e9, "%.3g GB/s")),
        ("bus_bytes_per_s", [2_100.0], (1e3, "%.3g kB/s")),
        ("tflops_per_s", [0.1063], (1e-3, "%.3g GFLOP/s")),
        ("flops", [106_300_000], (1e6, "%.3g MFLOP")),
        ("flops", [54_425_826_000_000, 6_184_753_000_000], (1e12, "%.3g TFLOP")),
        ("idle_ratio", [0.5], (0.01, "%.1f%%")),
        ("start_ns", [200_000, 12_400_000], (1e6, "%.6g ms")),
        ("slowdown", [0.23439130230329228], (1, "%.3g")),
        ("tokens", [123_456.0], None),
        ("count", [5], None),
    ],
)
def test_numbers_of_a_column_share_a_unit_and_have_three_digits(name, values, expected):
    assert widgets._scale(pl.Series(name, values)) == expected


def test_runs_have_the_devices_of_the_settings_where_the_dashboard_was_started(tmp_path, monkeypatch):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    (tmp_path / "tracekit.toml").write_text('[devices."a device"]\npeak_bf16_tflops = 800\nmemory_gb_per_s = 3000\n')
    monkeypatch.chdir(tmp_path)
    settings.read_settings.cache_clear()
    try:
        (entry,) = run_catalog.list_runs([str(tmp_path / "run")]).entries
        (stated,) = run_store.open_run(entry).run.trace(0).header[environment.DEVICE_OVERRIDES]
        assert (stated.name, stated.peaks["bf16"]) == ("a device", 8e14)
    finally:
        settings.read_settings.cache_clear()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["—", "—", "126.84 GFLOP"], 12 * 8 + 18),
        (["aten::add"] * 9 + ["n" * 80], widgets.MAX_NAME_PX),
        (["1.24 ms", "12.40 ms"], None),
        ([], None),
    ],
)
def test_a_column_that_the_browser_would_clip_has_a_width(texts, expected):
    assert widgets._width_px(texts) == expected


class Upload(io.BytesIO):
    """A file as Streamlit hands it over."""

    def __init__(self, name, content):
        super().__init__(content)
        self.name, self.file_id, self.size = name, name, len(content)


def test_messages_on_uploaded_files_name_them_as_the_person_does(tmp_path):
    def script():
        import streamlit as st

        from dashboard import widgets

        widgets.problem(st.session_state["message"])

    chosen = [Upload("my trace (1).json", b"{"), Upload("notes.txt", b"none")]
    folder = uploads.UploadFolder(tmp_path)
    folder.update(chosen)
    (stored,) = tmp_path.iterdir()
    app = testing.AppTest.from_function(script)
    app.session_state[widgets.UPLOAD_NAMES] = folder.names_by_path(chosen)
    for message, shown in (
        (f"{stored}: no complete event", "my trace (1).json: no complete event"),
        (f"{tmp_path}: no trace files here", "the uploaded files: no trace files here"),
    ):
        app.session_state["message"] = message
        app.run()
        assert app.error[0].value == widgets.plain(shown)

"""The history file and its trends, with simulated reports, a real DuckDB and real processes."""

import dataclasses
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from math import comb
from pathlib import Path

import duckdb
import jsonschema
import numpy as np
import pytest

from tests.browser import recorded
from tests.support import cli_runner, simulated_history
from tests.support.cli_runner import tracekit
from tracekit.errors import InputError
from tracekit.regression.history import entry, store, trends
from tracekit.regression.history.entry import Commit, history_entry, median_interval
from tracekit.report import history as history_report
from tracekit.report import json as report_json
from tracekit.report.render import cells
from tracekit.report.render import json as render_json
from tracekit.report.render import text as render_text

ROOT = Path(__file__).parents[3]


def entry_of(document, *, commit=None, failures=None):
    return history_entry(document, report_json.comparison_side(document), commit=commit, failures=failures)


def entries(documents):
    return [
        entry_of(each, commit=Commit(f"{number:02d}{'ab' * 19}", f"Change {number}\n\nWhy.", "main"), failures=())
        for number, each in enumerate(documents)
    ]


@pytest.fixture(scope="module")
def slower(tmp_path_factory):
    """A history of 20 runs, slower by a fifth from the 13th on."""
    path = tmp_path_factory.mktemp("history") / "history.duckdb"
    store.add(path, entries(simulated_history.slower_from(12, 20)))
    return path


def test_the_simulated_reports_have_the_form_of_reports_by_check():
    schema = json.loads(report_json.schema())
    jsonschema.Draft202012Validator(schema).validate(simulated_history.report(0, findings=[simulated_history.COMM]))


def test_added_runs_are_read_back(slower):
    history = store.read(slower)
    assert history.runs["name"].to_list() == [f"run-{number:02d}" for number in range(20)]
    last = history.runs.row(-1, named=True)
    assert (last["branch"], last["passed"], last["commit_text"]) == ("main", True, "Change 19\n\nWhy.")
    step = history.metrics.filter(history.metrics["metric"] == "step_time_ns").row(0, named=True)
    assert step["low"] <= step["median"] <= step["high"]
    assert step["samples"] == 12
    assert set(history.findings["finding"]) == {"COMM001"}


def test_a_run_is_one_entry_however_often_it_is_added(tmp_path):
    path = tmp_path / "history.duckdb"
    (once,) = entries([simulated_history.report(1)])
    assert store.add(path, [once]) == store.AddedRuns(new=1)
    assert store.add(path, [once, once]) == store.AddedRuns(unchanged=2)
    judged = dataclasses.replace(once, failures=("COMM001",), passed=False, commit=Commit())
    assert store.add(path, [judged]) == store.AddedRuns(updated=1)
    (row,) = store.read(path).runs.to_dicts()
    assert (row["failures"], row["commit"]) == (["COMM001"], once.commit.sha)  # what is known is not forgotten


def test_a_run_keeps_its_commit_unless_the_user_states_another(tmp_path):
    path, document = tmp_path / "history.duckdb", simulated_history.report(1)
    first, later = Commit("a" * 40, None, "main"), Commit("b" * 40, "Another change", "other")

    def stored(commit, given=None):
        store.add(path, [entry_of(document, commit=commit)], commit=given)
        (row,) = store.read(path).runs.to_dicts()
        return Commit(row["commit"], row["commit_text"], row["branch"])

    assert stored(first) == first
    assert stored(later) == first
    assert stored(Commit("a" * 40, "Its own words")) == Commit("a" * 40, "Its own words", "main")
    assert stored(later, given=Commit(branch="other")) == Commit("a" * 40, "Its own words", "other")
    assert stored(later, given=Commit("b" * 40)) == Commit("b" * 40, "Another change", "other")


def test_concurrent_writers_and_readers_lose_nothing(tmp_path):
    path = tmp_path / "history.duckdb"
    script = (
        "import pickle, sys; from pathlib import Path; from tracekit.regression.history import store\n"
        "for entry in pickle.load(sys.stdin.buffer): store.add(Path(sys.argv[1]), [entry])"
    )
    theirs = [subprocess.Popen([sys.executable, "-c", script, path], stdin=subprocess.PIPE, cwd=ROOT) for _ in range(2)]
    for number, writer in enumerate(theirs):
        pickle.dump(entries([simulated_history.report(run) for run in range(number, number + 3)]), writer.stdin)
        writer.stdin.close()
    with ThreadPoolExecutor(4) as pool:  # threads of this process too
        list(pool.map(lambda number: store.add(path, entries([simulated_history.report(number)])), range(40, 44)))
    assert [writer.wait(timeout=300) for writer in theirs] == [0, 0]
    runs = store.read(path).runs
    assert sorted(runs["name"]) == [f"run-{number:02d}" for number in (*range(4), *range(40, 44))]


def test_a_link_to_a_history_has_the_same_lock(tmp_path, wording):
    path, link = tmp_path / "here" / "history.duckdb", tmp_path / "there" / "linked.duckdb"
    store.add(path, entries([simulated_history.report(0)]))
    link.parent.mkdir()
    link.symlink_to(path)
    writer = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(writer, fcntl.LOCK_EX)
    with wording.raises(InputError):
        store.add(link, entries([simulated_history.report(1)]), timeout_s=0.2)
    os.close(writer)
    assert store.add(link, entries([simulated_history.report(1)])) == store.AddedRuns(new=1)
    assert link.is_symlink()
    assert store.read(path).runs.height == 2


def test_a_killed_writer_changes_nothing_and_leaves_no_lock(tmp_path, wording):
    path = tmp_path / "history.duckdb"
    store.add(path, entries([simulated_history.report(0)]))
    script = (
        "import os, sys; import duckdb\n"
        "c = duckdb.connect(sys.argv[1]); c.execute('BEGIN')\n"
        "c.execute(\"INSERT INTO runs (run, name) VALUES ('half', 'half')\")\n"
        "print('in', flush=True); sys.stdin.read()"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "in\n"
    with wording.raises(InputError):
        store.add(path, entries([simulated_history.report(1)]), timeout_s=0.2)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert store.add(path, entries([simulated_history.report(1)])) == store.AddedRuns(new=1)
    assert store.read(path).runs["name"].to_list() == ["run-00", "run-01"]


def _text(path):
    path.write_text("a text\n" * 1000)


def _empty(path):
    path.write_bytes(b"")


def _foreign(path):
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE runs (other INTEGER)")


def _later(path):
    store.add(path, [])
    with duckdb.connect(str(path)) as connection:
        connection.execute('UPDATE tracekit_history SET "schema" = 99')


def _views(path):
    """A database whose views would read files of its reader."""
    store.add(path, [])
    with duckdb.connect(str(path)) as connection:
        connection.execute("ALTER TABLE runs RENAME TO other")
        connection.execute("CREATE VIEW runs AS SELECT * FROM other, read_text('/etc/hostname')")


def _cut(path):
    store.add(path, entries([simulated_history.report(0)]))
    path.write_bytes(path.read_bytes()[: 16 << 10])


def _garbled(path):
    store.add(path, entries([simulated_history.report(0)]))
    damaged = bytearray(path.read_bytes())
    damaged[3 * 4096 : -4096] = os.urandom(len(damaged) - 4 * 4096)
    path.write_bytes(damaged)


@pytest.mark.parametrize("make", [_text, _empty, _foreign, _later, _views, _cut, _garbled])
def test_an_invalid_history_is_refused_and_not_changed(tmp_path, make):
    path = tmp_path / "history.duckdb"
    make(path)
    before = path.read_bytes()
    for use in (store.read, store.check, lambda path: store.add(path, entries([simulated_history.report(5)]))):
        with pytest.raises(InputError) as refused:
            use(path)
        assert str(refused.value).startswith(f"{path}: ")
        assert "\n" not in str(refused.value)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_folder_and_an_unwritable_path_are_refused(tmp_path, wording):
    with wording.raises(InputError):
        store.add(tmp_path, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        store.add(tmp_path / "file" / "history.duckdb", [])


def test_a_change_shows_its_commits_findings_and_facts(slower):
    (group,) = trends.groups(store.read(slower))
    shift = next(each for each in trends.latest_first(group) if each.metric == "step_time_ns")
    assert (shift.last, shift.first, shift.is_worse) == (11, 12, True)
    assert shift.after / shift.before == pytest.approx(1.2, abs=0.03)
    assert (shift.appeared, shift.disappeared) == (("COMM001",), ())
    assert shift.changed_facts == (("versions.torch", "2.12.0", "2.13.0"),)
    assert history_report.commit_range(group, shift) == "11abababab..12abababab"
    steady = next(each for each in group.series if each.metric == "exposed_communication_ratio")
    assert (steady.shifts, steady.drifts) == ((), ())


def test_changes_one_run_apart_are_reported_together(slower):
    (group,) = trends.groups(store.read(slower))
    shifts = trends.latest_first(group)
    assert [each.first for each in shifts] == [12, 12]
    neighbour = dataclasses.replace(shifts[0], metric="compute_ns", last=10, first=11)
    long_before = dataclasses.replace(shifts[0], last=3, first=4)
    series = dataclasses.replace(group.series[0], shifts=(long_before, neighbour, *shifts))
    (latest, first) = history_report.changes_by_run(dataclasses.replace(group, series=(series,)))
    assert [each.first for each in latest] == [12, 12, 11]
    assert first == [long_before]


def test_a_series_contains_only_runs_with_the_same_fingerprint(tmp_path):
    path = tmp_path / "history.duckdb"
    small = [simulated_history.report(number) for number in range(8)]
    large = [simulated_history.report(number, step_ms=90.0, world_size=8) for number in range(8, 16)]
    store.add(path, [*entries(small), *(entry_of(each) for each in large)])
    groups = trends.groups(store.read(path))
    assert [group.identity["world_size"] for group in groups] == ["8", "2"]  # that of the latest run first
    assert not any(trends.latest_first(group) for group in groups)
    (only,) = trends.groups(store.read(path), branch="main", last=3, metrics=["step_time_ns"])
    assert (only.runs.height, [series.metric for series in only.series]) == (3, ["step_time_ns"])


def test_a_metric_that_some_runs_lack_keeps_its_indexes(tmp_path):
    documents = simulated_history.slower_from(12, 20)
    for number in (3, 15):
        documents[number]["samples"] = [
            each for each in documents[number]["samples"] if each["metric"] != "step_time_ns"
        ]
    path = tmp_path / "history.duckdb"
    store.add(path, entries(documents))
    (group,) = trends.groups(store.read(path), metrics=["step_time_ns"])
    ((shift,),) = [series.shifts for series in group.series]
    assert (shift.last, shift.first) == (11, 12)
    assert np.isnan(group.series[0].values[[3, 15]]).all()
    assert cells.sparkline(group.series[0].values.tolist())[3] == " "


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_text_fits_and_lists_every_metric_and_change(slower, width, wording):
    text = render_text.render(history_report.document(trends.groups(store.read(slower))), width=width)
    assert max(map(len, text.splitlines())) <= width
    wording(text)
    assert "worse +2" in text or width == 60
    assert text.count("between 11abababab..12abababab") == 1
    wording(text)


def test_names_from_a_history_cannot_control_a_terminal(tmp_path):
    path = tmp_path / "history.duckdb"
    hostile = simulated_history.report(0, name="\x1b[31mred\x1b]0;title\x07", model={"name": "\x1b[2J"})
    store.add(path, [entry_of(hostile, commit=Commit("\x1b[5m", "\x1b[1mbold", "\x9b4m"), failures=["\x1b[7m"])])
    text = render_text.render(history_report.document(trends.groups(store.read(path))), width=100)
    assert not set(text) & {"\x1b", "\x07", "\x9b"}


def test_the_json_names_runs_of_changes(slower):
    document = json.loads(render_json.render(history_report.document(trends.groups(store.read(slower)))))
    (group,) = document["groups"]
    (change,) = next(each for each in group["metrics"] if each["metric"] == "step_time_ns")["changes"]
    names = {run["run"]: run["name"] for run in group["runs"]}
    assert (names[change["last_run_before"]], names[change["first_run_after"]]) == ("run-11", "run-12")
    assert (change["is_worse"], change["findings_appeared"]) == (True, ["COMM001"])


def test_an_interval_of_the_median_contains_it_in_95_of_100_cases():
    random = np.random.default_rng(2)
    for count in (6, 11, 30):
        ends = np.array([median_interval(random.exponential(size=count)) for _ in range(2000)])
        share = ((ends[:, 0] <= np.log(2)) & (np.log(2) <= ends[:, 1])).mean()
        assert 0.94 <= share <= 1
    assert median_interval(np.arange(5.0)) == (None, None)
    assert median_interval(np.arange(6.0)) == (0, 5)


def test_an_interval_of_many_samples_is_exact_and_cheap():
    def ends(count):
        below = [sum(comb(count, k) for k in range(number + 1)) for number in range((count + 1) // 2)]
        lowest = max((number for number, ways in enumerate(below) if 40 * ways <= 2**count), default=None)
        return (None, None) if lowest is None else (lowest, count - 1 - lowest)

    for count in (*range(1, 60), 299):
        assert median_interval(np.arange(float(count))) == ends(count)
    assert median_interval(np.arange(50_000.0)) == (24780, 25219)  # 15 minutes by a binomial a value


def test_the_commit_comes_from_ci_else_from_git(tmp_path):
    def git(*words):
        author = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    assert entry.known_commit({}, tmp_path) == Commit()
    git("init", "-b", "trunk")
    git("commit", "--allow-empty", "-m", "Make it fast\n\nBy magic.")
    found = entry.known_commit({}, tmp_path)
    assert (len(found.sha), found.text, found.branch) == (40, "Make it fast\n\nBy magic.", "trunk")
    by_ci = entry.known_commit({"GITHUB_SHA": found.sha, "GITHUB_HEAD_REF": "", "GITHUB_REF_NAME": "pr"}, tmp_path)
    assert by_ci == Commit(found.sha, found.text, "pr")
    assert entry.known_commit({"CI_COMMIT_SHA": "ab12", "CI_COMMIT_MESSAGE": "x"}, tmp_path) == Commit(
        "ab12", "x", None
    )
    assert entry.known_commit({}, tmp_path, sha="--output=/tmp/x", branch="b") == Commit("--output=/tmp/x", None, "b")


def test_on_the_command_line_reports_are_added_once_and_shown(tmp_path, wording):
    db = tmp_path / "ci" / "history.duckdb"
    files = [simulated_history.write(tmp_path, document) for document in simulated_history.slower_from(8, 14)]
    ci = {"GITHUB_SHA": "ab" * 20, "GITHUB_REF_NAME": "main"}
    done = tracekit("history", "add", *files, "--db", db, **ci)
    assert (done.returncode, done.stdout) == (0, "")
    wording(done.stderr)
    assert tracekit("history", "add", files[0], "--db", db).stderr.endswith("0 runs added, 1 unchanged\n")
    again = ("history", "add", files[0], "--db", db)
    assert tracekit(*again, GITHUB_SHA="cd" * 20).stderr.endswith("1 unchanged\n")
    assert tracekit(*again, "--commit", "ef" * 20).stderr.endswith("1 updated\n")
    assert tracekit(*again, "--commit", "ab" * 20).stderr.endswith("1 updated\n")
    shown = tracekit("history", "show", "--db", db, "--metric", "step_time", "--branch", "main", COLUMNS="100")
    assert shown.returncode == 0
    assert "worse +2" in shown.stdout
    assert "two runs of abababab" in shown.stdout  # all are of one commit
    assert "allocations" not in shown.stdout.partition("WORSE")[0]
    document = json.loads(tracekit("history", "show", "--db", db, "--last", "2", "--format", "json").stdout)
    assert len(document["groups"][0]["runs"]) == 2
    assert tracekit("history", "show", "--db", db, "--branch", "none").stdout.endswith(" has no run of branch none.\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "--db", "missing.duckdb"], "there is no such file"),
        (["show", "--db", "{db}", "--metric", "step_tme"], "did you mean step_time?"),
        (["add", "{broken}", "--db", "{db}"], "is not a complete report"),
        (["add", "nowhere", "--db", "{db}"], "nowhere"),
        (["add", "{broken}", "--db", "{broken}"], "cannot be read as a history"),
    ],
)
def test_on_the_command_line_invalid_input_is_one_line_and_exit_code_2(tmp_path, words, message):
    db, broken = tmp_path / "history.duckdb", tmp_path / "broken.json"
    store.add(db, [])
    broken.write_text(json.dumps({"schema": "tracekit.report/1", "run": {"name": "x"}}))
    before = broken.read_bytes()
    done = tracekit("history", *(word.format(db=db, broken=broken) for word in words))
    assert done.returncode == 2
    assert message in cli_runner.only_line(done)
    assert broken.read_bytes() == before


def test_a_check_is_added_to_a_history_with_its_verdict(tmp_path):
    run, db = tmp_path / "run", tmp_path / "history.duckdb"
    recorded.write_run(run, kernel="gemm")
    check = ("check", run, "--fail-on", "info", "--history", db, "--no-cache")
    done = tracekit(*check, GITHUB_SHA="cd" * 20)
    assert done.returncode == 1
    assert f"{db}: 1 run added" in done.stderr
    (row,) = store.read(db).runs.to_dicts()
    assert (row["passed"], row["commit"]) == (False, "cd" * 20)
    assert "COMM001" in row["failures"]
    assert "1 updated" in tracekit("history", "add", run, "--db", db, "--no-cache").stderr  # by another bar
    assert store.read(db).runs["passed"].to_list() == [True]
    run.rename(tmp_path / "gone")
    (tmp_path / "none").write_text("no database")
    refused = tracekit("check", tmp_path / "gone", "--history", tmp_path / "none")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_an_interactive_process_prints_no_progress_and_changes_no_settings(tmp_path):
    """DuckDB takes `python -c` for interactive: there it draws progress bars on the standard output."""
    store._make(tmp_path / "history.duckdb")
    script = (
        "import sys; from pathlib import Path; from tracekit.regression.history import store\n"
        "with store._locked_connection(Path(sys.argv[1])) as connection:\n"
        "    names = ('enable_progress_bar', 'lock_configuration')\n"
        "    print([connection.execute(f\"SELECT current_setting('{name}')\").fetchone()[0] for name in names])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "history.duckdb")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cli_runner.ROOT)
    assert done.stdout == "[False, True]\n"

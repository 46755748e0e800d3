"""A trainer of two ranks and a rollout worker that cooperated (tests/recordings/roles): two runs, and who waits."""

import base64
import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

import tracekit
from tests.support.cli_runner import tracekit as run_command
from tracekit.analysis.parallelism import role_waits
from tracekit.errors import InputError
from tracekit.report import timeline
from tracekit.rules import report_cache

RECORDING = Path(__file__).parents[1] / "recordings" / "roles"
NAMES = ["trainer", "rollout"]


@pytest.fixture(scope="module")
def run():
    return tracekit.load(RECORDING, cache=False)


def test_each_role_is_a_run_of_its_own(run):
    assert list(run.roles) == NAMES
    assert [role_run.ranks for role_run in run.roles.values()] == [(0, 1), (0,)]
    assert [role_run.manifest["role"] for role_run in run.roles.values()] == NAMES
    assert [role_run.table("steps")["step"].unique().sort().to_list() for role_run in run.roles.values()] == [
        [2, 3, 4, 5]
    ] * 2


def test_each_waits_for_the_other_in_its_annotation(run):
    waits = run.table("role_waits")
    assert waits.select("role", "working_role", "annotation").rows() == [
        ("trainer", "rollout", "wait for rollouts"),
        ("rollout", "trainer", "wait for weights"),
    ]
    # They alternate: what one waits is about what the other works.
    for wait_ns, other_work_ns in waits.select("wait_ns", "other_work_ns").iter_rows():
        assert 0.9 * other_work_ns <= wait_ns <= other_work_ns
    parts = waits.select("work_ns", "wait_ns", "both_idle_ns").sum_horizontal()
    assert (parts <= waits["common_ns"] * 1.01).all()


def test_one_finding_of_each_role_names_the_other(run):
    for role, other in zip(NAMES, reversed(NAMES), strict=True):
        report = run.roles[role].check()
        finding = next(finding for finding in report.findings if finding.code == "ROLE001")
        assert finding.claim == f"{role} waits for {other}"
        assert finding.severity.label == "warning"
        assert finding.impact == pytest.approx(run.roles[role].table("role_waits").filter(role=role)["wait_ratio"][0])
        assert finding.evidence["annotation"][0] in ("wait for rollouts", "wait for weights")
        # What the host and late ranks lose in these waits is the same trouble.
        on_host = [other for other in report.findings if other.code == "HOST001"]
        assert [other.consequence_of for other in on_host] == ["ROLE001"] * len(on_host)


def test_a_run_is_compared_with_the_same_role_of_a_path(run):
    for role_run in run.roles.values():
        compared = role_run.compare(RECORDING).compared
        assert {change.change for change in compared.changes if change.change is not None} == {0.0}


def test_a_role_is_compared_with_a_run_of_one_program_but_not_with_another_role(run, tmp_path):
    rollout = run.roles["rollout"]
    plain = shutil.copytree(RECORDING / "rollout", tmp_path / "plain")
    (plain / "run.json").unlink()
    compared = rollout.compare(plain).compared
    assert {change.change for change in compared.changes if change.change is not None} == {0.0}
    renamed = shutil.copytree(RECORDING, tmp_path / "renamed")
    manifest = renamed / "rollout" / "run.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"role": "evaluation"}))
    with pytest.raises(InputError, match="evaluation"):
        rollout.compare(renamed)


def test_names_only_label(tmp_path):
    for number, file in enumerate(sorted(RECORDING.rglob("*.json.gz"))):
        shutil.copy(file, tmp_path / f"{'gen' if file.parent.name == 'rollout' else 'learn'}-{number}.pt.trace.json.gz")
    run = tracekit.load(tmp_path, cache=False)
    assert list(run.roles) == ["learn", "gen"]
    assert run.table("role_waits")["annotation"].to_list() == ["wait for rollouts", "wait for weights"]


def test_roles_in_an_archive_and_of_a_pattern(run, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "job"), "gztar", RECORDING)
    packed = tracekit.load(archive, cache=False)
    assert [role_run.path for role_run in packed.roles.values()] == [f"{archive}/{name}" for name in NAMES]
    assert packed.table("role_waits").equals(run.table("role_waits"))
    by_pattern = tracekit.load(str(RECORDING / "*" / "*.json.gz"), cache=False)
    assert [role_run.path for role_run in by_pattern.roles.values()] == [str(RECORDING / name) for name in NAMES]


def test_a_role_alone_is_a_run_without_roles():
    run = tracekit.load(RECORDING / "trainer", cache=False)
    assert (run.roles, run.role, run.name) == ({}, "", "trainer")
    assert run.table("role_waits").is_empty()
    assert [finding.code for finding in run.check().findings if finding.code == "ROLE001"] == []


def test_check_judges_each_role_and_exits_with_the_worst(tmp_path):
    out = tmp_path / "reports.json"
    done = run_command("check", RECORDING, "--no-cache", "--format", "json", "--out", out)
    assert done.returncode == 0
    reports = json.loads(out.read_text(encoding="utf-8"))["reports"]
    assert [report["run"]["path"] for report in reports] == [str(RECORDING / name) for name in NAMES]
    failing = run_command("check", RECORDING, "--no-cache", "--fail-on", "warning", "--select", "ROLE001")
    assert failing.returncode == 1
    assert "trainer ROLE001, rollout ROLE001" in failing.stderr


def test_a_baseline_needs_one_role():
    done = run_command("check", RECORDING, "--no-cache", "--baseline", RECORDING)
    assert done.returncode == 2
    assert "--role" in done.stderr
    alone = run_command("check", RECORDING / "rollout", "--no-cache", "--baseline", RECORDING / "rollout")
    assert alone.returncode == 0


def test_a_role_is_compared_with_that_of_a_baseline(tmp_path):
    out, baseline = tmp_path / "report.json", tmp_path / "baseline.json"
    saved = run_command("baseline", "save", RECORDING, "--no-cache", "--role", "rollout", "--out", baseline)
    assert saved.returncode == 0
    assert json.loads(baseline.read_text(encoding="utf-8"))["fingerprint"]["role"] == "rollout"
    judge = ("check", RECORDING, "--no-cache", "--baseline", baseline, "--format", "json", "--out", out)
    assert run_command(*judge, "--role", "rollout").returncode == 0
    assert json.loads(out.read_text(encoding="utf-8"))["run"]["role"] == "rollout"
    assert run_command(*judge, "--role", "trainer").returncode == 4


@pytest.mark.parametrize("command", [("summary",), ("whatif",), ("query", "SELECT * FROM steps")])
def test_a_command_reads_the_role_that_is_named(command, tmp_path):
    out = tmp_path / "answer.json"
    name, *words = command
    options = ("--no-cache", "--format", "json", "--out", out)
    answers = []
    for path, role in ((RECORDING, ("--role", "rollout")), (RECORDING / "rollout", ()), (RECORDING, ())):
        assert run_command(name, path, *words, *role, *options).returncode == 0
        answers.append(json.loads(out.read_text(encoding="utf-8")))
    named, alone, by_default = answers
    if name != "whatif":  # the wait for the other role, which the folder of a role alone does not show, has a price
        assert named == alone
    assert named != by_default


def test_both_sides_of_a_comparison_are_of_one_role(tmp_path):
    out = tmp_path / "comparison.json"
    options = ("--no-cache", "--role", "rollout", "--format", "json", "--out", out)
    assert run_command("compare", RECORDING, RECORDING / "rollout", *options).returncode == 0
    compared = json.loads(out.read_text(encoding="utf-8"))
    assert (compared["reference"], compared["candidate"]) == ("rollout", "rollout")
    assert [change["reference"] for change in compared["changes"]] == [
        change["candidate"] for change in compared["changes"]
    ]


def test_a_role_that_does_not_exist_is_refused():
    done = run_command("summary", RECORDING, "--no-cache", "--role", "rollouts")
    assert done.returncode == 2
    assert "trainer, rollout" in done.stderr
    of_one_program = run_command("summary", RECORDING / "trainer", "--no-cache", "--role", "rollout")
    assert of_one_program.returncode == 2


def test_a_history_has_a_series_of_each_role(tmp_path):
    database = tmp_path / "history.duckdb"
    assert run_command("history", "add", RECORDING, "--no-cache", "--db", database).returncode == 0
    out = tmp_path / "history.json"
    assert run_command("history", "show", "--db", database, "--format", "json", "--out", out).returncode == 0
    groups = json.loads(out.read_text(encoding="utf-8"))["groups"]
    assert sorted(group["identity"]["role"] for group in groups) == ["rollout", "trainer"]


def test_watch_follows_the_role_that_is_named(tmp_path):
    for name in NAMES:
        (tmp_path / name).mkdir()
        shutil.copy(RECORDING / name / "run.json", tmp_path / name)
        (tmp_path / name / "rank00000.metrics.jsonl").write_text('{"step": 1, "dur_ns": 5000000, "start_ns": 1}\n')
    assert run_command("watch", tmp_path, "--once").returncode == 2
    shown = run_command("watch", tmp_path, "--once", "--role", "rollout", "--format", "json")
    assert shown.returncode == 0
    assert json.loads(shown.stdout)["name"] == "rollout"
    assert run_command("watch", tmp_path, "--once", "--role", "evaluator").returncode == 2


def test_summary_by_role(tmp_path):
    out = tmp_path / "roles.json"
    run_command("summary", RECORDING, "--no-cache", "--by", "role", "--format", "json", "--out", out)
    assert [row["role"] for row in json.loads(out.read_text(encoding="utf-8"))] == NAMES


def test_one_timeline_has_all_roles_on_one_clock(run, tmp_path):
    joined = timeline.join_roles(run)
    assert joined.labels == {0: "trainer rank 0", 1: "trainer rank 1", 2: "rollout rank 0"}
    scene = timeline.open_scene(joined.run, folder=tmp_path)
    assert scene.tracks["rank"].unique().sort().to_list() == [0, 1, 2]
    steps = scene.bands.filter(kind="step").group_by("rank").agg("start_ns", "end_ns").sort("rank")
    assert steps["start_ns"].list.len().to_list() == [4, 4, 4]
    # The steps of both roles overlap in time, each on the clock of its file.
    trainer, rollout = steps.row(0, named=True), steps.row(2, named=True)
    assert max(trainer["start_ns"][0], rollout["start_ns"][0]) < min(trainer["end_ns"][-1], rollout["end_ns"][-1])
    page = run.timeline().page
    packed = re.search(r'id="timeline-data">([A-Za-z0-9+/=]+)</script>', page)[1]
    assert b'"2": "rollout rank 0"' in gzip.decompress(base64.b64decode(packed))


def test_a_stored_report_of_files_in_one_folder_has_its_role_and_the_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEKIT_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "job"
    folder.mkdir()
    for file in RECORDING.rglob("*.json.gz"):
        shutil.copy(file, folder / f"{file.parent.name}-{file.name}")
    first, again = (report_cache.report(str(folder)) for _ in range(2))
    assert [report.run.name for report in (first, again)] == ["job (trainer)"] * 2
    assert [finding.id for finding in again.findings] == [finding.id for finding in first.findings]
    assert again.run.table(role_waits.role_waits).equals(first.run.table(role_waits.role_waits))
    assert first.run.roles
    assert not again.run.roles  # it was read from the store


def test_the_report_of_a_role_in_a_folder_below_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEKIT_CACHE_DIR", str(tmp_path))
    report_cache.report(str(RECORDING))
    assert report_cache.summary(str(RECORDING)) is None


def test_waits_do_not_depend_on_the_role_that_was_loaded(run):
    by_rollout = tracekit.load(RECORDING, cache=False, role="rollout")
    assert by_rollout.table(role_waits.role_waits).equals(run.table(role_waits.role_waits))

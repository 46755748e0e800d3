"""Checks against baselines on recorded runs, as CI makes them: exit codes, verdicts, files on disk."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest

from tests.support import loaded_runs
from tests.support.cli_runner import ROOT, only_line, tracekit
from tracekit.report import baseline_json as saved
from tracekit.report import json as report_json

runs_loaded_once = loaded_runs.runs_loaded_once
pytestmark = pytest.mark.usefixtures("runs_loaded_once")

SAMPLES = ROOT / "sample_traces"
FAULTS = SAMPLES / "faults"
FEW = ("--select", "MEM010")
"""The rules of checks that are about metrics."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, runs_loaded_once: None) -> Path:
    """Return a folder with a baseline of each healthy sample that the tests hold others against."""
    made = tmp_path_factory.mktemp("gate")
    for name in ("healthy-ddp", "healthy-save"):
        done = tracekit("baseline", "save", FAULTS / name, "--out", made / f"{name}.json")
        assert (done.returncode, done.stdout) == (0, "")
        assert f"1 recording of {name}" in only_line(done)
    return made


def gate(*arguments: object, cwd: Path | None = None) -> tuple[int, dict]:
    """Return exit code and gate of a check, after validating its report against the published schema."""
    done = tracekit("check", *arguments, "--format", "json", cwd=cwd)
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(json.loads(report_json.schema())).validate(document)
    return done.returncode, document["gate"]


def test_a_recorded_baseline_is_small_and_obeys_its_schema(folder: Path) -> None:
    for path in folder.glob("*.json"):
        assert path.stat().st_size < 40_000
        jsonschema.Draft202012Validator(json.loads(saved.schema())).validate(json.loads(path.read_text()))


def test_a_run_passes_against_its_own_baseline(folder: Path) -> None:
    for against in (folder / "healthy-ddp.json", FAULTS / "healthy-ddp"):
        code, result = gate(FAULTS / "healthy-ddp", "--baseline", against, "--fail-on", "info")
        assert (code, result["passed"], result["failures"], result["fixed"]) == (0, True, [], [])
        assert {each["standing"] for each in result["findings"]} <= {"known"}
        assert result["baseline"] == "healthy-ddp"


def test_recorded_churn_fails_and_its_cause_is_memory(folder: Path) -> None:
    code, result = gate(FAULTS / "churn", "--baseline", folder / "healthy-ddp.json")
    assert code == 1
    assert result["failures"] == ["allocated_bytes", "peak_allocated_bytes"]
    assert result["causes"][0]["name"] == "memory"
    assert "in forward" in result["causes"][0]["message"]
    by_name = {each["metric"]: each for each in result["metrics"]}
    assert by_name["allocated_bytes"]["fails"]
    assert by_name["sent_bytes"]["verdict"] == "same"


def test_the_text_says_first_that_it_failed_and_why(folder: Path) -> None:
    done = tracekit("check", FAULTS / "churn", "--baseline", folder / "healthy-ddp.json")
    assert done.stdout.startswith("Failed: 2 metrics worse than healthy-ddp\n")
    assert "  Why memory: A step allocates" in done.stdout
    assert done.stderr == "tracekit: the check fails: allocated_bytes, peak_allocated_bytes\n"
    assert "new" in done.stdout
    assert "worse, fails" in done.stdout


def test_new_findings_fail_from_the_chosen_severity_on(folder: Path) -> None:
    against = ("--baseline", folder / "healthy-save.json")
    code, result = gate(FAULTS / "small-tensors", *against, "--fail-on", "never")
    assert (code, result["failures"]) == (0, [])
    # They cost 5% of the step more than before, and therefore fail below the severity too.
    for options in ((), ("--fail-on", "warning")):
        code, result = gate(FAULTS / "small-tensors", *against, *options)
        assert code == 1
        assert {"CKPT001", "CKPT002"} <= set(result["failures"])
    standings = {each["id"]: each["standing"] for each in result["findings"]}
    assert (standings["CKPT001"], standings["CKPT002"]) == ("worse", "new")


def test_a_run_of_another_training_is_refused_with_the_fields_that_differ(folder: Path) -> None:
    done = tracekit("check", FAULTS / "no-prefetch", "--baseline", folder / "healthy-ddp.json")
    assert (done.returncode, done.stdout) == (4, "")
    assert "strategy differs: ddp in the baseline healthy-ddp, fsdp2 in no-prefetch" in only_line(done)
    code, result = gate(FAULTS / "no-prefetch", "--baseline", folder / "healthy-ddp.json", "--allow-different", *FEW)
    assert code == 1
    assert any("strategy differs" in note for note in result["notes"])


def test_a_file_that_is_no_baseline_is_named_in_one_line(folder: Path, tmp_path: Path) -> None:
    text = (folder / "healthy-ddp.json").read_text()
    spoiled = {
        "cut.json": text[: len(text) // 2],
        "report.json": '{"schema":"tracekit.report/2"}',
        "nan.json": text.replace('"values":[[', '"values":[[NaN,', 1),
        "empty.json": "",
    }
    for name, words in spoiled.items():
        (tmp_path / name).write_text(words)
        done = tracekit("check", FAULTS / "healthy-ddp", "--baseline", tmp_path / name)
        assert (done.returncode, done.stdout) == (2, "")
        assert name in only_line(done)
    assert tracekit("check", FAULTS / "healthy-ddp", "--baseline", tmp_path / "absent.json").returncode == 2


def test_a_regressed_run_becomes_the_baseline_only_by_name(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "main.json"
    shutil.copy(folder / "healthy-ddp.json", path)
    before = path.read_bytes()
    refused = tracekit("baseline", "update", path, FAULTS / "churn")
    assert refused.returncode == 1
    assert "allocated_bytes, peak_allocated_bytes got worse" in only_line(refused)
    half = tracekit("baseline", "update", path, FAULTS / "churn", "--accept", "allocated")
    assert half.returncode == 1
    assert path.read_bytes() == before
    done = tracekit("baseline", "update", path, FAULTS / "churn", "--accept", "allocated,peak_allocated_bytes")
    assert done.returncode == 0
    assert "replaced, because allocated_bytes, peak_allocated_bytes changed" in only_line(done)
    assert gate(FAULTS / "churn", "--baseline", path)[0] == 0


def test_the_same_recording_is_not_added_twice(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "main.json"
    shutil.copy(folder / "healthy-ddp.json", path)
    done = tracekit("baseline", "update", path, FAULTS / "healthy-ddp")
    assert done.returncode == 0
    assert "it stays as it is; 1 recording" in only_line(done)


def test_a_baseline_is_shown(folder: Path) -> None:
    done = tracekit("baseline", "show", folder / "healthy-ddp.json")
    assert done.returncode == 0
    assert "model.layers" in done.stdout
    assert json.loads(tracekit("baseline", "schema").stdout)["$id"] == "tracekit.baseline/1"


def test_repeat_adds_recordings_to_the_comparison(folder: Path) -> None:
    _, result = gate(
        FAULTS / "churn", "--repeat", FAULTS / "healthy-ddp", "--baseline", folder / "healthy-ddp.json", *FEW
    )
    (allocated,) = (each for each in result["metrics"] if each["metric"] == "allocated_bytes")
    assert allocated["candidate_samples"] == 4
    both = tracekit("check", FAULTS / "churn", FAULTS / "healthy-ddp", "--repeat", FAULTS / "churn")
    assert both.returncode == 2


def test_the_guide_shows_what_is_printed(folder: Path) -> None:
    guide = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    shown = guide.partition("$ tracekit check churn --baseline main.json --select MEM010\n")[2].partition(
        "\n\n**Why**"
    )[0]
    against = ("--baseline", folder / "healthy-ddp.json", "--select", "MEM010")
    printed = tracekit("check", FAULTS / "churn", *against, COLUMNS="100").stdout.partition("\n\ntime  ")[0]
    assert [line.removeprefix("    ") for line in shown.splitlines()] == printed.rstrip().splitlines()


# Budgets -------------------------------------------------------------------------------------------------------------


def settings(folder: Path, text: str) -> Path:
    (folder / "tracekit.toml").write_text(text)
    return folder


def test_budgets_in_the_settings_fail_a_check_without_a_baseline(tmp_path: Path) -> None:
    run = SAMPLES / "demo-yafsdp"
    here = settings(
        tmp_path,
        """
        [budget]
        step_time = "200ms"
        exposed_communication_ratio = 0.5
        peak_reserved = "70GiB"
        checkpoint_overhead_ratio = 0.01

        [[budget.where]]
        unit = "layers.*"
        exposed_communication = "1ms"
        """,
    )
    code, result = gate(run, "--select", "COMM001", cwd=here)
    outcomes = {each["budget"]: (each["outcome"], each["fails"]) for each in result["budgets"]}
    assert code == 1
    assert outcomes == {
        "step_time": ("broken", True),
        "exposed_communication_ratio": ("met", False),
        "peak_reserved": ("inconclusive", False),
        "checkpoint_overhead_ratio": ("broken", True),
        "exposed_communication of layers.*": ("broken", True),
    }
    strict = tracekit("check", run, "--strict", "--select", "COMM001", cwd=here)
    assert strict.stdout.startswith("Failed: 4 budgets broken\n")
    assert "at most 200 ms is allowed" in strict.stdout
    assert "inconclusive, which fails: strict" in strict.stdout


def test_an_invalid_budget_is_an_error_with_file_and_key(tmp_path: Path) -> None:
    here = settings(tmp_path, '[budget]\nstep_time = "412 MiB"\n')
    done = tracekit("check", SAMPLES / "demo-fsdp2", cwd=here)
    assert done.returncode == 2
    assert "tracekit.toml: budget: step_time: expected text of a number and a unit" in only_line(done)


def test_which_metrics_fail_is_a_setting(folder: Path, tmp_path: Path) -> None:
    here = settings(tmp_path, '[baseline]\nmetrics = ["step_time", "sent"]\n')
    assert gate(FAULTS / "churn", "--baseline", folder / "healthy-ddp.json", *FEW, cwd=here)[0] == 0
    wrong = settings(tmp_path, '[baseline]\nmetrics = ["step_tim"]\n')
    done = tracekit("check", FAULTS / "churn", cwd=wrong)
    assert "baseline.metrics: step_tim is not a metric: did you mean step_time?" in only_line(done)

"""`tracekit tune`: proposals for samples, trials of a simulated trainer whose best options are known, hostile input."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration import recorded
from tests.support import cli_runner
from tests.support.cli_runner import ROOT, tracekit
from tests.support.selection import others_in_accuracy
from tracekit.tune import recording, trials
from tracekit.tune.configuration import Configuration

SAMPLES = ROOT / "sample_traces"
SCRIPTS = Path(__file__).parent / "scripts"
TRAINER = (sys.executable, SCRIPTS / "simulated_trainer.py", "instrumented_trainers")
ALL = sorted(str(path.parent.relative_to(SAMPLES)) for path in SAMPLES.glob("**/run.json"))


def proposals(run: object, *words: object) -> dict[str, Any]:
    done = tracekit("tune", run, "--format", "json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the simulated trainer without options."""
    run = tmp_path_factory.mktemp("tune") / "run"
    subprocess.run([*map(str, TRAINER), "--out", str(run)], env=cli_runner.environment(), check=True)
    return run


def tuned(run: Path, out: Path, *options: object, trouble: str = "", **variables: str) -> dict[str, Any]:
    """Result of trials of the simulated trainer."""
    words = ("--trouble", trouble) if trouble else ()
    done = tracekit(
        "tune", run, "--run", "--out", out, *options, "--format", "json", "--", *TRAINER, *words, **variables
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((out / "tune.json").read_text()) == result
    assert {"report.html", "report.md", "report.txt"} < {path.name for path in out.iterdir()}
    return result


@pytest.mark.parametrize("name", others_in_accuracy(ALL, ["demo-fsdp2", "ci/red", "faults/slow-disk", "gpu/slow-rank"]))
def test_each_sample_has_an_answer(name: str) -> None:
    result = proposals(SAMPLES / name)
    assert result["step_ns"] > 0
    for row in result["proposals"]:
        assert 0 <= row["predicted_ns"] <= row["step_ns"]
        assert 0.01 <= row["saved_ratio"] <= 1
    exact = [round(row["saved_ratio"], 3) for row in result["proposals"] if not row["is_upper_bound"]]
    assert exact == sorted(exact, reverse=True)


def test_proposals_state_the_saving_of_what_if() -> None:
    by_change = {row["change"]: row for row in proposals(SAMPLES / "demo-fsdp2")["proposals"]}
    answers = json.loads(tracekit("whatif", SAMPLES / "demo-fsdp2", "--format", "json").stdout)["without"]
    without = {answer["cause"]: answer["without_ns"] for answer in answers}
    assert by_change["fsdp-prefetch"]["predicted_ns"] == without["communication"]
    assert by_change["background-save"]["predicted_ns"] == pytest.approx(without["checkpoint"], rel=0.01)
    assert by_change["fsdp-prefetch"]["text"].startswith("--prefetch")


FAULTS = (
    ("no-prefetch", "fsdp-prefetch", 5),
    ("dataloader-stall", "dataloader-workers", 5),
    ("allocator-retry", "expandable-segments", 4),
    ("needless-recomputation", "recomputed-layers", 5),
    ("serialized-communicators", "device-queues", 5),
    ("checkpoint-stall", "background-save", 1),
)
"""A fault, the change that mends it, and how many of five steps it makes longer."""


@pytest.mark.parametrize(("fault", "change", "steps"), others_in_accuracy(FAULTS, [FAULTS[1], FAULTS[3]]))
def test_the_saving_is_that_of_a_simulation_without_the_fault(
    tmp_path: Path, fault: str, change: str, steps: int
) -> None:
    size = ("--strategy", "fsdp2", "--gpus", "8", "--layers", "4", "--steps", "5", "--ranks-written", "4")
    assert tracekit("simulate", *size, "--fault", fault, "--out", tmp_path / "run").returncode == 0
    (row, *_) = [row for row in proposals(tmp_path / "run")["proposals"] if row["change"] == change]
    truth = json.loads((tmp_path / "run" / "truth.json").read_text())["faults"][0]
    assert truth["fault"] == fault
    assert row["step_ns"] - row["predicted_ns"] == pytest.approx(truth["cost_ns"] * steps / 5, rel=0.05)


def test_workers_load_a_batch_in_their_share_of_its_time() -> None:
    rows = [row for row in proposals(SAMPLES / "ci/red")["proposals"] if row["change"] == "dataloader-workers"]
    answers = json.loads(tracekit("whatif", SAMPLES / "ci/red", "--format", "json").stdout)["without"]
    (loading,) = [answer for answer in answers if answer["cause"] == "data-loading"]
    assert len(rows) == 2
    for row in rows:
        assert row["predicted_ns"] == max(loading["without_ns"], loading["saved_ns"] // int(row["value"]))


def test_arguments_of_the_settings_are_used(tmp_path: Path) -> None:
    settings = tmp_path / "mine.toml"
    settings.write_text('[tune.arguments]\ndataloader_workers = "--num-workers {value} -p"\n')
    (first, *_) = proposals(SAMPLES / "ci/red", "--config", settings)["proposals"]
    assert (first["change"], first["way"]) == ("dataloader-workers", "argument")
    assert first["text"] == f"--num-workers {first['value']} -p"


def test_patches_are_written_and_not_applied(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loader = DataLoader(data)\n")
    result = tracekit("tune", SAMPLES / "ci/red", "--out", tmp_path / "out", "--", "python", script)
    assert result.returncode == 0, result.stderr
    (patch, *_) = sorted((tmp_path / "out").glob("dataloader-workers*.patch"))
    assert "+loader = DataLoader(data, num_workers=" in patch.read_text()
    assert script.read_text() == "loader = DataLoader(data)\n"


def test_what_is_faster_is_kept_and_what_is_slower_is_not(slow_run: Path, tmp_path: Path) -> None:
    result = tuned(slow_run, tmp_path / "out", "--pairs", "2", trouble="slower")
    outcomes = {(trial["change"], trial["value"]): trial["outcome"] for trial in result["trials"]}
    assert outcomes["fsdp-prefetch", "1"] == "kept"
    assert outcomes["keep-gathered", "on"] == "worse"
    assert result["kept_command"] == [*map(str, TRAINER), "--trouble", "slower", "--prefetch", "1"]
    kept = next(trial for trial in result["trials"] if trial["outcome"] == "kept")
    low, high = kept["interval"]
    assert 0 < low <= kept["measured_ratio"] <= high
    assert result["saved_ratio"] == pytest.approx(kept["measured_ratio"])
    order = sorted(Path(name).name for name in (*kept["reference_runs"], *kept["candidate_runs"]))
    assert order[:4] == ["01-reference", "02-candidate", "03-candidate", "04-reference"]


TROUBLES = (("fail", "out of memory"), ("killed", "SIGKILL"), ("hang", "did not end"))


@pytest.mark.parametrize(("trouble", "note"), others_in_accuracy(TROUBLES, [("killed", "SIGKILL")]))
def test_a_change_that_breaks_the_command_is_not_kept(
    slow_run: Path, tmp_path: Path, trouble: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_LEAST_LIMIT_S", 1.0)
    result = tuned(slow_run, tmp_path / "out", "--risk", "memory", trouble=trouble)
    (broken,) = [trial for trial in result["trials"] if trial["change"] == "keep-gathered"]
    assert broken["outcome"] == "failed"
    assert note in broken["note"]
    assert "\x1b" not in broken["note"]


def test_a_recording_ends_at_its_limit(tmp_path: Path) -> None:
    script = "import time; print('begun', flush=True); time.sleep(600)"
    for words in ((sys.executable, "-c", script), (sys.executable, "-c", script, "instrumented_trainers")):
        folder = tmp_path / str(len(words))
        done = recording.record(Configuration(words), folder, steps="1:2", limit_s=1.0)
        assert done.is_out_of_time


def test_the_budget_ends_the_trials(slow_run: Path, tmp_path: Path) -> None:
    result = tuned(slow_run, tmp_path / "out", "--budget", "0.0001")
    (stopped,) = result["trials"]
    assert stopped["outcome"] == "stopped"
    assert result["kept_command"] == [*map(str, TRAINER)]
    assert len(result["left"]) == len(result["proposals"]) - 1


def test_risk_limits_what_is_tried(slow_run: Path, tmp_path: Path) -> None:
    result = tuned(slow_run, tmp_path / "out", "--risk", "same", "--pairs", "1")
    assert {trial["risk"] for trial in result["trials"]} <= {"same"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_and_leaves_a_report(slow_run: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    words = ["tune", slow_run, "--run", "--out", out, "--", *TRAINER, "--trouble", "always-hang"]
    process = subprocess.Popen(
        cli_runner.command(*words),
        env=cli_runner.environment(),
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a job in the background ignores SIGINT
    )
    recorded.wait_until(lambda: any(file.read_text() for file in out.glob("*/*.pid")))
    (file,) = out.glob("*/*.pid")
    process.send_signal(number)
    assert process.wait(cli_runner.TIMEOUT_S) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
    assert json.loads((out / "tune.json").read_text())["trials"][0]["outcome"] == "stopped"


def test_a_command_that_fails_by_itself_is_an_error(slow_run: Path, tmp_path: Path) -> None:
    done = tracekit("tune", slow_run, "--run", "--out", tmp_path / "out", "--", *TRAINER, "--trouble", "always-fail")
    assert done.returncode == 2
    assert "out of memory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--run",),
        ("--run", "--out", "{out}", "--", "no-such-program", "instrumented_trainers"),
        ("--run", "--budget", "nan", "--", "true"),
        ("--run", "--budget", "-1", "--", "true"),
        ("--run", "--budget", "1e300", "--", "true"),
        ("--run", "--steps", "5:5", "--", "true"),
        ("--run", "--steps", "none", "--", "true"),
        ("--run", "--out", "{full}", "--", "true"),
        ("--run", "--out", "{full}/file", "--", "true"),
        ("--run", "--out", "{out}", "--", "true", "instrumented_trainers"),
        ("--pairs", "0"),
        ("--config", "{bad}"),
        ("--config", "{odd}"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_used_is_refused(slow_run: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    full, bad, odd = tmp_path / "full", tmp_path / "bad.toml", tmp_path / "odd.toml"
    full.mkdir()
    (full / "file").touch()
    bad.write_text('[tune.arguments]\nworkers = "--num-workers {value}"\n')
    odd.write_text('[tune.arguments]\ncompile = "--compile=\'"\n')
    places = {"out": tmp_path / "out", "full": full, "bad": bad, "odd": odd}
    done = tracekit("tune", slow_run, *(word.format(**places) for word in words), cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("tune-*"))
    assert [path.name for path in full.iterdir()] == ["file"]


def test_a_plain_script_is_recorded_with_the_users_argument(tmp_path: Path) -> None:
    """One pair of recordings through the recorder: what they decide depends on the machine, not what was recorded."""
    pytest.importorskip("torch")
    settings, script = tmp_path / "mine.toml", SCRIPTS / "tuned_training.py"
    settings.write_text('[tune.arguments]\ndataloader_workers = "--fast-data {value}"\n')
    options = ("--config", settings, "--pairs", "1", "--steps", "3:6", "--out", tmp_path / "out", "--format", "json")
    done = tracekit("tune", SAMPLES / "ci/red", "--run", *options, "--", sys.executable, script)
    assert done.returncode == 0, done.stderr
    trial = json.loads(done.stdout)["trials"][0]
    assert trial["change"] == "dataloader-workers"
    assert trial["measured_ratio"] is not None
    (reference,), (candidate,) = trial["reference_runs"], trial["candidate_runs"]
    commands = [json.loads(Path(run, "run.json").read_text())["command"] for run in (reference, candidate)]
    assert "--fast-data" not in commands[0]
    assert commands[1][-2:] == ["--fast-data", trial["value"]]

"""``tracekit simulate`` as it is called."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tracekit import cli
from tracekit.simulate.faults import FAULTS


def _simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tracekit", "simulate", *arguments], capture_output=True, text=True, check=False
    )


def test_the_command_writes_a_run_with_its_truth_and_says_what_it_did(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--strategy", "fsdp1", "--model", "llama2-7b", "--layers", "3", "--gpus", "16", "--seq", "2048")
    done = _simulate(
        *options, "--steps", "2", "--ranks-written", "2", "--seed", "7", "--fault", "slow-rank:1:1.4", "--out", str(out)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Simulated: fsdp1, 7b with 3 layers on 16 a100-80; 2 steps of ")
    truth = json.loads((out / "truth.json").read_text())
    assert truth["arguments"]["seed"] == 7
    assert truth["faults"][0]["ranks"] == [1]
    assert json.loads((out / "run.json").read_text())["simulated"] is True


def test_the_faults_are_listed_one_a_line_name_first() -> None:
    names = [line.split()[0] for line in _simulate("--list-faults").stdout.splitlines()]
    assert names == list(FAULTS)
    assert len(names) >= 10
    assert all(name == name.lower() for name in names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--strategy", "fsdp3"), "'fsdp3' is not a strategy; known: ddp, fsdp1"),
        (("--model", "gpt"), "'gpt' is not a known model"),
        (("--hardware", "tpu"), "'tpu' is unknown hardware"),
        (("--model", "llama2-70b", "--gpus", "8"), "70b needs about"),
        (("--gpus", "1"), "--gpus is 1"),
        (("--strategy", "hsdp", "--gpus", "12"), "needs several full nodes of 8 GPUs"),
        ((), "no output folder given"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ("--out", str(tmp_path / "run")) if options else ()
    monkeypatch.setattr(sys, "argv", ["tracekit", "simulate", *options, *out])
    with pytest.raises(SystemExit) as left:
        cli.main()
    errors = capsys.readouterr().err
    assert left.value.code == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "run").exists()

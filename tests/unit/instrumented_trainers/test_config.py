import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from instrumented_trainers.config import TrainingConfig, parse, settings
from instrumented_trainers.faults import FAULTS
from instrumented_trainers.parallelism import STRATEGIES
from tests.support.wording import Wording

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
ROOT = Path(__file__).parents[3]
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from instrumented_trainers.__main__ import main; sys.exit(main())"
)
REQUIRED = ["--strategy", "ddp", "--out", "runs/x"]
PIPELINE = [*REQUIRED, "--world-size", "2", "--pp", "2"]


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_options_become_fields_of_the_config() -> None:
    config = parse([*REQUIRED, "--world-size", "3", "--steps", "7", "--precision", "bf16", "--no-memory", "--resume"])
    assert (config.strategy, config.out, config.world_size, config.steps) == ("ddp", Path("runs/x"), 3, 7)
    assert (config.precision, config.memory, config.resume) == ("bf16", False, "newest")


def test_overrides_replace_options_under_their_full_names() -> None:
    config = parse([*REQUIRED, "--resume", "--override", "lr=1e-4", "--override", "weight-decay=0", "--steps", "9"])
    assert (config.learning_rate, config.weight_decay, config.steps) == (1e-4, 0.0, 9)
    assert config.override == ("learning_rate=0.0001", "weight_decay=0.0")


def test_missing_options_have_the_defaults_of_the_config() -> None:
    parsed = parse(REQUIRED)
    default = TrainingConfig(strategy="ddp", out=Path("runs/x"), device=parsed.device, world_size=parsed.world_size)
    assert parsed == default


def test_the_launchers_world_size_has_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert parse([*REQUIRED, "--device", "cpu"]).world_size == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "x"], "--strategy"),
        (["--strategy", "zero9", "--out", "x"], "zero9"),
        ([*REQUIRED, "--steps", "0"], "--steps: '0' is not a whole number of 1 or more"),
        ([*REQUIRED, "--batch", "two"], "--batch: 'two'"),
        ([*REQUIRED, "--learning-rate", "-1"], "--learning-rate -1: takes more than 0"),
        ([*REQUIRED, "--learning-rate", "nan"], "--learning-rate nan: takes more than 0"),
        ([*REQUIRED, "--dropout", "2"], "--dropout 2: takes from 0 to below 1"),
        ([*REQUIRED, "--max-norm", "-1"], "--max-norm -1: takes more than 0, or 0 not to clip"),
        ([*REQUIRED, "--beta2", "1"], "--beta2 1: takes from 0 to below 1"),
        ([*REQUIRED, "--resume", "--override", "lr=-1"], "--learning-rate -1"),
        ([*REQUIRED, "--reentrant"], "--reentrant: recomputes nothing without --checkpoint-layers N"),
        ([*REQUIRED, "--keep-gathered"], "--keep-gathered: ddp gathers no weights"),
        ([*REQUIRED, "--data", "/dev/null"], "--data /dev/null: is no regular file"),
        ([*REQUIRED, "--data", "nowhere.txt"], "--data nowhere.txt: no such file"),
        ([*REQUIRED, "--eval-every", "2"], "--eval-every: on which text? Add --eval-data FILE or --eval-split 0.05"),
        ([*REQUIRED, "--eval-split", "0.1"], "the model is never evaluated; add --eval-every N"),
        ([*REQUIRED, "--eval-split", "0.9"], "--eval-split 0.9: a share of the text from 0 to 0.5"),
        ([*REQUIRED, "--tokenizer", "nowhere.json"], "--tokenizer nowhere.json: no such file"),
        ([*REQUIRED, "--train-tokenizer", "100"], "--train-tokenizer 100: bytes alone are 257 tokens"),
        ([*REQUIRED, "--separator", "</s>"], "--separator: only with --tokenizer"),
        ([*REQUIRED, "--decay-steps", "3"], "--decay-steps: cosine falls over all steps; only wsd takes it"),
        (["--strategy", "fsdp1", "--out", "x", "--optimizer", "muon"], "FSDP1 shards to flat vectors"),
        ([*REQUIRED, "--resume", "--override", "lr_schedule=up"], "--override lr_schedule=up: invalid choice"),
        ([*REQUIRED, "--checkpoint-layers", "9"], "--checkpoint-layers 9: tiny has 4"),
        ([*REQUIRED, "--stepz", "9"], "--stepz"),
        (["--strategy", "fsdp1", "--out", "x", "--precision", "fp64"], "add --max-norm 0"),
        ([*REQUIRED, "--override", "lr=1e-4"], "--override: only with --resume"),
        ([*REQUIRED, "--resume", "--override", "lrr=1"], "--override lrr=1: NAME=VALUE, NAME one of lr, steps, "),
        ([*REQUIRED, "--resume", "--override", "lr=fast"], "--override lr=fast: invalid float value"),
        ([*REQUIRED, "--memory-report", "--profile-wait", "2"], "add --profile-wait 3"),
        (
            [*REQUIRED, "--fault", "slow-rnak=1:20ms"],
            "'slow-rnak' is not a fault; did you mean slow-rank? Known: slow-rank, ",
        ),
        (
            [*REQUIRED, "--fault", "slow-rank=1"],
            "'' is not a duration such as 20ms, 500us or 1.5s; usage: slow",
        ),
        ([*REQUIRED, "--fault", "slow-rank=9:20ms"], "rank 9 does not exist: there are 2 ranks"),
        ([*REQUIRED, "--fault", "slow-disk=40"], "'40' is not a rate such as 40MB/s or 1GiB/s"),
        ([*REQUIRED, "--fault", "slow-disk=40MB/s:one"], "'one' is not a rank"),
        ([*REQUIRED, "--fault", "no-prefetch"], "ddp gathers no weights"),
        ([*REQUIRED, "--fault", "no-prefetch=2"], "takes no arguments"),
        ([*REQUIRED, "--fault", "churn=0"], "'0' is not a positive integer"),
        ([*REQUIRED, "--fault", "slow-fsync"], "no checkpoint is saved; add --checkpoint-every N"),
        ([*REQUIRED, "--tp", "4", "--world-size", "4"], "--tp 4: cannot divide 2 key and value heads"),
        ([*REQUIRED, "--tp", "2", "--sequence-parallel", "--tokens", "9"], "does not divide the 9 tokens"),
        ([*REQUIRED, "--schedule", "cosine"], "cosine is a schedule of the learning rate: --lr-schedule cosine"),
        ([*REQUIRED, "--schedule", "zbv"], "--schedule zbv: there is no pipeline; add --pp 2 or more"),
        ([*REQUIRED, "--virtual-stages", "2"], "--virtual-stages: there is no pipeline"),
        ([*REQUIRED, "--pp", "3"], "--world-size 2: not divisible by pp × cp × tp = 3"),
        ([*PIPELINE, "--virtual-stages", "2"], "1f1b has 1 stage on each rank; --schedule interleaved has more"),
        ([*PIPELINE, "--schedule", "zbv", "--virtual-stages", "3"], "zbv has 2 stages on each rank"),
        ([*PIPELINE, "--schedule", "zbv", "--micro-batches", "2"], "zbv on 2 ranks needs 3 or more"),
        ([*PIPELINE, "--schedule", "dualpipev"], "dualpipev on 2 ranks needs 4 or more"),
        ([*PIPELINE, "--schedule", "zb-h1", "--micro-batches", "5"], "zb-h1 needs a multiple of --pp 2"),
        ([*PIPELINE, "--model", "micro", "--schedule", "interleaved"], "micro has 2 layers, too few for 4 stages"),
        ([*PIPELINE, "--model", "1b"], "--pp 2: the embedding of 1b is its head, too"),
        ([*PIPELINE, "--strategy", "fsdp1"], "--pp: not with fsdp1"),
        ([*PIPELINE, "--strategy", "fsdp2", "--schedule", "zbv", "--micro-batches", "4"], "zbv: not with fsdp2"),
        ([*PIPELINE, "--checkpoint-layers", "1", "--reentrant"], "--reentrant: not with --pp"),
        ([*PIPELINE, "--strategy", "zero1", "--offload"], "--offload: not with --pp"),
        ([*PIPELINE, "--memory-report"], "--memory-report: has no formula for --pp 2"),
        ([*PIPELINE, "--dry-run"], "--dry-run: has no formula for --pp 2"),
        ([*PIPELINE, "--fault", "slow-stage=2:1.5"], "stage 2 does not exist: there are 2 stages"),
        ([*REQUIRED, "--fault", "slow-stage=0:1.5"], "there is no pipeline; add --pp 2 or more"),
        ([*PIPELINE, "--fault", "slow-stage=0:0.5"], "'0.5' is not a factor above 1"),
        ([*REQUIRED, "--sequence-parallel"], "--sequence-parallel: needs --tp 2 or more"),
        ([*REQUIRED, "--cp", "2", "--tokens", "6"], "--cp 2: cannot divide --tokens 6 into 4 chunks"),
        ([*REQUIRED, "--ep", "2"], "--ep 2: tiny has no experts; add --experts N"),
        ([*REQUIRED, "--ep", "2", "--experts", "3"], "--ep 2: cannot divide 3 experts"),
        ([*REQUIRED, "--cp-method", "ring"], "--cp-method ring: needs --cp 2 or more"),
        ([*REQUIRED, "--capacity", "1.25"], "--capacity 1.25: tiny has no experts; add --experts N"),
        ([*REQUIRED, "--experts", "4", "--capacity", "0"], "--capacity 0: times the mean number of tokens"),
        ([*REQUIRED, "--experts", "4", "--capacity", "1", "--cp", "2"], "--capacity 1: is of whole sequences"),
        (["--strategy", "yafsdp", "--out", "x", "--ep", "2", "--experts", "4"], "--ep: not with yafsdp"),
        (["--strategy", "fsdp1", "--out", "x", "--tp", "2"], "--tp: not with fsdp1"),
        ([*REQUIRED, "--tp", "2", "--optimizer", "muon"], "needs whole matrices; not with --tp or --ep"),
        ([*REQUIRED, "--dry-run", "--cp", "2"], "--dry-run: has no formula for --cp 2"),
        pytest.param([*REQUIRED, "--device", "cuda"], "no GPU", marks=NO_CUDA),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_one_clear_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    complaint = capsys.readouterr().err
    assert stopped.value.code == 2
    assert words in complaint
    assert len(complaint.splitlines()) == 1


def test_an_existing_run_is_not_overwritten_without_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/x").mkdir(parents=True)
    parse(REQUIRED)
    Path("runs/x/run.json").touch()
    with pytest.raises(SystemExit):
        parse(REQUIRED)
    assert "--overwrite" in capsys.readouterr().err
    assert parse([*REQUIRED, "--overwrite"]).overwrite


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "None" not in text
    for field in dataclasses.fields(TrainingConfig):
        option = "--no-memory" if field.name == "memory" else "--" + field.name.replace("_", "-")
        assert option in text


def test_help_explains_each_fault_and_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for fault in FAULTS.values():
        assert fault.__doc__
        said = " ".join(fault.__doc__.partition("\n\n")[0].split())
        assert f"{fault.usage}. {said}".replace("- ", "-") in text.replace("- ", "-")


def test_a_command_line_is_parsed_without_torch() -> None:
    words = ["--strategy", "fsdp2", "--out", "runs/x", "--device", "cpu"]
    program = "import sys; from instrumented_trainers import config, launch; "
    program += f"config.parse({words}); print('torch' in sys.modules)"
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=where, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_strategies_are_those_of_the_engines() -> None:
    assert tuple(STRATEGIES) == settings.STRATEGIES


def test_without_torch_one_line_says_what_to_install(wording: Wording) -> None:
    words, where = [sys.executable, "-c", WITHOUT_TORCH], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    wording(done.stderr)

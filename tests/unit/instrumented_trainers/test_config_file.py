"""Settings from a TOML file, and the resolved settings printed as one."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from instrumented_trainers.config import TrainingConfig, parse

REQUIRED = ["--strategy", "ddp", "--out", "runs/x"]


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def written(text: str) -> list[str]:
    Path("settings.toml").write_text(text, encoding="utf-8")
    return ["--config", "settings.toml"]


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse([*arguments, "--print-config"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2
    words = capsys.readouterr().err
    assert len(words.splitlines()) == 1
    return words


def test_the_command_line_has_priority_over_the_file_and_the_file_over_the_defaults() -> None:
    config = parse([*written('strategy = "fsdp2"\nout = "a"\nsteps = 7\nlearning-rate = 1'), "--steps", "9"])
    assert (config.strategy, config.out, config.steps, config.learning_rate) == ("fsdp2", Path("a"), 9, 1.0)
    assert config.batch == TrainingConfig.batch


def test_a_list_on_the_command_line_replaces_that_of_the_file() -> None:
    file = written('fault = ["host-sync", "churn=2"]')
    assert parse([*REQUIRED, *file]).fault == ("host-sync", "churn=2")
    assert parse([*REQUIRED, *file, "--fault", "dataloader"]).fault == ("dataloader",)


def test_keys_have_dashes_or_underscores() -> None:
    assert parse([*REQUIRED, *written("world_size = 3\nlog-every = 2\nmemory = false")]) == parse(
        [*REQUIRED, "--world-size", "3", "--log-every", "2", "--no-memory"]
    )


def test_the_printed_settings_are_read_back_as_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    text = Path('a "quoted" \\ name, 水.txt')
    text.write_text("x")
    arguments = ["--strategy", "fsdp2", "--out", "runs/x", "--data", str(text), "README", "--resume"]
    Path("README").write_text("x")
    more = ["--override", "lr=1e-5", "--prefetch", "1", "--no-memory", "--stacks", "--world-size", "4", "--fault"]
    arguments += [*more, "slow-rank=1:20ms", "--timeout-s", "1e9"]
    first = printed(arguments, capsys)
    file = written(first)
    assert printed(file, capsys) == first
    assert parse(file) == parse(arguments)


def test_every_setting_is_printed_that_has_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    values = tomllib.loads(printed(REQUIRED, capsys))
    names = {
        field.name for field in dataclasses.fields(TrainingConfig) if getattr(parse(REQUIRED), field.name) is not None
    }
    assert {key.replace("-", "_") for key in values} == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "settings.toml: stepz is no setting; did you mean steps?"),
        ("learning_rat = 3", "learning_rat is no setting; did you mean learning-rate?"),
        ("config = 'x'", "config is no setting"),
        ("[optimization]\nsteps = 3", "optimization is no setting"),
        ("steps = 0", "steps = 0: '0' is not a whole number of 1 or more"),
        ("steps = 1.5", "steps = 1.5: '1.5' is not a whole number"),
        ("steps = true", "steps = true: it must be a number"),
        ("steps = '3'", 'steps = "3": it must be a number'),
        ("stacks = 1", "stacks = 1: it must be true or false"),
        ("data = 'x'", 'data = "x": it must be a list'),
        ("model = 'huge'", "invalid choice: 'huge'"),
        ("world-size = 2\nworld_size = 2", "world_size is set twice"),
        ("steps 3", "settings.toml: not TOML: "),
        ("data = ['nowhere']", "--data nowhere: no such file"),
    ],
    ids=lambda value: value.splitlines()[0],
)
def test_a_bad_file_is_one_clear_line(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in complaint([*REQUIRED, *written(text)], capsys)


def test_a_file_that_is_missing_and_an_option_that_is_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config nowhere.toml: No such file" in complaint([*REQUIRED, "--config", "nowhere.toml"], capsys)
    assert "--out: required, as an option or in the file" in complaint(written('strategy = "ddp"'), capsys)

"""Configurations: how changes apply to a command, and which proposals fit into the devices' memory."""

import shlex

import pytest

import tracekit
from tests.support.cli_runner import ROOT
from tracekit.rules.rule import Report
from tracekit.tune import changes
from tracekit.tune.changes.change import Change, TunedRun
from tracekit.tune.configuration import Configuration, Way
from tracekit.tune.proposals import propose

COMMAND = ("torchrun", "train.py", "--name", "a b")


def named(name: str) -> Change:
    return next(change for change in changes.CHANGES if change.name == name)


@pytest.fixture(scope="module")
def report() -> Report:
    return tracekit.load(ROOT / "sample_traces" / "demo-fsdp2").check()


def test_an_argument_of_the_user_comes_before_variables_and_patches() -> None:
    arguments = {"threads_per_rank": "--threads {value}", "fused_optimizer": "--fused"}
    configuration = Configuration(COMMAND, arguments)
    threads = configuration.setting(named("threads-per-rank"), "2", is_of_trainers=False)
    assert (threads.way, threads.words) == (Way.ARGUMENT, ("--threads", "2"))
    assert configuration.setting(named("fused-optimizer"), "on", is_of_trainers=False).words == ("--fused",)
    assert Configuration(COMMAND).setting(named("fused-optimizer"), "on", is_of_trainers=False).way is Way.PATCH
    assert Configuration(COMMAND).setting(named("compile"), "on", is_of_trainers=False).way is Way.HAND


def test_settings_add_up_in_the_order_in_which_they_were_kept() -> None:
    configuration = Configuration(COMMAND, {"compile": "--compile 'a b'"})
    for name, value in (("threads-per-rank", "2"), ("compile", "on"), ("threads-per-rank", "4")):
        setting = configuration.setting(named(name), value, is_of_trainers=False)
        assert setting.is_applied
        configuration = configuration.with_setting(setting)
    assert configuration.words == (*COMMAND, "--compile", "a b")
    assert configuration.variables == {"OMP_NUM_THREADS": "4"}
    assert shlex.split(configuration.line) == ["OMP_NUM_THREADS=4", *COMMAND, "--compile", "a b"]


def test_a_list_in_the_environment_is_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    setting = Configuration(COMMAND).setting(named("expandable-segments"), "on", is_of_trainers=False)
    assert setting.text == "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512,expandable_segments:True"
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert Configuration(COMMAND).setting(named("threads-per-rank"), "2", is_of_trainers=False).text.endswith("=2")


def test_a_change_that_needs_more_memory_than_is_free_is_left_out(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = Configuration(("python", "-m", "instrumented_trainers"))
    names = {row.setting.change.name for row in propose(report, configuration, is_of_trainers=True).proposals}
    assert {"keep-gathered", "fsdp-prefetch", "background-save"} <= names
    monkeypatch.setattr(TunedRun, "free_bytes", 5_000_000)
    limited = propose(report, configuration, is_of_trainers=True)
    assert {row.setting.title for row in limited.too_large} == {"keep-gathered", "fsdp-prefetch 2"}
    assert "fsdp-prefetch 1" in {row.setting.title for row in limited.proposals}


def test_another_command_gets_no_options_of_our_trainers(report: Report) -> None:
    proposals = propose(report, Configuration(COMMAND), is_of_trainers=False).proposals
    assert proposals
    assert all(row.setting.way is not Way.OPTION for row in proposals)

"""CHANGES: each is complete, answers causes and rules that exist, and chooses values that fit the run."""

import copy
import dataclasses
from pathlib import Path

import pytest

import tracekit
from tests.support.cli_runner import ROOT
from tracekit.cli.commands.tune import HighestRisk
from tracekit.model.run import Run
from tracekit.replay.graph import causes
from tracekit.rules.registry import all_rules
from tracekit.tune import changes
from tracekit.tune.changes.change import Change, Risk, TunedRun, fill_template

SAMPLES = ROOT / "sample_traces"


@pytest.fixture(scope="module")
def fsdp2() -> Run:
    return tracekit.load(SAMPLES / "demo-fsdp2")


def with_manifest(run: Run, **fields: object) -> TunedRun:
    changed = copy.copy(run)
    changed.manifest = {**run.manifest, **fields}
    return TunedRun.of(changed)


def named(name: str) -> Change:
    return next(change for change in changes.CHANGES if change.name == name)


@pytest.mark.parametrize("change", changes.CHANGES, ids=lambda change: change.name)
def test_a_change_says_what_it_answers_and_how_it_is_applied(change: Change) -> None:
    assert change.causes or change.codes
    assert set(change.causes) <= set(causes.all_causes())
    assert set(change.codes) <= {rule.code for rule in all_rules()}
    assert change.summary
    assert not change.summary.endswith(".")
    assert change.key.isidentifier()
    assert change.variable == "" or change.variable.partition("=")[2]


def test_names_are_unique() -> None:
    assert len({change.key for change in changes.CHANGES}) == len(changes.CHANGES)


@pytest.mark.parametrize("change", [c for c in changes.CHANGES if c.option], ids=lambda change: change.name)
def test_options_are_those_of_our_trainers(change: Change) -> None:
    settings = pytest.importorskip("instrumented_trainers.config.settings")
    fields = {field.name for field in dataclasses.fields(settings.TrainingConfig)}
    options = [word for word in change.option.split() if word.startswith("--")]
    assert options
    assert {option.removeprefix("--").replace("-", "_") for option in options} <= fields


def test_options_take_each_risk() -> None:
    assert [risk.value for risk in HighestRisk] == [risk.label for risk in Risk]


def test_a_value_of_two_numbers_fills_both() -> None:
    assert fill_template("a={value} b={first} c={second}", "4/8") == "a=4/8 b=4 c=8"


def test_a_run_without_a_manifest_has_the_strategy_of_its_wrapper(fsdp2: Run) -> None:
    bare = copy.copy(fsdp2)
    bare.manifest = {}
    of_others = TunedRun.of(bare, is_of_trainers=False)
    assert of_others.strategy == "fsdp2"
    assert named("keep-gathered").values(of_others) == ("on",)
    assert not named("bucket-size").values(of_others)
    ddp = tracekit.load(SAMPLES / "faults" / "healthy-ddp")
    ddp.manifest = {}
    assert named("bucket-size").values(TunedRun.of(ddp, is_of_trainers=False)) == ("100",)


def test_prefetch_goes_deeper_than_today(fsdp2: Run) -> None:
    arguments = fsdp2.manifest["arguments"]
    assert named("fsdp-prefetch").values(TunedRun.of(fsdp2)) == ("1", "2")
    deeper = with_manifest(fsdp2, arguments={**arguments, "prefetch": 1})
    assert named("fsdp-prefetch").values(deeper) == ("2",)
    assert named("fsdp-prefetch").values(with_manifest(fsdp2, strategy="ddp")) == ()


def test_gathered_weights_need_the_memory_of_the_model(fsdp2: Run) -> None:
    run = TunedRun.of(fsdp2)
    assert named("keep-gathered").added_bytes(run, "on") == 4 * 3_082_496
    half = with_manifest(fsdp2, arguments={**fsdp2.manifest["arguments"], "precision": "bf16"})
    assert named("keep-gathered").added_bytes(half, "on") == 2 * 3_082_496


def test_micro_batches_keep_the_tokens_of_a_step(fsdp2: Run) -> None:
    arguments = {**fsdp2.manifest["arguments"], "micro_batches": 4, "batch": 2}
    assert named("fewer-micro-batches").values(with_manifest(fsdp2, arguments=arguments)) == ("1/8", "2/4")
    pipeline = {**arguments, "pp": 2}
    assert named("fewer-micro-batches").values(with_manifest(fsdp2, arguments=pipeline)) == ()
    assert named("more-micro-batches").values(with_manifest(fsdp2, arguments=pipeline)) == ("8/1",)


@pytest.mark.parametrize(
    ("layers", "schedules"), [(8, ("interleaved", "zb-h1")), (4, ("interleaved", "zb-h1")), (3, ("zb-h1",))]
)
def test_no_schedule_has_more_stages_than_the_model_has_layers(
    fsdp2: Run, layers: int, schedules: tuple[str, ...]
) -> None:
    arguments = {**fsdp2.manifest["arguments"], "pp": 2, "schedule": "1f1b"}
    run = with_manifest(fsdp2, arguments=arguments, model={"name": "any", "layers": layers})
    assert named("pipeline-schedule").values(run) == schedules


@pytest.mark.parametrize(
    ("cores", "quota", "ranks", "expected"), [(8, None, 2, "4"), (8, 3.5, 2, "1"), (1, None, 4, "1")]
)
def test_threads_divide_the_cores(fsdp2: Run, cores: int, quota: float | None, ranks: int, expected: str) -> None:
    processors = {"usable_cores": cores, "quota_cores": quota, "ranks": ranks, "threads": 64}
    assert named("threads-per-rank").values(with_manifest(fsdp2, processors=processors)) == (expected,)
    processors["threads"] = int(expected)
    assert named("threads-per-rank").values(with_manifest(fsdp2, processors=processors)) == ()


HOSTILE = (
    {"arguments": {"prefetch": "x", "micro_batches": -2, "batch": 10**5000, "checkpoint_layers": True, "pp": 2.5}},
    {"arguments": {"micro_batches": 10**30, "batch": 0}, "model": "a name"},
    {"model": {"layers": 0, "parameters": float("inf")}},
    {"model": {"layers": [1], "parameters": -1}, "device": ["cpu"], "strategy": {"a": 1}},
    {"processors": {"usable_cores": 0, "ranks": 0}, "world_size": -1},
    {"command": [None, {"a": 1}, "instrumented_trainers"], "arguments": None},
)


@pytest.mark.parametrize("fields", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_manifest_states_never_ends_a_command(fsdp2: Run, fields: dict[str, object]) -> None:
    run = with_manifest(fsdp2, **fields)
    for change in changes.CHANGES:
        for value in change.values(run):
            change.added_bytes(run, value)


def test_risks_are_ordered_from_the_same_numbers_to_another_training() -> None:
    assert [risk.label for risk in sorted(Risk)] == ["same", "memory", "rounding", "training"]
    assert all(risk.sentence for risk in Risk)


def test_the_registry_is_documented() -> None:
    page = (ROOT / "docs" / "tune.md").read_text(encoding="utf-8")
    assert [change.name for change in changes.CHANGES if f"| `{change.name}` |" not in page] == []
    assert Path(ROOT, "tracekit", "tune", "changes").is_dir()

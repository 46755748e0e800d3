"""Loss and gradient norm of two trainings: rounding is none, a mistake of a ten-thousandth is one, and has a place."""

import gzip
import json
import math
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import drawn_traces
from tests.support.cli_runner import ROOT
from tests.support.cli_runner import tracekit as command
from tracekit import conventions
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.regression import baseline as baselines
from tracekit.regression import numbers
from tracekit.report import baseline_json

SAMPLE = ROOT / "sample_traces" / "demo-fsdp2"
LOSSES = [6.4, 5.9, 5.5, 5.2, 5.0, 4.9]


def logged(*by_rank: list[float], name: str = "loss") -> Run:
    """Return a run in which rank R logged the R-th list, a value a step."""
    traces = []
    for rank, values in enumerate(by_rank):
        rows = {"step": range(len(values)), "name": name, "value": values}
        traces.append(
            drawn_traces.trace("compute aa", rank=rank).replace(
                metrics=pl.DataFrame(rows, strict=False).cast(schema.METRICS.schema)
            )
        )
    return drawn_traces.run(*traces)


def agreement_of(reference: Run, candidate: Run) -> numbers.Agreement | None:
    return numbers.agreement(*map(numbers.run_numbers, (reference, candidate)))


def scaled(values: list[float], factor: float, *, first: int = 0) -> list[float]:
    return [value * (factor if step >= first else 1) for step, value in enumerate(values)]


def test_equal_numbers_agree_in_all_steps() -> None:
    agreement = agreement_of(logged(LOSSES, LOSSES), logged(LOSSES, LOSSES))
    assert agreement is not None
    assert (agreement.steps, agreement.agreed_steps, agreement.rounding_ratio, agreement.first) == (6, 6, 0.0, None)
    assert agreement.metrics == ("loss",)


def test_the_first_difference_names_rank_step_and_values() -> None:
    agreement = agreement_of(logged(LOSSES, LOSSES), logged(LOSSES, scaled(LOSSES, 1.0001, first=3)))
    assert agreement is not None
    assert agreement.agreed_steps == 3
    first = agreement.first
    assert first is not None
    assert (first.metric, first.rank, first.step, first.reference) == ("loss", 1, 3, 5.2)
    assert first.ratio == pytest.approx(1e-4, rel=1e-3)
    assert not agreement.is_other_training


def test_rounding_that_grows_from_step_to_step_is_none() -> None:
    grown = [loss * (1 + 1e-7 * 5**step) for step, loss in enumerate(LOSSES)]  # to 3e-4
    agreement = agreement_of(logged(LOSSES), logged(grown))
    assert agreement is not None
    assert agreement.first is None
    assert agreement.rounding_ratio == pytest.approx(1e-7 * 5**5, rel=1e-2)


def test_a_jump_within_growing_rounding_is_a_difference() -> None:
    jumped = [loss * (1 + 1e-7 * 2**step + (1e-3 if step == 4 else 0)) for step, loss in enumerate(LOSSES)]
    agreement = agreement_of(logged(LOSSES), logged(jumped))
    assert agreement is not None
    assert agreement.first is not None
    assert agreement.first.step == 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_any_more_is_a_difference(value: float) -> None:
    agreement = agreement_of(logged(LOSSES), logged([*LOSSES[:2], value, *LOSSES[3:]]))
    assert agreement is not None
    assert agreement.first is not None
    assert (agreement.first.step, agreement.first.ratio) == (2, math.inf)
    both = agreement_of(logged([value]), logged([value]))
    assert both is not None
    assert both.first is None


def test_other_weights_or_data_are_no_mistake_of_a_formula() -> None:
    agreement = agreement_of(logged(LOSSES), logged(scaled(LOSSES, 1.2)))
    assert agreement is not None
    assert agreement.is_other_training


def test_runs_without_common_steps_say_nothing() -> None:
    assert agreement_of(logged([]), logged(LOSSES)) is None
    assert agreement_of(logged(LOSSES, name="speed"), logged(LOSSES, name="speed")) is None


def checksums(*rows: tuple[int, str, int, float]) -> pl.DataFrame:
    """Checksums by step, module and rank, in the order of their places."""
    named = [(step, f"{conventions.REDUCED_GRADIENT_CHECKSUM_PREFIX}{name}", rank, value, place)
             for place, (step, name, rank, value) in enumerate(rows)]  # fmt: skip
    return pl.DataFrame(named, numbers.NUMBER_COLUMNS, orient="row")


def test_the_gradient_that_clipping_does_not_explain_is_named() -> None:
    places = [(step, name, rank) for step in range(2) for name in "abcde" for rank in range(2)]
    before = checksums(*((*place, 2.0) for place in places))
    # In step 1, clipping multiplies what each rank has by a factor of its own, and d has another one.
    after = checksums(*(
        (step, name, rank, 2.0 * (1 if step == 0 else (0.9, 0.8)[rank] * (1.5 if name == "d" else 1)))
        for step, name, rank in places
    ))  # fmt: skip
    first = numbers.agreement(before, after).first
    assert (first.metric.rpartition("/")[2], first.step, first.ranks, first.other_modules) == ("d", 1, (0, 1), 4)


def test_a_module_that_one_rank_skips_is_a_difference() -> None:
    places = [(step, name, rank) for step in range(3) for name in "ab" for rank in range(2)]
    before = checksums(*((*place, 2.0) for place in places))
    skipped = before.filter((pl.col("step") != 2) | (pl.col("rank") != 1) | ~pl.col("name").str.ends_with("/a"))
    first = numbers.agreement(before, skipped).first
    assert (first.step, first.ranks, first.is_of_all_ranks, first.candidate) == (2, (1,), False, None)
    # A metric that one side never logged says nothing.
    never = before.filter(~pl.col("name").str.ends_with("/a"))
    assert numbers.agreement(before, never).first is None


@given(st.lists(st.floats(1e-9, 1e-2), min_size=1, max_size=12))
def test_the_first_step_is_that_of_the_definition(ratios: list[float]) -> None:
    after = [1 / (1 - ratio) for ratio in ratios]
    agreement = agreement_of(logged([1.0] * len(ratios)), logged(after))
    assert agreement is not None
    apart = [abs(value - 1) / value for value in after]
    expected = next(
        (
            step
            for step, ratio in enumerate(apart)
            if ratio > max([numbers.LEAST_RATIO, *(30 * before for before in apart[:step])])
        ),
        None,
    )
    assert (None if agreement.first is None else agreement.first.step) == expected


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample with the losses of rank 1 a ten-thousandth larger from step 12 on."""
    folder = tmp_path_factory.mktemp("numbers") / "changed"
    shutil.copytree(SAMPLE, folder)
    log = folder / "rank00001.metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["loss"] *= 1.0001 if row["step"] >= 12 else 1
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_compare_states_speed_and_numbers_and_fails_on_request(changed: Path) -> None:
    shown = command("compare", SAMPLE, changed, "--format", "json")
    assert shown.returncode == 0, shown.stderr
    stated = json.loads(shown.stdout)["numbers"]
    assert (stated["agree"], stated["agreed_steps"]) == (False, 12)
    assert (stated["first"]["rank"], stated["first"]["step"], stated["first"]["metric"]) == (1, 12, "loss")
    assert command("compare", SAMPLE, changed, "--same-numbers").returncode == 1
    assert command("compare", SAMPLE, SAMPLE, "--same-numbers").returncode == 0


def test_check_states_the_numbers_beside_a_slowdown(changed: Path, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    saved = command("baseline", "save", SAMPLE, "--out", file)
    assert saved.returncode == 0, saved.stderr
    same = command("check", SAMPLE, "--baseline", file, "--same-numbers", "--fail-on", "never", "--format", "json")
    assert json.loads(same.stdout)["gate"]["numbers"]["agree"]
    assert same.returncode == 0, same.stderr
    options = ("--baseline", file, "--fail-on", "never", "--format", "json", "--also", f"junit={tmp_path / 'j.xml'}")
    options += ("--also", f"sarif={tmp_path / 's.sarif'}", "--also", f"markdown={tmp_path / 'm.md'}")
    slow = tmp_path / "slow"
    shutil.copytree(changed, slow)
    stretch(slow / "rank00001.pt.trace.json.gz", 1.5)
    for must_agree in (False, True):
        checked = command("check", slow, *options, *(["--same-numbers"] if must_agree else []))
        gate = json.loads(checked.stdout)["gate"]
        first = gate["numbers"]["first"]
        assert (first["metric"], first["rank"], first["step"]) == ("loss", 1, 12)
        assert ("numbers" in gate["failures"]) is must_agree
        assert gate["comparison"]["change_ns"] > 10_000_000
        cases = {case.get("name"): case for case in ET.parse(tmp_path / "j.xml").iter("testcase")}
        assert (cases["numbers"].find("failure") is not None) is must_agree
        results = json.loads((tmp_path / "s.sarif").read_text())["runs"][0]["results"]
        assert [result["level"] for result in results if result["ruleId"] == "NUMBERS"] == [
            "error" if must_agree else "note"
        ]
        assert "step 12" in (tmp_path / "m.md").read_text()


def stretch(path: Path, factor: float) -> None:
    """Make all of a trace take longer by a factor."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    for event in content["traceEvents"]:
        for key in event.keys() & {"ts", "dur"}:
            event[key] = float(event[key]) * factor
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 1))


@pytest.mark.parametrize("options", [[], ["--baseline", SAMPLE]])
def test_numbers_that_must_agree_need_a_baseline_that_logged_them(tmp_path: Path, options: list[object]) -> None:
    shutil.copytree(SAMPLE, tmp_path / "run", ignore=shutil.ignore_patterns("*.metrics.jsonl"))
    refused = command("check", tmp_path / "run", "--same-numbers", *options)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1


def test_a_baseline_keeps_all_digits_and_the_order_of_modules(tmp_path: Path) -> None:
    run = logged(LOSSES, scaled(LOSSES, 1 / 3))
    made = baselines.Baseline("run", {}, (baselines.Recording.of(run),))
    checksums = pl.DataFrame(
        [(0, f"{conventions.CHECKSUM_PREFIX}{name}", 0, value, place) for place, (name, value) in enumerate(
            [("model.z" * 60, 1 / 7), ("model.a", 2 / 7)]
        )],
        schema=numbers.NUMBER_COLUMNS, orient="row",
    )  # fmt: skip
    recording = replace(made.recordings[0], numbers=pl.concat([made.recordings[0].numbers, checksums]))
    (tmp_path / "b.json").write_text(baseline_json.render(replace(made, recordings=(recording,))))
    read = baseline_json.read(tmp_path / "b.json").recordings[0].numbers
    key = ["name", "rank", "step"]
    assert read.sort(key).drop("order").equals(recording.numbers.sort(key).drop("order"))
    modules = read.filter(pl.col("name").str.starts_with(conventions.CHECKSUM_PREFIX)).sort("order")["name"]
    assert modules.to_list() == checksums["name"].to_list()


def test_a_training_agrees_with_the_recording_of_its_seed() -> None:
    recordings = [numbers.run_numbers(logged(scaled(LOSSES, factor))) for factor in (1.2, 1.0)]
    agreement = numbers.agreement_with_any(recordings, numbers.run_numbers(logged(LOSSES)))
    assert agreement is not None
    assert (agreement.first, agreement.agreed_steps) == (None, 6)
    assert numbers.agreement_with_any([], recordings[0]) is None


def test_runs_that_logged_no_numbers_cannot_be_required_to_agree(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "run", ignore=shutil.ignore_patterns("*.metrics.jsonl"))
    refused = command("compare", tmp_path / "run", SAMPLE, "--same-numbers")
    assert refused.returncode == 2
    assert "--same-numbers" in refused.stderr

"""Baselines: small files, read back as written; invalid ones are refused in one line."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import polars as pl
import pytest

from tests.support import sample_baselines, sample_report
from tests.support.wording import Wording
from tracekit.analysis.compute import step_charges
from tracekit.errors import InputError, NotComparableError
from tracekit.regression import baseline as baselines
from tracekit.regression.baseline import UNIT_COLUMNS, Baseline, Recording
from tracekit.regression.samples import SAMPLE_COLUMNS
from tracekit.report import baseline_json as saved
from tracekit.report.render import text as render_text


@functools.cache
def drawn() -> Baseline:
    run = sample_report.run(arguments={"batch": 4, "seed": 7}, versions={"torch": "2.13.0", "python": "3.11"})
    return baselines.of_reports([(sample_report.report(run), run)])


def test_a_baseline_follows_its_schema_and_does_not_name_the_host() -> None:
    text = saved.render(drawn())
    schema = json.loads(saved.schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert "secret-host" not in text
    assert "alice" not in text


def test_the_schema_rejects_an_invalid_baseline() -> None:
    document = json.loads(saved.render(drawn()))
    schema = json.loads(saved.schema())
    for spoil in ({"recordings": []}, {"schema": "tracekit.baseline/2"}, {"fingerprint": {"a": {}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document | spoil, schema)


def test_what_is_saved_is_what_was_measured(tmp_path: Path) -> None:
    made = drawn()
    (tmp_path / "b.json").write_text(saved.render(made))
    back = saved.read(tmp_path / "b.json")
    assert back.fingerprint == made.fingerprint
    (before,), (after,) = made.recordings, back.recordings
    assert after.findings == before.findings
    key = ["rank", "metric", "step"]
    for table in ("samples", "units"):
        a, b = (getattr(each, table).sort(*key, *(["unit"] if table == "units" else [])) for each in (before, after))
        assert a.drop("value").equals(b.drop("value"))
        assert b["value"].to_numpy() == pytest.approx(a["value"].to_numpy(), rel=1e-3)
    assert saved.render(back) == saved.render(made)


def test_the_fingerprint_contains_what_speed_depends_on() -> None:
    fingerprint = drawn().fingerprint
    assert fingerprint["model.layers"] == 2
    assert fingerprint["arguments.batch"] == 4
    assert fingerprint["versions.torch"] == "2.13.0"
    assert not {"arguments.seed", "versions.python"} & fingerprint.keys()


@pytest.mark.parametrize(
    ("different", "field"),
    [
        ({"world_size": 4}, "world_size differs: 2 in the baseline today, 4 in today"),
        ({"strategy": "yafsdp"}, "strategy differs: fsdp2"),
        ({"device_name": "Other GPU"}, "device_name differs: Drawn GPU"),
        ({"model": {"name": "tiny", "layers": 3}}, "model.layers differs: 2"),
        ({"versions": {"torch": "2.14.0"}}, "versions.torch differs: 2.13.0"),
        ({"arguments": {"batch": 8}}, "arguments.batch differs: 4"),
        ({"mesh": {"shape": [2, 2]}}, "mesh.shape differs: [4]"),
        ({"simulated": True}, "simulated differs: False"),
    ],
)
def test_a_run_of_another_training_is_refused_and_the_error_names_the_field(
    different: dict[str, object], field: str
) -> None:
    manifest = {"versions": {"torch": "2.13.0"}, "mesh": {"shape": [4]}}
    run = sample_report.run(**manifest)
    base = baselines.of_reports([(sample_report.report(run), run)])
    other = sample_report.run(**manifest | different)
    with pytest.raises(NotComparableError) as caught:
        baselines.differences(base, other)
    assert field in str(caught.value)
    assert any(field in note for note in baselines.differences(base, other, allow_different=True))


def test_a_field_that_one_side_lacks_only_adds_a_note(wording: Wording) -> None:
    run = sample_report.run()
    base = baselines.of_reports([(sample_report.report(run), run)])
    (note,) = baselines.differences(base, sample_report.run(versions={"torch": "2.13.0"}))
    wording(note)


def test_the_same_recording_twice_is_refused(wording: Wording) -> None:
    run = sample_report.run()
    with wording.raises(InputError):
        baselines.of_reports([(sample_report.report(run), run)] * 2)


def test_the_same_recording_is_recognized_without_a_manifest_and_after_it_was_saved(
    tmp_path: Path, wording: Wording
) -> None:
    run = sample_report.run(created_ns=None)
    with wording.raises(InputError):
        baselines.of_reports([(sample_report.report(run), run)] * 2)
    base = baselines.of_reports([(sample_report.report(run), run)])
    (tmp_path / "b.json").write_text(saved.render(base))
    (before,), (after,) = base.recordings, saved.read(tmp_path / "b.json").recordings
    assert before.is_same(after)
    assert after.is_same(drawn().recordings[0])  # with its manifest, but the same traces
    slower = replace(after, samples=after.samples.with_columns(pl.col("value") * 1.001))
    assert not before.is_same(slower)
    assert not replace(before, samples=before.samples.clear()).is_same(replace(after, samples=after.samples.clear()))


def large(ranks: int, steps: int, units: int) -> Baseline:
    """Return a baseline of a job as large as those in CI, of random samples, which do not compress."""
    random = np.random.default_rng(0)
    metrics = ["step_time_ns", "cpu_time_ns", "flops", "compute_ns", "communication_ns", "exposed_communication_ns",
               "exposed_communication_ratio", "overlap_ratio", "transfer_ns", "sent_bytes", "idle_ns", "allocations",
               "allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "tokens_per_second"]  # fmt: skip
    rows = pl.DataFrame({"rank": range(ranks)}, schema={"rank": pl.Int64}).join(
        pl.DataFrame({"step": range(steps)}, schema={"step": pl.Int64}), how="cross"
    )
    samples = rows.join(pl.DataFrame({"window": 0, "metric": metrics}), how="cross")
    names = pl.DataFrame({"unit": ["", *(f"layers.{n}" for n in range(units - 1))]})
    of_units = rows.join(names, how="cross").join(
        pl.DataFrame({"metric": list(step_charges.UNIT_METRICS)}), how="cross"
    )
    recording = Recording(
        "run",
        1,
        samples.with_columns(value=pl.Series(random.lognormal(18, 2, samples.height))).select(*SAMPLE_COLUMNS),
        of_units.with_columns(value=pl.Series(random.lognormal(16, 1, of_units.height))).select(*UNIT_COLUMNS),
        pl.DataFrame(
            [("compute", "forward", f"aten::op{n}", 1e6) for n in range(120)],
            schema=step_charges.WORK_COLUMNS,
            orient="row",
        ),
        tuple(sample_baselines.known(f"COMM001-{n:08x}") for n in range(20)),
    )  # fmt: skip
    return Baseline("main", sample_baselines.FINGERPRINT, (recording,))


def test_a_baseline_of_eight_ranks_and_fifty_steps_is_smaller_than_200_kilobytes() -> None:
    assert len(saved.render(large(8, 50, 33)).encode()) <= 200_000


HOSTILE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "words": lambda text: "not JSON at all",
    "list": lambda text: "[]",
    "nothing": lambda text: "{}",
    "deep": lambda text: "[" * 100_000,
    "deep within": lambda text: '{"schema":"tracekit.baseline/1","recordings":' + "[" * 100_000,
    "report": lambda text: text.replace("tracekit.baseline/1", "tracekit.report/1"),
    "later": lambda text: text.replace("tracekit.baseline/1", "tracekit.baseline/9"),
    "NaN": lambda text: text.replace('"values":[[', '"values":[[NaN,', 1),
    "infinity": lambda text: text.replace('"values":[[', '"values":[[1e999,', 1),
    "text for a number": lambda text: text.replace('"ranks":[0', '"ranks":["0"', 1),
    "negative rank": lambda text: text.replace('"ranks":[0', '"ranks":[-1', 1),
    "too many values": lambda text: text.replace('"values":[[', '"values":[[1,', 1),
    "too many ranks": lambda text: text.replace('"ranks":[0', '"ranks":[7,0', 1),
    "no such steps": lambda text: text.replace('"steps":0', '"steps":999999', 1),
    "wild severity": lambda text: text.replace('"error"', '"fatal"', 1),
    "impact of 5": lambda text: text.replace('"impact":0.2', '"impact":5', 1),
    "no recordings": lambda text: text[: text.index('"recordings"')] + '"recordings":[]}',
    "no findings": lambda text: text.replace('"findings"', '"finding"', 1),
    "a unit too many": lambda text: text.replace('"values":', '"unit":"","values":', 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invalid_baseline_is_refused_in_one_line_that_names_the_problem(tmp_path: Path, name: str) -> None:
    text = saved.render(drawn())
    spoiled = HOSTILE[name](text)
    assert spoiled != text
    path = tmp_path / "b.json"
    path.write_text(spoiled)
    with pytest.raises(InputError) as caught:
        saved.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_huge_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    with path.open("wb") as file:
        file.truncate(saved.MAX_BASELINE_BYTES + 1)
    with pytest.raises(InputError, match="too large"):
        saved.read(path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "b.json"
    path.write_bytes(saved.render(drawn()).encode().replace(b"today", b"\xff\xfe", 1))
    with wording.raises(InputError):
        saved.read(path)


def test_a_file_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    text = saved.render(drawn()).rstrip()
    path = tmp_path / "b.json"
    for end in range(0, len(text) - 1, 499):
        path.write_text(text[:end])
        with pytest.raises(InputError):
            saved.read(path)


def test_a_baseline_is_shown_as_text() -> None:
    text = render_text.render(saved.document(drawn()), width=100)
    assert "1 recording" in text
    assert "model.layers" in text
    assert "exposed-communication" in text
    assert "10 ms" in text

"""The benchmark's own code: that it measures what it reports and computes its ratios correctly. No times are judged."""

import re

import pytest

from benchmarks import __main__, cases, measure, results, runner, saves
from benchmarks.runner import Result, Sample

SAMPLE = next(case for case in cases.CASES if case.name == "sample")


def _sample(*, cpu_s, peak_mib=100.0):
    return Sample(work_wall_s=cpu_s, work_cpu_s=cpu_s, whole_wall_s=cpu_s, whole_cpu_s=cpu_s, peak_mib=peak_mib)


@pytest.mark.accuracy  # make accuracy measures; rows are drawn below
def test_one_command_measures_a_recorded_run_and_writes_the_results(tmp_path, capsys):
    out = tmp_path / "results.md"
    arguments = ["--cases", "sample", "--rounds", "1", "--subjects", "tracekit", "tracekit summary", "json"]
    assert __main__.main([*arguments, "--work", str(tmp_path / "work"), "--out", str(out)]) == 0
    text = out.read_text()
    size_mb = measure.size_bytes(tmp_path / "work" / "sample") / 1e6
    assert f"{size_mb:,.1f} MB of JSON" in text
    rows = {line.split("|")[1].strip(): line for line in text.partition("### sample")[2].splitlines() if "|" in line}
    assert {"tracekit", "tracekit summary", "json"} <= set(rows)
    assert not any("failed" in row for row in rows.values())
    assert re.search(r"\| sample \| .*\d% of json", text)


@pytest.mark.accuracy  # make accuracy measures
def test_recording_saves_is_measured_call_by_call(tmp_path, capsys):
    arguments = ["--rounds", "1", "--mib", "2", "--tensors", "3", "--calls", "2", "--folder", str(tmp_path)]
    assert saves.main(arguments) == 0
    output = capsys.readouterr().out
    for name in ("dcp.save, 2 MiB", "dcp.save, 3 tensors", "dcp.async_save", "dcp.load", "torch.save", "torch.load"):
        assert re.search(rf"\| {name}.* \| [\d.]+ ms \| [+-][\d.]+ ms \| [\d.]+ \| [\d.]+ \|", output), name
    assert re.search(r"\| to memory \| [\d.]+ µs \| [\d.]+ µs \| [\d.]+ µs \|", output)
    assert not list(tmp_path.iterdir())


def test_missing_traces_are_skipped_with_a_message(tmp_path, capsys):
    arguments = ["--cases", "nanogpt_h100_8ranks", "--traces", str(tmp_path), "--work", str(tmp_path / "work")]
    assert __main__.main(arguments) == 1
    assert "nanogpt_h100_8ranks: skipped: no folder nanogpt_h100_8ranks" in capsys.readouterr().err


def test_a_failing_subject_is_reported_and_the_benchmark_continues(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    said = []
    found = runner.measure(
        SAMPLE, empty, size_bytes=1, rounds=2, work=tmp_path, only=("tracekit summary", "json"), say=said.append
    )
    assert "no trace files" in found.failures["tracekit summary"]
    assert len(said) == 3  # the failed one is not tried again
    assert "| tracekit summary | failed: exit code 2" in results.markdown([found])


def test_a_ratio_is_taken_within_a_round_before_the_median_over_rounds():
    rounds = (
        {"tracekit": _sample(cpu_s=1.0), "hta": _sample(cpu_s=10.0)},
        {"tracekit": _sample(cpu_s=4.0), "hta": _sample(cpu_s=80.0)},  # a busy machine slows both
        {"tracekit": _sample(cpu_s=2.0)},
    )
    found = Result(SAMPLE, 10**6, rounds, {})
    assert found.ratios("hta", "tracekit", "work_cpu_s") == [10.0, 20.0]
    assert found.median("tracekit").work_cpu_s == 2.0
    assert "15.0x (10.0 to 20.0)" in results.markdown([found])


def test_copies_of_a_rank_have_rank_numbers_of_their_own(tmp_path):
    from tracekit.ingest import loader

    folder = cases.copies_of_rank(
        cases.ROOT / "sample_traces" / "demo-fsdp2" / "rank00000.pt.trace.json.gz", tmp_path, 3
    )
    run = loader.load(folder, cache=False)
    assert run.ranks == (0, 1, 2)
    assert {trace.activities.height for trace in run.traces()} == {run.trace(0).activities.height}


@pytest.mark.parametrize("name", ["json", "orjson", "msgspec", "simdjson"])
def test_a_floor_parses_every_byte_of_the_traces(name, tmp_path):
    pytest.importorskip(name)
    (tmp_path / "rank0.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    measure.SUBJECTS[name]()(str(tmp_path))
    (tmp_path / "rank0.json").write_text('{"traceEvents": [{"ph": "X"}]')
    with pytest.raises(ValueError, match=r".+"):  # each parser has an error of its own
        measure.SUBJECTS[name]()(str(tmp_path))

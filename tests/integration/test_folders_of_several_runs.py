"""Folders that hold files of several runs: one run is read, the others are listed, none is taken for a window."""

import shutil
from pathlib import Path

import pytest

from tests.support.kineto_files import trace, write
from tracekit.ingest.loader import load

TRACES = Path(__file__).parents[3] / "shared" / "traces"
HOUR_US = 3_600e6
A100, V100 = ({"deviceProperties": [{"name": name}] * 8} for name in ("NVIDIA A100", "Tesla V100"))


def of_process(process, rank=0, **options):
    content = trace(rank, **options)
    for event in content["traceEvents"]:
        event["pid"] = process
    return content


def names(run):
    return [(source.window, source.rank, Path(source.path).name) for source in run.sources]


def messages(run, kind):
    return [row["message"] for row in run.data_quality.iter_rows(named=True) if row["kind"] == kind]


def test_a_program_that_was_started_twice_is_two_runs(tmp_path):
    for start, process in enumerate((70, 90)):
        for rank in (0, 1):
            content = of_process(process + rank, rank, start_us=start * 60e6 + rank)
            write(tmp_path / f"start{start}_rank{rank}.json", content)
    run = load(tmp_path)
    assert names(run) == [(0, 0, "start1_rank0.json"), (0, 1, "start1_rank1.json")]
    (message,) = messages(run, "mixed_jobs")
    assert "2 files are of another run (rank 0 is process 70, not 90)" in message
    assert "start0_rank1.json" in message


def test_windows_of_one_process_are_one_run(tmp_path):
    for window in (0, 1):
        write(tmp_path / f"w{window}_rank0.json", of_process(70, 0, world_size=1, start_us=window * 60e6))
    run = load(tmp_path)
    assert [place[:2] for place in names(run)] == [(0, 0), (1, 0)]
    assert run.data_quality.is_empty()


def test_a_restarted_recording_with_a_manifest_is_one_run(tmp_path):
    # The recorder claims its folder: what lies in it is one run, whose processes may have been started again.
    (tmp_path / "run.json").write_text('{"strategy": "ddp", "world_size": 1}')
    for window, process in enumerate((70, 90)):
        content = of_process(process, 0, world_size=1, start_us=window * 60e6)
        write(tmp_path / f"window{window:03}" / "rank00000.json", content)
    assert [place[:2] for place in names(load(tmp_path))] == [(0, 0), (1, 0)]


def test_windows_on_another_device_are_another_run(tmp_path):
    write(tmp_path / "a_rank0.json", trace(0, 1, **A100))
    write(tmp_path / "b_rank0.json", trace(0, 1, start_us=60e6, **V100))
    run = load(tmp_path)
    assert names(run) == [(0, 0, "b_rank0.json")]
    assert "device NVIDIA A100, not Tesla V100" in messages(run, "mixed_jobs")[0]


def test_ranks_of_one_job_may_have_different_devices(tmp_path):
    for window in (0, 1):
        for rank, device in enumerate((A100, V100)):
            content = trace(rank, start_us=window * 3 * HOUR_US + rank, **device)
            write(tmp_path / f"w{window}_rank{rank}.json", content)
    run = load(tmp_path)
    assert [place[:2] for place in names(run)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert messages(run, "mixed_jobs") == []


@pytest.mark.parametrize("difference", [{"start_us": 2 * HOUR_US}, V100], ids=["time", "device"])
def test_unlike_files_that_state_nothing_are_not_one_job(tmp_path, difference):
    write(tmp_path / "first.json", trace(None, **A100))
    write(tmp_path / "second.json", trace(None, **(A100 | {"start_us": 500.0} | difference)))
    run = load(tmp_path)
    assert len(run.sources) == 1
    assert run.ranks == (0,)
    assert len(messages(run, "mixed_jobs")) == 1
    assert messages(run, "missing_ranks") == []


def test_files_of_one_process_are_its_windows(tmp_path):
    for window in (0, 1):
        content = of_process(70, None, start_us=window * 60e6)
        write(tmp_path / f"host_70.{1790000000000 + window * 60_000}.pt.trace.json", content)
    assert [place[:2] for place in names(load(tmp_path))] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("files", "read"),
    [
        (("hta_dlrm_a100/rank0.json.gz", "nanogpt_h100_8ranks/rank0-chrome-trace.json.gz"), 1),
        (("hta_nccl_args_a100/nccl_data.json.gz", "hta_ddp_v100_memory/df_index_resolver.json.gz"), 1),
        (
            (
                "kineto_resnet_v100_memory/worker0.1623212756351.pt.trace.json.gz",
                "tracelens_h100_memory_stacks/google_owlv2-large-patch14-ensemble__1016001.json.gz",
            ),
            1,
        ),
        (("nanogpt_h100_8ranks/rank0-chrome-trace.json.gz", "nanogpt_h100_8ranks/rank1-chrome-trace.json.gz"), 2),
    ],
    ids=["dlrm and nanogpt", "A100 and V100 of one world size", "no ranks stated", "two ranks of one job"],
)
def test_real_traces_of_other_programs_are_not_merged(tmp_path, files, read):
    for number, file in enumerate(files):
        if not (TRACES / file).is_file():
            pytest.skip("the shared traces are not installed")
        shutil.copy(TRACES / file, tmp_path / (f"{number}-" * (read == 1) + Path(file).name))
    run = load(tmp_path)
    assert len(run.sources) == read
    assert len(messages(run, "mixed_jobs")) == len(files) - read

"""Runs as people keep them: folders, lists, globs and URLs, with all that lies around in them."""

import json
import os
import shutil
import weakref
from pathlib import Path

import fsspec
import polars as pl
import pytest

from tests.support import drawn_traces
from tests.support.kineto_files import trace, write
from tracekit.analysis.time import breakdown
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest.loader import load
from tracekit.ingest.scrub import scrub
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.source import Source, Threads
from tracekit.report import phrases
from tracekit.rules.engine import check

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "sample_traces" / "demo-fsdp2"
MERGED = ROOT.parent / "shared" / "traces" / "merged_ddp_mi300_4ranks"
HOUR_US = 3_600e6


def kinds(run):
    return sorted(run.data_quality["kind"].unique().to_list())


def places(run):
    return [(source.window, source.rank) for source in run.sources]


@pytest.fixture
def pair(tmp_path):
    for rank in (0, 1):
        write(tmp_path / "run" / f"rank{rank}.json", trace(rank, start_us=100.0 + rank))
    return tmp_path / "run"


# Where ----------------------------------------------------------------------------------------------------------------


def test_a_folder_a_list_and_a_glob_are_the_same_run(pair, monkeypatch):
    named = [load(pair), load(sorted(pair.iterdir())), load(str(pair / "*.json")), load(f"file://{pair}")]
    monkeypatch.chdir(pair.parent)
    named += [load("run"), load("run/rank*.json"), load(["run/rank0.json", pair / "rank1.json"])]
    for run in named:
        assert run.ranks == (0, 1)
        assert run.data_quality.is_empty()
        assert run.table(breakdown.by_rank)["communication_ns"].to_list() == [400_000, 400_000]


def test_a_run_behind_a_url_is_read_with_manifest_and_logs():
    memory = fsspec.filesystem("memory")
    memory.put(f"{SAMPLE}/", "memory://bucket/run/", recursive=True)
    try:
        far, near = load("memory://bucket/run"), load(SAMPLE)
        assert far.name == "run"
        assert far.ranks == near.ranks
        assert far.manifest == near.manifest
        assert far.table(breakdown.by_step).equals(near.table(breakdown.by_step))
        assert far.trace(0).checkpoints.height == near.trace(0).checkpoints.height > 0
        assert far.trace(0).metrics.equals(near.trace(0).metrics)
        assert load("memory://bucket/run/rank*.json.gz").ranks == (0, 1)
        assert load("memory://bucket/run/rank00001.pt.trace.json.gz").ranks == (1,)
    finally:
        memory.rm("memory://bucket", recursive=True)


@pytest.mark.parametrize("url", ["memory://nothing/here", "nosuch://bucket/run", "hdfs://nowhere/run"])
def test_a_url_that_cannot_be_reached_is_one_clear_line(url):
    with pytest.raises(InputError) as caught:
        load(url)
    assert str(caught.value).startswith(url)
    assert "\n" not in str(caught.value)


def test_a_path_that_does_not_exist_is_named(tmp_path):
    for missing in (tmp_path / "gone", [tmp_path / "gone"], str(tmp_path / "*.json"), []):
        with pytest.raises(InputError):
            load(missing)


def test_nested_folders_are_searched_hidden_ones_are_not(tmp_path):
    write(tmp_path / "a" / "b" / "rank0.json.gz", trace(0))
    write(tmp_path / "a" / "c" / "rank1.json.gz", trace(1, start_us=101))
    write(tmp_path / ".git" / "rank2.json.gz", trace(2))
    run = load(tmp_path)
    assert places(run) == [(0, 0), (0, 1)]
    assert run.data_quality.is_empty()


@pytest.mark.parametrize("shard", [".metadata", "__0_0.distcp"])
def test_checkpoints_next_to_traces_are_not_searched(pair, shard):
    folder = pair / "checkpoints" / "step-000024"
    write(folder / "seal.json", {"step": 24})
    (folder / shard).write_bytes(b"")
    write(folder / "more" / "rank7.json", trace(7))
    memory = fsspec.filesystem("memory")
    memory.put(f"{pair}/", "memory://copy/run/", recursive=True)
    try:
        for run in (load(pair), load("memory://copy/run")):
            assert run.ranks == (0, 1)
            assert run.data_quality.is_empty()
    finally:
        memory.rm("memory://copy", recursive=True)


def test_ranks_are_known_before_anything_is_parsed(pair):
    run = load(pair)
    (pair / "rank0.json").unlink()
    assert run.ranks == (0, 1)
    assert run.data_quality.is_empty()


# Whose ----------------------------------------------------------------------------------------------------------------


def test_hta_fault_03_ranks_come_from_the_header_alone(tmp_path):
    # compact JSON, an event's argument named rank, a settings file with a rank, and names that say otherwise
    content = trace(1)
    content["traceEvents"][0]["args"] = {"rank": 7, "distributedInfo": {"rank": 9}}
    write(tmp_path / "rank0.json", content)
    write(tmp_path / "rank1.json", trace(0, start_us=103), indent=2)
    write(tmp_path / "config.json", {"rank": 0, "lr": 1e-3})
    run = load(tmp_path)
    assert [(s.rank, Path(s.path).name) for s in run.sources] == [(0, "rank1.json"), (1, "rank0.json")]
    assert kinds(run) == ["not_a_trace"]


def test_hta_fault_03_a_second_file_of_a_rank_overwrites_nothing(pair):
    shutil.copy(pair / "rank1.json", pair / "rank1 (copy).json")
    run = load(pair)
    assert places(run) == [(0, 0), (0, 1)]
    row = run.data_quality.row(0, named=True)
    assert (row["kind"], row["rank"]) == ("duplicate_rank", 1)
    assert "rank1" in row["message"]


def test_hta_fault_04_a_truncated_an_empty_and_a_garbled_file_leave_the_other_ranks(tmp_path):
    for rank in range(6):
        write(tmp_path / f"rank{rank}.json", trace(rank, 6, start_us=100 + rank))
    whole = (tmp_path / "rank1.json").read_bytes()
    (tmp_path / "rank1.json").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "rank2.json").write_bytes(b"")
    (tmp_path / "rank3.json").write_bytes((tmp_path / "rank3.json").read_bytes().replace(b"gemm", b"ge\xff\xfe"))
    (tmp_path / "rank4.json").write_bytes(b"\x1f\x8b\x08\x00 no gzip at all")
    run = load(tmp_path)
    rows = run.table(breakdown.by_rank)
    assert {0, 1, 3, 5} <= set(rows["rank"])
    assert rows.filter(pl.col("rank").is_in([0, 3, 5]))["communication_ns"].to_list() == [400_000] * 3
    assert {2, 4} == set(run.data_quality.filter(pl.col("kind") == "unreadable")["rank"])
    assert "missing_ranks" not in kinds(run)


def test_hta_fault_05_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no trace files"):
        load(tmp_path)


def test_a_folder_of_memory_snapshots_says_which_command_reads_them(tmp_path):
    (tmp_path / "oom.pickle.gz").write_bytes(b"")
    with pytest.raises(InputError, match=r"tracekit memory .*oom\.pickle\.gz"):
        load(tmp_path)


def test_hta_fault_06_a_rank_without_a_device_leaves_the_other_ranks(tmp_path):
    write(tmp_path / "rank0.json", trace(0))
    write(tmp_path / "rank1.json", trace(1, start_us=101, on_device=False))
    run = load(tmp_path)
    rows = run.table(breakdown.by_rank)
    assert rows.select("rank", "device").rows() == [(0, 0), (1, None)]
    check(run)
    assert run.offsets["matched_by"].to_list() == ["none", "none"]


def test_hta_fault_07_the_last_step_counts(tmp_path):
    run = load(write(tmp_path / "one.json", trace(0, 1, steps=3)))
    assert run.table(breakdown.by_step)["step"].to_list() == [0, 1, 2]


def test_ranks_from_names_are_reported_as_guessed(tmp_path):
    for i, name in enumerate(("job_rank-0.json", "job_rank-1.json")):
        write(tmp_path / name, trace(None, start_us=100 + i))
    run = load(tmp_path)
    assert run.ranks == (0, 1)
    assert kinds(run) == ["rank_guessed"]


@pytest.mark.parametrize("stated", [1, 3, 64])
def test_one_rank_that_states_another_number_of_ranks_is_of_the_same_job(tmp_path, stated):
    for rank in range(4):
        size = stated if rank == 2 else 4
        write(
            tmp_path / f"rank{rank}.json", trace(rank, size, start_us=100.0 + 40 * rank, trace_id=f"recording {rank}")
        )
    run = load(tmp_path)
    assert run.ranks == (0, 1, 2, 3)
    assert kinds(run).count("world_size") == 1
    assert "missing_ranks" not in kinds(run)


@pytest.mark.parametrize("is_of_another", ["time", "rank"])
def test_a_trace_of_another_job_is_not_read_as_its_missing_rank(tmp_path, is_of_another):
    """A rank that another job left in the folder began at another time, or has a rank of this job."""
    for rank in range(4):
        is_other = rank == 3
        start_us = 100.0 + 40 * rank + (300e6 if is_other and is_of_another == "time" else 0)
        stated_rank = 1 if is_other and is_of_another == "rank" else rank
        document = trace(stated_rank, 8 if is_other else 4, start_us=start_us, trace_id=f"recording {rank}")
        write(tmp_path / f"rank{rank}.json", document)
    run = load(tmp_path)
    assert run.ranks == (0, 1, 2)
    assert "world_size" not in kinds(run)


@pytest.mark.parametrize(("stated", "is_wrong"), [(2, True), (3, False), (5, False)])
def test_more_ranks_than_the_traces_state_are_reported(tmp_path, stated, is_wrong):
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", trace(rank, stated, start_us=100.0 + 40 * rank, trace_id=f"r {rank}"))
    assert ("world_size" in kinds(load(tmp_path))) == is_wrong


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("stated", [0, 1])
def test_processes_that_all_state_one_rank_have_the_ranks_of_their_names(tmp_path, size, stated):
    """A header may be written before the process group exists, or copied from another rank."""
    for rank in range(size):
        document = trace(stated, start_us=100.0 + 40 * rank, world_size=size, trace_id=f"recording {rank}")
        write(tmp_path / f"rank{rank}.json", document)
    run = load(tmp_path)
    assert run.ranks == tuple(range(size))
    assert set(kinds(run)) == {"rank_guessed"}


def test_copies_of_one_recording_stay_one_rank_whatever_their_names(tmp_path):
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", trace(0, world_size=2, trace_id="one recording"))
    run = load(tmp_path)
    assert run.ranks == (0,)
    assert "duplicate_rank" in kinds(run)


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (("trace_0_of.json", "trace_3_of.json"), (0, 3)),
        (("kineto_9.json", "kineto_10.json"), (9, 10)),
        (("host_29220.json", "host_29221.json"), (0, 1)),  # process ids
        (("2026_11_21_0.json", "2026_11_21_1.json"), (0, 1)),
        (("a.json", "b.json"), (0, 1)),
        (("dp_rank_0_tp_rank_0.json", "dp_rank_0_tp_rank_1.json", "dp_rank_1_tp_rank_0.json"), (0, 1, 2)),
        (("zero_pp_rank_0_mp_rank_00.json", "zero_pp_rank_1_mp_rank_00.json"), (0, 1)),
        (("dp0_pp0_tp0_rank2.json", "dp0_pp0_tp1_rank3.json"), (2, 3)),
        (("node0_local_rank1.json", "node1_local_rank0.json", "node1_local_rank1.json"), (0, 1, 2)),
        (("local_rank1.json", "local_rank2.json"), (1, 2)),
        (("tp_rank_01.json", "tp_rank_03.json"), (1, 3)),
    ],
)
def test_the_number_that_differs_between_names_is_the_rank(tmp_path, names, ranks):
    for i, name in enumerate(names):
        write(tmp_path / name, trace(None, start_us=100 + i))
    assert load(tmp_path).ranks == ranks


def test_small_process_ids_of_containers_are_no_ranks(tmp_path):
    for process_id in (41, 42):
        content = json.loads(
            json.dumps(trace(None, start_us=100 + process_id)).replace('"pid": 1', f'"pid": {process_id}')
        )
        write(tmp_path / f"trainer_{process_id}.1741234567.pt.trace.json", content)
    assert load(tmp_path).ranks == (0, 1)


def test_a_rank_stated_after_the_events_counts(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"rank{1 - rank}.json.gz", trace(rank, last=True, start_us=100 + rank))
    run = load(tmp_path)
    assert [Path(s.path).name for s in run.sources] == ["rank1.json.gz", "rank0.json.gz"]
    assert run.data_quality.is_empty()


def test_missing_ranks_are_named(tmp_path):
    for rank in (0, 2, 5):
        write(tmp_path / f"rank{rank}.json", trace(rank, 8, start_us=100 + rank))
    row = load(tmp_path).data_quality.row(0, named=True)
    assert row["kind"] == "missing_ranks"
    assert "3 of 8 ranks have a trace (not 1, 3-4, 6-7)" in row["message"]
    assert row["affected_ratio"] == 5 / 8


@pytest.mark.parametrize("size", [1 << 40, 1 << 70, -1, 0, True, "two", None, [], 1.5])
@pytest.mark.parametrize("key", ["world_size", "rank"])
def test_implausible_ranks_and_world_sizes_are_ignored(tmp_path, key, size):
    pg = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": size, "ranks": []}
    info = {"rank": 0, "world_size": 2, "pg_config": [pg]} | {key: size}
    run = load(write(tmp_path / "rank0.json", trace(None, distributedInfo=info)))
    assert run.ranks == (0,)
    assert run.trace(0).groups["ranks"].to_list() == [None]


def test_gaps_in_names_are_missing_ranks_too(tmp_path):
    for rank in (0, 1, 3):
        write(tmp_path / f"rank{rank}.json", trace(None, start_us=100 + rank))
    assert "missing_ranks" in kinds(load(tmp_path))


def test_a_running_training_says_which_ranks_and_windows_are_not_written_yet(tmp_path):
    windows = [{"window": n, "first_step": 10 * n, "steps": 2} for n in range(3)]
    (tmp_path / "run.json").write_text(json.dumps({"world_size": 4, "windows": windows}))
    for rank in range(3):
        write(tmp_path / f"rank0000{rank}.pt.trace.json.gz", trace(rank, 4))
    for rank in (0, 2):
        write(tmp_path / "window001" / f"rank0000{rank}.pt.trace.json.gz", trace(rank, 4, start_us=9e6))
    partial = tmp_path / "window001" / "rank00001.pt.trace.json.gz.partial"
    partial.write_bytes(b"half of it")
    run = load(tmp_path)
    assert [(source.window, source.rank) for source in run.sources] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)]
    assert [message for kind, message in run.data_quality.select("kind", "message").rows() if kind != "partial"] == [
        "3 of 4 ranks have a trace (not 3); the others cannot be analyzed.",
        "Window 1 has no trace of rank 1, other windows do.",
        "Window 2 is listed in the manifest, but no rank has a trace of it.",
    ]
    (row,) = run.data_quality.filter(kind="partial").rows(named=True)
    assert row["rank"] == 1
    assert f"{partial}: the trace of rank 1 is not complete and was not read" in row["message"]


def test_a_window_that_opened_by_itself_is_of_some_ranks(tmp_path):
    reason = {"step": 12, "rank": 0, "ratio": 3.1}
    windows = [{"window": n, "first_step": 10 * n, "steps": 2} for n in range(2)]
    for rank in range(4):
        write(tmp_path / f"rank0000{rank}.pt.trace.json.gz", trace(rank, 4))
    write(tmp_path / "window001" / "rank00000.pt.trace.json.gz", trace(0, 4, start_us=9e6))
    (tmp_path / "run.json").write_text(json.dumps({"world_size": 4, "windows": windows}))
    assert "missing_ranks" in kinds(load(tmp_path))
    windows[1]["outlier"] = reason
    (tmp_path / "run.json").write_text(json.dumps({"world_size": 4, "windows": windows}))
    assert "missing_ranks" not in kinds(load(tmp_path))
    assert "window 1 opened by itself: step 12 took 3.1x the median on rank 0" in phrases.subtitle(load(tmp_path))


def test_only_the_manifest_of_the_whole_run_says_which_windows_there_are(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"windows": [{"window": 1, "first_step": 0, "steps": 2}]}))
    file = write(tmp_path / "rank00000.pt.trace.json.gz", trace(0, 1))
    assert kinds(load(tmp_path)) == ["missing_ranks"]
    assert kinds(load(f"{tmp_path}/rank*.gz")) == kinds(load([file])) == []


@pytest.mark.parametrize("name", ["run.json", "rank00000.metrics.jsonl.partial", "rank00000.pt.trace.json.gz.partial"])
def test_a_training_that_has_no_trace_yet_is_not_a_wrong_folder(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match="no rank has written a trace yet"):
        load(tmp_path)


# Windows and jobs -----------------------------------------------------------------------------------------------------


def test_files_of_the_tensorboard_handler_are_windows_by_time(tmp_path):
    # <worker>.<ms>.pt.trace.json.gz: three windows a worker, written a second apart, one lost
    for window in range(3):
        for rank in (0, 1):
            if (window, rank) != (1, 0):
                content = trace(rank, start_us=window * 60e6 + 1_000 * rank)
                write(
                    tmp_path / f"node_{4000 + rank}.{1790000000000 + window * 60_000 + rank}.pt.trace.json.gz", content
                )
    run = load(tmp_path)
    assert places(run) == [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert "Window 1 has no trace of rank 0" in run.data_quality["message"][0]
    assert run.table(breakdown.by_rank).height == 5


def test_folders_by_iteration_are_windows(tmp_path):
    for window, name in enumerate(("iteration_5", "iteration_10")):
        for rank in (0, 1):
            write(tmp_path / name / f"rank{rank}_trace.json", trace(rank, start_us=window * 30e6 + rank))
    run = load(tmp_path)
    assert places(run) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert run.data_quality.is_empty()


def test_the_recorders_window_folders_give_the_windows(tmp_path):
    write(tmp_path / "rank00000.pt.trace.json.gz", trace(0, 1))
    write(tmp_path / "window002" / "rank00000.pt.trace.json.gz", trace(0, 1))
    assert places(load(tmp_path)) == [(0, 0), (2, 0)]


def test_folders_of_unlike_names_assumed_to_be_windows_are_reported(tmp_path):
    for window, name in enumerate(("baseline", "candidate")):
        write(tmp_path / name / "rank0.json", trace(0, 1, start_us=window * 30e6))
    run = load(tmp_path)
    assert places(run) == [(0, 0), (1, 0)]
    assert kinds(run) == ["windows_assumed"]


def test_jobs_of_other_sizes_are_left_out_and_reported(tmp_path):
    for rank in range(4):
        write(tmp_path / f"new-{rank}.json", trace(rank, 4, start_us=100 + rank))
    for rank in range(2):
        write(tmp_path / f"old-{rank}.json", trace(rank, 2, start_us=100 + rank))
    run = load(tmp_path)
    assert run.ranks == (0, 1, 2, 3)
    row = run.data_quality.row(0, named=True)
    assert row["kind"] == "mixed_jobs"
    assert "world size 2, not 4" in row["message"]
    assert "old-0.json" in row["message"]


def test_runs_with_manifests_of_their_own_are_jobs_of_their_own(tmp_path):
    for name, start_us in (("monday", 0.0), ("tuesday", 50e6)):
        for rank in (0, 1):
            write(tmp_path / name / f"rank{rank}.json", trace(rank, start_us=start_us + rank))
        (tmp_path / name / "run.json").write_text(json.dumps({"strategy": name, "world_size": 2}))
    run = load(tmp_path)
    assert run.manifest["strategy"] == "tuesday"
    assert places(run) == [(0, 0), (0, 1)]
    assert "monday" in run.data_quality["message"][0]


def test_some_ranks_of_a_job_recorded_hours_apart_are_not_one_window(tmp_path):
    write(tmp_path / "rank0.json", trace(0, 4))
    write(tmp_path / "rank1.json", trace(1, 4, start_us=5 * HOUR_US))
    run = load(tmp_path)
    assert places(run) == [(0, 0), (1, 1)]
    assert "windows_assumed" in kinds(run)
    assert "5.0 h apart" in " ".join(run.data_quality["message"])


def test_all_ranks_of_a_job_are_one_window_although_a_clock_is_hours_off(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", trace(rank, 2, start_us=rank * 5 * HOUR_US))
    run = load(tmp_path)
    assert places(run) == [(0, 0), (0, 1)]
    assert "windows_assumed" not in kinds(run)


def test_a_file_that_states_its_base_first_is_of_the_window_of_the_others(tmp_path):
    rank0 = trace(0)  # its rank is known from the beginning, its base only from the end
    write(
        tmp_path / "rank0.json", {key: rank0[key] for key in ("distributedInfo", "traceEvents", "baseTimeNanoseconds")}
    )
    rank1 = trace(1)
    write(tmp_path / "rank1.json", {key: rank1[key] for key in ("baseTimeNanoseconds", *rank1)})  # as jq -S writes it
    run = load(tmp_path)
    assert places(run) == [(0, 0), (0, 1)]
    assert kinds(run) == []


def test_a_single_process_trace_next_to_a_job_is_not_taken_for_rank_0(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", trace(rank, start_us=100 + rank))
    write(tmp_path / "warmup.json", trace(None, start_us=50))
    run = load(tmp_path)
    assert [Path(s.path).name for s in run.sources] == ["rank0.json", "rank1.json"]
    assert kinds(run) == ["mixed_jobs"]


@pytest.mark.skipif(not MERGED.is_dir(), reason="the shared traces are not installed")
def test_a_merged_file_splits_into_its_ranks():
    run = load(MERGED)
    assert run.ranks == (0, 1, 2, 3)
    assert run.offsets["pairs"].to_list() == [15] * 4
    assert run.offsets["residual_ns"].max() < 20_000


def test_the_file_of_several_ranks_is_one_input_and_counts_once(tmp_path):
    merged = trace(None)
    parts = [
        [{**event, "pid": rank, "args": {**event["args"], "rank": rank}} for event in trace(rank)["traceEvents"]]
        for rank in (0, 1)
    ]
    file = write(tmp_path / "merged.json", merged | {"traceEvents": [*parts[0], *parts[1]]})
    run = load(str(file))
    assert run.ranks == (0, 1)
    report = check(run)
    assert [(each.path, each.size_bytes) for each in report.inputs] == [(str(file), file.stat().st_size)]
    assert units.size(file.stat().st_size) in phrases.subtitle(run)


# Reading --------------------------------------------------------------------------------------------------------------


def test_a_trace_that_cannot_be_read_is_left_out_when_it_is_measured(pair):
    run = load(pair, cache=False)
    (pair / "rank1.json").write_text("gone")
    assert run.ranks == (0, 1)
    assert run.table(breakdown.by_rank)["rank"].to_list() == [0]
    assert run.ranks == (0,)
    assert kinds(run) == ["unreadable"]


def test_a_run_of_which_nothing_can_be_read_is_an_error(pair):
    run = load(pair, cache=False)
    for rank in (0, 1):
        (pair / f"rank{rank}.json").write_text("gone")
    with pytest.raises(BadTraceError):
        run.table(breakdown.by_step)


@pytest.mark.parametrize("readers", [1, 3])
def test_traces_are_read_once_in_order_and_evicted(readers):
    alive = weakref.WeakSet()
    read, most = [], 0

    def source(rank):
        def read_it():
            made = drawn_traces.trace("compute aa.b", rank=rank)
            alive.add(made)
            read.append(rank)
            return made

        return Source(rank, 0, f"rank{rank}", 1 << 20, read_it)

    seen = []

    def on_progress(done):
        nonlocal most
        seen.append(done.source.rank)
        most = max(most, len(alive))

    run = Run("many", [source(rank) for rank in range(64)], cache_bytes=1, executor=Threads(readers))
    run.measure((breakdown.by_rank, breakdown.by_step), on_progress)
    assert sorted(read) == list(range(64))
    assert seen == list(range(64))
    assert most <= readers + 2
    assert run.table(breakdown.by_rank)["rank"].to_list() == list(range(64))
    assert len(read) == 64


def test_large_files_are_not_read_concurrently():
    running, most = set(), 0

    def source(rank):
        def read_it():
            nonlocal most
            running.add(rank)
            most = max(most, len(running))
            made = drawn_traces.trace("compute aa", rank=rank)
            running.discard(rank)
            return made

        return Source(rank, 0, f"rank{rank}", 300 << 20, read_it)

    Run("large", [source(rank) for rank in range(6)], executor=Threads(4)).measure((breakdown.by_rank,))
    assert most == 1


def test_progress_is_reported_for_each_file(pair):
    calls = []
    load(pair, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]


def test_a_file_name_that_is_not_utf_8_is_named_in_the_run_s_issues(pair):
    (pair / os.fsdecode(b"\xff.json")).write_text("{}")
    run = load(pair)
    assert kinds(run) == ["not_a_trace"]
    assert run.data_quality["path"].item().endswith("/?.json")


def test_a_trace_whose_name_is_not_utf_8_is_scrubbed(tmp_path):
    name = os.fsdecode(b"\xff.pt.trace.json")
    write(tmp_path / "run" / name, trace(0))
    assert scrub(tmp_path / "run", tmp_path / "out").files == (name,)


def test_dumps_of_a_hang_are_no_traces_of_the_run(pair):
    (pair / "hang").mkdir()
    (pair / "hang" / "rank00001.hang.json").write_text('{"entries": []}', encoding="utf-8")
    run = load(pair, cache=False)
    assert list(run.ranks) == [0, 1]
    assert run.data_quality.filter(pl.col("path").str.contains("hang")).is_empty()

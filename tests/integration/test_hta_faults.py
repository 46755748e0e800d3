"""Where HTA fails, tracekit does not: one test for each fault that its users meet, on traces small enough to read.

Next to each is a test that HTA itself still has the fault. It skips where HTA is not installed or has fixed it, so
that a better HTA never fails this suite.
"""

import functools
import gzip
import itertools
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from tests.support.kineto_files import slice_, trace, write
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.compute import kernels
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.ingest.loader import load
from tracekit.model.run import Run
from tracekit.report import json as report_json
from tracekit.rules.engine import check
from tracekit.sync import collective_matching

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"


# Traces --------------------------------------------------------------------------------------------------------------

Kernel = tuple[str, float, float, int]
"""Name, start in µs, duration in µs, stream."""


def made(*kernels_run: Kernel, rank: int = 0, world_size: int = 1, steps: int = 1, launch: str = "cudaLaunchKernel"):
    """Return a trace of kernels, each launched 5 µs before it starts, and of steps of 1 ms."""
    events = [slice_("user_annotation", f"ProfilerStep#{step}", 1000.0 * step, 1000.0, tid=1) for step in range(steps)]
    for correlation, (name, at_us, dur_us, stream) in enumerate(kernels_run, 1):
        events.append(slice_("cuda_runtime", launch, at_us - 5, 2, tid=1, correlation=correlation))
        events.append(
            slice_("kernel", name, at_us, dur_us, tid=stream, device=0, stream=stream, correlation=correlation)
        )
    return trace(rank, world_size, steps=0) | {"traceEvents": events}


def one(tmp_path: Path, content: dict[str, object]) -> Run:
    return load(write(tmp_path / "run" / "rank0.json", content, indent=2), cache=False)


def row(table: pl.DataFrame) -> dict[str, object]:
    assert table.height == 1
    return table.row(0, named=True)


# HTA itself ----------------------------------------------------------------------------------------------------------


def hta_has_it(shows_the_fault: Callable[[Path], bool]) -> Callable[[Path], None]:
    """Make a test of a function that says whether HTA shows a fault; only `make accuracy` runs it."""

    @pytest.mark.accuracy
    @functools.wraps(shows_the_fault)
    def test(tmp_path: Path) -> None:
        pytest.importorskip("hta", reason="needs the extra [hta]")
        logging.getLogger("hta").setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not shows_the_fault(tmp_path):
                pytest.skip("HTA has mended this fault")

    return test


def in_hta(files: dict[int, Path], *, last_step: bool = True):
    """Return HTA's own analysis of the files, by rank."""
    from hta.common.trace import Trace
    from hta.trace_analysis import TraceAnalysis

    loaded = Trace(trace_files={rank: str(path) for rank, path in files.items()})
    loaded.load_traces(include_last_profiler_step=last_step, use_multiprocessing=False)  # it forks; threads run here
    analysis = TraceAnalysis.__new__(TraceAnalysis)
    analysis.t = loaded
    return analysis


def one_in_hta(tmp_path: Path, content: dict[str, object], **how: bool):
    return in_hta({0: write(tmp_path / "rank0.json.gz", content, indent=2)}, **how)


def raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 whatever it raises is the fault
        return True
    return False


# 1: kernel statistics collapse beyond ten names ----------------------------------------------------------------------

MANY_NAMES = made(*((f"gemm_{i:02}", 40.0 * i + 10 + 10 * j, 1.0 + i + j, 7) for i in range(15) for j in range(2)))


def test_hta_fault_01_kernels_beyond_ten_names_keep_their_own_statistics(tmp_path):
    found = kernels.kernels(one(tmp_path, MANY_NAMES)).sort("name")
    assert found["name"].to_list() == [f"gemm_{i:02}" for i in range(15)]
    assert found.select("count", "total_ns", "p50_ns", "mean_ns", "max_ns").rows() == [
        (2, (3 + 2 * i) * 1000, (1 + i) * 1000, 1500 + i * 1000, (2 + i) * 1000) for i in range(15)
    ]


@hta_has_it
def test_hta_fault_01_is_htas(tmp_path):
    _, found = one_in_hta(tmp_path, MANY_NAMES).get_gpu_kernel_breakdown(visualize=False)
    return bool(((found["min (us)"] == found["max (us)"]) & (found["max (us)"] == found["mean (us)"])).any())


# 2: rounding makes durations negative --------------------------------------------------------------------------------

SHORT = made(*(("tiny", 10.0 * i + 10.3, 0.25, 7) for i in range(20)))


def test_hta_fault_02_times_are_exact_to_the_nanosecond_and_never_negative(tmp_path):
    (read,) = one(tmp_path, SHORT).traces()
    assert read.activities["dur_ns"].to_list() == [250] * 20
    starts = read.activities["start_ns"]
    assert (starts - starts[0]).to_list() == [10_000 * i for i in range(20)]


@hta_has_it
def test_hta_fault_02_is_htas(tmp_path):
    frame = one_in_hta(tmp_path, SHORT).t.get_trace(0)
    return bool((frame["dur"] < 0).any())


# 3: ranks come from a search for a word ------------------------------------------------------------------------------


def write_ranks(folder: Path) -> dict[str, Path]:
    """Write ranks 0 to 2 as compact JSON, each with an argument called rank, and a file of settings."""
    for rank in range(3):
        content = trace(rank, 3, start_us=100 + rank)
        content["traceEvents"][0]["args"] = {"rank": 7}
        (folder / f"host-{'cab'[rank]}.json").write_text(json.dumps(content, separators=(",", ":")))
    (folder / "config.json").write_text(json.dumps({"rank": 0, "lr": 0.1}, indent=2))
    return {path.name: path for path in folder.iterdir()}


def test_hta_fault_03_ranks_are_those_that_the_traces_state(tmp_path):
    write_ranks(tmp_path)
    run = load(tmp_path, cache=False)
    assert [(s.rank, Path(s.path).name) for s in run.sources] == [
        (0, "host-c.json"),
        (1, "host-a.json"),
        (2, "host-b.json"),
    ]
    assert run.data_quality["kind"].to_list() == ["not_a_trace"]


def test_hta_fault_03_a_duplicate_overwrites_nothing_and_is_said(tmp_path):
    for name, kernel in (("a", "first"), ("b", "second")):
        content = made((kernel, 10, 5 if name == "a" else 6, 7), world_size=1)
        write(tmp_path / f"{name}.json", content, indent=2)
    run = load(tmp_path, cache=False)
    assert len(run.sources) == 1
    assert run.data_quality["kind"].to_list() == ["duplicate_rank"]
    assert "rank 0" in run.data_quality["message"][0]


@hta_has_it
def test_hta_fault_03_is_htas(tmp_path):
    from hta.common.trace_file import create_rank_to_trace_dict

    files = write_ranks(tmp_path)
    _, compact = create_rank_to_trace_dict([str(path) for name, path in files.items() if name != "config.json"])
    _, stray = create_rank_to_trace_dict([str(files["config.json"])])
    return set(compact) != {0, 1, 2} and stray == {0: str(files["config.json"])}


# 4: one bad file aborts all ranks ------------------------------------------------------------------------------------


def damage(content: bytes, how: str) -> bytes:
    return {
        "truncated": content[: len(content) * 2 // 3],
        "empty": b"",
        "not UTF-8": content.replace(b"gemm", b"ge\xff\xfe"),
    }[how]


@pytest.mark.parametrize("how", ["truncated", "empty", "not UTF-8"])
def test_hta_fault_04_a_bad_rank_leaves_the_others_and_is_a_finding(tmp_path, how):
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", trace(rank, 3, start_us=100 + rank), indent=1)
    bad = tmp_path / "rank1.json"
    bad.write_bytes(damage(bad.read_bytes(), how))
    run = load(tmp_path, cache=False)
    good = run.table(breakdown.by_rank).filter(pl.col("rank") != 1)
    assert good["communication_ns"].to_list() == [400_000, 400_000]
    issues = [found for found in check(run).findings if found.code == "DATA001" and 1 in found.ranks]
    assert issues
    assert run.ranks == ((0, 2) if how == "empty" else (0, 1, 2))


@hta_has_it
def test_hta_fault_04_is_htas(tmp_path):
    files = {rank: write(tmp_path / f"rank{rank}.json", trace(rank, 2), indent=1) for rank in range(2)}
    whole = files[1].read_bytes()
    found = []
    for how in ("truncated", "empty"):
        files[1].write_bytes(damage(whole, how))
        found.append(raises(lambda: in_hta(files)))
    return all(found)


# 5: an empty folder loads -------------------------------------------------------------------------------------------


def test_hta_fault_05_an_empty_folder_is_an_error_that_says_what_belongs_there(tmp_path):
    with pytest.raises(InputError, match=r"no trace files \(\*\.json"):
        load(tmp_path)


@hta_has_it
def test_hta_fault_05_is_htas(tmp_path):
    from hta.trace_analysis import TraceAnalysis

    return not raises(lambda: TraceAnalysis(trace_dir=str(tmp_path)))


# 6: a CPU-only rank breaks all ranks --------------------------------------------------------------------------------


def write_mixed(folder: Path) -> dict[int, Path]:
    return {
        rank: write(folder / f"rank{rank}.json", trace(rank, start_us=100 + rank, on_device=rank == 0), indent=1)
        for rank in (0, 1)
    }


def test_hta_fault_06_a_rank_without_a_device_is_measured_with_the_others(tmp_path):
    write_mixed(tmp_path)
    found = load(tmp_path, cache=False).table(breakdown.by_rank)
    assert found.select("rank", "device").rows() == [(0, 0), (1, None)]
    assert (found["compute_ns"] > 0).all()


@hta_has_it
def test_hta_fault_06_is_htas(tmp_path):
    analysis = in_hta(write_mixed(tmp_path))
    return raises(lambda: analysis.get_temporal_breakdown(visualize=False))


# 7: the last step is dropped ----------------------------------------------------------------------------------------


def test_hta_fault_07_the_last_step_is_measured_like_the_others(tmp_path):
    found = one(tmp_path, trace(0, 1, steps=3)).table(breakdown.by_step)
    assert found["step"].to_list() == [0, 1, 2]
    assert found["compute_ns"].to_list() == [300_000] * 3


@hta_has_it
def test_hta_fault_07_is_htas(tmp_path):
    content = trace(0, 1, steps=3)
    busy_us = [
        int(frame["dur"][frame["stream"] >= 0].sum())
        for frame in (one_in_hta(tmp_path, content, last_step=each).t.get_trace(0) for each in (False, True))
    ]
    return busy_us[0] < busy_us[1]


# 8: no communication gives NaN --------------------------------------------------------------------------------------

ALONE = made(("gemm", 10, 5, 7), ("gemm", 20, 5, 7))


def test_hta_fault_08_a_run_without_communication_has_none_of_it_and_no_nan(tmp_path):
    run = one(tmp_path, ALONE)
    found = row(breakdown.slowest_device_by_rank(run))
    assert (found["communication_ns"], found["overlapped_ns"], found["exposed_communication_ns"]) == (0, 0, 0)
    for table in (breakdown.slowest_device_by_rank(run), breakdown.slowest_device_by_step(run), kernels.kernels(run)):
        numbers = table.select(pl.selectors.float())
        assert not any(numbers[name].is_nan().any() for name in numbers.columns)
    assert "NaN" not in report_json.render(check(run), run)


@hta_has_it
def test_hta_fault_08_is_htas(tmp_path):
    found = one_in_hta(tmp_path, ALONE).get_comm_comp_overlap(visualize=False)
    return bool(found["comp_comm_overlap_pctg"].isna().any())


# 9: waits of a stream for another are nobody's ----------------------------------------------------------------------
# time (µs)  10   20   30   40   50   60
# stream 7   gggg .... .... .... gggg        the second gemm was launched at once, and waits for the collective
# stream 9   .... nnnn nnnn nnnn ....

WAITING_US = 30.0


def waiting(collective: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL") -> dict[str, object]:
    content = made(("gemm", 10, 10, 7), (collective, 20, WAITING_US, 9), ("gemm", 50, 10, 7))
    launches = [event for event in content["traceEvents"] if event["cat"] == "cuda_runtime"]
    for number, event in enumerate(launches):
        event["ts"] = 1.0 + 2 * number
    return content


def test_hta_fault_09_a_stream_that_waits_for_a_collective_shows_as_exposed_communication(tmp_path):
    found = row(one(tmp_path, waiting()).table(breakdown.by_step))
    assert found["compute_ns"] == 20_000
    assert found["exposed_communication_ns"] == WAITING_US * 1000
    assert found["idle_ns"] == 0


@pytest.mark.skipif(not TRACES.is_dir(), reason="no traces of other projects next to this checkout")
@pytest.mark.parametrize(
    "name", [pytest.param("nanogpt_h100_8ranks", marks=pytest.mark.accuracy), "hta_nccl_args_a100"]
)
def test_hta_fault_09_on_recorded_runs_no_communication_hides_in_idle_time(name):
    run = load(TRACES / name)
    found = run.table(breakdown.by_rank)
    parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
    assert found.select(pl.sum_horizontal(parts))["compute_ns"].to_list() == found["duration_ns"].to_list()
    for read in run.traces():
        edges = []
        for start_ns, dur_ns in read.activities.select("start_ns", "dur_ns").sort("start_ns").rows():
            if edges and start_ns <= edges[-1][1]:
                edges[-1][1] = max(edges[-1][1], start_ns + dur_ns)
            else:
                edges.append([start_ns, start_ns + dur_ns])
        idle_ns = sum(after[0] - before[1] for before, after in itertools.pairwise(edges))
        assert row(found.filter(pl.col("rank") == read.rank))["idle_ns"] == idle_ns


@hta_has_it
def test_hta_fault_09_is_htas(tmp_path):
    found, _ = one_in_hta(tmp_path, waiting()).get_idle_time_breakdown(ranks=[0], visualize=False)
    of_stream = found[found["stream"] == 7]
    return float(of_stream[of_stream["idle_category"] == "other"]["idle_time"].sum()) >= WAITING_US


# 10: collectives of newer NCCL are not seen by who looks for stragglers ---------------------------------------------


def late_rank(names: str) -> list[dict[str, object]]:
    """Return two ranks: in each of 4 collectives rank 1 comes 300 µs late, and both leave together."""
    contents = []
    for rank in (0, 1):
        late_us = 300.0 * rank
        made_of = [(names, 10 + 1000 * i + late_us, 500 - late_us, 9) for i in range(4)]
        contents.append(made(("gemm", 5, 4, 7), *made_of, rank=rank, world_size=2, steps=4))
    return contents


@pytest.mark.parametrize("name", ["ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclKernel_AllReduce_RING_LL_Sum_float"])
def test_hta_fault_10_the_late_rank_is_found_by_kernels_of_any_nccl(tmp_path, name):
    for rank, content in enumerate(late_rank(name)):
        write(tmp_path / f"rank{rank}.json", content)
    run = load(tmp_path, cache=False)
    assert run.table(collective_matching.calls)["op"].to_list() == ["all_reduce"] * 8
    found = run.table(collective_instances.instances)
    assert found["last_rank"].to_list() == [1] * 4
    assert found["max_wait_ns"].to_list() == [300_000] * 4


@hta_has_it
def test_hta_fault_10_is_htas(tmp_path):
    found = {}
    for name in ("ncclKernel_AllReduce_RING_LL_Sum_float", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"):
        contents = enumerate(late_rank(name))
        files = {rank: write(tmp_path / f"{name[:7]}{rank}.json", content) for rank, content in contents}
        analysis = in_hta(files)
        steps = analysis.t.get_iterations()
        found[name] = raises(lambda a=analysis, s=steps: next(iter(a.get_potential_stragglers(profiler_steps=s))))
    return list(found.values()) == [False, True]


# 11: kinds of work are recognized by letters of names ---------------------------------------------------------------

MISNAMED = ("hipblaslt_gemm", "SyncBatchNormForward", "dmabuf_gemm", "batch_norm_SyncFree", "fused_dma_softmax")


def test_hta_fault_11_names_with_hip_sync_or_dma_in_them_are_compute(tmp_path):
    run = one(tmp_path, made(*((name, 10.0 + 10 * i, 5, 7) for i, name in enumerate(MISNAMED))))
    (read,) = run.traces()
    assert set(read.activities["kind"]) == {"compute"}
    assert row(breakdown.slowest_device_by_rank(run))["compute_ns"] == 5_000 * len(MISNAMED)


@hta_has_it
def test_hta_fault_11_is_htas(tmp_path):
    from hta.utils.utils import get_kernel_type

    return all(get_kernel_type(name) != "COMPUTATION" for name in MISNAMED)


# 12: graph launches are unknown -------------------------------------------------------------------------------------


def graph() -> dict[str, object]:
    """Return a step whose one cudaGraphLaunch runs three kernels: they bear its correlation."""
    events = [
        slice_("user_annotation", "ProfilerStep#3", 0, 100, tid=1),
        slice_("cpu_op", "aten::replay", 1, 8, tid=1),
        slice_("cuda_runtime", "cudaGraphLaunch", 2, 5, tid=1, correlation=1),
    ]
    events += [
        slice_("kernel", f"gemm_{i}", 10 + 10 * i, 8, tid=7, device=0, stream=7, correlation=1, **{"graph node id": i})
        for i in range(3)
    ]
    return trace(0, 1, steps=0) | {"traceEvents": events}


def test_hta_fault_12_kernels_of_a_graph_are_linked_to_its_launch_op_and_step(tmp_path):
    run = one(tmp_path, graph())
    (read,) = run.traces()
    launch = row(read.ops.filter(pl.col("name") == "cudaGraphLaunch"))["id"]
    assert read.activities.select("launch_id", "step").rows() == [(launch, 3)] * 3
    assert row(kernels.kernels(run, ("op",)))["op"] == "aten::replay"
    assert row(kernels.kernels(run, ("op",)))["count"] == 3


@hta_has_it
def test_hta_fault_12_is_htas(tmp_path):
    loaded = one_in_hta(tmp_path, graph()).t
    return not loaded.symbol_table.get_runtime_launch_events_mask(loaded.get_trace(0)).any()


def test_each_fault_in_the_list_has_its_tests():
    tests = [name for name in globals() if name.startswith("test_hta_fault_")]
    for number in range(1, 13):
        own_tests = [name for name in tests if name.startswith(f"test_hta_fault_{number:02}_")]
        assert f"test_hta_fault_{number:02}_is_htas" in own_tests
        assert len(own_tests) > 1


def test_a_gzipped_trace_is_the_same_run(tmp_path):
    """The traces above are plain JSON; what people keep is gzipped."""
    plain = one(tmp_path, waiting())
    (tmp_path / "zipped").mkdir()
    zipped = tmp_path / "zipped" / "rank0.json.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "run" / "rank0.json").read_bytes()))
    assert load(zipped, cache=False).table(breakdown.by_step).equals(plain.table(breakdown.by_step))

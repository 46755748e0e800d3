"""A run handed to HTA gives what HTA gives on the same files, wherever its own loader reads them rightly."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import recorded
from tests.support.kineto_files import trace, write
from tests.support.selection import others_in_accuracy
from tracekit.errors import InputError, MissingExtraError
from tracekit.ingest import loader
from tracekit.report.export.hta import to_hta

pytest.importorskip("hta", reason="needs the extra [hta]")

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "traces"
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

RESULTS = {
    "overlap": lambda analysis, ranks: analysis.get_comm_comp_overlap(visualize=False),
    "temporal breakdown": lambda analysis, ranks: analysis.get_temporal_breakdown(visualize=False),
    "kernel breakdown": lambda analysis, ranks: analysis.get_gpu_kernel_breakdown(visualize=False),
    "idle time": lambda analysis, ranks: analysis.get_idle_time_breakdown(ranks=ranks, visualize=False)[0],
    "queue length": lambda analysis, ranks: analysis.get_queue_length_summary(ranks=ranks),
    "launch statistics": lambda analysis, ranks: _without_numbers(
        analysis.get_cuda_kernel_launch_stats(ranks=ranks, visualize=False)
    ),
    "steps": lambda analysis, ranks: analysis.get_profiler_steps(),
}


def _without_numbers(by_rank):
    """Leave correlation out: its numbers are generated."""
    return {
        rank: table.drop(columns="correlation")
        .astype(float)
        .sort_values(["launch_delay", "cpu_duration", "gpu_duration"])
        for rank, table in by_rank.items()
    }


def _from_files(files, folder, *, mend):
    """Return HTA's own analysis of the files. Where it takes events for work that are none, they are taken out."""
    copies = {}
    for rank, file in enumerate(files):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        if mend:
            trace["traceEvents"] = [mended for event in trace["traceEvents"] if (mended := _mended(event))]
        copies[rank] = str(folder / f"rank{rank}.json.gz")
        with gzip.open(copies[rank], "wt", compresslevel=1) as copy:
            json.dump(trace, copy)
    from hta.common.trace import Trace
    from hta.trace_analysis import TraceAnalysis

    loaded = Trace(trace_files=copies)
    loaded.load_traces(use_multiprocessing=False)  # it forks, and threads are running here
    analysis = TraceAnalysis.__new__(TraceAnalysis)
    analysis.t = loaded
    return analysis


def _mended(event):
    if event.get("cat") == "gpu_user_annotation":
        return None  # the device's copy of ProfilerStep counts as a step, so the last step is cut in its middle
    if event.get("cat") == "cpu_op" and "stream" in event.get("args", {}):
        args = {name: value for name, value in event["args"].items() if name != "stream"}
        return event | {"args": args}  # a host op that names a stream (Triton's launches) counts as a kernel
    return event


def _nanogpt(tmp_path):
    return sorted((TRACES / "nanogpt_h100_8ranks").glob("rank[01]-*"))


def _with_nccl_arguments(tmp_path):
    return sorted((TRACES / "hta_nccl_args_a100").glob("*.json.gz"))


def _on_amd(tmp_path):
    return sorted((TRACES / "tracelens_mi300_resnet_ddp").glob("*.json.gz"))


def _made_by_hand(tmp_path):
    recorded.write_run(tmp_path / "made", kernel="gemm")
    return sorted((tmp_path / "made").glob("rank*.gz"))


def _sample(tmp_path):
    return sorted((ROOT / "sample_traces" / "demo-yafsdp").glob("rank*.trace.json.gz"))


@pytest.fixture(
    scope="module",
    params=others_in_accuracy([_nanogpt, _with_nccl_arguments, _on_amd, _made_by_hand, _sample], [_made_by_hand]),
)
def pair(request, tmp_path_factory):
    """Return HTA's analysis of some files, and the one made of them loaded."""
    folder = tmp_path_factory.mktemp(request.param.__name__.strip("_"))
    files = request.param(folder)
    if not files:
        pytest.skip("no traces of other projects next to this checkout")
    own = folder / "own"
    own.mkdir()
    for file in files:
        (own / file.name).symlink_to(file)
    return _from_files(files, folder, mend=True), to_hta(loader.load(own))


@pytest.mark.parametrize("name", RESULTS)
def test_hta_results_of_a_loaded_run_equal_those_of_the_files(pair, name):
    theirs, ours = pair
    assert ours.t.get_ranks() == theirs.t.get_ranks()
    ranks = theirs.t.get_ranks()
    try:
        expected = RESULTS[name](theirs, ranks)
    except (IndexError, ValueError) as error:  # a run without a device, or with one step: HTA cannot, either way
        with pytest.raises(type(error), match=re.escape(str(error))):
            RESULTS[name](ours, ranks)
        return
    _assert_same(RESULTS[name](ours, ranks), expected)


def _assert_same(found, expected):
    import pandas as pd

    if isinstance(expected, pd.DataFrame):
        # Events of one µs come in another order, and a queue is then one longer or shorter for no time at all.
        tolerance = 1e-4 if "queue_length" in str(expected.columns[0]) else 1e-9
        pd.testing.assert_frame_equal(
            found.reset_index(drop=True), expected.reset_index(drop=True), check_dtype=False, rtol=tolerance
        )
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _assert_same(found[key], value)
    elif isinstance(expected, tuple):
        for each, other in zip(found, expected, strict=True):
            _assert_same(each, other)
    elif expected is None:
        assert found is None
    else:
        assert found == expected


def test_a_folder_that_hta_cannot_load_is_handed_over_all_the_same(tmp_path):
    """One cut rank among good ones: HTA's loader raises for all of them."""
    run = tmp_path / "run"
    recorded.write_run(run, kernel="gemm", ranks=(0, 1, 2))
    whole = run / "rank00002.pt.trace.json.gz"
    whole.write_bytes(whole.read_bytes()[:200])
    with pytest.raises(EOFError):
        _from_files(sorted(run.glob("rank*.gz")), tmp_path, mend=False)
    analysis = to_hta(loader.load(run))
    assert {0, 1} <= set(analysis.t.get_ranks())
    assert analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].tolist()[:2] == [0.0, 0.0]


def test_a_rank_without_a_device_is_left_out_with_a_warning_and_the_others_are_analyzed(tmp_path):
    for rank in (0, 1, 2):
        write(tmp_path / f"rank{rank}.json", trace(rank, 3, start_us=100.0 + rank, on_device=rank != 1))
    run = loader.load(tmp_path)
    with pytest.warns(UserWarning, match="rank 1 has no device activity"):
        analysis = to_hta(run)
    assert analysis.get_temporal_breakdown(visualize=False)["rank"].tolist() == [0, 2]
    assert to_hta(run, ranks=[0, 1]).t.get_ranks() == [0, 1]
    with pytest.raises(InputError, match="no trace of rank 7"):
        to_hta(run, ranks=[7])


def test_times_are_whole_us_as_hta_rounds_them_by_default(tmp_path, monkeypatch):
    events = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 1.25, "dur": 1.5,
         "args": {"correlation": 5}},
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10.25, "dur": 0.5,
         "args": {"correlation": 5, "stream": 7, "device": 0}},
    ]  # fmt: skip
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 10**18}))
    run = loader.load(tmp_path / "rank0.json")
    kernel = to_hta(run).t.get_trace(0).iloc[1]
    assert (kernel["ts"], kernel["dur"], kernel["correlation"]) == (9, -1, 0)  # HTA's rounding, its fault and all
    from hta.configs.env_options import HTAEnvOptions

    options = HTAEnvOptions.instance()  # it has read the environment already
    monkeypatch.setitem(options._options, "HTA_DISABLE_NS_ROUNDING", True)
    kernel = to_hta(run).t.get_trace(0).iloc[1]
    assert (kernel["ts"], kernel["dur"]) == (9.0, 0.5)


def test_a_kernel_whose_launch_is_not_there_is_linked_to_nothing(tmp_path):
    recorded.write_run(tmp_path / "run", kernel="gemm", ranks=(0,))
    frame = to_hta(loader.load(tmp_path / "run"), include_last_profiler_step=True).t.get_trace(0)
    kernels = frame[frame["stream"] >= 0]
    assert len(kernels) == 9
    assert (
        frame.loc[kernels["index_correlation"], "correlation"].to_numpy() == kernels["correlation"].to_numpy()
    ).all()
    assert (frame[frame["stream"] < 0]["correlation"] != -1).sum() == 9
    assert frame.index.tolist() == frame["index"].tolist()


def test_a_window_that_is_not_there_is_named(tmp_path):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    with pytest.raises(InputError, match="no window 3; there are 0"):
        to_hta(loader.load(tmp_path / "run"), window=3)


def test_without_hta_the_extra_is_named(tmp_path, monkeypatch):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    run = loader.load(tmp_path / "run")
    monkeypatch.setattr("tracekit.report.export.hta.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch-tracekit\[hta\]'"):
        to_hta(run)


def test_the_example_of_the_guide_runs(tmp_path):
    guide = (ROOT / "docs" / "hta.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    recorded.write_run(tmp_path / "run", kernel="gemm")
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs" / "today")
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "comp_comm_overlap_pctg" in done.stdout
    assert "idle_time(us)" in done.stdout
    assert "COMMUNICATION" in done.stdout

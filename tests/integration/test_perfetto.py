"""Perfetto's own reader opens what we write.

It is a program that Perfetto publishes; without it, its tests skip, and what its published schema says must do.
"""

import io
import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import tracekit
from tests.support import drawn_traces, perfetto_reader
from tests.support.selection import others_in_accuracy
from tests.unit.report.test_export import ops
from tracekit.model.run import Run
from tracekit.report.export import perfetto

ROOT = Path(__file__).parents[2]
OTHERS = ROOT.parent / "shared" / "traces"
_FIND = (
    "from perfetto.prebuilts.manifests.trace_processor_shell import TRACE_PROCESSOR_SHELL_MANIFEST as known\n"
    "from perfetto.prebuilts.perfetto_prebuilts import get_perfetto_prebuilt\n"
    "print(get_perfetto_prebuilt(known))"
)
_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def trace_processor() -> str:
    """Return the path of Perfetto's trace processor: one that is installed, else the one that Perfetto publishes."""
    installed = os.environ.get("TRACE_PROCESSOR_SHELL") or shutil.which("trace_processor_shell")
    if installed:
        return installed
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FIND], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("Perfetto's trace processor could not be downloaded in time")
    if done.returncode:
        pytest.skip("Perfetto's trace processor is not installed (TRACE_PROCESSOR_SHELL) and could not be downloaded")
    return done.stdout.strip().splitlines()[-1]


def ask(trace_processor: str, file: Path, sql: str) -> list[dict]:
    api = pytest.importorskip("perfetto.trace_processor")
    config = api.TraceProcessorConfig(bin_path=trace_processor, unique_port=True)
    with api.TraceProcessor(trace=str(file), config=config) as opened:
        return [row.__dict__ for row in opened.query(sql)]


def write(run: Run, file: Path) -> perfetto.ExportCounts:
    data = io.BytesIO()
    done = perfetto.write(run, data)
    file.write_bytes(data.getvalue())
    return done


ERRORS = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"


EXPORTED = ("demo-fsdp2", "overlapping", "nanogpt_h100_8ranks", "hta_ddp_v100_memory")


@pytest.mark.parametrize("name", others_in_accuracy(EXPORTED, EXPORTED[:2]))
def test_perfettos_own_reader_opens_the_file_without_an_error_and_finds_every_slice(trace_processor, tmp_path, name):
    if name == "overlapping":
        slices = ops(("outer", 0, 5), ("inner", 1, 3), ("late", 3, 7), ("nothing", 5, 5), ("again", 7, 7))
        run = drawn_traces.run(drawn_traces.trace("compute aab", ops=slices))
    elif name.startswith("demo"):
        run = tracekit.load(ROOT / "sample_traces" / name)
    elif (OTHERS / name).exists():
        run = tracekit.load(OTHERS / name)
    else:
        pytest.skip(f"{name} is not here")
    file = tmp_path / "run.pftrace"
    done = write(run, file)
    assert ask(trace_processor, file, ERRORS) == []
    sql = "SELECT count(*) AS slices, sum(dur) AS dur_ns, min(dur) AS least_ns FROM slice"
    (found,) = ask(trace_processor, file, sql)
    whole_ns = sum(
        int(trace.ops["dur_ns"].sum() + trace.activities["dur_ns"].sum() + trace.checkpoints["dur_ns"].sum())
        + int((trace.steps["end_ns"] - trace.steps["start_ns"]).sum())
        for trace in run.traces()
    )
    assert found == {"slices": done.slices + done.rows, "dur_ns": whole_ns, "least_ns": found["least_ns"]}
    assert found["least_ns"] >= 0
    assert ask(trace_processor, file, "SELECT count(*) AS n FROM flow") == [{"n": done.flows}]
    assert ask(trace_processor, file, "SELECT count(*) AS n FROM counter") == [{"n": done.counter_values}]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param("nanogpt_h100_8ranks", [4], marks=pytest.mark.accuracy), ("torchrec_v100_4ranks", None)],
)
def test_an_export_obeys_the_published_schema_and_no_track_overlaps(name, ranks):
    if not (OTHERS / name).exists():
        pytest.skip("no traces of other projects next to this checkout")
    run = tracekit.load(OTHERS / name)
    data = io.BytesIO()
    perfetto.write(run, data, ranks=ranks)
    found = perfetto_reader.read(data.getvalue())
    there = Counter()
    for rank in ranks or run.ranks:
        trace = run.trace(rank)
        for kinds in (trace.ops["kind"], trace.activities["kind"]):
            there.update(dict(kinds.value_counts().iter_rows()))
        there["step"] += trace.steps.height
    assert Counter(each.category for each in found.slices) == there
    level = defaultdict(list)
    for each in found.slices:
        level[each.track, each.depth].append((each.start_ns, each.start_ns + each.dur_ns))
    for slices in level.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(slices)))

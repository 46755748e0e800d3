"""Nothing of a real trace is lost: events are counted, and every lane's busy time added up, again in plain Python."""

import gzip
from collections import Counter, defaultdict
from pathlib import Path

import polars as pl
import pytest

from tests.integration import raw
from tests.support.selection import others_in_accuracy
from tracekit.ingest.loader import load
from tracekit.ingest.readers.kineto import reader
from tracekit.model import intervals

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"
SAMPLES = sorted(path.parent for path in ROOT.glob("sample_traces/*/run.json"))
OTHERS = (
    "hta_cpu_gloo",
    "hta_ddp_v100_memory",
    "hta_dlrm_a100",
    "hta_event_sync",
    "hta_nccl_args_a100",
    "hta_pair_of_128",
    "kineto_resnet_v100_memory",
    "megatron_tp8_a100_8ranks",
    "merged_ddp_mi300_4ranks",
    "nanogpt_h100_8ranks",
    "torchrec_v100_4ranks",
    "tracelens_h100_memory_stacks",
    "tracelens_mi300_resnet_ddp",
)
EVERYDAY = ("hta_cpu_gloo", "torchrec_v100_4ranks", "tracelens_mi300_resnet_ddp")
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
ON_HOST = {
    *("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function", "overhead"),
    *("operator", "runtime"),
}
NO_WORK = {"trace", "gpu_user_annotation", "cuda_sync"}


@pytest.fixture(
    params=[
        *others_in_accuracy(SAMPLES, SAMPLES[:1]),
        *others_in_accuracy([SHARED / name for name in OTHERS], [SHARED / name for name in EVERYDAY]),
    ],
    ids=lambda path: path.name,
    scope="module",
)
def folder(request):
    if not request.param.is_dir():
        pytest.skip("the shared traces are not installed")
    return request.param


@pytest.fixture(scope="module")
def run(folder):
    return load(folder, cache=False)


def test_no_event_is_lost_and_every_lane_is_busy_as_long_as_in_plain_python(folder, run):
    files = sorted({Path(source.path) for source in run.sources})
    assert files == sorted(folder.glob("*.json.gz"))
    for file in files:
        document = raw.RawTrace(file)
        assert reader.counts(str(file)) == counted(document.events)
        sources = [source for source in run.sources if Path(source.path) == file]
        for source in sources:
            trace = run.trace(source.rank, source.window)
            slices = [s for s in document.slices if len(sources) == 1 or s.args.get("rank") == source.rank]
            assert {s.cat.lower() for s in slices} <= ON_DEVICE | ON_HOST | NO_WORK
            assert lanes_of_ops(trace) == by_thread(s for s in slices if s.cat.lower() in ON_HOST)
            if trace.on_device:
                assert lanes_of_activities(trace) == by_stream(s for s in slices if s.cat.lower() in ON_DEVICE)
            else:
                assert work_of_threads(trace) == work_in_plain_python(document)
            lossy = {"truncated", "damaged_events", "bad_times", "unmatched_pairs", "unknown_kinds", "rankless_events"}
            assert not lossy & set(trace.data_quality["kind"])


def test_a_merged_file_splits_into_the_ranks_that_its_events_name():
    file = SHARED / "merged_ddp_mi300_4ranks" / "merged_all_events.json.gz"
    if not file.is_file():
        pytest.skip("the shared traces are not installed")
    run = load(file.parent, cache=False)
    assert run.ranks == (0, 1, 2, 3)
    work = [run.trace(rank).activities.height + run.trace(rank).ops.height for rank in run.ranks]
    found = reader.counts(str(file))
    assert sum(work) == sum(n for (ph, cat), n in found.items() if ph == "X" and cat != "gpu_user_annotation")


def test_allocator_events_of_a_sample_are_all_there():
    for file in (file for sample in SAMPLES for file in sample.glob("*.gz")):
        with gzip.open(file, "rt") as text:
            memory_events = text.read().count('"name": "[memory]"')
        assert reader.read(str(file), rank=0).allocations.height == memory_events > 0


def counted(events):
    return Counter((event.get("ph"), event.get("cat")) for event in events)


def measured(spans):
    """What is compared of a lane: slices, busy time, first start, last end."""
    return len(spans), raw.length(spans), min(start for start, _ in spans), max(end for _, end in spans)


def by_thread(slices):
    lanes = defaultdict(list)
    for s in slices:
        lanes[tuple(map(str, s.place))].append(s.span)
    return {place: measured(spans) for place, spans in lanes.items()}


def by_stream(slices):
    lanes = defaultdict(list)
    for s in slices:
        lanes[s.args["device"], s.args["stream"]].append(s.span)
    return {place: measured(spans) for place, spans in lanes.items()}


def lanes_of_ops(trace):
    return of_table(trace.ops.join(trace.lanes.select("lane", "pid", "tid"), on="lane"), "pid", "tid")


def lanes_of_activities(trace):
    placed = trace.activities.join(trace.lanes.select("lane", "device", "stream"), on="lane")
    return of_table(placed, "device", "stream")


def of_table(table, *place):
    found = {}
    for key, rows in table.group_by(*place):
        spans = intervals.from_columns(rows["start_ns"], rows["dur_ns"])
        found[key] = (len(spans), intervals.length(spans), int(spans[:, 0].min()), int(spans[:, 1].max()))
    return found


def work_of_threads(trace):
    placed = trace.activities.join(trace.lanes.select("lane", "pid", "tid"), on="lane")
    found = of_table(placed.filter(pl.col("dur_ns") > 0), "kind", "pid", "tid")
    return {key: numbers[1:] for key, numbers in found.items()}


def work_in_plain_python(document):
    gloo, computing = raw.work_on_host(document)
    spans = defaultdict(list)
    for s in gloo:
        spans["communication", *map(str, s.place)].append(s.span)
    for place, found in computing.items():
        spans["compute", *map(str, place)] += found
    return {key: measured(found)[1:] for key, found in spans.items()}

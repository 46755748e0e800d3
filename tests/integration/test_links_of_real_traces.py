"""Links of real traces against plain Python, and against what the profiler says of them in another way: its arrows."""

import random
from collections import defaultdict
from pathlib import Path

import polars as pl
import pytest

from tests.integration import raw
from tests.support.selection import others_in_accuracy
from tracekit.ingest.readers.kineto import reader

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"
SAMPLES = [ROOT / "sample_traces" / name / "rank00001.pt.trace.json.gz" for name in ("demo-fsdp2", "demo-yafsdp")]
NANOGPT = SHARED / "nanogpt_h100_8ranks" / "rank5-chrome-trace.json.gz"
GLOO = SHARED / "hta_cpu_gloo" / "rank-34.pt.trace.json.gz"
A100 = SHARED / "hta_nccl_args_a100" / "nccl_data.json.gz"
OTHERS = [
    NANOGPT,
    GLOO,
    A100,
    SHARED / "megatron_tp8_a100_8ranks" / "megatron_kineto_3.json.gz",
    SHARED / "tracelens_mi300_resnet_ddp" / "train_resnet18.json.gz",
    *sorted(SHARED.glob("torchrec_v100_4ranks/*.json.gz"))[:1],
]
ITEM_BYTES = {"Float": 4, "BFloat16": 2, "Int": 4, "Long": 8, "Byte": 1}


class Both:
    """One file, read in plain Python and by tracekit."""

    def __init__(self, path: Path) -> None:
        self.plain = raw.RawTrace(path)
        self.trace = reader.read(str(path), rank=0)
        places = self.trace.lanes.select("lane", "device", "stream", "pid", "tid")
        self.ops = self.trace.ops.join(places, on="lane", maintain_order="left")
        self.activities = self.trace.activities.join(places, on="lane", maintain_order="left")


@pytest.fixture(
    scope="module",
    params=others_in_accuracy([*SAMPLES, *OTHERS], [SAMPLES[1], GLOO, A100]),
    ids=lambda path: path.parent.name,
)
def both(request):
    return pair(request.param)


def pair(path):
    if not path.is_file():
        pytest.skip("the shared traces are not installed")
    return Both(path)


def arrows(plain, category):
    """Return (pid, tid, ns) of both ends of each of the profiler's arrows that has two."""
    ends = defaultdict(dict)
    for event in plain.events:
        if event.get("cat") == category:
            place = str(event["pid"]), str(event["tid"]), plain.base + int(event["ts"] * 1000)
            ends[event["id"]].setdefault(event["ph"], place)
    return [(found["s"], found["f"]) for found in ends.values() if len(found) == 2]


def test_backward_ops_point_where_the_profilers_arrows_come_from(both):
    drawn = arrows(both.plain, "fwdbwd")
    starting = defaultdict(dict)
    for row in both.ops.filter(pl.col("kind") == "cpu_op").select("pid", "tid", "start_ns", "id", "forward_id").rows():
        starting[row[:3]][row[3]] = row[4]
    for forward, backward in drawn:
        assert set(starting[backward].values()) & set(starting[forward])
    if not drawn:
        assert both.trace.ops["forward_id"].is_null().all()


def test_work_points_to_the_launch_that_the_profilers_arrows_come_from(both):
    drawn = arrows(both.plain, "ac2g")
    columns = both.activities.select("device", "stream", "start_ns", "launch_id").rows()
    launch_of = {(str(device), str(stream), start): launch for device, stream, start, launch in columns}
    begins = both.ops.select("pid", "tid", "start_ns").rows()
    checked = 0
    for call, work in drawn:
        if work in launch_of and launch_of[work] is not None:
            assert begins[launch_of[work]] == call
            checked += 1
    assert checked == len({work for _, work in drawn if work in launch_of})
    assert checked >= 0.9 * sum(launch is not None for launch in launch_of.values()) or not drawn


def test_launch_and_step_of_all_work_are_those_of_its_correlation(both):
    plain, calls = both.plain, {}
    for s in plain.of("cuda_runtime", "cuda_driver"):
        number = s.args.get("correlation")
        if number and (number not in calls or s.start < calls[number].start):
            calls[number] = s
    starts = both.trace.ops["start_ns"].to_list()
    expected, found = defaultdict(list), defaultdict(list)
    for s in plain.of("kernel", "gpu_memcpy", "gpu_memset"):
        call = calls.get(s.args.get("correlation"))
        launched = (call.start, plain.step_at(call.start)) if call else (None, None)
        expected[s.name, s.start].append(launched)
    for name, start, launch, step in both.activities.select("name", "start_ns", "launch_id", "step").rows():
        found[name, start].append((None if launch is None else starts[launch], step))
    if both.trace.on_device and plain.steps:
        assert found.keys() == expected.keys()
        assert all(sorted(found[key], key=str) == sorted(expected[key], key=str) for key in found)


def test_the_slice_around_an_op_is_the_shortest_that_encloses_it(both):
    lanes = defaultdict(list)
    for row in both.trace.ops.select("lane", "start_ns", "dur_ns", "id", "parent_id").rows():
        lanes[row[0]].append((row[1], row[1] + row[2], *row[3:]))
    every = [(lane, row) for lane, rows in lanes.items() for row in rows]
    for lane, (start, end, me, parent) in random.Random(1).sample(every, min(400, len(every))):
        around = [
            o for o in lanes[lane] if o[0] <= start and end <= o[1] and o[1] - o[0] > end - start and o[1] > start
        ]
        if parent is None:
            assert not around
        else:
            own = both.trace.ops.row(parent, named=True)
            assert own["lane"] == lane
            shortest = min((o[1] - o[0] for o in around), default=end - start)
            assert own["dur_ns"] in (shortest, end - start), me  # twins of one span lie in one another


def test_lanes_have_the_role_of_their_most_busy_kind(both):
    busy = defaultdict(lambda: defaultdict(int))
    for lane, kind, dur in both.trace.activities.select("lane", "kind", "dur_ns").rows():
        busy[lane][kind] += dur
    for lane, role in both.trace.lanes.select("lane", "role").rows():
        most = max(busy[lane].values(), default=None)
        assert role == "host" if most is None else busy[lane][role] == most


# Groups and collectives -------------------------------------------------------------------------------------------


def test_groups_are_those_of_the_header():
    both = pair(GLOO)
    listed = both.trace.header["distributedInfo"]["pg_config"]
    assert len(listed) == 11
    for group, config in zip(both.trace.groups.to_dicts(), listed, strict=True):
        assert group == {
            "group": config["pg_name"],
            "description": config["pg_desc"],
            "backend": config["backend_config"],
            "ranks": config["ranks"],
        }


OPS = {"allreduce": "all_reduce", "broadcast": "broadcast", "_reduce_scatter_base": "reduce_scatter"}
OPS |= {"_allgather_base": "all_gather"}


def sizes_of(args):
    item = ITEM_BYTES[args["dtype"]]
    sizes = item * args["In msg nelems"], item * args["Out msg nelems"]
    return OPS[args["Collective name"]], args["Process Group Name"], args["dtype"], *sizes, args["Group size"]


@pytest.mark.parametrize("path", others_in_accuracy([NANOGPT, A100], [A100]), ids=lambda path: path.parent.name)
def test_collectives_say_what_their_kernels_arguments_say(path):
    both = pair(path)
    joined = both.trace.collectives.join(both.trace.activities, left_on="activity_id", right_on="id")
    found = {
        row["start_ns"]: tuple(row[c] for c in ("op", "group", "dtype", "sent_bytes", "received_bytes", "group_size"))
        for row in joined.to_dicts()
    }
    kernels = [s for s in both.plain.of("kernel") if s.name.startswith("nccl")]
    assert found.keys() == {s.start for s in kernels}
    said = {s.start: sizes_of(s.args) for s in kernels if "Collective name" in s.args}
    assert len(said) >= 0.6 * len(kernels)
    for start, row in said.items():
        assert found[start] == row
    for s in kernels:  # kernels of a replayed graph have an op and no size
        assert found[s.start][0] in {"reduce_scatter": "ReduceScatter", "all_gather": "AllGather"} or s.start in said


@pytest.mark.accuracy
def test_kernels_all_named_generic_are_distinguished_by_their_arguments():
    path = SHARED / "merged_ddp_mi300_4ranks" / "merged_all_events.json.gz"
    if not path.is_file():
        pytest.skip("the shared traces are not installed")
    plain = raw.RawTrace(path)
    for rank, trace in reader.read_merged(str(path)).items():
        kernels = [s for s in plain.of("kernel") if s.name.startswith("nccl") and s.args["rank"] == rank]
        expected = sorted(sizes_of(s.args) for s in kernels)
        columns = ("op", "group", "dtype", "sent_bytes", "received_bytes", "group_size")
        assert sorted(trace.collectives.select(columns).rows()) == expected
        assert {row[0] for row in expected} == {"all_reduce", "broadcast"}
        assert trace.groups.select("group", "ranks").rows() == [("0", [0, 1, 2, 3])]


@pytest.mark.accuracy
def test_old_kernels_all_named_send_and_receive_are_distinguished_by_the_issuing_op():
    both = pair(SHARED / "hta_dlrm_a100" / "rank0.json.gz")
    calls = {s.args["correlation"]: s for s in both.plain.of("cuda_runtime") if s.args.get("correlation")}
    issuers = [s for s in both.plain.of("cpu_op") if s.name.startswith("c10d::")]
    sides = {
        "_reduce_scatter_base_": "reduce_scatter",
        "_allgather_base_": "all_gather",
        "alltoall_base_": "all_to_all",
    }
    expected = []
    for kernel in (s for s in both.plain.of("kernel") if s.name.startswith("nccl")):
        call = calls.get(kernel.args["correlation"])  # none: launched before the trace began
        issuer = next((s for s in issuers if call and s.place == call.place and s.start <= call.start < s.end), None)
        name = issuer.name.removeprefix("c10d::") if issuer else None
        if name in sides:
            item = {"float": 4, "int": 4, "long": 8}[issuer.args["Input type"][0]]
            expected.append((sides[name], item * elements(issuer, 1), item * elements(issuer, 0)))
        else:
            expected.append(("all_reduce", None, None) if name else ("send_recv", None, None))
    found = both.trace.collectives.join(both.trace.activities, left_on="activity_id", right_on="id").sort("start_ns")
    rows = found.select("op", "sent_bytes", "received_bytes").rows()
    in_order = sorted(rows, key=str)
    assert [row[0] for row in in_order] == [row[0] for row in sorted(expected, key=str)]
    assert sorted(row for row in rows if row[0] in sides.values()) == sorted(
        row for row in expected if row[0] in sides.values()
    )


# Gloo of the samples ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=others_in_accuracy(SAMPLES, SAMPLES[1:]), ids=lambda path: path.parent.name)
def sample(request):
    return Both(request.param)


def test_gloo_slices_have_kind_and_size_of_the_op_that_issued_them(sample):
    kinds = {
        "c10d::_allgather_base_": ("all_gather", 1, 0),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 0),
        "c10d::allreduce_": ("all_reduce", 0, 0),
    }
    issued = [s for s in sample.plain.of("cpu_op") if s.name.startswith("c10d::") and "barrier" not in s.name]
    run = [s for s in sample.plain.slices if s.name.startswith("gloo:")]
    assert len(issued) == len(run)
    found = sample.trace.collectives.join(sample.trace.activities, left_on="activity_id", right_on="id").sort(
        "start_ns"
    )
    rows = found.select("op", "sent_bytes", "received_bytes", "start_ns").rows()
    ordered = zip(sorted(issued, key=lambda s: s.start), sorted(run, key=lambda s: s.start), rows, strict=True)
    checked = 0
    for op, slice_, row in ordered:
        assert row[3] == slice_.start
        if op.name in kinds and row[0] != "barrier":
            kind, sent, received = kinds[op.name]
            assert row[:3] == (kind, 4 * elements(op, sent), 4 * elements(op, received))
            checked += 1
    assert checked > 50


def elements(op, which):
    dims = op.args["Input Dims"][which]
    while dims and isinstance(dims[0], list):
        dims = dims[0]
    product = 1
    for n in dims:
        product *= int(n)
    return product


def test_collectives_belong_to_the_unit_whose_span_issued_them(sample):
    spans = [s for s in sample.plain.of("user_annotation") if s.name.startswith(("FSDP::", "YaFSDP::"))]
    begins = sample.trace.ops["start_ns"].to_list()
    of = dict(sample.activities.drop_nulls("launch_id").select("start_ns", "launch_id").rows())
    checked = 0
    for row in sample.activities.filter(pl.col("kind") == "communication").to_dicts():
        issued = begins[of[row["start_ns"]]]
        around = [s for s in spans if s.start <= issued < s.end]
        inner = min(around, key=lambda s: s.end - s.start, default=None)
        assert row["unit"] == (None if inner is None else unit_in(inner.name))
        checked += inner is not None
    assert checked > 50


def unit_in(name):
    if " for " in name:
        return name.partition(" for ")[2]
    return name[name.index("(") + 1 : -1] if name.endswith(")") else ""

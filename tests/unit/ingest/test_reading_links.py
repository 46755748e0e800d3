"""What belongs to what: work to launch, op, annotation and step; backward to forward; collectives to their groups."""

import json

import polars as pl
import pytest

from tests.support.kineto_files import slice_
from tracekit.ingest.readers.kineto import reader

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)"


def read(folder, *events, **header):
    path = folder / "trace.json"
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return reader.read(str(path), rank=0)


def op(name, at_us, dur_us, *, tid=1, category="cpu_op", **args):
    return slice_(category, name, at_us, dur_us, tid=tid, **args)


def span(name, at_us, dur_us, *, tid=1):
    return slice_("user_annotation", name, at_us, dur_us, tid=tid)


def launched(name, at_us, correlation, *, on_us, stream=7, tid=1, category="kernel", **args):
    """Return a launch and what it launched."""
    call = slice_("cuda_runtime", "cudaLaunchKernel", at_us, 1, tid=tid, correlation=correlation)
    return call, slice_(category, name, on_us, 5, tid=stream, device=0, stream=stream, correlation=correlation, **args)


def of(trace, name):
    """Return the one row of activities, or else of ops, of a name."""
    for table in (trace.activities, trace.ops):
        rows = table.filter(pl.col("name") == name)
        if rows.height:
            return rows.row(0, named=True)
    raise KeyError(name)


def around(trace, op_id):
    """Return the names of the slices around an op, innermost first."""
    found = []
    while op_id is not None:
        row = trace.ops.row(op_id, named=True)
        found.append(row["name"])
        op_id = row["parent_id"]
    return found


# Work, launch, op, annotation, step ---------------------------------------------------------------------------------


def test_a_kernel_is_linked_to_its_launch_op_annotation_and_step(tmp_path):
    # time µs   0        20        40        60        80
    # step      [5                          ][6             ]
    # host      [forward [linear[mm[launch]]]]
    # stream 7  .................................[gemm]          runs in step 6, belongs to 5
    trace = read(
        tmp_path,
        span("ProfilerStep#5", 0, 40),
        span("tracekit::forward", 1, 35),
        op("aten::linear", 5, 20),
        op("aten::mm", 6, 10),
        *launched("gemm", 8, 4, on_us=50),
        span("ProfilerStep#6", 40, 40),
        op("aten::mm", 7, 3, tid=2),  # on another thread, around the same moment
    )
    gemm = of(trace, "gemm")
    assert around(trace, gemm["launch_id"]) == [
        "cudaLaunchKernel", "aten::mm", "aten::linear", "tracekit::forward", "ProfilerStep#5"
    ]  # fmt: skip
    assert (gemm["step"], gemm["phase"]) == (5, "forward")
    assert trace.ops["id"].to_list() == list(range(trace.ops.height))


def test_the_first_of_several_launches_with_one_correlation_counts(tmp_path):
    # cudaLaunchKernel calls cuLaunchKernel under the same number
    trace = read(
        tmp_path,
        slice_("cuda_runtime", "cudaLaunchKernel", 5, 10, tid=1, correlation=3),
        slice_("cuda_driver", "cuLaunchKernel", 7, 5, tid=1, correlation=3),
        slice_("kernel", "gemm", 30, 5, tid=7, device=0, stream=7, correlation=3),
    )
    assert around(trace, of(trace, "gemm")["launch_id"]) == ["cudaLaunchKernel"]


def test_work_without_a_launch_takes_the_step_of_the_op_that_owns_it(tmp_path):
    # ROCm and old traces: no runtime slice, but an External id
    trace = read(
        tmp_path,
        span("ProfilerStep#5", 0, 40),
        span("FSDP::all_gather (layers.1)", 1, 30),
        op("aten::mm", 5, 20, **{"External id": 12}),
        slice_("kernel", "gemm", 50, 5, tid=7, device=0, stream=7, correlation=99, **{"External id": 12}),
        slice_("kernel", "add", 60, 5, tid=7, device=0, stream=7, **{"External id": 13}),
    )
    gemm, add = of(trace, "gemm"), of(trace, "add")
    assert (gemm["launch_id"], gemm["step"], gemm["unit"], gemm["span"]) == (None, 5, "layers.1", "all_gather")
    assert (add["launch_id"], add["step"], add["unit"]) == (None, None, None)


@pytest.mark.parametrize("key", ["External id", "external id"])
def test_the_external_id_is_written_in_two_ways(tmp_path, key):
    trace = read(
        tmp_path,
        span("ProfilerStep#5", 0, 40),
        op("aten::mm", 5, 20, **{key: 12}),
        slice_("kernel", "gemm", 50, 5, tid=7, device=0, stream=7, **{key: 12}),
    )
    assert of(trace, "gemm")["step"] == 5


def test_slices_that_end_together_or_touch_nest_as_drawn(tmp_path):
    # time µs 0 1 2 3 4 5 6 7 8 9
    # a       # # # # # # . . . .
    # b       # # # # # # . . . .    as long as a: inside it
    # c       . . # # # # . . . .    ends with b: inside it
    # d       . . . . . . # # # .    touches them: a sibling
    # e       . . . . . . . # # #    outlasts d: a sibling, not inside
    # f       . . . . . . . . . #
    spans = {"a": (0, 6), "b": (0, 6), "c": (2, 4), "d": (6, 3), "e": (7, 3), "f": (9, 1)}
    trace = read(tmp_path, *(op(name, *times) for name, times in spans.items()))
    parents = {name: around(trace, of(trace, name)["id"])[1:] for name in spans}
    assert parents == {"a": [], "b": ["a"], "c": ["b", "a"], "d": [], "e": [], "f": ["e"]}


@pytest.mark.parametrize("order", [1, -1], ids=["as called", "reversed"])
def test_slices_with_equal_times_nest_as_they_were_numbered_in_any_order_of_the_file(tmp_path, order):
    # Of a clock of whole µs: hta_pair_of_128 has 37 such groups of operators, torchrec_v100_4ranks 513.
    calls = [
        slice_("python_function", "train.py(3): step", 5, 2, tid=1),
        span("forward", 5, 2),
        op("aten::clone", 5, 2, **{"External id": 8}),
        op("aten::contiguous", 5, 2, **{"External id": 9}),
        slice_("cuda_runtime", "cudaLaunchKernel", 5, 2, tid=1, correlation=3, **{"External id": 3}),
    ]
    calls[1]["args"]["External id"] = 7
    trace = read(tmp_path, *calls[::order])
    inner = of(trace, "cudaLaunchKernel")["id"]
    assert around(trace, inner) == [call["name"] for call in reversed(calls)]


def test_a_step_marked_on_several_threads_counts_once(tmp_path):
    marks = [span(f"ProfilerStep#{n}", 100 * n, 100, tid=tid) for n in (1, 2) for tid in (1, 2)]
    trace = read(tmp_path, *marks, *launched("k", 110, 1, on_us=120), *launched("k", 210, 2, on_us=220))
    assert trace.steps.select("step", "host_start_ns", "host_end_ns").rows() == [
        (1, 100_000, 200_000), (2, 200_000, 300_000)
    ]  # fmt: skip


def test_the_device_window_of_a_step_starts_with_its_first_work_on_the_main_lane(tmp_path):
    # time µs    0    100   200   300   400
    # step       [1         ][2        ]
    # stream 7   .....[gemm].....[gemm].        main: most compute time
    # stream 20  .[comm]...[comm].......        starts earlier in both steps
    def work(base, step):
        return (
            *launched("gemm", base + 5, 10 * step, on_us=base + 60),
            *launched("gemm", base + 6, 10 * step + 1, on_us=base + 70),
            *launched(NCCL, base + 2, 10 * step + 2, on_us=base + 20, stream=20),
        )

    trace = read(tmp_path, span("ProfilerStep#1", 0, 200), span("ProfilerStep#2", 200, 200), *work(0, 1), *work(200, 2))
    assert trace.steps.select("step", "start_ns", "end_ns", "device").rows() == [
        (1, 60_000, 260_000, 0), (2, 260_000, 275_000, 0)
    ]  # fmt: skip


# Forward and backward ----------------------------------------------------------------------------------------------


def numbered(name, at_us, number, *, forward_thread=0, tid=1, dur_us=2):
    return op(name, at_us, dur_us, tid=tid, **{"Sequence number": number, "Fwd thread id": forward_thread})


def test_a_backward_op_knows_the_forward_op_of_its_number(tmp_path):
    trace = read(
        tmp_path,
        numbered("aten::mul", 1, 7),
        numbered("aten::mm", 4, 8),
        numbered("autograd::engine::evaluate_function: MmBackward0", 20, 8, forward_thread=1, tid=2, dur_us=8),
        numbered("MmBackward0", 21, 8, forward_thread=1, tid=2, dur_us=6),
        numbered("MulBackward0", 30, 7, forward_thread=1, tid=2),
        numbered("AddBackward0", 33, 9, forward_thread=1, tid=2),
        op("aten::mm", 22, 2, tid=2),
    )
    names = dict(trace.ops.select("id", "name").rows())
    found = {row["name"]: names.get(row["forward_id"]) for row in trace.ops.to_dicts() if row["start_ns"] >= 20_000}
    assert found == {
        "autograd::engine::evaluate_function: MmBackward0": "aten::mm",
        "MmBackward0": "aten::mm",
        "MulBackward0": "aten::mul",
        "AddBackward0": None,
        "aten::mm": None,
    }


def test_the_last_of_several_forward_ops_with_one_number_made_the_node(tmp_path):
    # ops without a gradient carry the number of the next node that is made
    trace = read(
        tmp_path,
        numbered("aten::zeros", 1, 7),
        numbered("aten::linear", 4, 7, dur_us=6),
        numbered("aten::addmm", 5, 7, dur_us=3),
        numbered("AddmmBackward0", 20, 7, forward_thread=1),
        numbered("aten::mm", 10, 8),
    )
    assert of(trace, "AddmmBackward0")["forward_id"] == of(trace, "aten::addmm")["id"]


# Groups ------------------------------------------------------------------------------------------------------------

TP = {"pg_name": "3", "pg_desc": "mesh_tp", "backend_config": "cuda:nccl", "pg_size": 2, "ranks": [2, 3]}
WORLD = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cpu:gloo,cuda:nccl", "pg_size": 4, "ranks": []}
ROWS = [("0", "default_pg", "cpu:gloo,cuda:nccl", [0, 1, 2, 3]), ("3", "mesh_tp", "cuda:nccl", [2, 3])]


@pytest.mark.parametrize("listed", [[WORLD, TP], {"0": WORLD, "3": TP}], ids=["as a list", "by name"])
def test_groups_come_from_the_header(tmp_path, listed):
    trace = read(tmp_path, op("x", 0, 1), distributedInfo={"rank": 2, "world_size": 4, "pg_config": listed})
    assert trace.groups.rows() == ROWS


def test_groups_that_the_header_leaves_out_come_from_collectives(tmp_path):
    args = {"Collective name": "allreduce", "Process Group Description": "mesh_dp"}
    trace = read(
        tmp_path,
        *launched(NCCL, 1, 1, on_us=9, **args, **{"Process Group Name": "5", "Process Group Ranks": "[0, 2]"}),
        *launched(NCCL, 2, 2, on_us=19, **args, **{"Process Group Name": "5", "Process Group Ranks": "[0, 2]"}),
        *launched(NCCL, 3, 3, on_us=29, **args, **{"Process Group Name": "6", "Process Group Ranks": "[0, 1, ...]"}),
        *launched(NCCL, 4, 4, on_us=39, **args, **{"Process Group Name": "3", "Process Group Ranks": "[7, 8]"}),
        distributedInfo={"rank": 2, "world_size": 4, "pg_config": [WORLD, TP]},
    )
    assert trace.groups.rows() == [*ROWS, ("5", "mesh_dp", None, [0, 2]), ("6", "mesh_dp", None, None)]


@pytest.mark.parametrize("ranks", [[0, 1 << 70], [0, "1"], [-1], [0.5], "[0, 1]", 7, None, {}, []])
def test_implausible_ranks_of_a_group_are_null(tmp_path, ranks):
    info = {"rank": 0, "world_size": 8, "pg_config": [TP | {"ranks": ranks}]}
    args = {"Process Group Name": "9", "Process Group Ranks": json.dumps(ranks), "Collective name": "allreduce"}
    trace = read(tmp_path, *launched(NCCL, 1, 1, on_us=9, **args), distributedInfo=info)
    known = trace.groups.with_columns(pl.col("ranks").list.len().fill_null(0))["ranks"].to_list()
    assert known == [0, 0]


@pytest.mark.parametrize("info", [None, 5, [], {"pg_config": None}, {"pg_config": [5, None, "x"]}, {"pg_config": 7}])
def test_a_header_without_groups_gives_none(tmp_path, info):
    assert read(tmp_path, op("x", 0, 1), distributedInfo=info).groups.is_empty()


# Collectives -------------------------------------------------------------------------------------------------------

COLLECTIVE_ARGS = {
    "Collective name": "_reduce_scatter_base", "dtype": "BFloat16", "In msg nelems": 800, "Out msg nelems": 200,
    "Group size": 4, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3]", "Seq": 17,
}  # fmt: skip
ROW = {
    "op": "reduce_scatter", "group": "0", "seq": 17, "dtype": "BFloat16", "sent_bytes": 1600, "received_bytes": 400,
    "group_size": 4, "peer": None, "splits": None, "row_bytes": None,
}  # fmt: skip


def only(trace):
    row = trace.collectives.row(0, named=True)
    assert trace.collectives.height == 1
    assert row.pop("activity_id") == trace.activities.filter(pl.col("kind") == "communication")["id"].item()
    return row


def test_a_collective_is_described_by_its_kernels_arguments(tmp_path):
    assert only(read(tmp_path, *launched("ncclDevKernel_Generic(x)", 5, 1, on_us=9, **COLLECTIVE_ARGS))) == ROW


@pytest.mark.parametrize(
    ("collective", "args", "peer"),
    [
        ("send", {"Dst Rank": 2}, 12),
        ("recv", {"Src Rank": "1"}, 11),
        ("send", {"Dst Rank": 2, "Process Group Ranks": "[0, 1, ...]"}, 2),
        ("send", {"Dst Rank": -1}, None),
        ("allreduce", {}, None),
    ],
)
def test_the_peer_of_a_send_is_a_rank_of_its_group(tmp_path, collective, args, peer):
    group = COLLECTIVE_ARGS | {"Collective name": collective, "Process Group Ranks": "[10, 11, 12, 13]"} | args
    row = only(read(tmp_path, *launched("ncclDevKernel_SendRecv(x)", 5, 1, on_us=9, **group)))
    assert (row["op"], row["peer"]) == ("all_reduce" if collective == "allreduce" else collective, peer)


def test_without_kernel_arguments_a_collective_is_described_by_the_op_around_its_launch(tmp_path):
    trace = read(
        tmp_path,
        op("c10d::_reduce_scatter_base_", 1, 20),
        op("record_param_comms", 2, 15, **COLLECTIVE_ARGS),
        *launched("ncclDevKernel_Generic(x)", 5, 1, on_us=40),
        op("record_param_comms", 50, 15, **COLLECTIVE_ARGS | {"Seq": 18}),  # of another collective
    )
    assert only(trace) == ROW


def test_without_described_sizes_they_come_from_the_shapes_of_that_op(tmp_path):
    shapes = {"Input Dims": [[100, 2], [400, 2], [], []], "Input type": ["c10::BFloat16", "c10::BFloat16", "", ""]}
    trace = read(
        tmp_path,
        op("c10d::_reduce_scatter_base_", 1, 20, **shapes),
        *launched("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 5, 1, on_us=40),
    )
    row = only(trace)
    assert (row["op"], row["sent_bytes"], row["received_bytes"]) == ("reduce_scatter", 1600, 400)
    assert (row["group"], row["seq"], row["group_size"]) == (None, None, None)


SHAPES = {  # op: dims, types, dtype, sent, received
    "c10d::allreduce_": ([[[100], [28]], []], ["TensorList", ""], None, None, None),
    "c10d::_allgather_base_": ([[64], [16], []], ["float", "float", ""], "float", 64, 256),
    "c10d::alltoall_base_": ([[30], [20], [], []], ["long int", "long int", "", ""], "long int", 160, 240),
    "c10d::broadcast_": ([[], [], []], ["", "", ""], None, None, None),
    "c10d::scatter_": ([[8], [4, 8]], ["Scalar", "float"], "float", 128, None),
    "c10d::gather_": ([[8]], ["c10::quint1024"], None, None, None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_output_and_input_of_the_op(tmp_path, name):
    dims, types, *expected = SHAPES[name]
    trace = read(
        tmp_path,
        op(name, 1, 20, **{"Input Dims": dims, "Input type": types}),
        *launched("ncclDevKernel_Generic(x)", 5, 1, on_us=40),
    )
    row = only(trace)
    assert [row["dtype"], row["sent_bytes"], row["received_bytes"]] == expected


def test_lists_of_tensors_have_the_type_of_the_kernel_or_an_inner_slice(tmp_path):
    # allreduce_ takes a list: its shapes come without an element type
    listed = {"Input Dims": [[[100], [28]], []], "Input type": ["TensorList", ""]}
    trace = read(
        tmp_path,
        op("c10d::allreduce_", 1, 20, **listed),
        *launched("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 5, 1, on_us=40),
        op("c10d::allreduce_", 61, 20, **listed),
        op("nccl:all_reduce", 62, 10, category="user_annotation", **dims([100])),
        *launched("ncclDevKernel_Generic(x)", 65, 2, on_us=90),
    )
    rows = trace.collectives.select("op", "dtype", "sent_bytes", "received_bytes").rows()
    assert rows == [("all_reduce", "BFloat16", 256, 256), ("all_reduce", "float", 512, 512)]


def test_a_slice_inside_the_op_states_only_the_input(tmp_path):
    trace = read(
        tmp_path,
        op("record_param_comms", 2, 15, **dims([64])),
        *launched("ncclDevKernel_AllGather_RING_LL(x)", 5, 1, on_us=40),
    )
    row = only(trace)
    assert (row["op"], row["sent_bytes"], row["received_bytes"]) == ("all_gather", 256, None)


@pytest.mark.parametrize(
    ("issuer", "expected"),
    [
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::send", "send"),
        ("c10d::gather_", "gather"),
        ("aten::mm", "send_recv"),
    ],
)
def test_sends_and_receives_are_the_op_that_issued_them(tmp_path, issuer, expected):
    trace = read(tmp_path, op(issuer, 1, 20, **dims([4], [4])), *launched("ncclDevKernel_SendRecv(x)", 5, 1, on_us=40))
    assert only(trace)["op"] == expected


@pytest.mark.parametrize(
    ("changed", "sent", "received"),
    [
        ({"dtype": "Float8_e4m3fn"}, 800, 200),
        ({"dtype": "Long"}, 6400, 1600),
        ({"dtype": "int128_of_tomorrow"}, None, None),
        ({"In msg nelems": None}, None, 400),
        ({"In msg nelems": "800"}, 1600, 400),
        ({"In msg nelems": "many"}, None, 400),
        ({"In msg nelems": 0}, 0, 400),
        ({"In msg nelems": 1 << 80}, None, 400),
    ],
)
def test_sizes_are_elements_times_their_type_or_not_known(tmp_path, changed, sent, received):
    row = only(read(tmp_path, *launched("ncclDevKernel_Generic(x)", 5, 1, on_us=9, **COLLECTIVE_ARGS | changed)))
    assert (row["sent_bytes"], row["received_bytes"]) == (sent, received)


# FSDP units --------------------------------------------------------------------------------------------------------

SPANS = {
    "FSDP::all_gather (layers.0)": ("layers.0", "all_gather"),
    "YaFSDP::reduce_scatter (layers.7.mlp)": ("layers.7.mlp", "reduce_scatter"),
    "FSDP::all_gather_copy_out (layers.0, layers.1)": ("layers.0, layers.1", "all_gather_copy_out"),
    "FSDP::backward_prefetch for layers.3": ("layers.3", "backward_prefetch"),
    "FSDP::all_gather": ("", "all_gather"),
    "FSDP::post_backward_reduce ()": ("", "post_backward_reduce"),
    "FullyShardedDataParallel._pre_unshard": (None, "_pre_unshard"),
    "forward": (None, None),
    "NotFSDP::all_gather (layers.0)": (None, None),
}


@pytest.mark.parametrize("name", SPANS)
def test_collectives_and_copies_belong_to_the_unit_whose_span_launched_them(tmp_path, name):
    trace = read(
        tmp_path,
        span(name, 1, 30),
        op("c10d::_allgather_base_", 2, 20),
        *launched(NCCL, 5, 1, on_us=50, stream=20),
        *launched("Memcpy DtoD", 25, 2, on_us=60, category="gpu_memcpy"),
        *launched("outside", 40, 3, on_us=70),
    )
    for work in (NCCL, "Memcpy DtoD", "c10d::_allgather_base_"):
        assert (of(trace, work)["unit"], of(trace, work)["span"]) == SPANS[name]
    assert (of(trace, "outside")["unit"], of(trace, "outside")["span"]) == (None, None)


def test_the_innermost_span_names_the_unit(tmp_path):
    # a prefetch of layers.1 inside the backward of layers.2
    trace = read(
        tmp_path,
        span("FSDP::pre_backward (layers.2)", 0, 40),
        span("FSDP::backward_prefetch for layers.1", 5, 30),
        span("FSDP::all_gather (layers.1)", 6, 20),
        *launched(NCCL, 8, 1, on_us=50),
        *launched("gemm", 37, 2, on_us=60),
    )
    assert (of(trace, NCCL)["unit"], of(trace, NCCL)["span"]) == ("layers.1", "all_gather")
    assert (of(trace, "gemm")["unit"], of(trace, "gemm")["span"]) == ("layers.2", "pre_backward")


# Gloo --------------------------------------------------------------------------------------------------------------


def sends(tmp_path, to, groups):
    """Return the peers of gloo sends of rank 0, which record the receiver's place `to` in an unnamed group."""
    events = []
    for at, place in enumerate(to):
        inputs = {"Concrete Inputs": ["", "", str(place), "0"], "Input Dims": [[[8]], [], [], []]}
        events += [op("c10d::send", 20 * at, 9, **inputs), op("gloo:send", 20 * at + 1, 5, category="user_annotation")]
    listed = [
        {"pg_name": str(i), "pg_desc": text, "pg_size": len(of), "ranks": of} for i, (text, of) in enumerate(groups)
    ]
    trace = read(tmp_path, *events, distributedInfo={"rank": 0, "world_size": 4, "pg_config": listed})
    return trace.collectives["peer"].to_list()


ALL = ("default_pg", [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("to", "groups", "peers"),
    [
        ([2, 1], [], [2, 1]),
        ([2, 1], [ALL], [2, 1]),
        ([1], [ALL, ("mesh_pp", [0, 2]), ("mesh_dp", [0, 1])], [2]),
        ([0], [ALL, ("PIPELINE_MODEL_PARALLEL_GROUP", [2, 0])], [2]),
        ([1, 2], [ALL, ("undefined", [0, 3])], [1, 2]),
        ([0], [ALL, ("undefined", [3, 0])], [3]),
        ([0], [ALL, ("undefined", [3, 0]), ("undefined", [2, 0])], [None]),
        ([0], [], [None]),
        ([0], [ALL], [None]),
    ],
    ids=[
        "no group is known", "only the group of all", "described as the pipeline's", "in the group's own order",
        "a place that only the group of all has", "no rank sends to itself", "two groups fit", "itself",
        "itself, in the group of all",
    ],
)  # fmt: skip
def test_the_peer_of_a_gloo_send_is_a_rank_of_the_group_that_fits(tmp_path, to, groups, peers):
    assert sends(tmp_path, to, groups) == peers


@pytest.mark.parametrize(
    ("splits", "read_as"),
    [
        ("[300, 100, 0, 400]", [600, 200, 0, 800]),
        ("[3, 1, 0, 4]", [600, 200, 0, 800]),
        ("[]", None),
        ("[0, 0]", None),
        ("[3, 1, ...]", None),
        ("[-1, 801]", None),
        ("[0.5, 0.5]", None),
        ("[7, 2]", None),
        (f"[{1 << 70}]", None),
        (None, None),
        ({}, None),
    ],
)
def test_what_an_all_to_all_sends_to_each_rank(tmp_path, splits, read_as):
    args = COLLECTIVE_ARGS | {"Collective name": "all_to_allv", "In split size": splits}
    row = only(read(tmp_path, *launched("ncclDevKernel_SendRecv(x)", 5, 1, on_us=9, **args)))
    assert (row["op"], row["splits"]) == ("all_to_all", read_as)


def test_a_gloo_all_to_all_takes_its_splits_from_the_ops_inputs(tmp_path):
    inputs = {"Concrete Inputs": ["", "", "", "[5, 3]", "[6, 2]"], "Input type": ["float", "float", "", "", ""]}
    events = (
        op("c10d::alltoall_base_", 0, 9, **inputs, **{"Input Dims": [[8], [8], [], [], []]}),
        op("gloo:all_to_all", 1, 5, category="user_annotation"),
    )
    row = only(read(tmp_path, *events))
    assert (row["splits"], row["row_bytes"]) == ([24, 8], 4)


def dims(*shapes):
    return {"Input Dims": list(shapes), "Input type": ["float"] * len(shapes)}


def test_a_gloo_slice_takes_kind_size_and_unit_of_the_op_that_issued_it(tmp_path):
    # gloo runs a reduce-scatter as an all-reduce: only the issuing op knows. The i-th issued is the i-th run.
    # main      [all_gather layers.0][post_backward_reduce layers.0]
    # thread 9  ........[gloo:all_gather]......[gloo:all_reduce]
    trace = read(
        tmp_path,
        span("ProfilerStep#2", 0, 100),
        span("FSDP::all_gather (layers.0)", 1, 20),
        op("c10d::_allgather_base_", 2, 5, **dims([64], [32])),
        span("FSDP::post_backward_reduce (layers.0)", 30, 30),
        op("c10d::_reduce_scatter_base_", 31, 5, **dims([32], [64])),
        op("gloo:all_gather", 4, 15, tid=9, category="user_annotation", **dims([32])),
        op("gloo:all_reduce", 35, 15, tid=9, category="user_annotation", **dims([64])),
    )
    rows = trace.collectives.join(trace.activities, left_on="activity_id", right_on="id", maintain_order="left")
    assert rows.select("name", "op", "sent_bytes", "received_bytes", "unit", "step").rows() == [
        ("gloo:all_gather", "all_gather", 128, 256, "layers.0", 2),
        ("gloo:all_reduce", "reduce_scatter", 256, 128, "layers.0", 2),
    ]
    issuers = trace.ops.filter(pl.col("id").is_in(rows["launch_id"].implode()))["name"].to_list()
    assert issuers == ["c10d::_allgather_base_", "c10d::_reduce_scatter_base_"]


def test_collectives_issued_before_the_trace_do_not_stop_matching_by_kind(tmp_path):
    trace = read(
        tmp_path,
        op("gloo:broadcast", 1, 2, tid=9, category="user_annotation", **dims([8])),  # issued before the trace
        op("c10d::_allgather_base_", 4, 1, **dims([64], [32])),
        op("gloo:all_gather", 5, 2, tid=9, category="user_annotation", **dims([32])),
    )
    rows = trace.collectives.join(trace.activities, left_on="activity_id", right_on="id", maintain_order="left")
    assert rows.select("op", "sent_bytes", "received_bytes").rows() == [("broadcast", 32, 32), ("all_gather", 128, 256)]
    assert rows["launch_id"].is_null().to_list() == [True, False]


def test_a_reduction_that_runs_after_later_sends_does_not_make_their_thread_one_of_communication(tmp_path):
    # main      [all_reduce][send, gloo:send......][mm]
    # thread 9  ..............................[gloo:all_reduce]
    trace = read(
        tmp_path,
        op("c10d::allreduce_", 1, 3, **dims([64])),
        op("c10d::send", 5, 3, **dims([8])),
        op("gloo:send", 6, 40, category="user_annotation", **dims([8])),
        op("aten::mm", 10, 20, **dims([8, 8], [8, 8])),
        op("gloo:all_reduce", 30, 15, tid=9, category="user_annotation", **dims([64])),
    )
    assert trace.activities.filter(pl.col("kind") == "compute")["name"].to_list() == ["aten::mm"]
    rows = trace.collectives.join(trace.activities, left_on="activity_id", right_on="id", maintain_order="left")
    issuers = dict(trace.ops.select("id", "name").iter_rows())
    assert [(row["name"], issuers[row["launch_id"]]) for row in rows.iter_rows(named=True)] == [
        ("gloo:send", "c10d::send"),
        ("gloo:all_reduce", "c10d::allreduce_"),
    ]


def test_a_send_that_cannot_be_tied_to_its_op_does_not_hide_the_compute_of_its_thread(tmp_path):
    trace = read(
        tmp_path,
        op("gloo:recv", 1, 30, category="user_annotation", **dims([8])),  # issued before the trace
        op("c10d::send", 5, 3, **dims([8])),
        op("gloo:send", 6, 4, category="user_annotation", **dims([8])),
        op("aten::mm", 12, 8, **dims([8, 8], [8, 8])),
    )
    assert trace.activities.filter(pl.col("kind") == "compute")["name"].to_list() == ["aten::mm"]


# Allocations -------------------------------------------------------------------------------------------------------


def test_an_allocation_belongs_to_the_innermost_op_of_its_thread_at_its_moment(tmp_path):
    def memory(at_us, size, tid=1, **more):
        args = {"Bytes": size, "Device Type": 1, "Device Id": 0, "Addr": 4096} | more
        return {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "pid": 1,
            "tid": tid,
            "ts": at_us,
            "args": args,
        }

    trace = read(
        tmp_path,
        span("ProfilerStep#1", 0, 50),
        op("aten::linear", 5, 20),
        op("aten::empty", 6, 2),
        memory(7, 512, **{"Total Allocated": 1024, "Total Reserved": 2048}),
        memory(10, 64),
        memory(40, -512),
        memory(41, 8, tid=5),
        memory(99, 16, **{"Device Type": 0, "Device Id": -1}),
    )
    names = dict(trace.ops.select("id", "name").rows())
    rows = trace.allocations.to_dicts()
    assert [names.get(row["op_id"]) for row in rows] == ["aten::empty", "aten::linear", "ProfilerStep#1", None, None]
    assert [row["delta_bytes"] for row in rows] == [512, 64, -512, 8, 16]
    assert [row["step"] for row in rows] == [1, 1, 1, 1, None]
    assert [row["device"] for row in rows] == [0, 0, 0, 0, None]
    assert (rows[0]["allocated_bytes"], rows[0]["reserved_bytes"], rows[1]["reserved_bytes"]) == (1024, 2048, None)

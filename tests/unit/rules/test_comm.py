import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces, rule_examples
from tracekit.analysis.parallelism import workload
from tracekit.rules import cost_attribution
from tracekit.rules.communication import ExposedCommunication, fix_for
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity


def judge(*traces, **thresholds):
    manifest = thresholds.pop("manifest", {})
    return check(drawn_traces.run(*traces, **manifest), [ExposedCommunication(**thresholds)])


def test_the_message_quotes_a_recorded_step_with_its_own_numbers(wording):
    # time     0123456789
    # exposed    2 of 10, then 6 of 10, then 4 of 10: the last is the median
    (found,) = judge(
        drawn_traces.trace("""
            step     000000000011111111112222222222
            compute  aaaaaaa...aaa.......aaaaa.....
            comm     ......xxx....xxxxxx.....xxxxx.
        """)
    ).findings
    assert (found.impact, found.cost_ns) == (0.4, 4)
    wording(found.message)
    first = found.evidence.row(0, named=True)
    assert (first["step"], first["start_ns"], first["dur_ns"], first["exposed_ns"]) == (2, 24, 5, 4)
    whole = found.evidence.filter(pl.col("name") == "whole step").row(0, named=True)
    assert (whole["step"], whole["exposed_ns"], whole["step_ns"], whole["start_ns"]) == (2, 4, 10, None)


# Gradients are reduced in every second of four steps: 8 of 40 in all, 4 of 12 in those steps.
EVERY_SECOND = """
    step     0000000011111111111122222222333333333333
    compute  aaaaaaaaaaaaaaaa....aaaaaaaaaaaaaaaa....
    comm     ................xxxx................xxxx
"""


def test_communication_of_every_second_step_counts_by_the_mean_of_all_steps():
    (found,) = judge(drawn_traces.trace(EVERY_SECOND)).findings
    assert (found.impact, found.cost_ns) == (8 / 40, 2)
    assert found.steps == (1, 3)
    assert found.evidence.row(0, named=True)["step"] in found.steps
    assert not judge(drawn_traces.trace(EVERY_SECOND), max_exposed_ratio=0.2).findings  # the mean does not exceed it


def test_communication_of_a_single_step_is_no_rule_of_the_median():
    once = EVERY_SECOND.replace("................xxxx................xxxx", "................xxxx....................")
    assert not judge(drawn_traces.trace(once), max_exposed_ratio=0.05).findings


@pytest.mark.parametrize(("threshold", "fires"), [(0.3, True), (0.4, False)])
def test_the_share_must_exceed_its_threshold(threshold, fires):
    trace = drawn_traces.trace("step 0000000000\ncompute aaaaaa....\ncomm ......xxxx")
    assert bool(judge(trace, max_exposed_ratio=threshold).findings) == fires


# Step 1 saves: its collectives g belong to the save.
SAVING = """
    step     000000000011111111112222222222
    compute  aaaaaaaaa.a.........aaaaaaaaa.
    comm     ........xx.gggggggg..........x
"""


LARGE = 64 << 20


def save_span(start: int, end: int) -> pl.DataFrame:
    return rule_examples.ops(("tracekit::checkpoint", "annotation", start, end), step=1)


def test_steps_that_save_are_left_out_of_verdict_and_evidence():
    trace = drawn_traces.trace(SAVING, ops=save_span(11, 19), columns={"g": {"phase": "checkpoint"}})
    assert judge(trace).findings == ()
    (found,) = judge(trace, max_exposed_ratio=0.05).findings
    assert found.steps == (0, 2)
    assert "g" not in found.evidence["name"].to_list()
    assert set(found.evidence["step"]) == {0, 2}


def test_a_step_is_left_out_on_every_rank_if_one_rank_saves_in_it():
    saver = drawn_traces.trace(SAVING, ops=save_span(11, 19), columns={"g": {"phase": "checkpoint"}})
    waiter = drawn_traces.trace(SAVING, rank=1)
    assert judge(saver, waiter).findings == ()


def test_a_run_that_saves_in_every_step_is_a_blind_spot(wording):
    trace = drawn_traces.trace("step 111\ncompute a..\ncomm .xx", ops=save_span(0, 3))
    report = judge(trace)
    assert report.findings == ()
    wording(report.notes[0])


def test_the_wait_for_a_late_rank_is_not_exposed_communication():
    # Rank 0 is 3 of 8 late at each of twelve all-reduces, which then take 2: of small ones that would be latency.
    run = rule_examples.straggler_run(0, 3, sent_bytes=LARGE)
    (found,) = check(run, [ExposedCommunication(max_exposed_ratio=0.2)]).findings
    assert found.impact == pytest.approx(2 / 8)
    assert set(found.evidence.filter(pl.col("name") == "y")["exposed_ns"]) == {2 * drawn_hosts.UNIT_NS}
    assert check(run, [ExposedCommunication(max_exposed_ratio=0.25)]).findings == ()


def test_the_message_states_the_wait_for_late_ranks():
    run = rule_examples.straggler_run(0, 3, sent_bytes=LARGE)
    (found,) = check(run, [ExposedCommunication(max_exposed_ratio=0.2)]).findings
    of_rank_0 = "The rank waits another 600 µs for late ranks."
    assert ("rank 0" in found.message) == (of_rank_0 in found.message)


def test_ranks_that_arrive_together_do_not_wait():
    traces = [drawn_traces.trace("step 0000000000\ncompute aaaaaa....\ncomm ......xxxx", rank=rank) for rank in (0, 1)]
    assert "late ranks" not in judge(*traces).findings[0].message


def collectives(trace, op):
    rows = trace.activities.filter(pl.col("kind") == "communication").select(
        pl.col("id").alias("activity_id"), pl.lit(op).alias("op")
    )
    return drawn_traces.schema.COLLECTIVES.conform(rows)


def exposed(op, *, span="", manifest=None):
    picture = "step 0000000000\ncompute aaaaaa....\ncomm ......xxxx"
    named = {"x": {"name": "ncclDevKernel"}}
    bare = drawn_traces.trace(picture, columns=named)
    tables = {"collectives": collectives(bare, op)}
    if span:
        tables["ops"] = rule_examples.ops((span, "annotation", 0, 1))
    (found,) = judge(drawn_traces.trace(picture, columns=named, **tables), manifest=manifest or {}).findings
    return found.fix


@pytest.mark.parametrize(
    ("span", "op", "names"),
    [
        ("FullyShardedDataParallel.forward", "all_gather", "forward_prefetch=True, backward_prefetch=BackwardPrefetch"),
        ("FullyShardedDataParallel.forward", "reduce_scatter", "MixedPrecision(reduce_dtype"),
        ("FSDP::all_gather (layers.0)", "all_gather", "set_modules_to_forward_prefetch"),
        ("FSDP::post_backward_reduce", "reduce_scatter", "set_reduce_scatter_max_input_buffers"),
        ("YaFSDP::all_gather (layers.0)", "all_gather", "YaFSDP already prefetches the next unit"),
        ("DistributedDataParallel.forward", "all_reduce", "no_sync()"),
        ("DistributedDataParallel.forward", "all_to_all", "Split the batch in two"),
        ("", "all_gather", "Start the all-gather collectives"),
        ("", "send", "Post the sends and receives"),
        ("", None, "Start the collectives"),
    ],
)
def test_the_fix_depends_on_the_spans_of_the_strategy_and_the_collective(span, op, names):
    assert names in exposed(op, span=span)


def test_the_strategy_in_the_manifest_takes_precedence_over_spans():
    fix = exposed("all_gather", span="FSDP::all_gather (a)", manifest={"strategy": "fsdp1"})
    assert "BackwardPrefetch" in fix


def test_on_gloo_the_fix_for_fsdp1_depends_on_the_overlap():
    communication = {"strategy": "fsdp1", "op": "all_gather", "gloo": True}
    assert "overlaps none of it" in fix_for(**communication, overlapped_ratio=0.0)
    assert "overlaps none of it" not in fix_for(**communication, overlapped_ratio=0.3)


def test_every_api_that_a_fix_names_exists_in_pytorch():
    torch = pytest.importorskip("torch")
    from torch.distributed import fsdp
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    assert set(workload._PREFIXES) == {"ddp", "fsdp1", "fsdp2", "yafsdp"}
    for name in (
        *("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "unshard"),
        *("set_separate_reduce_scatter_group", "set_reduce_scatter_max_input_buffers"),
    ):
        if torch.__version__ >= "2.13":
            assert hasattr(fsdp.FSDPModule, name)
    assert fsdp.ShardingStrategy.SHARD_GRAD_OP
    assert fsdp.BackwardPrefetch.BACKWARD_PRE
    assert default_hooks.bf16_compress_hook
    assert DistributedDataParallel.no_sync
    assert DistributedDataParallel.register_comm_hook


def gathering_rank(rank, picture, sent_bytes):
    """Return a rank that runs `picture` with all-gathers of a group of two."""
    groups = pl.DataFrame({"group": ["0"], "ranks": [[0, 1]]})
    plain = drawn_hosts.trace(picture, {"a": 0}, rank=rank, groups=groups)
    known = plain.collectives.with_columns(
        group=pl.lit("0"),
        group_size=pl.lit(2, pl.Int64),
        received_bytes=pl.lit(2 * sent_bytes, pl.Int64),
        seq=pl.int_range(pl.len(), dtype=pl.Int64),
    )
    return plain.replace(collectives=known)


@pytest.mark.parametrize("later", [4, 20])  # 0.2 ms may be a network's, 1 ms is the time slice of a device
def test_transfers_of_ranks_that_take_turns_on_a_device_are_no_warning(later):
    # Each rank leaves every other collective later than the other one, so no clock offset explains it.
    first, last = "x" * 60 + "." * later, "x" * (60 + later)
    pictures = [
        f"step {'0' * (4 * (100 + later))}\ncompute {('a' * 40 + '.' * (60 + later)) * 4}\n"
        f"comm {''.join('.' * 40 + ends for ends in 2 * order)}"
        for order in ((first, last), (last, first))
    ]
    (finding,) = judge(*(gathering_rank(rank, picture, 4 << 20) for rank, picture in enumerate(pictures))).findings
    takes_turns = later == 20
    assert (finding.confidence < cost_attribution.MIN_CONFIDENCE) == takes_turns
    assert (finding.severity is Severity.INFO) == takes_turns
    assert ("set_device" in finding.fix) == takes_turns
    assert ("below any link inside a node" in finding.message) != takes_turns


@pytest.mark.parametrize(("sent_bytes", "is_slow"), [(40 << 20, False), (4 << 20, True), (1 << 20, False)])
def test_bandwidth_below_any_link_inside_a_node_is_stated(sent_bytes, is_slow):
    # Two ranks all-gather for 9 ms: 40 MiB on the bus at 4.7 GB/s, 4 MiB at 0.5 GB/s; messages of 2 MiB are too small.
    picture = f"step {'0' * 400}\ncompute {('a' * 20 + '.' * 180) * 2}\ncomm {('.' * 20 + 'x' * 180) * 2}"
    (found,) = judge(*(gathering_rank(rank, picture, sent_bytes) for rank in range(2))).findings
    assert ("below any link inside a node" in found.message) == is_slow
    assert ("NCCL_DEBUG=INFO" in found.fix) == is_slow


@pytest.mark.parametrize(
    ("mebibytes", "device", "indices", "links"),
    [
        (40, "NVIDIA H100 80GB HBM3", (0, 1), "450 GB/s"),
        (400, "NVIDIA H100 80GB HBM3", (0, 1), None),
        (7, "NVIDIA H100 80GB HBM3", (0, 1), None),  # too small for the full rate
        (40, "NVIDIA H100 PCIe", (0, 1), None),
        (40, "NVIDIA H100 80GB HBM3", (0, 0), None),  # maybe on two nodes
        (40, "AMD Instinct MI300X", (0, 1), None),  # 28 of 64 GB/s: of a pair, one link of seven
        (8.5, "AMD Instinct MI300X", (0, 1), "64 GB/s"),
        (8.5, "AMD Instinct MI355X", (0, 1), "76.8 GB/s"),
        (8.5, "AMD Instinct MI250X", (0, 1), None),  # 5.9 of 50 GB/s
    ],
)
def test_bandwidth_far_below_the_links_inside_a_node_is_stated(mebibytes, device, indices, links):
    # Two ranks all-gather for 1.5 ms, 15% of the step: 40 MiB on the bus at 28 GB/s, 8.5 MiB at 5.9 GB/s.
    picture = f"step {'0' * 400}\ncompute {('a' * 170 + '.' * 30) * 2}\ncomm {('.' * 170 + 'x' * 30) * 2}"
    traces = [gathering_rank(rank, picture, int(mebibytes * 2**20)) for rank in range(2)]
    placed = [
        trace.replace(
            lanes=trace.lanes.with_columns(pl.when(pl.col("device").is_not_null()).then(index).alias("device")),
            steps=trace.steps.with_columns(pl.lit(index, pl.Int64).alias("device")),
            header={"deviceProperties": [{"name": device}]},
        )
        for trace, index in zip(traces, indices, strict=True)
    ]
    (found,) = judge(*placed).findings
    assert (f"where a device's links carry {links} to the other rank." in found.message) == bool(links)
    assert ("inside a node" in found.message) == ("NCCL_DEBUG=INFO" in found.fix) == bool(links)

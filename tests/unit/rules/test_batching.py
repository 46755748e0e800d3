"""Small collectives, gradients reduced in every micro-batch, and the fit of latency and bandwidth."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests.support import drawn_hosts, drawn_traces, rule_examples
from tests.support.selection import others_in_accuracy
from tracekit.analysis.communication import latency
from tracekit.analysis.time import backward_passes
from tracekit.model import schema
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes import SMALL_COLLECTIVES
from tracekit.rules.collective_batching import ReducedEveryMicroBatch, SmallCollectives
from tracekit.rules.communication import ExposedCommunication
from tracekit.rules.engine import check

CHARACTER_NS = drawn_hosts.UNIT_NS


def small(picture, manifest=None, **columns):
    run = drawn_traces.run(rule_examples.collectives_trace(picture, **columns), **(manifest or {}))
    return check(run, [SmallCollectives()]).findings


def test_collectives_launched_without_compute_between_them_are_one_burst():
    # b is launched between the fourth and the fifth, and overlaps the fifth and the sixth.
    picture = "step 000000000000\ncompute aa....bbbc..\ncomm ..xyxy..xyx."
    found = drawn_traces.run(drawn_hosts.trace(picture, {"a": 0, "c": 0})).table(latency.bursts)
    assert found["count"].to_list() == [4, 4, 4, 4, 3, 3, 3]
    assert found["position"].to_list() == [0, 1, 2, 3, 0, 1, 2]
    assert found["exposed_ns"].to_list() == [CHARACTER_NS] * 4 + [0, 0, CHARACTER_NS]
    assert found["burst_exposed_ns"].to_list() == [4 * CHARACTER_NS] * 4 + [CHARACTER_NS] * 3


def test_batching_saves_latency_and_at_most_the_exposed_time(wording):
    # Eight collectives of 50 µs on 8 ranks: 7 hops of 5 µs are assumed for each. Seven collectives are saved.
    (found,) = small("step 0000000000000000\ncompute aaaa........bbbb\ncomm ....xyxyxyxy....")
    assert found.cost_ns == 7 * 35_000
    assert found.impact == 7 * 35_000 / (16 * CHARACTER_NS)
    wording(found.message)
    (hidden,) = small("step 0000000000000000\ncompute aaaaaaaaaa..bbbb\ncomm ....xyxyxyxy....")
    assert hidden.cost_ns == 2 * CHARACTER_NS


@pytest.mark.parametrize(
    ("strategy", "named"),
    # The drawn collectives are all-gathers, which DDP does not start itself.
    [("ddp", "flat buffer"), ("fsdp1", "auto_wrap_policy"), ("fsdp2", "fully_shard([a, b])"), ("x", "flat buffer")],
)
def test_the_fix_depends_on_the_strategy(strategy, named):
    picture = "step 0000000000000000\ncompute aaaa........bbbb\ncomm ....xyxyxyxy...."
    (found,) = small(picture, {"strategy": strategy})
    assert named in found.fix


def test_few_or_large_collectives_and_unknown_sizes_are_not_reported():
    assert small("step 0000000000000000\ncompute aaaa........bbbb\ncomm ....xyx.........") == ()
    assert small("step 0000000000000000\ncompute aaaa........bbbb\ncomm ....xxxxyyyy....") == ()
    picture = "step 0000000000000000\ncompute aaaa........bbbb\ncomm ....xyxyxyxy...."
    assert small(picture, group_size=None) == ()


def buckets(size_bytes, other_bytes=None, **more):
    """Return two ranks that reduce eight buckets in backward, as gloo records them: the group is only listed.

    Buckets are equal, or every second one is of another size.
    """
    compute, comm = "ffff" + "bb...." * 8 + "bb", "......" + "xxxx..yyyy.." * 4
    groups = pl.DataFrame({"group": ["0"], "description": ["default_pg"], "ranks": [[0, 1]]})
    traces = []
    for rank in range(2):
        plain = drawn_hosts.trace(
            f"step {'0' * len(compute)}\ncompute {compute}\ncomm {comm}",
            phases={"f": "forward"} | dict.fromkeys("bxy", "backward"),
            ops=dict.fromkeys("xy", "all_reduce"),
            rank=rank,
            groups=groups,
            **more,
        )
        is_other = pl.int_range(pl.len()) % 2 == 1
        size = pl.when(is_other).then(other_bytes or size_bytes).otherwise(size_bytes).cast(pl.Int64)
        collectives = plain.collectives.with_columns(
            group=None, group_size=None, dtype=pl.lit("Float"), sent_bytes=size, received_bytes=size
        )
        traces.append(replace(plain, collectives=schema.COLLECTIVES.conform(collectives)))
    return drawn_traces.run(*traces, strategy="ddp")


def test_equal_undersized_buckets_are_found_without_sizes_to_compare(wording):
    # 64 KiB need 33 µs at 2 GB/s, and take 200 µs: 84 µs for each of two hops are latency.
    (found,) = check(buckets(1 << 16), [SmallCollectives()]).findings
    wording(found.message)
    assert "bucket_cap_mb" in found.fix
    assert found.cost_ns == pytest.approx(7 * (200_000 - (1 << 16) / 2), rel=0.01)


def test_equal_buckets_of_a_megabyte_are_not_undersized():
    # At 200 µs they move data at 10 GB/s; at 25 MiB no latency of a link explains a time.
    assert check(buckets(1 << 20), [SmallCollectives()]).findings == ()
    assert check(buckets(25 << 20), [SmallCollectives()]).findings == ()


def reductions(compute, comm, phases):
    """Return two ranks with all-reduces x and y of 2 KiB, each of which takes 50 µs a character."""
    groups = pl.DataFrame({"group": ["0"], "description": ["default_pg"], "ranks": [[0, 1]]})
    traces = []
    for rank in range(2):
        plain = drawn_hosts.trace(
            f"step {'0' * len(compute)}\ncompute {compute}\ncomm {comm}",
            phases=phases,
            ops=dict.fromkeys("xy", "all_reduce"),
            rank=rank,
            groups=groups,
        )
        size = pl.lit(2048, pl.Int64)
        collectives = plain.collectives.with_columns(
            group=None, group_size=None, dtype=pl.lit("Float"), sent_bytes=size, received_bytes=size
        )
        traces.append(replace(plain, collectives=schema.COLLECTIVES.conform(collectives)))
    return drawn_traces.run(*traces)


def test_a_burst_of_equal_small_collectives_shows_their_latency():
    # Nobody is known to issue them. Of 50 µs, 1 µs is the time of 2 KiB at 2 GB/s; eleven of twelve are saved.
    compute, comm = "ffff" + "." * 12 + "ffff", "...." + "xy" * 6 + "...."
    run = reductions(compute, comm, {"f": "forward"})
    findings = check(run, [SmallCollectives(), ExposedCommunication()]).findings
    assert [finding.code for finding in findings] == ["COMM002"]  # one price for their time
    assert findings[0].confidence > 0.5  # measured, not assumed
    assert findings[0].cost_ns == pytest.approx(11 * CHARACTER_NS, rel=0.05)


def test_bursts_of_one_backward_pass_are_merged_across_the_compute_between_them():
    # Four bursts of four: three in four are saved without merging bursts.
    compute, comm = "ffff" + "bb...." * 4 + "bb", "...." + "..xyxy" * 4 + ".."
    run = reductions(compute, comm, {"f": "forward"} | dict.fromkeys("bxy", "backward"))
    (found,) = check(run, [SmallCollectives()]).findings
    assert found.evidence.select("count", "joined").rows() == [(16, 1)] * 2
    assert found.cost_ns == pytest.approx(15 * CHARACTER_NS, rel=0.05)


EVEN = (("..n..n", "xx.yy."),) * 2
UNEVEN = (("n....nnn..", ".xxxx...yy"), ("nnn..n....", "...xx.yyyy"))


def reductions_after_backward(pairs=EVEN, launched=None, *, last_forward=False):
    """Return two ranks that reduce eight tensors of 1 KiB after backward, with compute between: nobody wraps them.

    `pairs` are what computes and what reduces of two tensors on each rank, repeated four times.
    """
    groups = pl.DataFrame({"group": ["0"], "description": ["default_pg"], "ranks": [[0, 1]]})
    traces = []
    for rank, (computing, reducing) in enumerate(pairs):
        compute, comm = "ffffbbbb" + computing * 4 + "f" * last_forward, "........" + reducing * 4
        plain = drawn_hosts.trace(
            f"step {'0' * len(compute)}\ncompute {compute}\ncomm {comm}",
            launched,
            phases={"b": "backward"},
            ops=dict.fromkeys("xy", "all_reduce"),
            rank=rank,
            groups=groups,
        )
        letters = dict(plain.activities.select("launch_id", "name").iter_rows())
        phases = [{"f": "forward", "b": "backward"}.get(letters[call]) for call in plain.ops["id"]]
        ops = plain.ops.with_columns(pl.Series("phase", phases, pl.String), step=pl.lit(0, pl.Int64))
        traces.append(replace(plain, ops=ops))
    return drawn_traces.run(*traces)


def test_collectives_of_the_program_with_compute_between_are_batched_outside_the_model():
    (found,) = check(reductions_after_backward(), [SmallCollectives()]).findings
    assert found.evidence["issuer"].to_list() == ["program"] * 2
    assert found.evidence.select("count", "joined").rows() == [(8, 1)] * 2
    # 1 KiB needs half a microsecond at 2 GB/s of the 100 µs; seven of eight are saved.
    assert found.cost_ns == pytest.approx(7 * 2 * CHARACTER_NS, rel=0.01)


def test_ranks_wait_for_each_other_once_a_batch():
    # Before each tensor one rank computes for one character and the other for three, in turns. With one all-reduce each
    # computes for 16 characters and 2 are left of 40; without latency alone, 24 of waits for the later rank would stay.
    run = reductions_after_backward(UNEVEN, dict.fromkeys("nxy", 5))
    saved_ns = savings.saving(run, SMALL_COLLECTIVES.name).saved_ns
    assert saved_ns == pytest.approx((40 - 16 - 2) * CHARACTER_NS, rel=0.01)


def test_collectives_between_forward_ops_may_be_tensor_parallelism():
    assert check(reductions_after_backward(last_forward=True), [SmallCollectives()]).findings == ()


CASES = Path(__file__).parents[3].parent / "shared" / "cases"


@pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases, which is not part of the project")
@pytest.mark.parametrize(
    ("case", "issuer", "named", "least_ratio"),
    others_in_accuracy(
        [("small", "fsdp", "fully_shard", 0.3), ("fulltensor", "dtensor", "full_tensor()", 0.3)],
        [("small", "fsdp", "fully_shard", 0.3)],
    ),
)
def test_small_collectives_of_gloo_are_the_first_finding_by_their_own_latency(case, issuer, named, least_ratio):
    first = check(tracekit.load(str(CASES / case))).findings[0]
    assert first.code == "COMM002"
    assert first.confidence > 0.5  # measured, not assumed
    assert first.evidence["issuer"][0] == issuer
    assert named in first.fix
    assert first.impact > least_ratio
    assert first.evidence["latency_ns"].median() > 1_000_000


def test_large_buckets_that_a_slow_host_reduces_are_not_latency_bound():
    # A bucket nine times as large takes as long: a fit says that all is latency, but both are DDP's usual sizes.
    assert buckets(1 << 20, 9 << 20, on_device=False).table(latency.batchable_calls).is_empty()
    assert buckets(1 << 12, 9 << 12, on_device=False).table(latency.batchable_calls).height == 16


@settings(max_examples=50, deadline=None)
@given(
    st.floats(1_000, 50_000),
    st.floats(1, 400),
    st.lists(st.tuples(st.sampled_from([7, 14, 31]), st.integers(10_000, 1 << 28)), min_size=2, max_size=6),
)
def test_the_fit_recovers_latency_and_bandwidth(hop_ns, bytes_per_ns, points):
    hops, sent = (np.array([float(point[i]) for point in points]) for i in (0, 1))
    found = latency.fit(hops, sent, hops * hop_ns + sent / bytes_per_ns)
    each = sent / hops
    if each.max() < 1.25 * each.min():
        assert found is None
    elif hop_ns * bytes_per_ns > 0.01 * each.min():  # else rounding hides the latency
        assert found is not None
        assert found.hop_ns == pytest.approx(hop_ns, rel=1e-3)
        assert found.bytes_per_ns == pytest.approx(bytes_per_ns, rel=1e-3)


def test_an_impossible_fit_is_none():
    # The larger collective is faster, so something else slows the smaller one.
    assert latency.fit(np.array([14.0, 14.0]), np.array([8e8, 10e8]), np.array([4e8, 3e8])) is None


TWO_PASSES = "step 00000000000000000000\ncompute ffffbbbb..ggggcccc..\ncomm ........xx........yy"


def test_reductions_belong_to_their_backward_pass():
    found = rule_examples.micro_batch_run(TWO_PASSES).table(backward_passes.gradient_reductions)
    assert found.select("backward", "backward_count", "exposed_ns").rows() == [
        (0, 2, 2 * CHARACTER_NS),
        (1, 2, 2 * CHARACTER_NS),
    ]


def test_a_reduction_that_the_last_pass_repeats_is_a_loss(wording):
    (found,) = check(rule_examples.micro_batch_run(TWO_PASSES), [ReducedEveryMicroBatch()]).findings
    assert (found.cost_ns, found.impact) == (2 * CHARACTER_NS, 0.1)
    wording(found.message)
    assert found.evidence["backward"].to_list() == [0]


@pytest.mark.parametrize(
    ("strategy", "named"),
    [("ddp", "no extra memory"), ("fsdp1", "no_sync"), ("fsdp2", "set_requires_gradient_sync(False)")],
)
def test_the_fix_for_repeated_reductions_depends_on_the_strategy_and_states_its_memory(strategy, named):
    run = rule_examples.micro_batch_run(TWO_PASSES)
    run.manifest = {"strategy": strategy}
    (found,) = check(run, [ReducedEveryMicroBatch()]).findings
    assert named in found.fix
    assert ("1 KiB" in found.fix) == (strategy != "ddp")


def test_reductions_of_two_optimizer_steps_are_not_accumulated():
    # o is an optimizer: two updates within one marked step, as of reinforcement learning.
    picture = "step 00000000000000000000\ncompute ffffbbbb..ooggcccc..\ncomm ........xx........yy"
    phases = {"f": "forward", "g": "forward", "o": "optimizer"} | dict.fromkeys("bcxy", "backward")
    run = drawn_traces.run(drawn_hosts.trace(picture, phases=phases, ops=dict.fromkeys("xy", "reduce_scatter")))
    assert run.table(backward_passes.gradient_reductions)["backward_count"].to_list() == [2, 2]
    assert check(run, [ReducedEveryMicroBatch()]).findings == ()


def test_yafsdp_reduces_each_micro_batch_by_design():
    run = rule_examples.micro_batch_run(TWO_PASSES)
    run.manifest = {"strategy": "yafsdp"}
    assert check(run, [ReducedEveryMicroBatch()]).findings == ()


def test_reductions_that_forward_repeats_are_not_gradients():
    # z is the same reduction in forward, as in tensor parallelism.
    picture = "step 000000000000000000000000\ncompute ff..ffbbbb..gg..ggcccc..\ncomm ..zz......xx..zz......yy"
    plain = drawn_hosts.trace(
        picture,
        phases=dict.fromkeys("fgz", "forward") | dict.fromkeys("bcxy", "backward"),
        ops=dict.fromkeys("xyz", "all_reduce"),
    )
    assert drawn_traces.run(plain).table(backward_passes.gradient_reductions).is_empty()
    gathers = plain.collectives.join(
        plain.activities.filter(pl.col("name") == "z").select(activity_id="id"), on="activity_id", how="anti"
    )
    assert drawn_traces.run(replace(plain, collectives=gathers)).table(backward_passes.gradient_reductions).height == 2


def test_work_without_a_phase_does_not_split_a_backward_pass():
    # u is short and has no phase, such as the kernel of a hook.
    picture = "step 0000000000000000000000000\ncompute ffffffffffbbbbbbubbbbbbbb\ncomm " + "." * 25
    plain = drawn_hosts.trace(picture, phases={"f": "forward", "b": "backward"})
    assert drawn_traces.run(plain).table(backward_passes.backward_starts)["backward"].to_list() == [0]

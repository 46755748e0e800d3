"""One fault makes one finding, on drawn timelines that are long enough to be replayed."""

import random
from pathlib import Path

import polars as pl
import pytest

import tracekit
from benchmarks import injected_faults, perturbation_graph
from tests.support import drawn_hosts, drawn_traces, rule_examples
from tests.support.rule_examples import slow_link_run
from tracekit.analysis.parallelism.stragglers import occasional_stragglers
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes.stalls import OCCASIONAL_STRAGGLER, Removal
from tracekit.rules.device_slowdowns import ClockDrop
from tracekit.rules.engine import check
from tracekit.rules.host import LateLaunch
from tracekit.rules.outlier_steps import OutlierStep
from tracekit.rules.rule import Severity
from tracekit.rules.slow_collectives import SlowLink
from tracekit.rules.stragglers import LateGroup, OccasionalStraggler, Straggler, UnevenRanks

BLOCKS = 36


def ranks_run(block, ranks=3):
    """Return ranks with BLOCKS blocks in three steps. `block(rank)` draws one: compute, collective, and its host.

    The host is the launch times of the compute's letters and the slices during the block, in characters. Letters are
    renamed in each block.
    """
    groups = pl.DataFrame({"group": ["0"], "ranks": [list(range(ranks))]})
    traces = []
    for rank in range(ranks):
        compute, comm, launched, doing = block(rank)
        rows = {"step": "", "compute": "", "comm": ""}
        calls, slices, ops = {}, [], {}
        for number in range(BLOCKS):
            begin, names = len(rows["step"]), {}
            for letter in dict.fromkeys((compute + comm).replace(".", "")):
                names[letter] = chr(0x4E00 + 8 * number + len(names))
            rows["step"] += str(3 * number // BLOCKS) * len(compute)
            for lane, cells in (("compute", compute), ("comm", comm)):
                rows[lane] += cells.translate(str.maketrans(names))
            calls |= {names[letter]: 0 if at is None else begin + at for letter, at in launched.items()}
            slices += [(name, "runtime", begin + since, begin + until) for name, since, until in doing]
            ops |= {names[letter]: "all_reduce" for letter in comm if letter != "."}
        picture = "\n".join(f"{lane} {cells}" for lane, cells in rows.items())
        traces.append(drawn_hosts.trace(picture, calls, tuple(slices), rank=rank, groups=groups, ops=ops))
    return drawn_traces.run(*traces)


def synchronizing(late_by):
    """Return a block in which each host waits for `a` and then pauses: that of rank 1 for `late_by` more."""

    def block(rank):
        pause = 8 + late_by * (rank == 1)
        rest = 8 + late_by - pause
        # compute  aaaa........bb......   (rank 1, late by 2:  aaaa..........bb....)
        # comm     ..............xxxx..                        ................xx..
        compute = "aaaa" + "." * pause + "bb" + "." * (4 + rest)
        comm = "." * (6 + pause) + "x" * (2 + rest) + ".."
        launched = {"a": 0, "b": 3 + pause, "x": 3 + pause}
        return compute, comm, launched, (("cudaStreamSynchronize", 1, 4),)

    return block


def slow(late_by):
    """Return a block whose work is launched in advance; the kernels of rank 1 take `late_by` longer."""

    def block(rank):
        own = 10 + late_by * (rank == 1)
        rest = 10 + late_by - own
        return "a" * own + "." * (4 + rest), "." * own + "x" * (2 + rest) + "..", {"a": None, "x": None}, ()

    return block


def pausing(late_by, pause):
    """Return a block in which each host waits for `a` alike and pauses; that of rank 1 for `late_by` more."""

    def block(rank):
        before_b = pause + late_by * (rank == 1)
        rest = pause + late_by - before_b
        compute = "a" * 8 + "." * before_b + "bbbb" + "." * (2 + rest)
        comm = "." * (12 + before_b) + "x" * (2 + rest)
        # The host launches `a` with `b` of the block before, and waits for it from then on.
        launches_at = 7 + before_b
        before_a = launches_at - len(compute)
        launched = {"a": before_a, "b": launches_at, "x": launches_at}
        return compute, comm, launched, (("cudaStreamSynchronize", before_a + 1, 8),)

    return block


def slow_parts(first, second):
    """Return a block of two parts, each with a collective at its end, whose work is launched at once and awaited.

    The first and the second part of a rank take longer by the times in `first` and `second`, by rank.
    """

    def block(rank):
        parts = (("a", "x", first), ("b", "y", second))
        compute = comm = ""
        for kernel, collective, late_by in parts:
            own, longest = 8 + late_by.get(rank, 0), 8 + max(late_by.values(), default=0)
            compute += kernel * own + "." * (longest - own + 2)
            comm += "." * own + collective * (longest - own + 2)
        waits = (("cudaStreamSynchronize", 1, len(compute)),)
        return compute + ".", comm + ".", dict.fromkeys("axby", 0), waits

    return block


def warned(run, rules):
    """Return the ranks and the cost, in characters per block, of each warning of some rules."""
    per_block = BLOCKS // 3 * drawn_hosts.UNIT_NS
    warnings = [each for each in check(run, rules).findings if each.severity >= Severity.WARNING]
    return {each.ranks: round(each.cost_ns / per_block, 1) for each in warnings}


def judged(run):
    return {each.code: each for each in check(run).findings if not each.code.startswith("DATA")}


@pytest.mark.parametrize("late_by", [1, 2, 3])
def test_a_sync_on_all_ranks_does_not_also_make_a_straggler_of_one(late_by, wording):
    found = judged(ranks_run(synchronizing(late_by)))
    assert found["HOST002"].severity is Severity.WARNING
    assert found["HOST002"].ranks == (0, 1, 2)
    wording(found["RANK001"].message)
    assert found["RANK001"].severity is Severity.INFO
    wording(found["RANK001"].message)


def test_the_same_waits_for_slow_kernels_make_a_straggler():
    found = judged(ranks_run(slow(2)))
    assert (found["RANK001"].severity, found["RANK001"].ranks) == (Severity.WARNING, (1,))
    assert "HOST002" not in found


@pytest.mark.parametrize("pause", [2, 3])
def test_a_pause_of_one_rank_after_a_wait_of_all_makes_it_a_straggler(pause):
    found = judged(ranks_run(pausing(6, pause), ranks=4))
    assert (found["RANK001"].severity, found["RANK001"].ranks) == (Severity.WARNING, (1,))
    per_character = BLOCKS // 3 * drawn_hosts.UNIT_NS
    assert found["RANK001"].cost_ns == pytest.approx(6 * per_character, rel=0.1)
    # What the waits of all ranks cost is apart from that.
    assert found["HOST002"].cost_ns <= pause * per_character


@pytest.mark.parametrize(
    ("first", "second", "costs"),
    [
        ({1: 4}, {}, {(1,): 4}),
        ({1: 4}, {2: 2}, {(1,): 4, (2,): 2}),
        ({1: 3}, {2: 3}, {(1,): 3, (2,): 3}),
        ({1: 4, 2: 4}, {}, {(1, 2): 4}),
    ],
    ids=["one rank", "two ranks", "by equal times", "two ranks of one cause"],
)
def test_unrelated_late_ranks_are_a_finding_each(first, second, costs):
    rules = [Straggler(), LateGroup(), UnevenRanks()]
    assert warned(ranks_run(slow_parts(first, second), ranks=5), rules) == costs


def test_a_rank_that_is_late_behind_another_one_saves_what_remains_without_that():
    # Rank 2 is late by 2 at collectives that rank 1 reaches 4 later still: alone, it costs nothing.
    run = ranks_run(slow_parts({1: 6, 2: 2}, {}), ranks=5)
    found = {each.ranks: each for each in check(run, [Straggler()]).findings}
    per_character = BLOCKS // 3 * drawn_hosts.UNIT_NS
    assert found[1,].cost_ns == pytest.approx(4 * per_character, rel=0.1)
    assert found[2,].cost_ns == pytest.approx(2 * per_character, rel=0.1)
    assert {found[1,].code, found[2,].code} == {"RANK001"}
    assert found[2,].evidence["late_rank"].unique().to_list() == [2]
    assert "once rank 1" in found[2,].claim
    assert "once" not in found[1,].claim


def test_a_slow_group_of_which_a_rank_has_no_trace_may_wait_for_that_rank(wording):
    # Group 1 is slower than groups 0 and 2, as with a slow link. Without rank 3, rank 2 may only wait for that rank.
    whole, rules = slow_link_run(3, 6, 3), [SlowLink(min_bandwidth_bytes_per_s=0)]
    others = drawn_traces.run(*(trace for trace in whole.traces() if trace.rank != 3))
    (found,), (doubtful,) = check(whole, rules).findings, check(others, rules).findings
    assert "without a trace" not in found.message
    wording(doubtful.message)
    assert doubtful.confidence < found.confidence


@pytest.mark.parametrize("length", [4, 10, 40])
def test_contention_of_some_percent_is_at_least_information(length):
    # a takes 4 during x and 2 alone: that costs 2 of each part, the share of which falls with the length of z.
    work = "z" * length
    compute, comm = f"aaaa{work}aa{work}", f".xxx{'.' * (2 * length + 2)}"
    rows = [f"step {'0' * len(compute) * 20}", f"compute {compute * 20}", f"comm {comm * 20}"]
    found = judged(drawn_traces.run(drawn_hosts.trace("\n".join(rows), dict.fromkeys("axz", 0))))["STREAM003"]
    assert found.severity >= Severity.INFO
    assert found.impact == pytest.approx(2 / len(compute), rel=0.05)


def test_a_rank_that_is_slower_in_one_step_costs_what_it_takes_beyond_its_other_steps():
    run = rule_examples.occasional_straggler_run(0, 0, 0, 10, 0, 0)
    late = run.table(occasional_stragglers).row(0, named=True)
    removal = Removal(OCCASIONAL_STRAGGLER, tuple(late["late_ranks"]), steps=((0, 3),))
    saved = savings.saving_of(run, [removal]).steps
    assert saved.filter(pl.col("saved_ns") > 0, rank=0)["step"].to_list() == [3]
    assert saved["saved_ns"].max() == late["lost_ns"]


SHARED = Path(__file__).parents[4] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")


@needs_traces
@pytest.mark.parametrize(
    ("change", "code"),
    [(injected_faults.slow_every_second_step, "RANK005"), (injected_faults.slow_last_step, "STEP003")],
    ids=["one step between others", "last step"],
)
def test_a_recorded_rank_that_is_slower_in_one_step_is_one_warning_with_its_price(change, code, tmp_path):
    job = perturbation_graph.load((SHARED / "torchrec_v100_4ranks").glob("*.json.gz"))
    rank = change(job, 0.12, random.Random("one step"))
    true_ns = 1000 * job.lost_in_steps_us() / 3
    run = recorded(job, tmp_path)
    warnings = [f for f in check(run, [OccasionalStraggler(), ClockDrop()]).findings if f.severity >= Severity.WARNING]
    assert [(found.code, found.ranks) for found in warnings] == [(code, (rank,))]
    assert warnings[0].cost_ns == pytest.approx(true_ns, rel=0.25)


@pytest.mark.accuracy  # reads a large public recording
@needs_traces
def test_a_pause_of_all_ranks_leaves_no_rank_a_straggler(tmp_path):
    # Launches of rank 1 are late in the recording as it is: a part of HOST001. All ranks pause in step 11: it has no
    # lead to lose any more, so that others are late by chance in the steps after.
    job = perturbation_graph.load((SHARED / "nanogpt_h100_8ranks").glob("*.json.gz"))
    injected_faults.nameless_save(job, 0.05, random.Random("nanogpt_h100_8ranks save without a name 0.05 1100"))
    rules = [OutlierStep(), LateLaunch(), OccasionalStraggler(), LateGroup()]
    findings = check(recorded(job, tmp_path), rules).findings
    assert {found.code for found in findings if found.severity >= Severity.WARNING} == {"STEP001", "HOST001"}
    launches = [found.id for found in findings if found.code == "HOST001"]
    assert [found.consequence_of for found in findings if found.code == "RANK005"] == launches * 2


def recorded(job, folder):
    """Replay a job, and return what the profilers would have recorded as a run."""
    job.replay()
    for of_rank, document in zip(job.ranks, job.documents(), strict=True):
        perturbation_graph.write(document, folder / f"rank{of_rank.number}.json.gz")
    return tracekit.load(str(folder), cache=False)

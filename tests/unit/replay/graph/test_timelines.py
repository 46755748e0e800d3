"""Timelines drawn by hand, with known step times without each cause."""

from pathlib import Path

import polars as pl
import pytest

from tests.support import drawn_traces
from tracekit.analysis.time import dependencies
from tracekit.errors import InputError
from tracekit.replay.graph import causes, savings, what_if
from tracekit.replay.graph.causes.host import LATE_LAUNCH, blocking_sync, without_waits_and_pauses
from tracekit.replay.graph.causes.stalls import SINGLE_STALL, Removal
from tracekit.replay.graph.nodes import HOST, WORK, HostSpan

MS = 1_000_000


def calls(*rows):
    """Return runtime calls, each a name, a start and a duration in ms; those named launch launch the activities."""
    return pl.DataFrame(
        [
            {
                "id": at,
                "lane": 9,
                "name": name,
                "kind": "runtime",
                "step": 0,
                "start_ns": start * MS,
                "dur_ns": dur * MS,
            }
            for at, (name, start, dur) in enumerate(rows)
        ]
    )


def run(picture, *rows):
    return drawn_traces.run(drawn_traces.trace(picture, scale_ns=MS, ops=calls(*rows)))


def without_ms(found):
    return round((found.step_ns - found.saved_ns) / MS, 1)


def test_late_launches_cost_the_time_in_which_the_device_waits():
    # host     l.....l...     the second launch comes after five ms of Python
    late = run(
        """
        step     .00000000
        compute  .aa....bb
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 6, 1),
    )
    found = savings.saving(late, "late-launch")
    assert found.step_ns == 8 * MS
    assert without_ms(found) == 4.0


def test_launches_ahead_of_the_device_cost_nothing():
    early = run(
        """
        step     .00000000
        compute  .aaaaaabb
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 4, 1),
    )
    assert savings.saving(early, "late-launch").saved_ns == 0


def test_without_communication_exposed_time_is_saved_but_not_overlapped_time():
    # Twice: x begins when a has ended, overlaps c for two ms, then for four alone, and b begins when it has ended.
    exposed = run(
        """
        step     00000000000000000000
        compute  aacc....bbaacc....bb
        comm     ..xxxxxx....xxxxxx..
        """,
        *(("cudaLaunchKernel", order / 1000, 0) for order in (0, 2, 3, 4, 6, 7, 1, 5)),  # a x c b a x c b
    )
    found = savings.saving(exposed, "communication")
    assert found.saved_ns / MS == pytest.approx(8, abs=0.1)
    waits = exposed.table(dependencies.dependencies).filter(pl.col("kind") == "event").rows()
    assert {row[2:4] for row in waits} == {(6, 0), (2, 6), (7, 3), (5, 7)}


@pytest.mark.parametrize(("between", "waits"), [("hipStreamWaitEvent", 1), ("hipGetDevice", 0)])
def test_work_launched_after_a_wait_call_waits_for_what_ended_up_to_30_us_before_it(between, waits):
    # A cell is 9 µs: b starts 18 µs after c has ended, as on AMD devices, though it was launched 100 µs before.
    cell_ms = 0.009
    calls_of_host = calls(
        *(("hipLaunchKernel", order * cell_ms / 4, 0) for order in (0, 2, 1)),  # a b c, the compute's first
        (between, 1.5 * cell_ms / 4, 0),
    )
    drawn = drawn_traces.trace(
        """
        step     .00000000000000000
        compute  .aa............bbb
        comm     ...cccccccccc.....
        """,
        scale_ns=9_000,
        ops=calls_of_host,
    )
    found = drawn_traces.run(drawn).table(dependencies.dependencies)
    assert found.filter(kind="event", waiting_id=1, awaited_id=2).height == waits


def test_a_blocking_read_costs_the_time_in_which_no_work_is_queued():
    # host     lss..l      the launch of b waits for the end of a, and the host looks at the value for two ms
    read = run(
        """
        step     .000000000
        compute  .aaa...bbb
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 6, 1),
        ("cudaStreamSynchronize", 1, 3),
    )
    found = savings.saving(read, "blocking-sync")
    assert without_ms(found) == 6.0
    waits = read.table(dependencies.dependencies)
    assert set(waits["kind"]) == {"launch", "stream"}


def test_reads_after_a_blocking_read_wait_for_nothing_but_keep_the_device_idle():
    # host     lss..s..l      a second read after the first: nothing is queued until b is launched
    read = run(
        """
        step     .00000000000
        compute  .aaa.....bbb
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 8, 1),
        ("cudaStreamSynchronize", 1, 3),
        ("cudaStreamSynchronize", 6, 0.001),
    )
    assert without_ms(savings.saving(read, "blocking-sync")) == 6.0


def test_a_pause_after_a_call_that_finds_the_device_idle_counts_as_those_after_waits_in_the_same_call():
    # host     lsss.....lSS..lSS..lSS..l.s.....l    s (of the device) waits for a, then finds it idle; five ms of Python
    # follow each time. After S, which reads a value, it is two.
    synced = run(
        """
        step     .0000000000000000000000000000000
        compute  .aaa......bb...cc...dd...e.....ff
        """,
        *(("cudaLaunchKernel", at, 1) for at in (0, 9, 14, 19, 24, 31)),
        ("cudaDeviceSynchronize", 1, 3),
        *(("cudaStreamSynchronize", at, 2) for at in (10, 15, 20)),
        ("cudaDeviceSynchronize", 26, 0.001),
    )
    graph = savings.graphs_of(synced)[0]
    changed = without_waits_and_pauses(graph, graph.column("what") == HOST)
    last = int(graph.launch[: graph.count].max())
    assert graph.chain_ns[last] == 4_999_000
    assert changed.chain_ns[last] == 1_000_000  # as long as the median pause here


def test_a_call_that_waited_for_a_kernel_which_started_late_returns_as_late_in_a_replay():
    # host     lLssssss.l      nothing shows why c starts three ms after its launch; the host waits for its end
    read = run(
        """
        step     .000000000000
        compute  .aa.......bbb
        compute2 .....ccc.....
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 9, 1),
        ("cudaLaunchKernel", 1, 1),
        ("cudaStreamSynchronize", 2, 6),
    )
    replayed = savings.replayed_steps(read)
    assert replayed["replayed_ns"].item() == pytest.approx(replayed["duration_ns"].item(), abs=1000)
    assert without_ms(savings.saving(read, "blocking-sync")) < 10


def test_a_call_directly_after_the_launch_of_a_copy_waits_for_it_though_its_clock_is_behind():
    # host     lL......l      the wait L follows the copy's launch; it returns 0.1 ms after the copy's end
    copied = run(
        """
        step     .0000000000
        compute  .aaaaa..bbb
        copy     ......m....
        """,
        ("cudaLaunchKernel", 0, 0.5),
        ("cudaLaunchKernel", 7.2, 0.5),
        ("cudaMemcpyAsync", 0.5, 0.5),
        ("cudaStreamSynchronize", 1, 6.1),
    )
    graph = savings.graphs_of(copied)[0]
    nodes = {(what, ref): at for what, ref, at in graph.frame.select("what", "ref", "at").iter_rows()}
    waits = graph.edges.select(graph.edges.kind == "sync")
    assert list(zip(waits.waiting.tolist(), waits.awaited.tolist(), strict=True)) == [(nodes[HOST, 3], nodes[WORK, 2])]


def test_a_launch_that_takes_long_while_little_is_queued_does_not_wait_for_the_queue():
    # host     lLLLLLL.l      the second launch loads code for six ms; a happens to end shortly before it returns
    loading = run(
        """
        step     .0000000000
        compute  .aaaaa..bbb
        """,
        ("cudaLaunchKernel", 0, 0.5),
        ("cudaLaunchKernel", 1, 6.5),
        *(("cudaLaunchKernel", 8 + at / 10, 0.01) for at in range(10)),
    )
    graph = savings.graphs_of(loading)[0]
    assert not len(graph.edges.select(graph.edges.kind == "queue").waiting)
    assert without_ms(savings.saving(loading, "late-launch")) == 8.0


def test_a_wait_after_which_the_device_goes_on_stays():
    # host     lLss.l.ss...l    the first wait is for the copy m, while a runs; the second drains the device
    read = run(
        """
        step     .0000000000000000
        compute  .aaaaaacc....bbbb
        copy     ..mm.............
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 5, 1),
        ("cudaLaunchKernel", 12, 1),
        ("cudaMemcpyAsync", 1, 1),
        ("cudaStreamSynchronize", 2, 2),
        ("cudaStreamSynchronize", 6, 3),
    )
    graph = savings.graphs_of(read)[0]
    host = graph.frame.select(pl.all()).filter(pl.col("what") == HOST).sort("start_ns")
    harmless, blocking = host.filter(pl.col("ref").is_in([4, 5]))["at"].to_list()
    changed = blocking_sync(graph)
    assert {harmless, blocking} <= set(graph.edges.waiting.tolist())
    assert harmless in changed.edges.waiting.tolist()
    assert blocking not in changed.edges.waiting.tolist()
    assert without_ms(savings.saving(read, "blocking-sync")) == 12.0


@pytest.mark.parametrize(("stalls", "left_ms"), [((), 7.0), (((0, 0, 8, 13),), 10.0), (((0, 1, 8, 13),), 7.0)])
def test_a_single_stall_stays_where_a_steady_cause_is_removed(stalls, left_ms):
    # host     l....l.......l      b and c are launched late; c's host pauses for seven ms: that is the stall
    late = run(
        """
        step     .0000000000000000
        compute  .aa...bb......ccc
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 5, 1),
        ("cudaLaunchKernel", 13, 1),
    )
    spans = tuple(HostSpan(window, rank, start * MS, end * MS) for window, rank, start, end in stalls)
    found = savings.saving_of(late, [Removal(LATE_LAUNCH, stalls=spans)])
    assert without_ms(found) == left_ms


def test_a_single_stall_is_removed_where_it_is_and_not_the_pauses_of_other_places():
    # host     l....l.......l      b and c are launched late; only c's pause is the stall
    late = run(
        """
        step     .0000000000000000
        compute  .aa...bb......ccc
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 5, 1),
        ("cudaLaunchKernel", 13, 1),
    )
    found = _stall_saving(late, HostSpan(0, 0, 8 * MS, 13 * MS))
    assert without_ms(found) == 10.0


def test_without_a_single_stall_the_host_still_pauses_as_at_the_same_place_of_other_steps():
    # host     l..l......l.......l     c comes 2 ms after a's launch in step 0, and 7 ms after it in step 1
    late = run(
        """
        step     .00000000001111111111
        compute  .aa.cc.....aa......cc
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 3, 1),
        ("cudaLaunchKernel", 10, 1),
        ("cudaLaunchKernel", 18, 1),
    )
    found = _stall_saving(late, HostSpan(0, 0, 13 * MS, 18 * MS))
    assert found.saved_ns == 5 * MS // 2


def test_a_launch_does_not_wait_for_its_own_short_kernel():
    # a is done before the call that launches it returns: without the wait before it, b is queued in time
    short = run(
        """
        step     .00000000000
        compute  .a.....bbbbb
        """,
        ("cudaLaunchKernel", 0, 3),
        ("cudaLaunchKernel", 7, 1),
    )
    graph = savings.graphs_of(short)[0]
    assert graph.frame.select(pl.all()).filter(pl.col("what") == HOST).height == 2
    assert not (graph.edges.kind == "sync").any()


def test_a_long_launch_does_not_wait_for_the_kernel_that_it_launches_itself():
    # host     ll..LLLLL       the last call loads code; its kernel d is done when it returns
    slow = run(
        """
        step     .000000000
        compute  .aabb...d
        """,
        ("cudaLaunchKernel", 0, 0),
        ("cudaLaunchKernel", 1, 0),
        ("cudaLaunchKernel", 4, 5),
    )
    assert not (savings.graphs_of(slow)[0].edges.kind == "queue").any()


@pytest.mark.parametrize(
    ("size_bytes", "later_bytes", "waits"),
    [
        (128 << 10, 4, False),  # as recorded on an H100: the host does not wait, though the copy ends within the call
        (1 << 20, 4, True),
        (1 << 20, 1 << 20, False),  # another copy of that size runs after its call has returned
    ],
)
def test_a_copy_that_ends_within_its_call_is_waited_for_only_if_copies_of_its_size_are(size_bytes, later_bytes, waits):
    # host     cccl.C.     copy d runs within its call c, copy e long after its call C
    drawn = drawn_traces.trace(
        """
        step     .000000000
        copy     .d....e...
        compute  ...a...bbb
        """,
        scale_ns=MS,
        ops=calls(
            ("cudaMemcpyAsync", 0, 3),
            ("cudaMemcpyAsync", 4, 0),
            ("cudaLaunchKernel", 3, 0),
            ("cudaLaunchKernel", 5, 0),
        ),
        columns={
            name: {"name": "Memcpy HtoD (Pageable -> Device)", "bytes": size}
            for name, size in (("d", size_bytes), ("e", later_bytes))
        },
    )
    graph = savings.graphs_of(drawn_traces.run(drawn))[0]
    assert bool((graph.edges.kind == "sync").any()) == waits


@pytest.mark.parametrize(
    ("compute", "saved_ms", "without_ms"),
    [
        # The second load delays b by 3 of its 4 ms, so the first one counts by 3 ms: 6 ms in two steps. What is left
        # of a step is its work.
        ("aa...bb....", 3.0, 2.0),
        # The device has work of the first step during the second load: in steady state, loads cost nothing.
        ("aaaaaabb...", 0.0, 4.0),
    ],
)
def test_a_load_before_the_first_step_counts_as_much_as_loads_of_other_steps_cost(compute, saved_ms, without_ms):
    # host     LLLLlLLLLl
    launches = calls(("cudaLaunchKernel", 4, 0), ("cudaLaunchKernel", 9, 0))
    loads = calls(*(("enumerate(DataLoader)#Iter.__next__", start, 4) for start in (0, 5)))
    ops = pl.concat([launches, loads.with_columns(pl.col("id") + 10, kind=pl.lit("annotation"))])
    steps = compute.replace("a", "0").replace("b", "1")
    second = steps.index("1")
    drawn = drawn_traces.trace(
        f"""
        step     .....{steps[:second].replace(".", "0")}{steps[second:]}
        compute  .....{compute}
        """,
        scale_ns=MS,
        ops=ops,
    )
    found = savings.saving(drawn_traces.run(drawn), "data-loading")
    assert found.saved_ns / MS == pytest.approx(saved_ms, abs=0.01)
    assert found.step_ns / MS == pytest.approx(saved_ms + without_ms, abs=0.01)
    assert found.saved_ratio == pytest.approx(saved_ms / (saved_ms + without_ms), abs=0.001)
    assert found.steps["without_ns"].sum() / 2 / MS == pytest.approx(without_ms, abs=0.01)


def test_all_causes_with_a_cost_are_listed_largest_first_with_hours_and_money():
    late = run(
        """
        step     .00000000
        compute  .aa....bb
        """,
        ("cudaLaunchKernel", 0, 1),
        ("cudaLaunchKernel", 6, 1),
    )
    found = what_if.answer(late, gpu_hour_price=2.0)
    assert [each.name for each in found.answers] == ["late-launch"]
    (only,) = found.answers
    assert only.gpu_hours_per_day == pytest.approx(24 * only.saved_ratio)
    assert only.per_day == pytest.approx(2 * only.gpu_hours_per_day)
    assert "straggler" in {each.name for each in found.unavailable}


def test_an_unknown_cause_and_a_run_without_work_are_rejected(wording):
    with wording.raises(InputError):
        causes.find("stragler")
    with wording.raises(InputError):
        what_if.answer(drawn_traces.run(drawn_traces.trace("compute .....")))
    with pytest.raises(InputError, match="gpu-hour-price"):
        what_if.answer(drawn_traces.run(drawn_traces.trace("compute aa")), gpu_hour_price=-1.0)


def test_each_cause_has_a_summary_a_basis_and_a_rule_code():
    for cause in causes.CAUSES:
        assert cause.summary
        assert cause.basis
        assert all(code[-3:].isdecimal() for code in cause.codes)


def test_the_guide_lists_every_cause():
    page = (Path(__file__).parents[4] / "docs" / "whatif.md").read_text(encoding="utf-8")
    for cause in causes.run_causes():
        assert f"| {cause.name} | {', '.join(cause.codes)} | {cause.summary} | {cause.basis} |" in page


def _stall_saving(run, *spans):
    return savings.saving_of(run, [Removal(SINGLE_STALL, stalls=spans)])

"""The cause of a hang from the dumps of its ranks."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.flight_records import BEGAN_NS, GROUP, SECOND_NS, done, dump, entry
from tests.support.wording import Wording
from tracekit.analysis.hangs import causes
from tracekit.analysis.hangs.causes import Kind
from tracekit.analysis.hangs.collectives import Group
from tracekit.analysis.hangs.diagnosis import Diagnosis, diagnose
from tracekit.analysis.hangs.waits import Wait, WaitGraph
from tracekit.ingest.hang_dumps import flight_recorder
from tracekit.model import units
from tracekit.model.hang_dump import Frame, HangDumps
from tracekit.report import hang

DATA, TENSOR, PIPE = ("1", "data"), ("2", "tensor"), ("3", "pipe")
STEP = ["all_reduce", "all_gather", "all_reduce"]


def diagnosed(
    ranks: dict[int, list[dict[str, Any]]],
    *,
    size: int | None = None,
    groups: Any = None,
    own: Any = None,
    wait_s: int = 60,
) -> Diagnosis:
    size = len(ranks) if size is None else size
    groups = {GROUP: list(range(size)), **(groups or {})}
    dumps = {}
    for rank, entries in ranks.items():
        members = {name: each for name, each in groups.items() if rank in each}
        last_ns = max((each["time_created_ns"] for each in entries), default=BEGAN_NS)
        stated = {"rank": rank, "written_ns": last_ns + wait_s * SECOND_NS, **(own or {}).get(rank, {})}
        value = dump(entries, groups=members, tracekit=stated)
        dumps[rank] = flight_recorder.parse(json.loads(json.dumps(value)), rank=rank, path="x")
    return diagnose(HangDumps(dumps))


C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"


def thread(*frames: tuple[str, str, int], **fields: Any) -> dict[str, Any]:
    listed = [{"name": name, "filename": file, "line": line} for name, file, line in frames]
    return {"threads": [{"name": "MainThread", "is_main": True, "frames": listed, **fields}]}


def waiting_in(group: tuple[str, str]) -> list[dict[str, Any]]:
    return [*done(STEP), entry("all_reduce", 1, state="started", group=group, created_ns=BEGAN_NS + 9 * SECOND_NS)]


def on_host(call: str, path: str = "") -> dict[str, Any]:
    return thread(("save", "/home/user/a.py", 3), system_call={"name": call, "path": path})


def ranks_of(found: Diagnosis) -> list[int]:
    return [each.rank for each in found.culprits]


def test_complete_calls_are_no_hang(wording: Wording) -> None:
    found = diagnosed({rank: done(STEP) for rank in range(4)})
    assert not found.is_hang
    wording(found.verdict)


def test_ranks_that_wait_only_milliseconds_are_a_running_training() -> None:
    late = [*done(STEP), entry("all_gather", 4, state="started")]
    found = diagnosed({0: late, 1: late, 2: done(STEP)}, wait_s=0)
    assert not found.is_hang
    assert found.waited_ns is None


def test_a_rank_that_has_not_come_is_the_cause_and_its_stack_says_why(wording: Wording) -> None:
    late = [*done(STEP), entry("all_gather", 4, state="started")]
    stack = thread(("__getitem__", "/home/user/data.py", 7), ("fetch", "/x/torch/utils/data/_utils/fetch.py", 54))
    found = diagnosed({0: late, 1: late, 2: done(STEP), 3: late}, own={2: stack})
    assert (found.kind, ranks_of(found)) == (Kind.HOST, [2])
    assert found.wait is not None
    assert (found.wait.op, found.wait.seq, found.wait.missing_ranks) == ("all_gather", 4, (2,))
    wording(found.verdict)


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (thread(("solve", "/home/user/a.py", 3), cpu_ratio=0.9), "runs code on the host in solve"),
        (
            thread(("default_pg", C10D, 688), ("get_rank", C10D, 2572), ("solve", "/home/user/a.py", 6), cpu_ratio=1.0),
            "runs code on the host in solve",
        ),
        (thread(("barrier", C10D, 9), ("save", "/home/user/a.py", 6)), "is in a call of torch.distributed in save"),
        (on_host("fsync", "/nfs/x.pt"), "access to /nfs/x.pt"),
        (on_host("clock_nanosleep"), "sleeps in save"),
        (on_host("read", "pipe:[7]"), "is on the host in save"),
        ({}, "the dumps have no stack of it"),
    ],
)  # fmt: skip
def test_what_keeps_a_rank_on_the_host_is_named(stack: dict[str, Any], words: str) -> None:
    late = [*done(STEP), entry("all_gather", 4, state="started")]
    found = diagnosed({0: late, 1: done(STEP)}, own={1: stack})
    assert ranks_of(found) == [1]
    assert words in found.verdict


def test_a_chain_of_waits_leads_to_its_end() -> None:
    # rank 0 waits in data for 1, rank 1 in tensor for 2, rank 2 in pipe for 3, which is on the host
    groups = {DATA: [0, 1], TENSOR: [1, 2], PIPE: [2, 3]}
    waits = {rank: waiting_in(group) for rank, group in enumerate((DATA, TENSOR, PIPE))}
    found = diagnosed({**waits, 3: done(STEP)}, groups=groups)
    assert (ranks_of(found), found.wait and found.wait.group.description) == ([3], "pipe")


def test_a_cycle_of_three_groups_is_drawn() -> None:
    groups = {DATA: [0, 1], TENSOR: [1, 2], PIPE: [2, 0]}
    waits = {rank: waiting_in(group) for rank, group in enumerate((DATA, TENSOR, PIPE))}
    found = diagnosed(waits, groups=groups)
    assert (found.kind, ranks_of(found)) == (Kind.DEADLOCK, [0, 1, 2])
    assert found.cycle == (
        'rank 0 waits in all_reduce (seq 1 of group "1" (data)) for rank 1',
        'rank 1 waits in all_reduce (seq 1 of group "2" (tensor)) for rank 2',
        'rank 2 waits in all_reduce (seq 1 of group "3" (pipe)) for rank 0',
    )


def test_two_pending_calls_enqueued_in_different_orders_are_a_deadlock() -> None:
    groups = {DATA: [0, 1], TENSOR: [0, 1]}
    one, other = (
        entry("all_reduce", 1, state=state, group=group) for state, group in (("started", DATA), ("scheduled", TENSOR))
    )
    found = diagnosed({0: [one, other], 1: [dict(other, state="started"), dict(one, state="scheduled")]}, groups=groups)
    assert (found.kind, ranks_of(found)) == (Kind.DEADLOCK, [0, 1])


def test_another_operation_at_the_same_number_is_a_mismatch_of_the_minority(wording: Wording) -> None:
    late = [*done(STEP), entry("all_gather", 4, state="started", outputs=(32,))]
    other = [*done(STEP), entry("all_reduce", 4, state="started")]
    found = diagnosed({0: other, 1: late, 2: late, 3: late})
    assert (found.kind, ranks_of(found)) == (Kind.MISMATCH, [0])
    wording(found.verdict)


@pytest.mark.parametrize(("change", "kind"), [({"size": (9,)}, "size"), ({"dtype": "Half"}, "dtype")])
def test_other_sizes_and_types_are_mismatches(change: dict[str, Any], kind: str) -> None:
    calls = {rank: [*done(STEP), entry("all_reduce", 4, state="started")] for rank in (0, 1)}
    found = diagnosed({**calls, 2: [*done(STEP), entry("all_reduce", 4, state="started", **change)]})
    assert (ranks_of(found), [each.kind for each in found.mismatches]) == ([2], [kind])


@pytest.mark.parametrize("sizes", [(8, 9, 10, 11), (8, 8, 9, 9), (8, 9, 9, 8)], ids=str)  # no batch has a usual size
def test_a_size_is_stated_only_of_the_ranks_that_pass_it(sizes: tuple[int, ...]) -> None:
    calls = {r: [*done(STEP), entry("all_reduce", 4, state="started", size=(size,))] for r, size in enumerate(sizes)}
    diagnosis = diagnosed(calls)
    stated = re.findall(r"[Rr]anks? ([\d–, ]+) calls? all_reduce \[(\d+)\]", diagnosis.verdict)
    assert len(stated) == 2
    report_text = str(hang.document(diagnosis).sections)
    for ranks, size in stated:
        passing = [rank for rank in range(4) if sizes[rank] == int(size)]
        assert ranks == units.ranges(passing)
        assert f"{units.numbers('rank', passing)}: all_reduce [{size}]" in report_text


def test_shapes_of_equally_many_elements_match() -> None:
    shapes = {0: (4, 2), 1: (8,), 2: (2, 4)}
    found = diagnosed({r: [*done(STEP), entry("all_reduce", 4, state="started", size=s)] for r, s in shapes.items()})
    assert (found.kind, found.mismatches) == (Kind.COMMUNICATION, ())


def test_roots_of_gather_and_scatter_may_pass_other_tensors() -> None:
    gather = {r: [entry("gather", 1, state="started", outputs=(16,) if r == 0 else ())] for r in (0, 1)}
    scatter = {r: [entry("scatter", 1, state="started", size=(16,) if r else (), outputs=(8,))] for r in (0, 1)}
    for calls in (gather, scatter):
        assert diagnosed(calls).kind is Kind.COMMUNICATION


def test_a_skipped_call_is_found_where_the_calls_part_not_where_they_stop(wording: Wording) -> None:
    # seq        1 2 3 4 5
    # others     r g r g b*     b: broadcast, pending
    # rank 1     r r g b . .    skipped g at 2 of its own
    others = [*done(["all_reduce", "all_gather", "all_reduce", "all_gather"]), entry("broadcast", 5, state="started")]
    skipped = [*done(["all_reduce", "all_reduce", "all_gather"]), entry("broadcast", 4, state="started")]
    others[3] = entry("all_gather", 4, state="started")
    found = diagnosed({0: others[:4], 1: skipped, 2: others[:4]})
    assert (ranks_of(found), found.mismatches[0].seq) == ([1], 2)
    wording(found.culprits[0].reason)


def test_calls_in_the_opposite_order_in_one_group_are_named() -> None:
    one = [*done(STEP), entry("all_reduce", 4, state="started"), entry("broadcast", 5, state="scheduled")]
    two = [*done(STEP), entry("broadcast", 4, state="started"), entry("all_reduce", 5, state="scheduled")]
    found = diagnosed({0: one, 1: one, 2: two})
    assert (found.kind, ranks_of(found)) == (Kind.ORDER, [2])


def test_two_ranks_that_differ_are_both_named_as_there_is_no_majority() -> None:
    calls = {0: [entry("all_reduce", 1, state="started")], 1: [entry("broadcast", 1, state="started")]}
    found = diagnosed(calls)
    assert ranks_of(found) == [0, 1]


def test_a_call_that_is_complete_on_some_ranks_names_those_where_it_is_not() -> None:
    states = {0: "completed", 1: "started", 2: "completed"}
    found = diagnosed({rank: [*done(STEP), entry("all_reduce", 4, state=state)] for rank, state in states.items()})
    assert (found.kind, ranks_of(found), found.completed_ranks) == (Kind.COMMUNICATION, [1], (0, 2))


def test_a_rank_whose_gpu_has_not_started_the_call_is_named() -> None:
    states = {0: "started", 1: "scheduled", 2: "started"}
    found = diagnosed({rank: [*done(STEP), entry("all_reduce", 4, state=state)] for rank, state in states.items()})
    assert (ranks_of(found), found.culprits[0].reason) == ([1], "has not started it")


def test_a_rank_without_dump_whose_process_is_gone_has_died(wording: Wording) -> None:
    late = [*done(STEP), entry("all_gather", 4, state="started")]
    found = diagnosed({0: late, 2: late}, size=3, own={0: {"dead_ranks": [1]}})
    assert (found.kind, ranks_of(found)) == (Kind.DIED, [1])
    wording(*found.notes)


def test_one_dump_of_eight_names_no_rank() -> None:
    found = diagnosed({0: [*done(STEP), entry("all_gather", 4, state="started")]}, size=8)
    assert found.is_hang
    assert (found.kind, found.culprits) == (Kind.UNKNOWN, ())


def test_a_receive_without_send_waits_for_the_sender() -> None:
    waiting = [*done(STEP), entry("recv 1<-0", 1, state="started", is_p2p=True)]
    found = diagnosed({0: done(STEP), 1: waiting}, own={0: thread(("load", "/home/user/a.py", 3), cpu_ratio=1.0)})
    assert ranks_of(found) == [0]
    assert "recv from rank 0" in found.verdict


def test_a_send_and_its_receive_wait_for_nobody_else() -> None:
    found = diagnosed({
        0: [*done(STEP), entry("send 0->1", 1, state="started", is_p2p=True)],
        1: [*done(STEP), entry("recv 1<-0", 1, state="started", is_p2p=True)],
        2: done(STEP),
    })  # fmt: skip
    assert 2 not in ranks_of(found)


def test_a_call_enqueued_on_gloo_by_a_rank_in_its_own_loop_is_no_wait() -> None:
    # rank 1 has enqueued "data" and loops; rank 2 waits in "tensor" for rank 1
    groups = {DATA: [1, 2], TENSOR: [1, 2]}
    calls = {
        1: [entry("all_reduce", 1, state="scheduled", group=DATA, backend="gloo")],
        2: [entry("all_reduce", 1, state="scheduled", group=TENSOR, backend="gloo")],
    }
    stack = thread(("search", "/home/user/a.py", 3), cpu_ratio=1.0)
    found = diagnosed({0: [], **calls}, groups=groups, own={1: stack})
    assert (found.kind, ranks_of(found)) == (Kind.HOST, [1])


def test_groups_without_stated_ranks_are_those_that_called() -> None:
    pending = [entry("all_reduce", 1, state="started", group=TENSOR)]
    found = diagnosed({0: pending, 1: pending, 2: []})
    assert found.wait is not None
    assert (found.wait.group.ranks, found.wait.group.is_inferred) == ((0, 1), True)


def test_groups_of_one_name_and_other_ranks_are_different_groups() -> None:
    dumps = {}
    for rank in range(4):
        members = [0, 1] if rank < 2 else [2, 3]
        entries = [entry("all_reduce", 1, state="started" if rank == 0 else "completed", group=TENSOR)]
        own = {"rank": rank, "written_ns": BEGAN_NS + 100 * SECOND_NS}
        value = dump([] if rank == 1 else entries, groups={GROUP: [0, 1, 2, 3], TENSOR: members}, tracekit=own)
        dumps[rank] = flight_recorder.parse(value, rank=rank, path="x")
    assert ranks_of(diagnose(HangDumps(dumps))) == [1]


def test_unequal_amounts_of_an_all_to_all_are_a_mismatch() -> None:
    calls = {r: [entry("all_to_all", 1, state="started", size=(8,), outputs=(8 + r,))] for r in (0, 1)}
    found = diagnosed(calls)
    assert found.kind is Kind.MISMATCH
    assert "drop_last" in found.advice
    assert "16 elements and expect 17" in found.verdict


def test_many_ranks_that_wait_for_one_are_summed_up(wording: Wording) -> None:
    late = [*done(STEP), entry("all_gather", 4, state="started")]
    found = diagnosed({rank: late if rank != 30 else done(STEP) for rank in range(40)})
    assert ranks_of(found) == [30]
    wording(found.verdict)


def test_members_of_a_group_are_not_read_for_each_call_and_each_member() -> None:
    class Members(tuple[int, ...]):
        reads = 0

        def __hash__(self) -> int:
            Members.reads += 1
            return super().__hash__()

    members = Members(range(500))
    waiting = {rank: flight_recorder.parse(_waiting_call(), rank=rank, path="x") for rank in range(2)}
    groups = {"0": ("default_pg", members)}
    dumps = HangDumps({rank: replace(dump, groups=groups) for rank, dump in waiting.items()})
    assert diagnose(dumps).is_hang
    assert Members.reads == 0


def _waiting_call() -> Any:
    recorder = {"rank": 0, "written_ns": BEGAN_NS + 60 * SECOND_NS}
    stated = dump([entry("all_reduce", 1, state="started")], groups={GROUP: [0, 1]}, tracekit=recorder)
    return json.loads(json.dumps(stated))


def test_ranks_that_many_waits_lead_to_are_those_of_a_search_from_each_rank() -> None:
    generator = random.Random(8)
    for _ in range(50):
        size = generator.randint(2, 8)
        graph = WaitGraph(*_random_waits(generator, size))
        for root in graph.roots():
            others = set(range(size)) - (set(root.ranks) if len(root.ranks) == 1 else set())
            targets = {(0, rank) for rank in root.ranks} | {(1, wait) for wait in root.waits}
            assert set(root.led_ranks) == {rank for rank in others if _reaches(graph, (0, rank), targets)}


def _random_waits(generator: random.Random, size: int) -> tuple[tuple[Wait, ...], dict[int, tuple[int, ...]]]:
    waits: list[Wait] = []
    of_rank: dict[int, list[int]] = {}
    for number in range(generator.randint(1, 5)):
        ranks = generator.sample(range(size), generator.randint(2, size))
        waiting, missing = tuple(ranks[:1]), tuple(ranks[1:])
        waits.append(Wait(Group("0", "", tuple(ranks)), number, "all_reduce", waiting, missing, None, None))  # type: ignore[arg-type]
        of_rank.setdefault(ranks[0], []).append(number)
    return tuple(waits), {rank: tuple(numbers) for rank, numbers in of_rank.items()}


def _reaches(graph: WaitGraph, node: tuple[int, int], targets: set[tuple[int, int]]) -> bool:
    visited, rest = set(), [node]
    while rest:
        kind, number = current = rest.pop()
        if current not in visited:
            visited.add(current)
            rest += [(1, wait) for wait in graph.of_rank.get(number, ())] if kind == 0 else []
            rest += [(0, rank) for rank in graph.waits[number].missing_ranks] if kind == 1 else []
    return bool(visited & targets)


def test_all_ranks_in_file_access_without_a_pending_call_are_named(tmp_path: Path) -> None:
    stack = thread(("read", "/home/user/a.py", 3), system_call={"name": "read", "path": "/nfs/data.bin"})
    own = {rank: {**stack, "reason": "timeout", "stalled_ns": 300 * SECOND_NS} for rank in (0, 1)}
    found = diagnosed({0: done(STEP), 1: done(STEP)}, own=own)
    assert (found.kind, ranks_of(found)) == (Kind.HOST, [0, 1])
    assert "/nfs/data.bin" in found.verdict


def in_call(op: str) -> dict[str, Any]:
    return {**thread((op, C10D, 9), ("train", "/home/user/a.py", 6)), "reason": "timeout"}


def test_the_first_call_of_the_only_group_without_one_is_inferred_from_stacks(wording: Wording) -> None:
    # ranks 0 and 1 are in the first all_reduce of "data", in which NCCL creates a communicator; rank 2 does not come
    loop = {**thread(("search", "/home/user/a.py", 3), cpu_ratio=1.0), "reason": "timeout"}
    own = {0: in_call("all_reduce"), 1: in_call("all_reduce"), 2: loop}
    found = diagnosed({rank: done(STEP) for rank in range(3)}, groups={DATA: [0, 1, 2]}, own=own)
    assert (found.kind, ranks_of(found)) == (Kind.HOST, [2])
    wording(found.verdict)


def test_of_two_groups_without_a_call_none_is_blamed_and_the_rank_outside_is_the_cause(wording: Wording) -> None:
    own = {0: in_call("all_reduce"), 1: in_call("all_reduce")}
    groups = {DATA: [0, 1, 2], TENSOR: [0, 1, 2]}
    found = diagnosed({0: done(STEP), 1: done(STEP)}, size=3, groups=groups, own=own)
    assert (found.kind, ranks_of(found)) == (Kind.NO_DUMP, [2])
    wording(found.verdict)


@pytest.mark.parametrize(
    ("retired", "seen_after_s", "reason", "is_pending"),
    [(False, 6, "timeout", True), (True, 6, "timeout", False), (False, 0, "timeout", False), (False, 6, "exit", False)],
)
def test_a_call_whose_end_only_the_dump_discovered_is_pending(
    retired: bool, seen_after_s: int, reason: str, is_pending: bool
) -> None:
    last = entry("recv 1<-0", 1, is_p2p=True)
    last |= {"retired": retired, "time_discovered_completed_ns": last["time_created_ns"] + seen_after_s * SECOND_NS}
    value = dump([*done(STEP), last], groups={GROUP: [0, 1]}, tracekit={"reason": reason})
    assert flight_recorder.parse(value, rank=1, path="x").calls[-1].is_pending is is_pending


def test_several_ranks_with_one_reason_are_named_in_a_sentence(wording: Wording) -> None:
    late = [*done(STEP), entry("all_gather", 4, state="started")]
    found = diagnosed({0: late, 1: late, 2: done(STEP), 3: done(STEP)})
    wording(found.verdict)


@pytest.mark.parametrize(
    "library",
    [
        "/src/tracekit/tracekit/capture/hangs/calls.py", "/opt/pytorch/torch/distributed/distributed_c10d.py",
        "/venv/lib/python3.11/site-packages/accelerate/accelerator.py",
        r"C:\venv\Lib\site-packages\torch\distributed\distributed_c10d.py",
    ],
)  # fmt: skip
@pytest.mark.parametrize("own", ["/home/me/train.py", r"D:\jobs\train.py"])
def test_the_users_line_is_that_of_no_package_wherever_it_is_installed(library: str, own: str) -> None:
    frame = causes.user_frame((Frame("all_reduce", library, 3), Frame("step", own, 12)))
    assert frame is not None
    assert (frame.function, frame.brief) == ("step", "step (train.py:12)")


@pytest.mark.parametrize("script", ["/opt/venv/bin/acme-train", "/usr/lib/python3.12/runpy.py"])
def test_the_users_line_of_an_installed_program_is_in_its_package(script: str) -> None:
    packages = "/opt/venv/lib/python3.12/site-packages"
    frames = [
        Frame("all_reduce", f"{packages}/torch/distributed/distributed_c10d.py", 3068),
        Frame("reduce_loss", f"{packages}/acme/trainer.py", 71),
        Frame("fit", f"{packages}/acme/trainer.py", 12),
        Frame("<module>", script, 8),
    ]
    frame = causes.user_frame(tuple(frames))
    assert frame is not None
    assert (frame.function, frame.line) == ("reduce_loss", 71)

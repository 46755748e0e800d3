"""Waits between roles: the drawn milliseconds, and random ones against a count of each millisecond."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import drawn_traces
from tests.support.rule_examples import ops
from tracekit.analysis.parallelism import role_waits
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.rules.cost_attribution import MIN_CONFIDENCE
from tracekit.rules.roles import WaitingRole

MS = 1_000_000


def run_of(*pictures, host=None, **tables):
    traces = [drawn_traces.trace(picture, rank=rank, scale_ns=MS, **tables) for rank, picture in enumerate(pictures)]
    sources = [Source(t.rank, t.window, t.path, 0, lambda t=t: t) for t in traces]
    return Run("drawn", sources, manifest={} if host is None else {"host": host})


def job(**runs):
    for name, run in runs.items():
        run.role, run.roles = name, runs
    return runs


def waits_ms(runs, role, working_role):
    row = (
        next(iter(runs.values()))
        .table(role_waits.role_waits)
        .row(by_predicate=(pl.col("role") == role) & (pl.col("working_role") == working_role), named=True)
    )
    return {name.removesuffix("_ns"): value / MS for name, value in row.items() if name.endswith("_ns")}


# ms        0         1
#           01234567890
TRAINER = "compute a....bb...a"
ROLLOUT = "compute x.yyyy....x"


def test_a_role_waits_while_it_is_idle_and_the_other_works():
    runs = job(trainer=run_of(TRAINER), rollout=run_of(ROLLOUT))
    expected = {"common": 11, "work": 4, "other_work": 6, "wait": 3, "both_idle": 4, "limit": 0}
    assert waits_ms(runs, "trainer", "rollout") == expected
    assert waits_ms(runs, "rollout", "trainer")["wait"] == 1
    assert runs["rollout"].table(role_waits.role_waits)["wait_ratio"].to_list() == pytest.approx([3 / 11, 1 / 11])


def test_collectives_of_ranks_that_wait_for_a_pausing_rank_are_no_work():
    # Rank 1 waits in a collective for rank 0, which waits for the rollout.
    in_collective = run_of(TRAINER, TRAINER + "\ncomm .cccc......")
    assert waits_ms(job(trainer=in_collective, rollout=run_of(ROLLOUT)), "trainer", "rollout")["wait"] == 3
    # While rank 1 computes, the trainer works.
    computing = run_of(TRAINER, "compute abb..bb...a\ncomm ...cc......")
    assert waits_ms(job(trainer=computing, rollout=run_of(ROLLOUT)), "trainer", "rollout")["wait"] == 2
    # A collective that no rank is missing in is work.
    together = run_of(*[TRAINER + "\ncomm .cccc......"] * 2)
    assert waits_ms(job(trainer=together, rollout=run_of(ROLLOUT)), "trainer", "rollout")["wait"] == 0


def test_a_receive_is_no_work():
    receive = pl.DataFrame({"activity_id": [3], "op": ["recv"]})
    trainer = run_of(TRAINER + "\ncomm .cccc......", collectives=receive)
    assert waits_ms(job(trainer=trainer, rollout=run_of(ROLLOUT)), "trainer", "rollout")["wait"] == 3


def test_an_operator_of_the_host_is_work():
    trainer = run_of(TRAINER, ops=ops(("aten::stack", "cpu_op", 1 * MS, 4 * MS)))
    assert waits_ms(job(trainer=trainer, rollout=run_of(ROLLOUT)), "trainer", "rollout")["wait"] == 1


def test_short_waits_do_not_count_between_hosts():
    runs = job(trainer=run_of(TRAINER, host="a"), rollout=run_of(ROLLOUT, host="b"))
    assert waits_ms(runs, "trainer", "rollout")["wait"] == 0
    long = [picture[:9] + "".join(10 * letter for letter in picture[9:-1]) + "x" for picture in (TRAINER, ROLLOUT)]
    runs = job(trainer=run_of(long[0], host="a"), rollout=run_of(long[1], host="b"))
    assert waits_ms(runs, "trainer", "rollout")["wait"] == 30
    assert waits_ms(runs, "trainer", "rollout")["limit"] == 10


def test_roles_that_were_not_recorded_together_have_no_row():
    later = drawn_traces.trace(ROLLOUT, scale_ns=MS, start_ns=100 * MS)
    runs = job(trainer=run_of(TRAINER), rollout=Run("drawn", [Source(0, 0, "later", 0, lambda: later)]))
    assert runs["trainer"].table(role_waits.role_waits).is_empty()


def test_a_log_of_collectives_does_not_say_when_its_role_works():
    runs = job(trainer=run_of("comm a....bb...a"), rollout=run_of(ROLLOUT))
    assert runs["trainer"].table(role_waits.role_waits).is_empty()


def test_a_role_whose_device_was_not_recorded_is_not_judged():
    lack = pl.DataFrame({"kind": ["no_device_activity"], "message": [""], "affected_ratio": [1.0]})
    runs = job(trainer=run_of(TRAINER), rollout=run_of(ROLLOUT, data_quality=lack))
    assert list(WaitingRole().check(runs["trainer"])) == []
    assert "rollout" in WaitingRole().blind_spot(runs["trainer"])


def test_a_run_without_roles_has_no_row_and_no_finding():
    run = run_of(TRAINER)
    assert run.table(role_waits.role_waits).is_empty()
    assert list(WaitingRole().check(run)) == []


def test_the_finding_names_both_roles_and_has_the_pauses_as_evidence():
    runs = job(trainer=run_of(f"step 00000000000\n{TRAINER}"), rollout=run_of(ROLLOUT))
    (finding,) = WaitingRole().check(runs["trainer"])
    assert (finding.claim, finding.ranks, finding.impact) == ("trainer waits for rollout", (0,), pytest.approx(3 / 11))
    assert finding.cost_ns == pytest.approx(3 * MS)
    assert finding.evidence.select("start_ns", "dur_ns").rows() == [(1 * MS, 4 * MS)]
    assert not finding.is_of_window
    assert list(WaitingRole(min_wait_ratio=0.3).check(runs["trainer"])) == []


def test_of_several_roles_the_finding_names_the_one_waited_for_longest():
    runs = job(trainer=run_of(TRAINER), reward=run_of("compute r.r.......r"), rollout=run_of(ROLLOUT))
    (finding,) = WaitingRole().check(runs["trainer"])
    assert finding.claim == "trainer waits for rollout"
    assert runs["trainer"].table(role_waits.role_waits).height == 6


def test_waits_for_a_program_that_is_never_idle_have_low_confidence():
    runs = job(trainer=run_of(TRAINER), other=run_of("compute " + 11 * "x"))
    (finding,) = WaitingRole().check(runs["trainer"])
    assert finding.confidence < MIN_CONFIDENCE
    (alternating,) = WaitingRole().check(job(trainer=run_of(TRAINER), rollout=run_of("compute xyyyy..yyyx"))["trainer"])
    assert alternating.confidence >= MIN_CONFIDENCE


CELLS = st.lists(st.sampled_from(".acb"), min_size=3, max_size=14).map("".join)


def drawn_rank(cells):
    compute = "".join(cell if cell in "ab" else "." for cell in cells)
    comm = "".join("c" if cell == "c" else "." for cell in cells)
    return f"compute {compute}\ncomm {comm}"


def states(ranks, length):
    """Recorded, computing and pausing of each rank and millisecond, by the drawn cells."""
    recorded, computing, pausing = (np.zeros((len(ranks), length), bool) for _ in range(3))
    for number, cells in enumerate(ranks):
        busy = [place for place, cell in enumerate(cells) if cell != "."]
        for place in range(busy[0], busy[-1] + 1) if busy else ():
            recorded[number, place] = True
            computing[number, place] = cells[place] in "ab"
            pausing[number, place] = cells[place] == "."
    return recorded.any(0), ~computing.any(0) & pausing.any(0)


@given(st.lists(CELLS, min_size=1, max_size=3), st.lists(CELLS, min_size=1, max_size=2))
def test_waits_are_those_of_each_millisecond(first, second):
    runs = job(first=run_of(*map(drawn_rank, first)), second=run_of(*map(drawn_rank, second)))
    length = max(map(len, first + second))
    (recorded, idle), (other_recorded, other_idle) = states(first, length), states(second, length)
    common = recorded & other_recorded
    table = runs["first"].table(role_waits.role_waits)
    assert table.height == (2 if common.any() else 0)
    if common.any():
        ms = waits_ms(runs, "first", "second")
        assert ms["common"] == common.sum()
        assert ms["wait"] == (common & idle & ~other_idle).sum()
        assert ms["both_idle"] == (common & idle & other_idle).sum()
        assert ms["work"] == (common & ~idle).sum()

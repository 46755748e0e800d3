"""Replays of some ranks of a run: which they are, and that prices are those of a replay of all ranks."""

import gc
import weakref
from pathlib import Path

import pytest

import tracekit
from tests.support.selection import others_in_accuracy
from tests.support.wording import Wording
from tests.unit.simulate.jobs import job, pipelined, written
from tracekit.replay.graph import representative_ranks, what_if
from tracekit.replay.graph.causes.device_time import STRAGGLER
from tracekit.replay.graph.causes.host import DATA_LOADING
from tracekit.report import what_if as report
from tracekit.rules import cost_attribution, engine
from tracekit.rules.rule import Finding, Report, Severity, WhatIf


@pytest.fixture
def few_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(representative_ranks, "MAX_RANKS", 8)
    monkeypatch.setattr(representative_ranks, "_LEAST_RANKS", 4)


@pytest.fixture(scope="module")
def twelve_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a simulated run, which tests only read."""
    folder = tmp_path_factory.mktemp("twelve-ranks")
    written(job("fsdp2", layers=2, ranks_written=12, steps=2), folder)
    return folder


def priced(of: Report) -> dict[tuple[str, tuple[int, ...]], float]:
    """Return what each finding costs per step in ms, by rule and ranks."""
    return {(each.code, each.ranks): each.cost_ns / 1e6 for each in of.findings}


def test_prices_are_those_of_a_replay_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    written(job("fsdp2", layers=2, ranks_written=12, steps=2), tmp_path, "slow-rank:7", "host-sync")
    everything = engine.check(tracekit.load(str(tmp_path), cache=False))
    monkeypatch.setattr(representative_ranks, "MAX_RANKS", 8)
    monkeypatch.setattr(representative_ranks, "_LEAST_RANKS", 4)
    part = engine.check(tracekit.load(str(tmp_path), cache=False))
    assert priced(part).keys() == priced(everything).keys()
    assert ("RANK001", (7,)) in priced(part)
    for key, cost_ms in priced(everything).items():
        assert priced(part)[key] == pytest.approx(cost_ms, rel=0.02, abs=0.01)
    (note,) = set(part.notes) - set(everything.notes)
    wording(note)


@pytest.mark.usefixtures("few_ranks")
def test_pipelines_and_tensor_parallel_groups_are_whole(tmp_path: Path) -> None:
    # ranks: stage x replica x tp; replica 1 is ranks 2, 3 of stage 0 and 10, 11 of stage 1
    written(pipelined(16, pp=2, tp=2, layers=2, micro_batches=2, steps=1), tmp_path)
    run = tracekit.load(str(tmp_path), cache=False)
    chosen = representative_ranks.run_of(run, ((3,),))
    assert chosen.ranks == (2, 3, 10, 11)
    others = representative_ranks.run_of(run, ((3,), (5,))).ranks
    assert others == (2, 3, 4, 5, 10, 11, 12, 13)


@pytest.mark.usefixtures("few_ranks")
def test_a_finding_on_other_ranks_keeps_its_measured_cost(twelve_ranks: Path, wording: Wording) -> None:
    run = tracekit.load(str(twelve_ranks), cache=False)
    shared = {"severity": Severity.WARNING, "fix": "", "impact": 0.1, "cost_ns": 1_000_000}
    late = [Finding("RANK001", message="late", ranks=(n,), what_if=WhatIf(STRAGGLER), **shared) for n in range(8)]
    own = Finding("HOST003", message="measured", ranks=(11,), what_if=WhatIf(DATA_LOADING), **shared)
    attributed = cost_attribution.attribute_costs(Report(run, (*late, own), (), (), ""))
    (kept,) = [each for each in attributed.findings if each.code == "HOST003"]
    assert (kept.cost_ns, kept.message, kept.severity) == (1_000_000, "measured", Severity.WARNING)
    wording(*attributed.notes)


@pytest.mark.usefixtures("few_ranks")
def test_answers_say_of_how_many_ranks_they_are(twelve_ranks: Path) -> None:
    run = tracekit.load(str(twelve_ranks), cache=False)
    answers = what_if.answer(run, ("straggler",))
    assert report.caveat(answers) == "Replays 4 of 12 ranks, which represent the others."


@pytest.mark.usefixtures("few_ranks")
def test_of_traces_with_much_work_fewer_ranks_are_replayed(twelve_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracekit.load(str(twelve_ranks), cache=False)
    work = int(run.table(representative_ranks.activity_counts)["activities"].sum()) // 12
    monkeypatch.setattr(representative_ranks, "_FEWEST_RANKS", 2)
    for budget, ranks in ((work, 2), (3 * work, 3), (100 * work, 4)):
        monkeypatch.setattr(representative_ranks, "_MOST_ACTIVITIES", budget)
        assert len(representative_ranks.run_of(tracekit.load(str(twelve_ranks), cache=False)).ranks) == ranks


def test_a_run_of_few_ranks_is_replayed_whole(tmp_path: Path) -> None:
    written(job("fsdp2", layers=2, ranks_written=3, steps=2), tmp_path)
    run = tracekit.load(str(tmp_path), cache=False)
    assert representative_ranks.run_of(run, ((1,),)) is run
    assert report.caveat(what_if.answer(run, ("straggler",))) == ""


def test_a_run_of_some_ranks_has_the_tables_and_the_clock_of_the_whole(tmp_path: Path) -> None:
    written(job("fsdp2", layers=2, ranks_written=6, steps=2), tmp_path)
    run = tracekit.load(str(tmp_path), cache=False)
    engine.check(run)
    part = run.of_ranks([1, 4, 77])
    assert part.ranks == (1, 4)
    assert part.offsets.equals(run.offsets.filter(run.offsets["rank"].is_in([1, 4])))
    for name, table in part.measured_tables.items():
        assert set(table["rank"].unique()) <= {1, 4}, name


@pytest.mark.parametrize("limit", others_in_accuracy([2, 100], [2]))
def test_a_checked_run_that_nobody_uses_is_no_longer_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(representative_ranks, "MAX_RANKS", limit)
    written(job("fsdp2", layers=2, ranks_written=3, steps=2), tmp_path, "slow-rank:1")
    run = tracekit.load(str(tmp_path), cache=False)
    assert any(each.what_if for each in engine.check(run).findings)
    last = weakref.ref(run)
    del run
    gc.collect()
    assert last() is None

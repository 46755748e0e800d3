"""The benchmark that scores memory rules on simulated programs: a small sample, and its score."""

from benchmarks import memory_faults
from benchmarks.memory_faults import Judged
from benchmarks.memory_programs import CHURN, FAULTS, FRAGMENTATION, LEAK, RETRY


def test_faults_of_simulated_programs_are_found_without_false_alarms():
    found = list(memory_faults.judge_programs(28, seed=11))
    assert {each.fault for each in found} == {None, *FAULTS}
    assert [each for each in found if each.fault is None and each.reported] == []
    for fault in FAULTS:
        score = memory_faults.score(found, fault)
        assert score.precision >= 0.95, score
        assert score.recall >= 0.95, score


def test_a_fault_counts_only_for_its_own_rule():
    def judged(fault, *codes):
        return Judged(fault, frozenset(codes))

    found = [
        judged(LEAK, LEAK),
        judged(LEAK),
        judged(None, LEAK),
        judged(RETRY, RETRY, FRAGMENTATION),
        judged(None, FRAGMENTATION),
        judged(CHURN, CHURN),
    ]
    leak, cut = (memory_faults.score(found, fault) for fault in (LEAK, FRAGMENTATION))
    assert (leak.right, leak.wrong, leak.missed, leak.precision, leak.recall) == (1, 1, 1, 0.5, 0.5)
    assert (cut.right, cut.wrong, cut.missed, cut.recall) == (0, 1, 0, None)
    assert "| leak | MEM003 | 1 | 1 | 1 | 50.0% | 50.0% |" in memory_faults.table(found)

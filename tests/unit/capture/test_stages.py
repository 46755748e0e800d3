import time

import pytest

from tracekit.capture.checkpoints.operation import StageClock, apportion


def clock_with(**spent_ns: int) -> StageClock:
    clock = StageClock(None)
    clock.spent_ns.update(spent_ns)
    clock.first_ns.update({stage: index for index, stage in enumerate(spent_ns)})
    return clock


def test_every_moment_belongs_to_one_stage() -> None:
    before_ns = time.time_ns()
    clock = StageClock("plan")
    clock.switch("serialize")
    with clock.inside("write"):
        with clock.inside("fsync"):
            sum(range(1000))
        assert clock.stage == "write"
    assert clock.stage == "serialize"
    end_ns = clock.stop()
    start_ns = clock.first_ns["plan"]
    assert before_ns <= start_ns <= clock.first_ns["serialize"] <= clock.first_ns["write"] <= clock.first_ns["fsync"]
    assert sum(clock.spent_ns.values()) == end_ns - start_ns


def test_time_inside_another_stage_is_not_charged_to_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # serialize . 3 . write . 50 . serialize . 7
    monkeypatch.setattr(time, "time_ns", iter((100, 103, 153, 160)).__next__)
    clock = StageClock("serialize")
    with clock.inside("write"):
        pass
    clock.stop()
    assert clock.spent_ns == {"serialize": 10, "write": 50}


def test_a_duration_is_divided_in_proportion_to_the_threads_time() -> None:
    # thread 1  write write fsync
    # thread 2  write
    shares = apportion(100, [clock_with(write=20, fsync=10), clock_with(write=10)])
    assert {stage: share for stage, (_, share) in shares.items()} == {"write": 75, "fsync": 25}


def test_time_outside_of_stages_gets_no_share() -> None:
    waiting = StageClock(None)
    waiting.stop()
    assert apportion(100, [waiting]) == {}
    assert apportion(100, [waiting, clock_with(write=1)])["write"][1] == 100

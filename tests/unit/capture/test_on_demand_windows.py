import itertools
import json
import time
from pathlib import Path

import pytest

from tests.support.wording import Wording
from tracekit import conventions
from tracekit.capture import Recorder, window_schedule
from tracekit.capture.launcher import command
from tracekit.capture.slow_steps import REST_STEPS, Outlier
from tracekit.capture.window_schedule import Window, WindowRequests, WindowSchedule, peers

STEP_NS = 500_000_000


@pytest.fixture(autouse=True)
def look_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_schedule, "_POLL_EVERY_S", 0.0)


def requests(run: Path, windows: WindowSchedule, *, leads: bool) -> WindowRequests:
    return WindowRequests(run, windows, length=5, warmup=2, leads=leads)


def test_all_ranks_read_the_requested_steps_in_time(tmp_path: Path) -> None:
    ranks = [WindowSchedule(None) for _ in range(3)]
    looking = [requests(tmp_path, windows, leads=rank == 0) for rank, windows in enumerate(ranks)]
    (tmp_path / conventions.NOW_FILE).touch()
    for step, rank in ((40, 0), (42, 1), (43, 2)):
        looking[rank].poll(step, STEP_NS)
    # 3 s of steps of 0.5 s, two to warm up, and the one that begins
    assert [windows.upcoming(40) for windows in ranks] == [Window(0, 49, 54)] * 3
    assert not (tmp_path / conventions.NOW_FILE).exists()


def test_the_request_may_set_the_number_of_steps(tmp_path: Path) -> None:
    windows = WindowSchedule(10, 15)
    (tmp_path / conventions.NOW_FILE).write_text(json.dumps({"steps": 2}))
    requests(tmp_path, windows, leads=True).poll(4, STEP_NS)
    assert windows.upcoming(15) == Window(1, 17, 19)


@pytest.mark.parametrize("text", ["steps", "[]", '{"steps": "many"}', '{"steps": -1}', '{"steps": 1e9}', "\x00\xff"])
def test_an_unreadable_request_gets_the_default_length(tmp_path: Path, text: str) -> None:
    windows = WindowSchedule(None)
    (tmp_path / conventions.NOW_FILE).write_text(text)
    requests(tmp_path, windows, leads=True).poll(0, STEP_NS)
    assert windows.upcoming(0) == Window(0, 9, 14)


def test_a_second_request_waits_for_the_first(tmp_path: Path) -> None:
    windows = WindowSchedule(None)
    looking = requests(tmp_path, windows, leads=True)
    for _ in range(2):
        (tmp_path / conventions.NOW_FILE).touch()
        looking.poll(0, STEP_NS)
    assert (tmp_path / conventions.NOW_FILE).exists()
    looking.poll(14, STEP_NS)
    assert windows.upcoming(14) == Window(1, 23, 28)


def test_a_rank_that_reads_a_request_too_late_reports_it_and_numbers_windows_alike(
    tmp_path: Path, wording: Wording
) -> None:
    leading, late = WindowSchedule(None), WindowSchedule(None)
    late_looking = requests(tmp_path, late, leads=False)
    (tmp_path / conventions.NOW_FILE).touch()
    requests(tmp_path, leading, leads=True).poll(0, STEP_NS)
    with wording.raises(ValueError):
        late_looking.poll(12, STEP_NS)
    assert late.request(100, 105)
    assert late.upcoming(50) == Window(1, 100, 105)


@pytest.mark.parametrize("text", ["", "{", '{"first": 5}', '{"first": 5, "end": 5}', '{"first": "a", "end": 9}', "[1]"])
def test_an_invalid_request_is_ignored(tmp_path: Path, text: str) -> None:
    windows = WindowSchedule(None)
    looking = requests(tmp_path, windows, leads=False)
    (tmp_path / conventions.REQUEST_FILE).write_text(text)
    looking.poll(0, STEP_NS)
    assert windows.upcoming(0) is None


def test_a_request_of_an_earlier_training_is_ignored(tmp_path: Path) -> None:
    (tmp_path / conventions.REQUEST_FILE).write_text(json.dumps({"first": 50, "end": 55}))
    windows = WindowSchedule(None)
    requests(tmp_path, windows, leads=False).poll(0, STEP_NS)
    assert windows.upcoming(0) is None


def test_ranks_poll_about_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    windows = WindowSchedule(None)
    looking = requests(tmp_path, windows, leads=True)
    (tmp_path / conventions.NOW_FILE).touch()
    began_s = time.monotonic()
    while windows.upcoming(0) is None:
        looking.poll(0, STEP_NS)
        assert time.monotonic() - began_s < 120
    assert time.monotonic() - began_s > 0.9


# Because of slow steps ------------------------------------------------------------------------------------------------

OUTLIER = Outlier(step=20, rank=5, ratio=3.1, median_ns=STEP_NS, gap_steps=12, is_regular=True)


def outlier_requests(run: Path, windows: WindowSchedule, rank: int, *, budget: int = 2) -> WindowRequests:
    return WindowRequests(run, windows, length=5, warmup=2, leads=rank == 0, rank=rank, outlier_windows=budget)


def test_a_slow_rank_and_its_neighbours_record_the_same_steps_and_all_ranks_number_them_alike(tmp_path: Path) -> None:
    schedules = [WindowSchedule(None) for _ in range(8)]
    asking = [outlier_requests(tmp_path, windows, rank) for rank, windows in enumerate(schedules)]
    asking[5].ask(OUTLIER, peers(5, 8))
    windows = [requests.poll(22, STEP_NS) for requests in asking]
    # 3 s of steps of 0.5 s, two to warm up and the one that begins: step 31; around the next slow step after 20 + 12
    assert windows == [Window(0, 42, 47, rank in (4, 5, 6), OUTLIER) for rank in range(8)]
    assert [schedule.upcoming(30) for schedule in schedules] == windows


def test_a_request_of_a_person_is_not_replaced_by_one_of_a_rank(tmp_path: Path) -> None:
    now = tmp_path / conventions.NOW_FILE
    now.write_text('{"steps": 2}')
    outlier_requests(tmp_path, WindowSchedule(None), 5).ask(OUTLIER, [5])
    assert now.read_text() == '{"steps": 2}'


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
def test_no_more_windows_open_than_the_budget_of_a_day_allows(tmp_path: Path, budget: int) -> None:
    windows = WindowSchedule(None)
    leading = outlier_requests(tmp_path, windows, 0, budget=budget)
    opened = []
    for step in range(0, 10_000, 500):
        leading.ask(OUTLIER._replace(step=step), [0])
        opened.append(leading.poll(step, STEP_NS))
        assert not (tmp_path / conventions.NOW_FILE).exists()
    assert sum(window is not None for window in opened) == budget
    (tmp_path / conventions.NOW_FILE).touch()  # a person's request is not limited
    assert leading.poll(20_000, STEP_NS) is not None


def test_a_request_that_an_earlier_training_left_opens_no_window(tmp_path: Path) -> None:
    outlier_requests(tmp_path, WindowSchedule(None), 5).ask(OUTLIER, [5])
    leading = outlier_requests(tmp_path, WindowSchedule(None), 0)
    assert leading.poll(22, STEP_NS) is None
    assert not (tmp_path / conventions.NOW_FILE).exists()
    (tmp_path / conventions.NOW_FILE).touch()  # a person's waits for the training to start
    assert outlier_requests(tmp_path, WindowSchedule(None), 0).poll(22, STEP_NS) is not None


def test_windows_because_of_slow_steps_are_apart(tmp_path: Path) -> None:
    leading = outlier_requests(tmp_path, WindowSchedule(None), 0, budget=100)
    firsts = []
    for step in range(0, 3000, 10):
        leading.ask(OUTLIER._replace(step=step), [0])
        window = leading.poll(step, STEP_NS)
        firsts += [window.first] if window is not None else []
    assert len(firsts) > 5
    assert all(later - earlier >= REST_STEPS for earlier, later in itertools.pairwise(firsts))


def test_the_option_of_the_command_reaches_the_recorder(tmp_path: Path) -> None:
    parser = command._parser("tracekit record")
    for words, budget in ((["--on-outlier", "4"], 4), ([], 0)):
        options = parser.parse_args([*words, "--out", str(tmp_path / "run"), "--", "python", "train.py"])
        settings = command._settings(parser, options)
        assert settings.recorder_options()["on_outlier"] == budget
        assert Recorder(tmp_path, **{**settings.recorder_options(), "scratch": None})._outlier_windows == budget
    with pytest.raises(SystemExit):
        parser.parse_args(["--on-outlier", "0", "--", "python"])
    with pytest.raises(ValueError, match="windows a day"):
        Recorder(tmp_path, on_outlier=-1)


@pytest.mark.parametrize("ranks", [None, "0", [], ["0"], [True]])
def test_a_request_with_invalid_ranks_is_for_all(tmp_path: Path, ranks: object) -> None:
    windows = WindowSchedule(None)
    requests = outlier_requests(tmp_path, windows, 7)
    request = {"first": 50, "end": 55, "ranks": ranks, "outlier": {"step": "x"}}
    (tmp_path / conventions.REQUEST_FILE).write_text(json.dumps(request))
    assert requests.poll(0, STEP_NS) == Window(0, 50, 55)

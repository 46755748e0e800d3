"""The display of a watched training fits one screen, and names from logs cannot control the terminal."""

import io
import json
import unicodedata
from pathlib import Path

import pytest
from rich.console import Console

from tests.support import sample_logs
from tests.support.sample_logs import line, steady
from tracekit.cli.watch import screen
from tracekit.cli.watch.run_watch import Watch

NOW_S = 2e9
NASTY = "\x1b[2J\x1b]0;owned\x07[bold red]x[/]\u202e\r\n"


def watch(folder: Path, now_s: float = NOW_S) -> Watch:
    made = Watch(folder)
    made.poll(now_s)
    made.judge_pending()
    return made


def text(folder: Path, *, width: int = 100, now_s: float = NOW_S) -> str:
    return screen.as_text(watch(folder, now_s).state(now_s), width=width)


def eventful(folder: Path) -> Path:
    lines = [{**each, "loss": 3.0, "tokens_per_second": 4000.0, "data_wait_ns": 2e6} for each in steady(80)]
    lines[40] |= {"step_time_ns": 300_000_000}
    lines[60] |= {"step_time_ns": 400_000_000, "data_wait_ns": 290e6}
    lines[70] |= {"loss": float("nan")}
    lines[75] |= {"allocated_bytes": 3 << 30, "reserved_bytes": 4 << 30, "num_alloc_retries": 2, "grad_norm": 1.25}
    sample_logs.write(folder, lines, [{**each, "loss": 3.0} for each in steady(80, seed=1)])
    sample_logs.save(folder, step=41, ms=200)
    sample_logs.manifest(folder, world_size=2, strategy="fsdp2", windows=[{"window": 0, "first_step": 20, "steps": 5}])
    return folder


def test_the_display_has_all_values_and_outliers(tmp_path: Path) -> None:
    shown = text(eventful(tmp_path / "today"), width=120)
    for words in (
        "today  fsdp2 · 2 ranks  ended  80 steps done",
        "4,000 tokens/s",
        "1 · last step-41, 200 ms blocked, 1 MiB",
        "1 window · last: steps 20–24",
        "3 outliers",
        "step 40  300 ms              3.0x  rank 0 of 2  checkpoint step-41 blocked 200 ms",
        "step 60  400 ms              4.0x  rank 0 of 2  rank 0 waited 290 ms for data",
        "step 70  loss is not finite        rank 0 of 2  no event recorded",
    ):
        assert words in shown


def test_the_reason_of_a_window_that_opened_by_itself_is_shown(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, steady(80))
    reason = {"step": 12, "rank": 3, "ratio": 3.14, "median_ns": 100}
    window = {"window": 0, "first_step": 20, "steps": 5}
    sample_logs.manifest(tmp_path, windows=[window | {"outlier": reason}])
    assert "opened by itself: step 12 took 3.1x the median on rank 3" in " ".join(text(tmp_path, width=120).split())
    state = json.loads(screen.state_json(watch(tmp_path).state(NOW_S)))
    assert state["windows"][0]["outlier"] == {"step": 12, "rank": 3, "ratio": 3.14}
    sample_logs.manifest(tmp_path, windows=[window])
    assert "opened by itself" not in text(tmp_path)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_width(tmp_path: Path, width: int) -> None:
    eventful(tmp_path / ("a_long_name_of_a_run_" * 4))
    assert max(map(len, text(next(tmp_path.iterdir()), width=width).splitlines())) <= width


def test_a_thousand_ranks_fit_one_screen(tmp_path: Path) -> None:
    lines = steady(30)
    ranks = [lines[: 30 - (rank % 5 == 0) * (rank % 7)] for rank in range(990)]
    sample_logs.write(tmp_path, *ranks, live=True)
    sample_logs.manifest(tmp_path, world_size=1000)
    now_s = sample_logs.path(tmp_path, live=True).stat().st_mtime + 100
    state = watch(tmp_path, now_s).state(now_s)
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(screen.screen(state, height=24))
    shown = console.file.getvalue()
    assert len(shown.splitlines()) <= 24
    shown = " ".join(shown.split())
    assert "990 of 1,000 logging" in shown
    assert "no log of ranks 990–999" in shown


def test_a_short_terminal_shows_the_last_outliers_and_their_number(tmp_path: Path) -> None:
    lines = steady(1000)
    for n in range(8):
        lines[200 + 100 * n] = line(200 + 100 * n, ms=300)
    state = watch(sample_logs.write(tmp_path, lines)).state(NOW_S)
    console = Console(file=io.StringIO(), width=100)
    console.print(screen.screen(state, height=14))
    shown = console.file.getvalue()
    assert len(shown.splitlines()) <= 14
    assert "8 outliers, last" in shown
    assert "step 900" in shown
    assert "step 200" not in shown


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    lines = [{**each, NASTY: 1.5} for each in steady(60)]
    lines[40] |= {"step_time_ns": 10**9}
    sample_logs.write(tmp_path / "[red]run[bold]", lines)
    sample_logs.save(tmp_path / "[red]run[bold]", step=41, ms=200, name=NASTY)
    sample_logs.manifest(tmp_path / "[red]run[bold]", strategy=NASTY)
    made = watch(tmp_path / "[red]run[bold]")
    (found,) = made.take_new_outliers()
    state = made.state(NOW_S)
    shown = [screen.as_text(state, width=200), screen.state_line(state), screen.outlier_line(found)]
    shown += [screen.state_json(state), screen.outlier_json(found)]
    for each in shown:
        assert not [c for c in each if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"]
    assert "[red]run[bold]" in shown[0]
    assert all(each.count("\n") <= 1 for each in shown[1:])


def test_json_has_only_finite_numbers(tmp_path: Path) -> None:
    made = watch(eventful(tmp_path))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    document = json.loads(screen.state_json(made.state(NOW_S)), parse_constant=refuse)
    assert (document["schema"], document["kind"], document["steps_done"]) == ("tracekit.watch/2", "state", 80)
    assert document["outliers"][0]["events"][0]["kind"] == "save"
    for found in made.take_new_outliers():
        assert json.loads(screen.outlier_json(found), parse_constant=refuse)["kind"] == "outlier"


@pytest.mark.parametrize(
    ("quiet_s", "words"),
    [(1, "running"), (90, "no rank has logged for 1 min"), (7500, "no rank has logged for 2 h 5 min")],
)
def test_a_stalled_training_is_reported(tmp_path: Path, quiet_s: float, words: str) -> None:
    sample_logs.write(tmp_path, steady(30), live=True)
    now_s = sample_logs.path(tmp_path, live=True).stat().st_mtime + quiet_s
    assert words in text(tmp_path, now_s=now_s)


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([1], ""), ([2, 2, 2], "▁▁▁"), ([0, 7, 0], "▁█▁"), (range(400), None)]
)
def test_a_sparkline_spans_from_the_lowest_to_the_highest_value(values: list[float], bars: str | None) -> None:
    drawn = screen.loss_curve(values)
    assert bars is None or drawn == bars
    assert len(drawn) <= 40
    if bars is None:
        assert drawn == "".join(sorted(drawn))
        assert (drawn[0], drawn[-1]) == ("▁", "█")

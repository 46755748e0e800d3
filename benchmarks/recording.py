"""What recording costs a training: outside of the profiled window, and inside by what the trace holds.

    python -m benchmarks.recording --out recording.md

One process on one thread trains on the CPU. Outside the window, the same training runs alone, alone once more,
unchanged under ``tracekit record``, and with a ``Recorder`` in its loop: processes that live at the same time and take
turns of a few steps, so that other load on the machine affects all alike. Compared is the CPU time of a step.
Inside, windows of one process are compared with the steps right before them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import recording_training, results
from benchmarks.yafsdp_measures import median_with_interval
from tracekit.model import units

ALONE, AGAIN, RECORD, RECORDER = SUBJECTS = ("alone", "alone again", "tracekit record", "Recorder")
_ROOT = Path(__file__).parents[1]
_TRAINING = Path(recording_training.__file__)
_MODEL, _EMPTY = "model", "empty"


@dataclass(frozen=True)
class Plan:
    """How much is measured: fresh processes of each subject, turns of each, steps of a turn by the kind of step."""

    starts: int
    turns: int
    steps: Mapping[str, int]
    windows: int
    window_starts: int


Turns = Mapping[str, Mapping[str, Sequence[Sequence[int]]]]
"""By subject, what each step of each turn of one start took: cpu_ns and wall_ns. All subjects take the same turns."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables as Markdown and write them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=6, help="fresh processes of each subject (default: 6)")
    parser.add_argument("--turns", type=int, default=60, help="turns of each process (default: 60)")
    parser.add_argument("--model-steps", type=int, default=2, help="steps of a turn of the model (default: 2)")
    parser.add_argument("--empty-steps", type=int, default=100, help="empty steps of a turn (default: 100)")
    parser.add_argument("--windows", type=int, default=4, help="profiled windows of a process (default: 4)")
    parser.add_argument("--window-starts", type=int, default=5, help="fresh processes of each option (default: 5)")
    parser.add_argument("--options", nargs="+", choices=list(recording_training.OPTIONS), metavar="OPTION")
    parser.add_argument("--inside-work", choices=(_MODEL, _EMPTY), default=_MODEL, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out",
        type=Path,
        help="write the tables to this file too, and all measurements to a .json file with the same name",
    )
    options = parser.parse_args(arguments)
    steps = {_MODEL: options.model_steps, _EMPTY: options.empty_steps}
    plan = Plan(options.starts, options.turns, steps, options.windows, options.window_starts)
    outside = {work: _outside(work, plan) for work in (_MODEL, _EMPTY) if steps[work] and plan.starts}
    inside = _inside(options.options or list(recording_training.OPTIONS), plan, options.inside_work)
    text = "\n".join([results.machine_description(), *outside_tables(outside), *inside_table(inside)]) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
        raw = {"outside": outside, "inside": inside}
        options.out.with_suffix(".json").write_text(json.dumps(raw) + "\n", encoding="utf-8")
    return 0


# Outside the window --------------------------------------------------------------------------------------------------


def _outside(work: str, plan: Plan) -> list[Turns]:
    """Return by start what the steps of each subject took."""
    starts = []
    for number in range(plan.starts):
        with tempfile.TemporaryDirectory(prefix="recording-") as folder:
            starts.append(take_turns(work, Path(folder), turns=plan.turns, steps=plan.steps[work]))
        print(f"{work} step, start {number + 1} of {plan.starts}", file=sys.stderr, flush=True)
    return starts


def take_turns(work: str, folder: Path, *, turns: int, steps: int, subjects: Sequence[str] = SUBJECTS) -> Turns:
    """Times of the steps of subjects that live at the same time; `folder` is for what they record.

    Raises RuntimeError if ``tracekit record`` recorded nothing.
    """
    bare = [sys.executable, str(_TRAINING), "turns", work]
    record = [sys.executable, "-m", "tracekit.capture", "record", "--steps", "none", "--quiet"]
    commands = {
        ALONE: bare,
        AGAIN: bare,
        RECORD: [*record, "--out", str(folder / "record"), "--", *bare],
        RECORDER: [*bare, str(folder / "recorder")],
    }
    sides = {name: _start(commands[name]) for name in subjects}
    try:
        for side in sides.values():
            _answer(side)
        measured: dict[str, dict[str, list[list[int]]]] = {name: {"cpu_ns": [], "wall_ns": []} for name in subjects}
        for number in range(turns):
            # Who goes first changes from turn to turn.
            order = [subjects[(place + number) % len(subjects)] for place in range(len(subjects))]
            for name in order:
                for measure, times in _measure_steps(sides[name], steps).items():
                    measured[name][measure].append(times)
    finally:
        for side in sides.values():
            assert side.stdin is not None
            side.stdin.close()
            side.wait()
    if RECORD in subjects and not any((folder / "record").glob("*.metrics.jsonl")):
        raise RuntimeError("tracekit record recorded nothing, so there is nothing to compare")
    return measured


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _measure_steps(side: "subprocess.Popen[str]", steps: int) -> dict[str, list[int]]:
    assert side.stdin is not None
    side.stdin.write(f"{steps}\n")
    return _answer(side)


def _answer(side: "subprocess.Popen[str]") -> dict[str, Any]:
    assert side.stdout is not None
    line = side.stdout.readline()
    if not line:
        raise RuntimeError(f"{side.args}: ended with exit code {side.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def ratios(starts: Sequence[Turns], subject: str, measure: str) -> list[float]:
    """Return by turn how many times as long a subject's steps took as those alone right before or after."""
    return [subject_ns / bare_ns for subject_ns, bare_ns in _paired_with_alone(starts, subject, measure)]


def added_us(starts: Sequence[Turns], subject: str) -> list[float]:
    """Return by turn the µs of CPU time that a subject's step took more than alone."""
    return [(subject_ns - bare_ns) / 1000 for subject_ns, bare_ns in _paired_with_alone(starts, subject, "cpu_ns")]


def _paired_with_alone(starts: Sequence[Turns], subject: str, measure: str) -> Iterator[tuple[float, float]]:
    for start in starts:
        for subject_ns, bare_ns in zip(start[subject][measure], start[ALONE][measure], strict=True):
            # Of many steps, some are disturbed.
            yield statistics.median(subject_ns), statistics.median(bare_ns)


def outside_tables(measured: Mapping[str, Sequence[Turns]]) -> list[str]:
    """Return as Markdown what recording costs outside of the window."""
    if not measured:
        return []
    starts = next(iter(measured.values()))
    turns = sum(len(start[ALONE]["cpu_ns"]) for start in starts)
    lines = [f"Outside the window; medians and 95% intervals of {turns} turns in {len(starts)} starts:\n"]
    lines += ["| | step of the model | CPU time, against alone | wall time, against alone | added to an empty step |"]
    lines += ["|---|---|---|---|---|"]
    model, empty = measured.get(_MODEL, ()), measured.get(_EMPTY, ())
    for subject in SUBJECTS:
        times = [time for start in model for turn in start[subject]["cpu_ns"] for time in turn]
        cells = [units.duration(statistics.median(times)) if times else "—"]
        for measure in ("cpu_ns", "wall_ns"):
            against = ratios(model, subject, measure) if subject != ALONE else []
            cells.append(_interval([100 * (ratio - 1) for ratio in against], "{:+.2f}%"))
        cells.append(_interval(added_us(empty, subject) if subject != ALONE else [], "{:+.1f} µs"))
        lines.append(f"| {subject} | {' | '.join(cells)} |")
    return [*lines, ""]


def _interval(values: Sequence[float], form: str) -> str:
    if not values:
        return "—"
    median, low, high = median_with_interval(values)
    text = form.format(median)
    return text if low is None or high is None else f"{text} ({form.format(low)} to {form.format(high)})"


# Inside the window ---------------------------------------------------------------------------------------------------


def _inside(options: Sequence[str], plan: Plan, work: str) -> dict[str, list[list[dict[str, float]]]]:
    """Return by option, start and window what it cost."""
    measured: dict[str, list[list[dict[str, float]]]] = {option: [] for option in options}
    for number in range(plan.window_starts):
        for option in options:
            with tempfile.TemporaryDirectory(prefix="recording-") as folder:
                words = [sys.executable, str(_TRAINING), "window", work, option, folder, str(plan.windows)]
                done = subprocess.run(words, env=_environment(), stdout=subprocess.PIPE, text=True, check=True)
            measured[option].append([json.loads(line) for line in done.stdout.splitlines()])
        print(f"windows, start {number + 1} of {plan.window_starts}", file=sys.stderr, flush=True)
    return measured


def inside_table(measured: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> list[str]:
    """Return as Markdown what a profiled window costs, by option."""
    steps = recording_training.WINDOW_STEPS
    count = max((sum(map(len, by_start)) for by_start in measured.values()), default=0)
    lines = [f"Inside the window, {steps} steps each; medians and 95% intervals of {count} windows:\n"]
    lines += [
        "| option | CPU time of a step, against before the window | trace a step | the window holds the training up "
        "| compressed in the background |",
        "|---|---|---|---|---|",
    ]
    for option, by_start in measured.items():
        windows = [window for of_start in by_start for window in of_start]
        against = [window["inside_ns"] / window["before_ns"] for window in windows]
        cells = (
            _interval(against, "{:.2f}x"),
            units.size(statistics.median(window["trace_bytes"] for window in windows) / steps),
            units.duration(statistics.median(window["blocked_ns"] for window in windows)),
            units.duration(statistics.median(window["background_ns"] for window in windows)) + " of CPU",
        )
        lines.append(f"| {option} | {' | '.join(cells)} |")
    calls_us = [window["call_ns"] / 1000 for starts in measured.values() for windows in starts for window in windows]
    cost = _interval(calls_us, "{:.0f} µs")
    return [*lines, f"\nOutside of windows, `Recorder.step` itself takes {cost} of CPU between steps of the model."]


if __name__ == "__main__":
    sys.exit(main())

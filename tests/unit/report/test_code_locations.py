"""Where a finding points: a function of the repository, its script, or the trace, and never somebody else's file."""

import os
from pathlib import Path

import polars as pl
import pytest

from tests.support import drawn_traces, sample_gates
from tracekit.model.run import Run
from tracekit.report.ci import code_locations
from tracekit.report.ci.code_locations import Checkout, LocationKind
from tracekit.rules.rule import Finding, Severity

TRAIN = """\
import data


def traced(function):
    return function


@traced
def train(steps):
    for step in range(steps):
        batch = data.load()
        (lambda: step_of(batch))()


def step_of(batch):
    return batch


train(3)
"""
DATA = """\
def load():
    return [decode(n) for n in range(3)]


class Set:
    def decode(self, n):
        return n
"""

# time            0         1         2
#                 0123456789012345678901234
# <module>        [-----------------------]
# train           [-----------------------]     it was at line 11 when the trace began
# load                [---------]
#   decode             [-------]
#   torch                [---]
# step_of                          [----]
CALLS = [
    ("train.py(19): <module>", 0, 25),
    ("train.py(11): train", 0, 25),
    ("src/data.py(1): load", 4, 11),
    ("src/data.py(6): decode", 5, 9),
    ("torch/nn/functional.py(9): relu", 7, 5),
    ("<built-in function sleep>", 7, 5),
    ("train.py(15): step_of", 17, 6),
]


def run(calls: list[tuple[str, int, int]] = CALLS, *, command: tuple[str, ...] = ("train.py",)) -> Run:
    rows = [
        {"id": number, "lane": 9, "name": name, "kind": "python", "start_ns": start, "dur_ns": long}
        for number, (name, start, long) in enumerate(calls)
    ]
    trace = drawn_traces.trace("compute aaaaaaaaaaaaaaaaaaaaaaaaa", on_device=False, ops=pl.DataFrame(rows))
    return drawn_traces.run(trace, path="runs/today", command=list(command))


def finding(*spans: tuple[int, int], rank: int = 0) -> Finding:
    evidence = pl.DataFrame(
        {"rank": [rank] * len(spans), "start_ns": [a for a, _ in spans], "dur_ns": [b for _, b in spans]},
        schema={"rank": pl.Int64, "start_ns": pl.Int64, "dur_ns": pl.Int64},
    )
    return Finding("HOST003", Severity.WARNING, "late", "", ranks=(rank,), evidence=evidence)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(sample_gates.repository(tmp_path, train=TRAIN, src__data=DATA))


@pytest.mark.parametrize(
    ("spans", "where"),
    [
        ([(6, 6)], "src/data.py:6 decode"),
        ([(4, 1), (13, 2)], "src/data.py:1 load"),  # decode holds none of it
        ([(6, 5), (17, 5)], "train.py:9 train"),  # no one callee holds half of it; a def, not its decorator
        ([(20, 0)], "train.py:15 step_of"),  # a moment
        ([(1, 2)], "train.py:9 train"),
    ],
)
def test_a_finding_points_at_the_innermost_function_that_holds_most_of_it(
    spans: list[tuple[int, int]], where: str, checkout: Checkout
) -> None:
    place = checkout.locate(run(), finding(*spans))
    assert f"{place.path}:{place.line} {place.function}" == where
    assert place.kind is LocationKind.FUNCTION


def test_a_function_that_calls_itself_does_not_outweigh_its_callees(checkout: Checkout) -> None:
    # train, three times inside itself, calls step_of for most of the time.
    calls = [("train.py(9): train", 0, 25)] * 3 + [("train.py(15): step_of", 5, 15)]
    place = checkout.locate(run(calls), finding((0, 25)))
    assert (place.path, place.line) == ("train.py", 15)


def test_work_of_a_device_points_at_what_launched_it(checkout: Checkout) -> None:
    # time     0         1         2
    # host     step_of launches at 18
    # device                         x runs from 40 to 45
    rows = [
        {"id": number, "lane": 9, "name": name, "kind": "python", "start_ns": start, "dur_ns": long}
        for number, (name, start, long) in enumerate(CALLS)
    ]
    rows.append({"id": 99, "lane": 9, "name": "cudaLaunchKernel", "kind": "runtime", "start_ns": 18, "dur_ns": 1})
    trace = drawn_traces.trace(
        f"comm {'.' * 40}xxxxx", ops=pl.DataFrame(rows), columns={"x": {"launch_id": 99, "kind": "communication"}}
    )
    place = checkout.locate(drawn_traces.run(trace), finding((40, 5)))
    assert (place.path, place.line) == ("train.py", 15)


def test_columns_are_those_of_the_line(checkout: Checkout) -> None:
    place = checkout.locate(run(), finding((6, 6)))
    assert "    def decode(self, n):"[place.start_column - 1 : place.end_column - 1] == "def decode(self, n):"


def test_without_stacks_a_finding_points_at_the_script(checkout: Checkout) -> None:
    place = checkout.locate(run([]), finding((6, 6)))
    assert (place.kind, place.path, place.line) == (LocationKind.SCRIPT, "train.py", 1)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        (("python", "-m", "src.data", "--x"), "src/data.py"),
        (("-c",), None),
        (("data.py",), "src/data.py"),
        (("/elsewhere/train.py",), None),
        (("/home/me/project/src/data.py",), "src/data.py"),
        (("other.py", "train.py"), "train.py"),
    ],
)
def test_the_script_is_found_by_how_it_was_started(
    command: tuple[str, ...], path: str | None, checkout: Checkout
) -> None:
    place = checkout.locate(run([], command=command))
    assert (place.path if place.kind is LocationKind.SCRIPT else None) == path


def test_what_is_not_in_the_repository_points_at_the_trace(checkout: Checkout, tmp_path: Path) -> None:
    place = checkout.locate(run(CALLS[4:6], command=("missing.py",)), finding((6, 6)))
    assert (place.kind, place.path) == (LocationKind.TRACE, "today/drawn-rank0")
    inside = drawn_traces.run(drawn_traces.trace("compute aaa"), path=str(tmp_path / "runs" / "today"))
    source = inside.sources[0]
    here = str(tmp_path / "runs" / "today" / "rank00000.pt.trace.json.gz")
    moved = Run(inside.path, [type(source)(0, 0, here, 0, source.read)])
    assert checkout.locate(moved).path == "runs/today/rank00000.pt.trace.json.gz"
    far = Run("s3://bucket/today", [type(source)(0, 0, "s3://bucket/today/rank0.json", 0, source.read)])
    assert checkout.locate(far).path == "today/rank0.json"


def test_a_file_of_the_same_name_elsewhere_is_not_taken_for_it(tmp_path: Path) -> None:
    other = Checkout(sample_gates.repository(tmp_path, queue="\n\ndef put():\n    pass\n"))
    calls = [("queue.py(154): get", 0, 25)]  # the standard library's
    assert other.locate(run(calls, command=()), finding((6, 6))).kind is LocationKind.TRACE


def test_two_files_that_a_name_may_mean_are_none(tmp_path: Path) -> None:
    both = Checkout(sample_gates.repository(tmp_path, a__data=DATA, b__data=DATA))
    assert (
        both.locate(run([("data.py(1): load", 0, 25)], command=("data.py",)), finding((6, 6))).kind
        is LocationKind.TRACE
    )


def test_an_environment_in_the_checkout_is_nobodys_source(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    checkout = Checkout(sample_gates.repository(tmp_path, env__lib__data=DATA, site__data=DATA))
    place = checkout.locate(run([("data.py(1): load", 0, 25)]), finding((6, 6)))
    assert place.path == "site/data.py"


def test_the_root_is_the_repository_around_a_folder(tmp_path: Path) -> None:
    root = sample_gates.repository(tmp_path / "project", src__deep__x="")
    assert code_locations.repository_root(root / "src" / "deep") == root


def test_a_folder_that_is_closed_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no entry").mkdir()
    (tmp_path / "train.py").touch()
    scandir, exists = os.scandir, Path.exists

    def closed(name: object) -> None:
        if "no entry" in str(name):
            raise PermissionError(13, "Permission denied", str(name))

    monkeypatch.setattr(os, "scandir", lambda name: closed(name) or scandir(name))
    monkeypatch.setattr(Path, "exists", lambda path: closed(path) or exists(path))
    assert Checkout(tmp_path)._files == {tmp_path / "train.py"}

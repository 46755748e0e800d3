"""The registry of causes: names stand nowhere else, and each single stall has one cause that removes it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tracekit.analysis.host import host_stalls
from tracekit.analysis.parallelism import late_ranks
from tracekit.replay.graph import causes
from tracekit.replay.graph.causes import CAUSES
from tracekit.replay.graph.causes.collectives import SHARED_QUEUE
from tracekit.replay.graph.causes.contention import GIVE_WAY, SLOWED_COMPUTE
from tracekit.replay.graph.causes.device_time import STRAGGLER
from tracekit.replay.graph.causes.host import DATA_LOADING, LATE_LAUNCH
from tracekit.replay.graph.causes.stalls import STALLED_COLLECTIVE
from tracekit.rules.registry import RULES

ROOT = Path(__file__).parents[4]
NAMES = {cause.name for cause in CAUSES}
REGISTRY = ROOT / "tracekit" / "replay" / "graph" / "causes"
# The simulator shares no code with the analysis: its faults have names of their own, some of them the same.
SEPARATE = ROOT / "tracekit" / "simulate"
PRICES = {"WhatIf", "Removal", "find", "saving", "combined_saving", "host_time", "without", "together", "answer"}


def test_names_are_unique_and_rules_exist():
    assert len(NAMES) == len(CAUSES)
    assert {code for cause in CAUSES for code in cause.codes} <= {rule.code for rule in RULES}
    assert {cause.idle_part for cause in CAUSES} <= {"", *late_ranks.PARTS}
    assert {cause.title for cause in (LATE_LAUNCH, STRAGGLER)} == {"late launch", "straggler"}


def test_each_single_stall_is_removed_by_one_cause():
    removed = [kind for cause in CAUSES for kind in cause.removed_stalls]
    assert sorted(removed) == sorted(host_stalls.CAUSES)
    for cause in CAUSES:
        assert not set(cause.removed_stalls) & set(cause.excluded_stalls)


def test_causes_that_compare_recorded_durations_are_removed_first_and_those_that_move_work_last():
    requested = [SHARED_QUEUE, DATA_LOADING, LATE_LAUNCH, STRAGGLER, GIVE_WAY, SLOWED_COMPUTE, STALLED_COLLECTIVE]
    ordered = (STALLED_COLLECTIVE, SLOWED_COMPUTE, GIVE_WAY, STRAGGLER, LATE_LAUNCH, DATA_LOADING, SHARED_QUEUE)
    assert causes.in_order(requested * 2) == ordered


def test_no_module_outside_the_registry_names_a_cause():
    modules = [path for folder in ("tracekit", "dashboard") for path in (ROOT / folder).rglob("*.py")]
    others = [path for path in modules if not path.is_relative_to(REGISTRY) and not path.is_relative_to(SEPARATE)]
    assert len(others) > 400
    named = {str(path): list(named_causes(ast.parse(path.read_text(encoding="utf-8")))) for path in others}
    assert {path: names for path, names in named.items() if names} == {}


def named_causes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of string literals that name a cause.

    "late-launch" can only be a cause. "communication" or "checkpoint" are kinds of work and phases, too: they name a
    cause where one is expected.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES and "-" in node.value:
            yield node.lineno, node.value
        function = node.func if isinstance(node, ast.Call) else None
        is_call = getattr(function, "attr", None) in PRICES or getattr(function, "id", None) in PRICES
        is_comparison = isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("cause.name")
        for part in ast.walk(node) if is_call or is_comparison else ():
            if isinstance(part, ast.Constant) and part.value in NAMES:
                yield part.lineno, part.value


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('LIST = ("late-launch",)', True),
        ('savings.saving(run, "communication")', True),
        ('finding.what_if.cause.name == "checkpoint"', True),
        ('pl.col("kind") == "communication"', False),
    ],
)
def test_a_name_is_found_where_a_cause_is_expected(line: str, is_found: bool):
    assert bool(list(named_causes(ast.parse(line)))) is is_found

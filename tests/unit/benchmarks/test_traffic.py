"""Traffic of data parallelism: the formula, the simulator's messages, and those of real trainings are the same."""

import re

import pytest

from benchmarks import traffic
from benchmarks.traffic import CASES, Case
from tests.support.cli_runner import ROOT
from tracekit.conventions.strategies import DDP, FSDP2, HSDP, YAFSDP, ZERO1, ZERO1_SCATTERED, ZERO2

PAGE = ROOT / "docs" / "lab" / "traffic.md"
PADDING, PADDED_WEIGHTS = 0.005, 0.02
"""Shards are padded to equal sizes: YaFSDP's of a layer, FSDP2's of each weight, which three ranks cannot share."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.strategy}, {case.name}, {case.micro_batches}")
def test_the_simulator_sends_what_the_formula_says(case: Case) -> None:
    assert traffic.simulated_bytes(case) == pytest.approx(traffic.formula_bytes(case), rel=1e-9)


# Ψ = 10 parameters in 2 bytes, gradients in 4, n = 2 ranks: half of each message is sent per pass.
@pytest.mark.parametrize(
    ("strategy", "options", "sent"),
    [
        (DDP, {"micro_batches": 3}, 2 * 40 / 2),
        (ZERO1, {}, (2 * 40 + 20) / 2),
        (ZERO1_SCATTERED, {"micro_batches": 3}, (40 + 20) / 2),
        (ZERO2, {"micro_batches": 3}, (3 * 40 + 20) / 2),
        (FSDP2, {"micro_batches": 3}, 3 * (20 + 20 + 40) / 2),
        (FSDP2, {"micro_batches": 3, "reduces_each": False}, (3 * (20 + 20) + 40) / 2),
        (YAFSDP, {"still_gathered": 4}, (20 + 12 + 40) / 2),
        (HSDP, {"replicas": 4}, (20 + 20 + 40) / 2 + 2 * 40 / 2 * 3 / 4),
        (FSDP2, {"gathered_bytes": 4}, (40 + 40 + 40) / 2),
    ],
)
def test_bytes_by_hand(strategy, options, sent) -> None:
    assert strategy.sent_bytes(10, ranks=2, **options) == sent
    assert strategy.sent_bytes(10, ranks=1, **options) == (2 * 40 * 3 / 4 if "replicas" in options else 0)


def test_the_page_has_the_formula_and_the_simulation() -> None:
    page = PAGE.read_text(encoding="utf-8")
    stated = [row.rpartition(" | ")[0] for row in re.findall(r"^\| .* \|$", page, re.MULTILINE)]
    printed = [row.rpartition(" | ")[0] for row in traffic.table({}).splitlines() if row.startswith("| ")]
    assert stated == printed


@pytest.mark.accuracy
def test_real_trainings_send_what_the_formula_says() -> None:
    counted = traffic.counted_bytes(CASES)
    assert len(counted) == 30
    for case, sent in counted.items():
        is_uneven = case.strategy == "fsdp2" and case.ranks == 3
        assert sent == pytest.approx(traffic.formula_bytes(case), rel=PADDED_WEIGHTS if is_uneven else PADDING), case

"""Memory per rank and pipeline bubbles against the published numbers."""

import json

import pytest

from tests.commands import tracekit
from tracekit.plan import memory, pipeline


@pytest.mark.parametrize(("zero", "size_gb"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_memory_of_the_paper(zero: int, size_gb: float) -> None:
    done = tracekit("plan", "memory", "--params", 7.5e9, "--dp", 64, "--zero", zero, "--format", "json")
    assert json.loads(done.stdout)["total_bytes"] == pytest.approx(size_gb * 1e9, rel=0.003)


@pytest.mark.parametrize(("factor", "size_gb"), [(memory.GQA_SWIGLU_FACTOR, 108.7), (2.0, 5.37)])
def test_activations_of_llama_2_70b(factor: float, size_gb: float) -> None:
    size = memory.activation_bytes(factor, sequence=4096, batch=1, width=8192, layers=80)
    assert size == pytest.approx(size_gb * 1e9, rel=1e-3)


def test_bubble_of_four_stages() -> None:
    done = tracekit("plan", "pipeline", "--stages", 4, "--micro-batches", 8, "--format", "json")
    told = json.loads(done.stdout)
    assert told["bubble_to_ideal_ratio"] == 0.375
    assert told["bubble_ratio"] == pytest.approx(0.273, abs=5e-4)


def test_interleaving_halves_the_bubble() -> None:
    assert pipeline.bubble(64, 512, chunks=2).bubble_to_ideal_ratio == pytest.approx(0.0615, abs=5e-5)
    assert pipeline.zb_h1_bubble(4, 8).bubble_to_ideal_ratio == pytest.approx(0.125)


def test_no_stages_are_refused() -> None:
    assert tracekit("plan", "pipeline", "--stages", 0, "--micro-batches", 8).returncode == 2

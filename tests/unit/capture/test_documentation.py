"""Examples in docstrings of the recorder, which the test run's own collection leaves out: it would import torch."""

import doctest

import pytest

from tracekit.capture import atomic_files, manifest, step_inference, window_schedule


@pytest.mark.parametrize("module", [atomic_files, manifest, step_inference, window_schedule])
def test_examples_are_right(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]

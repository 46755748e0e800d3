"""Times of a pipeline's actions, changed."""

import pytest

from tracekit.conventions.pipeline_schedules import BACKWARD, FORWARD, INPUT_GRADIENT, Shape
from tracekit.replay.graph.pipeline_timing import PipelineTiming

TIMING = PipelineTiming("dualpipev", Shape(2, 1, 4), (1, 1), (50.0, 50.0), (60.0, 60.0), (40.0, 40.0), {})


@pytest.mark.parametrize(
    ("kinds", "input_ns"),
    [((BACKWARD,), 50.0), ((INPUT_GRADIENT,), 50.0), ((BACKWARD, INPUT_GRADIENT), 50.0), ((FORWARD,), 60.0)],
)
def test_whole_and_divided_backwards_of_a_stage_save_once(kinds: tuple[str, ...], input_ns: float) -> None:
    changed = TIMING.shorten({(0, kind): 10.0 for kind in kinds})
    assert changed.input_ns == (input_ns, 60.0)
    assert changed.weight_ns == TIMING.weight_ns

"""Digits of other scripts in names: patterns match them, but no integer can be made of them."""

import pytest

from tests.support import kineto_files
from tracekit.analysis.parallelism import pipeline_actions
from tracekit.ingest.loader import load
from tracekit.rules.engine import check


@pytest.mark.parametrize(
    ("name", "healthy_name"),
    [("PP:٣F0", "PP:1F0"), ("PP:(٣F0;1B0)OVERLAP_F_B", "PP:(0F0;1B0)OVERLAP_F_B"), ("Forward ٣", "Forward 1"),
     ("ProfilerStep#٣", "ProfilerStep#3")],
)  # fmt: skip
def test_a_name_with_other_digits_is_a_name_without_a_number(tmp_path, name, healthy_name):
    content = kineto_files.trace(0, steps=2)
    content["traceEvents"] += [
        kineto_files.slice_("user_annotation", span, 10.0 + 20 * number, 10.0, tid=1)
        for number, span in enumerate((name, healthy_name))
    ]
    kineto_files.write(tmp_path / "rank0.pt.trace.json", content)
    run = load(tmp_path, cache=False)
    actions = run.table(pipeline_actions.pipeline_actions)  # raised: Polars makes no integer of such a digit
    assert actions["stage"].null_count() == 0
    check(run)

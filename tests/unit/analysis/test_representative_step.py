"""The representative step of a run has no save in it."""

import polars as pl

from tests.support import drawn_traces, rule_examples
from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.time import breakdown

# step 1 is nearest to the median, and saves
STEPS = "0" * 8 + "1" * 12 + "2" * 20
SAVE = rule_examples.ops((conventions.span_name(conventions.CHECKPOINT), "annotation", 10, 14), step=1)


def _run(**tables):
    return drawn_traces.run(drawn_traces.trace(f"step {STEPS}\ncompute {'a' * len(STEPS)}", **tables))


def test_the_step_nearest_to_the_median_is_chosen_among_those_without_a_save():
    plain, saving = _run(), _run(ops=SAVE)
    for run in (plain, saving):
        assert breakdown.representative_step(run.table(breakdown.by_step))["step"] == 1
    assert save_stages.representative_step(plain)["step"] == 1
    assert save_stages.representative_step(saving)["step"] in (0, 2)


def test_where_each_step_has_a_save_one_of_them_is_chosen():
    run = _run(ops=SAVE)
    only = run.table(breakdown.by_step).filter(pl.col("step") == 1)
    assert save_stages.representative_step(run, only)["step"] == 1

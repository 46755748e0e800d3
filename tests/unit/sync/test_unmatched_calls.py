"""Calls of an unnamed group of which none has a counterpart on another rank."""

from tracekit.sync import collective_matching


def test_no_matches_are_an_empty_table_of_the_same_columns():
    rows = collective_matching._row_instances([])
    assert rows.is_empty()
    assert rows.columns == ["at", "instance"]

import io
import math

import numpy as np
import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.rule_examples import program_on_streams, run_with_snapshots
from tests.support.sample_snapshots import MIB
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.model import schema
from tracekit.model.fact import TraceTable
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.report import query_rows
from tracekit.report.render import text as render_text
from tracekit.sql import run_query, run_tables
from tracekit.sync import alignment

TABLES = {fact.name: fact.published_table for fact in run_tables.FACTS}


@pytest.fixture(scope="module")
def run() -> Run:
    pictures = {0: "step 000111\ncompute aab.cc\ncomm ..xxx.", 1: "step 000111\ncompute aa.bcc\ncomm ..xxx."}
    return drawn_traces.run(*(drawn_traces.trace(picture, rank=rank) for rank, picture in pictures.items()))


def test_a_table_has_the_rows_of_all_ranks_with_window_and_rank_first(run):
    found = tracekit.query(run, "SELECT * FROM activities")
    assert found.columns == ["window", "rank", *schema.ACTIVITIES.schema]
    assert found.height == sum(trace.activities.height for trace in run.traces())
    for trace in run.traces():
        own = found.filter(pl.col("rank") == trace.rank).drop("window", "rank")
        assert own.equals(trace.activities)


def test_a_table_is_either_read_from_traces_or_derived_from_the_run():
    derived = {fact.name for fact in run_tables.FACTS if not isinstance(fact, TraceTable)}
    assert run_query.READ | derived == set(TABLES)
    assert not run_query.READ & derived


def test_every_table_has_the_columns_and_types_that_the_schema_says(run):
    columns = ", ".join(f"COLUMNS({name}.*) AS '{name}.\\0'" for name in TABLES)
    first, *others = TABLES
    joined = "".join(f" FULL JOIN {name} ON false" for name in others)
    found = tracekit.query(run, f"SELECT {columns} FROM {first}{joined}")
    schemas = {name: table.schema for name, table in TABLES.items()}
    expected = [(f"{name}.{column}", dtype) for name, schema in schemas.items() for column, dtype in schema.items()]
    assert list(found.schema.items()) == expected


def test_the_breakdown_is_the_one_that_reports_and_rules_read(run):
    found = tracekit.query(run, 'SELECT * FROM breakdown ORDER BY "window", rank, step')
    assert found.equals(run.table(breakdown.by_step).sort("window", "rank", "step"))


def test_memory_snapshots_of_the_run_are_tables_too():
    snapshots = run_with_snapshots(program_on_streams((0, 90)), program_on_streams((0, 40), (7, 20)))
    found = tracekit.query(
        snapshots, "SELECT rank, stream, sum(total_bytes) AS bytes FROM snapshot_segments GROUP BY ALL ORDER BY ALL"
    )
    assert found.rows() == [(0, 0, 90 * MIB), (1, 0, 40 * MIB), (1, 7, 20 * MIB)]


def test_joins_groups_and_sums_come_back_as_plain_integers(run):
    sql = """
        SELECT a.rank, l.role, sum(a.dur_ns) AS busy_ns, count(*) AS n
        FROM activities a JOIN lanes l USING ("window", rank, lane) GROUP BY ALL ORDER BY ALL
    """
    found = tracekit.query(run, sql)
    assert found.rows() == [(r, *row) for r in (0, 1) for row in (("communication", 3, 1), ("compute", 5, 3))]
    assert found.schema["busy_ns"] == pl.Int64


def test_a_number_of_more_than_64_bits_is_exact(run):
    found = tracekit.query(run, f"SELECT {2**100}::HUGEINT AS large")
    assert int(found.item()) == 2**100


def test_columns_of_one_name_are_numbered(run):
    found = tracekit.query(run, "SELECT a.rank, b.rank, 1 AS rank_1 FROM steps a, steps b LIMIT 1")
    assert found.columns == ["rank", "rank_1", "rank_1_1"]
    joined = tracekit.query(run, 'SELECT * FROM activities a JOIN lanes l USING ("window", rank, lane)')
    assert "name" in joined.columns
    assert "name_1" in joined.columns


EXOTIC = (
    "INTERVAL 3 DAYS",
    "[INTERVAL 3 DAYS]",
    "{'a': INTERVAL 3 DAYS}",
    "'101'::BIT",
    "TIMETZ '10:00:00+02'",
    "gen_random_uuid()",
    "'[1]'::JSON",
    "1::UHUGEINT",
    "union_value(a := 1)",
    "MAP {'a': 1}",
    "'a'::ENUM('a', 'b')",
    "now()",
    "DATE '9999-12-31' + 1",
    "DATE '-infinity'",
    "[TIMESTAMP 'infinity']",
    "TIMESTAMPTZ '294247-01-01'",
    "TIMESTAMP_NS '2262-04-11 23:47:16.854775806'",
    "TIME '24:00:00'",
    "'x'::BLOB",
    "1.5::DECIMAL(20, 3)",
    "[1, 2]::INTEGER[2]",
    "NULL",
    "'nan'::DOUBLE",
    "'9999999999999999999999999'::BIGNUM",
    "1::VARIANT",
)


def test_values_of_any_type_come_back_and_can_be_written(run):
    columns = ", ".join(f"{value} AS x{i}" for i, value in enumerate(EXOTIC))
    found = tracekit.query(run, f"SELECT {columns}, {columns} FROM range(2) -- twice")
    assert found.shape == (2, 2 * len(EXOTIC))
    assert found["x0"].to_list() == ["3 days"] * 2
    for written in (
        render_text.render(query_rows.document(found), width=4000),
        query_rows.as_csv(found),
        query_rows.as_json(found),
    ):
        assert f"x{len(EXOTIC) - 1}_1" in written
    found.write_parquet(io.BytesIO())


def test_data_quality_is_that_of_reports_with_measured_issues_and_clocks():
    drawn_ranks = [drawn_traces.trace("compute aab.cc\ncomm ..xxx.", rank=rank) for rank in (0, 1)]
    run = drawn_traces.run(*drawn_ranks)
    assert set(tracekit.query(run, "FROM data_quality")["kind"]) == set(run.table(trace_quality.data_quality)["kind"])
    alone = tracekit.query(run, "FROM run_data_quality")
    assert alone.equals(alignment.data_quality(run))


def test_offsets_instances_and_waits_are_tables():
    collective = pl.DataFrame({"activity_id": [1, 2, 3, 4], "op": ["all_reduce"] * 4, "bytes": [8, 16, 24, 32]})
    picture = "compute a..............\ncomm .xx.yyyy.zzz.wwwww."
    late = "compute aaaa...........\ncomm .xx...yy..zz....ww."
    traces = [
        drawn_traces.trace(p, rank=rank, scale_ns=1000, collectives=collective.rename({"bytes": "sent_bytes"}))
        for rank, p in enumerate((picture, late))
    ]
    run = drawn_traces.run(*traces)
    assert tracekit.query(run, "FROM offsets").equals(run.offsets)
    assert tracekit.query(run, "FROM instances").equals(run.table(collective_instances.instances))
    assert tracekit.query(run, "FROM waits").equals(run.table(collective_instances.waits))
    found = tracekit.query(
        run, "SELECT instance, last_rank, max_wait_ns FROM instances ORDER BY max_wait_ns DESC LIMIT 1"
    )
    assert found.rows()[0][1:] == (1, 3000)


def test_no_trace_is_opened_for_tables_that_are_not_named():
    def read():
        raise AssertionError("read")

    unread = Run("unread", [Source(0, 0, "a", 0, read)])
    assert tracekit.query(unread, "SELECT count(*) FROM range(5)").item() == 5
    with pytest.raises(InputError, match="not found"):
        tracekit.query(unread, "SELECT durr_ns FROM ops")


def test_only_as_many_rows_as_allowed_come_back(run):
    assert tracekit.query(run, "FROM range(1_000_000_000_000)", max_rows=7)["range"].to_list() == list(range(7))


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT * FROM opps", "no table opps, did you mean ops"),
        ("SELECT durr_ns FROM ops", '"dur_ns"'),
        ("SELECT o.durr_ns FROM ops o", "dur_ns"),
        ("SELECT window FROM ops", '"window"'),
        ("SELECT group FROM collectives", '"group"'),
        ("SELECT max(start_ns FROM ops", "syntax error"),
        ("SELECT fooo(1)", "fooo"),
        ("SELECT 'a'::INT", "'a'"),
        ("", "nothing given"),
        ("SELECT 1; SELECT 2", "SELECT, SELECT given"),
        ("SELECT " + "+".join(["1"] * 900), "too deep"),
        ("SELECT " + "(" * 20_000 + "1" + ")" * 20_000, "depth"),
    ],
)
def test_an_error_is_one_line_with_a_suggestion(run, sql, message):
    with pytest.raises(InputError) as raised:
        tracekit.query(run, sql)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_query_may_end_in_a_semicolon_and_hold_comments(run):
    assert tracekit.query(run, "/* one */ SELECT 1 AS x -- and no more\n;").item() == 1


# Trace tables as pandas ----------------------------------------------------------------------------------------------


def test_the_tables_of_a_trace_convert_to_pandas():
    trace = drawn_traces.trace("step  000111\ncompute aab.cc", start_ns=2**60 + 1)
    frame = trace.activities.to_pandas()
    assert list(frame.columns) == list(schema.ACTIVITIES.schema)
    assert frame["start_ns"].dtype == np.int64
    assert frame["start_ns"].tolist() == trace.activities["start_ns"].to_list()
    assert math.isnan(frame["bytes"].iloc[0])


def test_pandas_can_have_integers_with_missing_values():
    starts = pl.DataFrame({"step": [1, None], "start_ns": [2**60 + 1, None]})
    steps = schema.STEPS.conform(starts).to_pandas(use_pyarrow_extension_array=True)
    assert steps["start_ns"].iloc[0] == 2**60 + 1
    assert steps["start_ns"].isna().tolist() == [False, True]

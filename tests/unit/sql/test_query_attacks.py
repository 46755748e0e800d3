"""A query reads the run's tables and nothing else, whoever wrote it."""

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

import tracekit
from tests.support import drawn_traces
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.sql import run_query, run_tables, sandbox

TABLES = {fact.name: fact.published_table for fact in run_tables.FACTS}
SECRET = "hunter2"
local_frame = "a variable of this module, which no query may see"


@pytest.fixture(scope="module")
def run() -> Run:
    return drawn_traces.run(drawn_traces.trace("compute aab.cc"))


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files to steal."""
    place = tmp_path_factory.mktemp("secrets")
    (place / "secret.csv").write_text(f"word\n{SECRET}\n")
    (place / "secret.txt").write_text(SECRET)
    (place / "secret.json").write_text(f'[{{"word": "{SECRET}"}}]')
    duckdb.connect().execute(f"COPY (SELECT '{SECRET}' AS word) TO '{place}/secret.parquet'")
    with duckdb.connect(str(place / "secret.db")) as base:
        base.execute(f"CREATE TABLE words AS SELECT '{SECRET}' AS word")
    return place


@pytest.fixture
def folder(secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with files to steal, which is the current one."""
    shutil.copytree(secrets, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET_OF_OURS", SECRET)
    return tmp_path


READING = [
    "SELECT * FROM read_csv('{folder}/secret.csv')",
    "SELECT * FROM read_csv_auto('/etc/passwd')",
    "SELECT * FROM '{folder}/secret.csv'",
    "SELECT * FROM 'secret.parquet'",
    "SELECT * FROM 'secret.db'",
    'SELECT * FROM "secret.json"',
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM read_text('{folder}/*')",
    "SELECT * FROM read_blob('secret.txt')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM sniff_csv('secret.csv')",
    "SELECT * FROM read_json('http://127.0.0.1:{port}/x')",
    "SELECT * FROM read_parquet('s3://bucket/x')",
    "SELECT * FROM 'http://127.0.0.1:{port}/x.csv'",
    "SELECT getenv('SECRET_OF_OURS')",
    "SELECT * FROM local_frame",
    "SELECT * FROM query('SELECT * FROM read_text(''secret.txt'')')",
    "SELECT (SELECT content FROM read_text('secret.txt'))",
    "WITH x AS (FROM read_text('secret.txt')) FROM x",
    "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('FROM read_text(''secret.txt'')'))",
    "SELECT * FROM arrow_scan(1::POINTER, 2::POINTER, 3::POINTER)",
    "SELECT * FROM python_map_function(1)",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM pg_catalog.pg_settings",
    "SELECT * FROM pg_settings",
    "SELECT * FROM duckdb_logs",
    "SELECT * FROM sqlite_master",
    "SELECT * FROM information_schema.tables",
    "WITH ops AS (SELECT 1) SELECT * FROM pg_settings, ops",
    "SELECT current_setting('secret_directory')",
    "SELECT CURRENT_SETTING('secret_directory')",
    "SELECT main.current_setting('secret_directory')",
    "SELECT getvariable('x')",
    "SELECT write_log('x')",
]

CHANGING = [
    "COPY (SELECT 1) TO '{folder}/stolen.csv'",
    "COPY activities TO 'stolen.parquet'",
    "WITH x AS (COPY (SELECT 1) TO 'stolen.csv') FROM x",
    "EXPORT DATABASE '{folder}/stolen'",
    "ATTACH '{folder}/stolen.db'",
    "ATTACH '{folder}/secret.db' AS s",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET memory_limit = '1TB'",
    "SET enable_external_access = true",
    "RESET lock_configuration",
    "PRAGMA enable_profiling",
    "PRAGMA database_list",
    "CALL enable_logging('QueryLog', storage = 'file', storage_path = '{folder}/log')",
    "SELECT * FROM enable_logging('QueryLog', storage = 'file', storage_path = '{folder}/log')",
    "SELECT * FROM checkpoint()",
    "CREATE TABLE x AS SELECT 1",
    "CREATE SECRET s (TYPE s3)",
    "INSERT INTO activities SELECT * FROM activities",
    "WITH x AS (DELETE FROM activities RETURNING *) FROM x",
    "DROP VIEW activities",
    "USE temp",
    "SELECT 1; COPY (SELECT 1) TO 'stolen.csv'",
    "PREPARE p AS SELECT 1",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO 'stolen.csv'",
    "BEGIN",
    "VACUUM",
]


@pytest.fixture(scope="module")
def sandboxed() -> Iterator[duckdb.DuckDBPyConnection]:
    """Return the DuckDB that a query's process has, in this one: a process for each attack takes minutes."""
    with sandbox.connect(50 << 20) as connection:
        for name, table in TABLES.items():
            connection.register(name, table.empty().to_arrow())
        yield connection


@pytest.mark.parametrize("sql", [*READING, *CHANGING])
def test_nothing_outside_the_run_is_read_and_nothing_is_written(sandboxed, folder, sql):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises((sandbox.RefusedError, duckdb.Error)) as raised:
            sandbox.validate(sandboxed, sql.format(folder=folder, port=server.getsockname()[1]), list(TABLES))
        with pytest.raises(BlockingIOError):
            server.accept()  # nobody called
    assert SECRET not in str(raised.value)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


ATTACKS = [
    READING[0],
    "SELECT * FROM 'secret.parquet'",
    "SELECT getenv('SECRET_OF_OURS')",
    CHANGING[0],
    "INSTALL httpfs",
]


@pytest.mark.parametrize("sql", ATTACKS)
def test_an_attack_gives_one_line_and_changes_nothing(run, folder, sql):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError) as raised:
        tracekit.query(run, sql.format(folder=folder, port=9))
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_duckdb_itself_refuses_functions_that_our_own_check_would_accept(folder):
    known = duckdb.connect().execute("SELECT DISTINCT function_name FROM duckdb_functions()").fetchall()
    reading = sorted(name for (name,) in known if name.startswith(("read_", "parquet_", "glob", "sniff")))
    assert len(reading) > 10
    files = [path.name for path in folder.iterdir()]
    calls = [f"SELECT * FROM {name}('{file}')" for name in reading for file in (*files, "*", "/etc/passwd")]
    # Functions that take addresses crash on made-up ones: those only our own check keeps out.
    ours = ("arrow_scan", "setting", "duckdb_logs", "sqlite_master", "information_schema", "getvariable", "write_log")
    others = [sql.format(folder=folder, port=9) for sql in READING if not any(name in sql.lower() for name in ours)]
    with sandbox.connect(50 << 20) as connection:
        for sql in (*calls, *others):
            with pytest.raises(duckdb.Error) as raised:
                connection.sql(sql).fetchall()
            assert SECRET not in str(raised.value)
    assert [path.name for path in folder.iterdir()] == files


# Time and memory -----------------------------------------------------------------------------------------------------

FOREVER = {
    "recursion": "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t",
    "rows without end": "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT * FROM t",
    "a cross join": "SELECT count(*) FROM range(10_000_000) a, range(10_000_000) b WHERE a.range * b.range % 7 = 3",
    # One call that DuckDB cannot interrupt, while checking and while running: these end with the process.
    "one long call": "SELECT levenshtein(repeat('a', 200_000), repeat('b', 200_000))",
    "one long call a row": "SELECT levenshtein(repeat(name, 200_000), repeat('b', 200_000)) FROM activities",
}
HUGE = {
    "a cross join, sorted": "SELECT * FROM range(100_000) a, range(100_000) b ORDER BY hash(a.range, b.range)",
    "one list": "SELECT list(range) FROM range(1_000_000_000)",
    "one text": "SELECT string_agg(range::VARCHAR, '') FROM range(1_000_000_000)",
    "long texts": "SELECT repeat(range::VARCHAR, 10_000_000) FROM range(1_000)",
    "many rows": "SELECT * FROM range(1_000_000_000_000)",
    # What DuckDB does not count: these meet the limit of the process.
    "one text of 4 GB": "SELECT length(repeat('x', 4_000_000_000))",
    "one text of 4 GB a row": "SELECT length(repeat(name, 4_000_000_000)) FROM activities",
    "one list of 8 GB": "SELECT len(range(1_000_000_000))",
}


@pytest.mark.parametrize("sql", FOREVER.values(), ids=FOREVER)
def test_what_would_run_forever_is_stopped_in_time(run, sql):
    began_s, before = time.monotonic(), set(threading.enumerate())
    with pytest.raises(InputError, match=r"stopped after 0\.3 s"):
        tracekit.query(run, sql, timeout_s=0.3)
    assert time.monotonic() - began_s < 120  # a hang would be caught, a busy machine is not
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("sql", HUGE.values(), ids=HUGE)
def test_what_would_need_too_much_memory_is_stopped_and_nothing_spills_to_disk(run, folder, sql, wording):
    before = set(folder.iterdir())
    with wording.raises(InputError):
        tracekit.query(run, sql, memory_bytes=50 << 20, timeout_s=120)
    assert set(folder.iterdir()) == before


def test_no_process_outlives_its_query():
    with run_query.open_query("SELECT 1") as query:
        process = query._process
        assert process.poll() is None
    assert process.poll() is not None
    with pytest.raises(InputError):
        run_query.check("SELECT * FROM nothing")


def test_the_process_of_a_query_does_not_inherit_the_environment(folder):
    assert SECRET not in " ".join(run_query._environment().values())


def test_a_program_without_a_main_guard_can_query(tmp_path):
    """A script that calls query at its top level: a process that imports it again would start another, and so on."""
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.support.drawn_traces import run, trace\nimport tracekit\n"
        "print(tracekit.query(run(trace('compute aab.cc')), 'SELECT count(*) FROM activities').item())\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, script],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("3\n", "")

"""What commands import, and the time that starting takes: all of it comes before each result."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "sample_traces" / "demo-yafsdp")
SQL = "SELECT count(*) FROM ops"
SCRIPT = """
import json, sys
from tracekit.cli import main
try:
    main()
except SystemExit as leaving:
    print(json.dumps([leaving.code, sorted(sys.modules)]), file=sys.stderr)
"""
NEVER = {"torch", "pandas", "streamlit", "pydantic", "scipy", "fsspec", "dask", "plotly", "duckdb", "pyarrow"}
TABLES = NEVER | {"polars", "numpy"}
START = TABLES | {"rich", "msgspec", "tracekit.model"}
JUDGING = {"tracekit.rules", "tracekit.regression", "tracekit.replay"}
READING = {"tracekit.ingest.readers.kineto.reader", "tracekit.ingest.readers.perfetto.reader", "sqlite3"}
# What a command must not import. The tables of RUN are in the cache.
FORBIDDEN = [
    (["--version"], START | {"tracekit.cli.commands"}),
    (["--help"], START | {"tracekit.cli.commands"}),
    (["check", "--help"], START | {"tracekit.ingest"} | JUDGING),
    (["explain", "--kind", "rule"], TABLES | {"tracekit.rules.rule", "tracekit.analysis"}),
    (["explain", "COMM001"], TABLES | {"tracekit.rules.rule", "tracekit.analysis"}),
    (["explain", "--kind", "table", "ops"], TABLES | {"tracekit.model.schema", "tracekit.analysis"}),
    (["summary", RUN], NEVER | {"tracekit.analysis.compute"} | JUDGING | READING),
    (["query", RUN, SQL], NEVER | {"tracekit.analysis"} | JUDGING | READING),
    (["check", RUN, "--fail-on", "never"], NEVER | {"tracekit.sql"} | READING),
]


def imported(*arguments: str) -> set[str]:
    """Return the modules that a command imports which succeeds."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code in (0, None)
    return set(modules)


@pytest.fixture(scope="module", autouse=True)
def tables_in_the_cache():
    imported("query", RUN, SQL)


@pytest.mark.parametrize(
    "command",
    [
        ["check", RUN, "--fail-on", "never", "--format", "json"],
        pytest.param(["summary", RUN], marks=pytest.mark.accuracy),
    ],
)
def test_a_stored_answer_needs_neither_tables_nor_rules(command, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEKIT_CACHE_DIR", str(tmp_path))
    assert imported(*command) >= {"polars"}
    assert not imported(*command) & (TABLES | JUDGING | {"rich", "tracekit.ingest.readers"})


@pytest.mark.parametrize(("command", "forbidden"), FORBIDDEN, ids=[command[0] for command, _ in FORBIDDEN])
def test_a_command_imports_nothing_that_it_does_not_need(command, forbidden):
    assert not imported(*command) & forbidden


def test_a_worker_process_imports_no_command():
    # It imports the script that started the command, then the module of its tasks.
    script = "import json, sys; from tracekit.cli import main; import tracekit.executors.worker_pool; "
    done = subprocess.run(
        [sys.executable, "-c", script + "print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not {"typer", "rich", "tracekit.cli.application"} & set(json.loads(done.stdout))


@pytest.mark.accuracy  # on a busy machine the same work takes more CPU time
def test_starting_takes_less_than_a_quarter_of_a_second():
    used_s = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "tracekit", "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used_s) < 0.25  # CPU time: other processes do not affect it

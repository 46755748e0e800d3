"""A table of another distribution is one file: queries, the schema and the library serve it by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracekit
from tracekit.errors import InputError

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "demo-fsdp2"
GUIDE = Path(__file__).parents[2] / "docs" / "query.md"


def _install(folder: Path, source: str, *points: str) -> None:
    (folder / "acme.py").write_text(source)
    metadata = folder / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    lines = [f"{point} = acme:{point}" for point in points]
    (metadata / "entry_points.txt").write_text("\n".join(["[tracekit.tables]", *lines, ""]))


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install the table of the guide, and one of the run."""
    source = GUIDE.read_text(encoding="utf-8").partition("# acme.py\n")[2].partition("```")[0]
    source += """
import polars as pl
from tracekit.model.fact import run_fact

@run_fact(table=schema.table("acme_ranks", "rank", schema.column("rank", "Rank."), schema.column("size", "Ranks.")))
def acme_ranks(run):
    return pl.DataFrame({"rank": run.ranks}, schema={"rank": pl.Int32})
"""
    _install(tmp_path, source, "acme_steps", "acme_ranks")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("acme", None)


@pytest.mark.usefixtures("plugin")
def test_the_library_and_queries_serve_the_tables_of_a_plugin():
    run = tracekit.load(SAMPLE)
    steps = run.table("acme_steps")
    assert steps.columns == ["window", "rank", "step", "dur_ns"]
    assert steps.equals(tracekit.query(run, "SELECT * FROM acme_steps"))
    read = run.table("steps")
    assert steps["dur_ns"].equals(read["end_ns"] - read["start_ns"])
    assert run.table("acme_ranks").rows() == [(0, None), (1, None)], "it has exactly the documented columns"
    assert "acme_steps" in dir(run.tables)
    with pytest.raises(InputError, match="did you mean acme_steps"):
        run.table("acme_step")


def test_commands_serve_the_tables_of_a_plugin(plugin):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(plugin), *filter(None, sys.path)])}

    def command(*arguments: str) -> str:
        line = [sys.executable, "-m", "tracekit", *arguments]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout

    rows = json.loads(command("query", str(SAMPLE), "SELECT count(*) AS n FROM acme_steps", "--format", "json"))
    assert rows == [{"n": tracekit.load(SAMPLE).table("steps").height}]
    assert "Training step." in command("explain", "acme_steps")
    assert "acme_ranks" in command("explain", "--kind", "table")


def test_what_is_no_published_fact_and_a_name_twice_are_refused(tmp_path, monkeypatch):
    source = """
import polars as pl
from tracekit.model import schema
from tracekit.model.fact import run_fact

@run_fact
def plain(run):
    return pl.DataFrame()

@run_fact(table=schema.table("ops", "rank", schema.column("rank", "Rank.")))
def ops(run):
    return pl.DataFrame()
"""
    for point, message in (("plain", "acme:plain: not a fact with a table"), ("ops", "there is already a table ops")):
        folder = tmp_path / point
        folder.mkdir()
        _install(folder, source, point)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            with pytest.raises(InputError, match=message):
                tracekit.load(SAMPLE).table("steps")
        sys.modules.pop("acme", None)

"""docs/memory.md shows what the command prints, lists every column of a snapshot, and its code runs."""

import re
from pathlib import Path

import tracekit
from tests.support.sample_snapshots import MIB, Simulation, write
from tracekit.model import schema
from tracekit.replay.allocator import memory_usage
from tracekit.report import explanations, memory
from tracekit.report.render import text

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_guide_lists_the_tables_of_a_snapshot_as_the_schema_says_them():
    assert (
        explanations.tables_as_markdown([table.document for table in schema.SNAPSHOT_TABLES.values()], "###") in GUIDE
    ), "write them again: tracekit.report.explanations.tables_as_markdown of the documents of schema.SNAPSHOT_TABLES"


def test_the_guide_shows_what_the_command_prints():
    run = tracekit.load(str(ROOT / "sample_traces" / "demo-fsdp2"))
    printed = text.render(memory.document(memory_usage.of_run(run)), width=100)
    (shown,) = re.findall(r"```\n\$ tracekit memory sample_traces/demo-fsdp2\n…\n(.*?)\n…\n```", GUIDE, re.DOTALL)
    for part in shown.split("\n\n"):
        assert part in printed


def test_the_guides_code_runs(tmp_path, monkeypatch, capsys):
    made = Simulation()
    made.malloc(30 * MIB)
    write(tmp_path / "snapshot.pickle", made.document())
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(code, "docs/memory.md", "exec"), {})
    assert capsys.readouterr().out == f"{40 * MIB}\n"

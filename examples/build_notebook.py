"""Write examples/notebook.ipynb: the cells below, executed on the sample runs (``pip install nbclient ipykernel``).

python examples/build_notebook.py
"""

import os
from pathlib import Path

import nbclient
import nbformat
from nbformat import v4

FILE = Path(__file__).with_name("notebook.ipynb")
CELLS = (
    "# A run in a notebook\n\nEach call shows itself; [docs/notebook.md](../docs/notebook.md) describes them.",
    'import tracekit\n\nrun = tracekit.load("../sample_traces/demo-yafsdp")\nrun',
    "## Tables\n\n`run.tables.<Tab>` completes their names.",
    "run.tables",
    'run.table("breakdown")',
    'tracekit.query(run, "SELECT rank, sum(idle_ns) / sum(duration_ns) AS idle_ratio FROM breakdown GROUP BY rank")',
    "## What is wrong, and what it costs",
    "report = run.check()\nreport",
    "report.findings[0]",
    "report.to_frame()",
    "run.what_if()",
    "## Is it better than the other run?",
    'run.compare("../sample_traces/demo-fsdp2")',
    'run.compare("../sample_traces/demo-fsdp2", by="operator").to_frame().head(5)',
    "## Figures",
    'run.plot("breakdown")',
    'run.plot("waits")',
    "## The timeline\n\nScroll to zoom, drag to move. `max_bytes` keeps this notebook small: short slices are merged.",
    "run.timeline(max_bytes=100_000)",
)
"""Text begins with a heading."""


def notebook() -> nbformat.NotebookNode:
    """The notebook, without outputs."""
    cells = [(v4.new_markdown_cell if text.startswith("#") else v4.new_code_cell)(text) for text in CELLS]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # random ids would change with each build
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def execute(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run the cells in the folder of this file."""
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"  # a figure without the 4 MB of Plotly's script
    executed: nbformat.NotebookNode = nbclient.NotebookClient(
        book, timeout=300, record_timing=False, resources={"metadata": {"path": str(FILE.parent)}}
    ).execute()
    executed.metadata.pop("language_info", None)  # the version of the interpreter
    return executed


if __name__ == "__main__":
    nbformat.write(execute(notebook()), FILE)

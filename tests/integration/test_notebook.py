"""The example notebook runs as it is stored, and the guide names every figure."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tracekit.report import figures

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
GUIDE = (ROOT / "docs" / "notebook.md").read_text(encoding="utf-8")


def _shown(cells):
    """Return the kinds of output of each code cell, and the sizes of its tables."""
    for cell in cells:
        if cell["cell_type"] == "code":
            outputs = [
                (output["output_type"], sorted(output.get("data", {})), re.findall(r"shape: \(.*?\)", str(output)))
                for output in cell["outputs"]
            ]
            yield "".join(cell["source"]), outputs


@pytest.mark.accuracy  # test_python_of_guides runs the guide's cells
def test_each_cell_of_the_example_shows_the_same_kind_of_output_as_stored():
    pytest.importorskip("nbclient", reason="needs the extra [dev]")
    pytest.importorskip("ipykernel", reason="needs the extra [dev]")
    spec = importlib.util.spec_from_file_location("build_notebook", ROOT / "examples" / "build_notebook.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    again = builder.execute(builder.notebook())
    assert list(_shown(again.cells)) == list(_shown(stored["cells"])), (
        "python examples/build_notebook.py writes it again"
    )
    assert all(outputs for _, outputs in _shown(stored["cells"]))
    assert NOTEBOOK.stat().st_size < 1_000_000


def test_the_guide_lists_every_figure_with_what_it_shows():
    section = GUIDE.partition("## Figures")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE))
    assert rows == {name: draw.__doc__.partition("\n")[0].rstrip(".") for name, draw in figures.FIGURES.items()}

"""A figure of a run in a notebook: exports of the notebook draw it, and a renderer that somebody chose is used."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

import tracekit
from tracekit.library.notebook_figure import HTML

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "demo-yafsdp"
PLOTLY = "application/vnd.plotly.v1+json"
CELL = f"""
import tracekit
tracekit.load({str(SAMPLE)!r}).plot("breakdown")
"""


@pytest.fixture
def executed(monkeypatch):
    """Return the function that runs the cell in a kernel, with an optional first line, and returns the notebook."""
    nbclient = pytest.importorskip("nbclient", reason="needs the extra [dev]")
    pytest.importorskip("ipykernel", reason="needs the extra [dev]")
    from nbformat import v4

    monkeypatch.delenv("PLOTLY_RENDERER", raising=False)

    def run(first_line=""):
        book = v4.new_notebook(cells=[v4.new_code_cell(first_line + CELL)])
        return nbclient.NotebookClient(book, timeout=300).execute()

    return run


def page_in(html):
    return unescape(re.search(r'srcdoc="([^"]*)"', html)[1])


def test_an_exported_notebook_draws_the_figure_without_a_network(executed):
    nbconvert = pytest.importorskip("nbconvert", reason="is part of Jupyter")
    book = executed()
    ((output,),) = (cell["outputs"] for cell in book.cells)
    assert {PLOTLY, HTML} <= set(output["data"])
    exported, _ = nbconvert.HTMLExporter().from_notebook_node(book)
    page = page_in(exported)
    assert 'id="figure-figure"' in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)


def test_the_renderer_that_somebody_chose_is_used(executed, monkeypatch):
    chosen = executed("import plotly.io; plotly.io.renderers.default = 'json'")
    assert [set(output["data"]) for output in chosen.cells[0]["outputs"]] == [{"application/json"}]
    monkeypatch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
    by_variable = executed()
    assert [set(output["data"]) for output in by_variable.cells[0]["outputs"]] == [{PLOTLY}]


def test_the_figure_is_plotlys_with_the_name_of_the_run_and_its_heading():
    figure = tracekit.load(str(SAMPLE), cache=False).plot("breakdown")
    page = page_in(figure.as_html())
    assert "demo-yafsdp" in page
    assert "Where the time goes" in page
    assert json.loads(figure.to_json())["data"]
    assert len(page) < 1_000_000

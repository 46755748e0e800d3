"""The lines of docs/hta.md that answer the questions of HTA's notebooks run as they are, and HTA's run beside them."""

import re
from pathlib import Path

import pytest

import tracekit
from tracekit.library.run import Run

ROOT = Path(__file__).parents[2]
RUN = ROOT / "sample_traces" / "gpu" / "slow-rank"
GUIDE = (ROOT / "docs" / "hta.md").read_text(encoding="utf-8")
SECTION = GUIDE.partition("## The common calls")[2].partition("\n## ")[0]
CALLS = re.findall(r"^\| ([^|]+\?) \| `(.+)` \| `(.+)` \|$", SECTION, re.MULTILINE)
NOT_ON_TWO_RANKS = "get_potential_stragglers"
"""HTA fails in it on this recording: "attempt to get argmax of an empty sequence"."""


@pytest.fixture
def _in_folder(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    for name in ("today", "yesterday"):
        (tmp_path / "runs" / name).symlink_to(RUN)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run() -> Run:
    return tracekit.load(RUN)


def test_ten_questions_are_answered_in_one_line_each():
    assert len(CALLS) >= 10
    for _, _, ours in CALLS:
        assert "\n" not in ours
        assert ";" not in ours


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.parametrize("question", [question for question, _, _ in CALLS])
def test_the_line_here_shows_rows_or_a_figure(run, question):
    line = next(ours for name, _, ours in CALLS if name == question)
    answer = eval(line, {"run": run, "tracekit": tracekit})
    if line.startswith("run.plot("):
        assert answer.data
    else:
        table = answer.to_frame() if hasattr(answer, "to_frame") else answer
        assert table.height
    assert hasattr(answer, "_repr_html_")


@pytest.mark.accuracy  # what another project does
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.usefixtures("_in_folder")
def test_the_lines_of_hta_run_on_the_same_recording():
    trace_analysis = pytest.importorskip("hta.trace_analysis", reason="needs the extra [hta]")
    from hta.trace_diff import TraceDiff

    analysis = trace_analysis.TraceAnalysis(trace_dir=str(RUN))
    names = {"analysis": analysis, "before": analysis, "TraceDiff": TraceDiff}
    for _, theirs, _ in CALLS:
        # Its plots open a browser.
        plots = re.search(r"(breakdown|overlap|stats|sequences)\(", theirs)
        line = theirs.replace("()", "(visualize=False)").replace('")', '", visualize=False)') if plots else theirs
        if NOT_ON_TWO_RANKS in line:
            with pytest.raises(ValueError, match="argmax of an empty sequence"):
                eval(line, names)
        else:
            assert eval(line, names) is not None, line

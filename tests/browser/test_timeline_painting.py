"""What the timeline's scripts place and paint, without a server: their functions in a browser, on a recorded canvas."""

from pathlib import Path

import pytest

from tracekit.report.timeline_view import embedding, message

pytestmark = pytest.mark.browser
SCRIPTS = Path(embedding.__file__).parents[1] / "templates" / "timeline"
TRACKS = [
    {"track": 2 * rank + number, "rank": rank, "group": group, "label": group, "role": role, "rows": 1}
    for rank in (3, 617)
    for number, (group, role) in enumerate((("GPU", "compute"), ("host", "host")))
]


@pytest.fixture
def scripts(context):
    page = context.new_page()
    page.set_content("<p></p>")
    for name in ("time.js", "layout.js", "paint.js"):
        page.add_script_tag(content=(SCRIPTS / name).read_text())
    yield page
    page.close()


def test_the_evidence_of_a_rank_is_painted_on_that_rank_alone(scripts):
    marks = [{"rank": rank, "key": "a", "start": 400, "end": 500} for rank in (617, *range(4, 84))]
    painted = scripts.evaluate(
        """({tracks, marks}) => {
          const rectangles = [], layout = new Layout(tracks, []);
          const ctx = { fillRect: (...rectangle) => rectangles.push(rectangle) };
          const timeline = { ctx, layout, findings: marks, inks: {}, widthPx: 1000, xOf: (ns) => ns, yOf: (y) => y };
          paintEvidence(timeline);
          return { rectangles, part: layout.partOfRank.get(617) };
        }""",
        {"tracks": TRACKS, "marks": marks},
    )
    part = painted["part"]
    assert painted["rectangles"] == [[400, part["top"], 100, part["bottom"] - part["top"]]]


@pytest.mark.parametrize(("ranks", "hosts"), [((3,), 1), ((3, 617), 0)])
def test_host_threads_of_several_ranks_are_folded(scripts, ranks, hosts):
    tracks = [track for track in TRACKS if track["rank"] in ranks]
    placed = scripts.evaluate("(tracks) => [...new Layout(tracks, []).lineOfTrack.keys()]", tracks)
    roles = [track["role"] for track in tracks if track["track"] in placed]
    assert (roles.count("host"), roles.count("compute")) == (hosts, len(ranks))
    assert (len(ranks) <= message.MAX_OPEN_HOSTS) == bool(hosts)

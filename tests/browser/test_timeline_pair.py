"""A step of two runs side by side, and the flame graph of a part of the timeline, in a real browser."""

import gzip
import json
import os
import re
import shutil
import time

import pytest
from playwright.sync_api import expect

import tracekit
from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean, open_again, settle
from tests.browser.test_timeline_page import Shown
from tracekit.analysis.host import call_trees
from tracekit.model import escaping, units
from tracekit.report import step_pair

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
OTHER, UNMARKED = "one-rank", "unmarked"


@pytest.fixture(scope="module")
def runs(server):
    """List a run of one rank with other times, and one whose traces mark no steps, as long as these tests run."""
    recorded.write_run(server.runs / OTHER, kernel="gemm_kernel<float, 128>", communication_us=6000, ranks=(0,))
    _write_without_steps(server.runs / recorded.GOOD, server.runs / UNMARKED)
    yield server.runs
    for name in (OTHER, UNMARKED):
        shutil.rmtree(server.runs / name)


def _write_without_steps(run, folder):
    folder.mkdir()
    for path in run.glob("*.json.gz"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        trace["traceEvents"] = [each for each in trace["traceEvents"] if "ProfilerStep" not in each["name"]]
        (folder / path.name).write_bytes(gzip.compress(json.dumps(trace).encode()))
        os.utime(folder / path.name, (time.time() - 3600,) * 2)


def _sentence(runs, rank, steps):
    rows = [
        step_pair.marked_steps(tracekit.load(runs / name, cache=False)).row(of, step)
        for name, of, step in zip((recorded.GOOD, OTHER), (rank, 0), steps, strict=True)
    ]
    return step_pair.sentence(*rows)


def _choose(page, label, text):
    """Choose an option by its name, again where the page was drawn anew meanwhile: the choice is lost."""
    box = page.get_by_role("combobox", name=re.compile(label))
    for _ in range(5):
        settle(page)
        box.fill(text)
        page.get_by_role("option", name=text).first.click()
        settle(page)
        if box.input_value() == text:
            return
    expect(box).to_have_value(text)


def test_lanes_of_the_second_run_are_below_those_of_the_first(page):
    scripts = escaping.asset("timeline/layout.js") + escaping.asset("timeline/pair.js")
    lanes = (("stream 7", 0), ("stream 20", 0), ("stream 9", 1), ("stream 21", 1))
    tracks = [
        {"track": number, "rank": side, "group": "GPU 0", "label": label, "role": "compute", "rows": 1, "order": order}
        for number, ((label, side), order) in enumerate(zip(lanes, (0, 2, 1, 3), strict=True))
    ]
    lines = page.evaluate(
        f"tracks => {{ {scripts}; const at = new PairLayout(tracks, [], ['A', 'B']);"
        "const labels = () => at.lines.map((line) => line.label); const all = labels();"
        "at.toggleAll(); const folded = labels(); at.reveal(tracks[0]); return [all, folded, at.lines.length]; }",
        tracks,
    )
    assert lines[0] == ["A", "B", "GPU 0", "stream 7", "stream 9", "stream 20", "stream 21"]
    assert lines[1:] == [["A", "B", "GPU 0"], 7]


def test_two_runs_are_aligned_by_their_typical_steps_and_a_key_moves_both(page, server, runs, context):
    page.goto(f"{server.url}/timeline?run={recorded.GOOD}")
    alone = Shown(page)
    alone.wait_until_sharp()
    _choose(page, "Compare steps with", OTHER)
    shown = Shown(page)
    shown.wait("e.steps && e.sharp === 'true' && e.seq === e.requested")
    marked = [step_pair.marked_steps(tracekit.load(runs / name, cache=False)) for name in (recorded.GOOD, OTHER)]
    steps = [own.step for own in marked]
    assert shown["steps"] == " / ".join(f"step {step}" for step in steps)
    headline = page.locator(".tk-headline")
    expect(headline).to_contain_text(_sentence(runs, marked[0].rank, steps))
    expect(headline).to_contain_text(f"A is rank {marked[0].rank} of 2 of good; B is rank 0 of 1 of {OTHER}")
    zero = int(shown["zero"])
    durations = [own.row(rank, own.step)["duration_ns"] for own, rank in zip(marked, (marked[0].rank, 0), strict=True)]
    assert shown.view[0] <= zero
    assert zero + max(durations) <= shown.view[1] < zero + 1.2 * max(durations)
    for name in (f"A · rank {marked[0].rank}", "B · rank 0"):  # each has a kernel right after the start
        shown.point_at(zero + 100_000, name)
    length = shown.length
    shown.press("w")
    shown.wait(f"e.to - e.from < {length} && e.sharp === 'true' && e.seq === e.requested")
    expect(page).to_have_url(re.compile(f"pair_from={shown.view[0]}&pair_to={shown.view[1]}"))
    view, before = shown.view, shown["steps"]
    shown.press("." if steps[0] != recorded.STEPS[-1] else ",")
    shown.wait(f"e.steps !== '{before}' && e.sharp === 'true' && e.seq === e.requested")
    moved = [int(text.removeprefix("step ")) for text in shown["steps"].split(" / ")]
    assert [abs(now - before) for now, before in zip(moved, steps, strict=True)] == [1, 1]
    expect(headline).to_contain_text(_sentence(runs, marked[0].rank, moved))
    assert shown.view[0] - int(shown["zero"]) == pytest.approx(view[0] - zero, abs=2)
    assert shown.length == pytest.approx(view[1] - view[0], abs=2)
    expect(page).to_have_url(re.compile(f"step_b={moved[1]}"))
    expect(page).to_have_url(re.compile(f"pair_from={shown.view[0]}&pair_to={shown.view[1]}"))
    settle(page)
    other = context.new_page()
    other.goto(page.url)
    again = Shown(other)
    again.wait(f"e.steps === '{shown['steps']}' && e.sharp === 'true' && e.seq === e.requested")
    assert again.view == shown.view
    again.press("m")
    again.wait("e.totals === 'shown'")
    by_rank = again.root.get_by_role("region", name=re.compile("^Time by rank"))
    assert by_rank.locator("tbody th").all_inner_texts() == [f"A · rank {marked[0].rank} · GPU 0", "B · rank 0 · GPU 0"]
    other.close()
    page.get_by_role("button", name="Previous steps").or_(page.get_by_role("button", name="Next steps")).and_(
        page.locator("button:enabled")
    ).first.click()
    shown.wait(f"e.steps !== '{' / '.join(f'step {step}' for step in moved)}'")
    settle(page)
    _choose(page, "Compare steps with", "no other run")
    expect(headline).to_contain_text("A step takes")
    settle(page)
    alone.wait("!e.steps && e.sharp === 'true'")
    assert_clean(page)


def test_a_run_without_steps_is_said_to_have_none_and_the_first_is_shown_alone(page, server, runs):
    page.goto(f"{server.url}/timeline?run={recorded.GOOD}&with={UNMARKED}")
    shown = Shown(page)
    shown.wait("!e.steps && e.sharp === 'true'")
    expect(page.locator("[data-testid=stAlert]")).to_contain_text(f"{UNMARKED} has no marked steps")
    assert_clean(page)


def test_a_flame_graph_adds_up_a_part_and_leads_to_the_longest_instance(page, server):
    trace = tracekit.load(server.runs / recorded.GOOD, cache=False).trace(0)
    page.goto(f"{server.url}/timeline?run={recorded.GOOD}")
    shown = Shown(page)
    shown.wait_until_sharp()
    settle(page)
    page.get_by_role("button", name="Flame graph of the part in view").focus()
    page.keyboard.press("Enter")
    chart = page.locator(".js-plotly-plot").filter(has_text="tracekit::forward")
    chart.wait_for()
    expect(page).to_have_url(re.compile(r"flame=0-\d+"))
    page.get_by_label("Search frames").fill("forward")
    page.keyboard.press("Enter")
    whole = (trace.ops["start_ns"].min(), int((trace.ops["start_ns"] + trace.ops["dur_ns"]).max()) + 1)
    tree = call_trees.of_window(trace, whole)
    frames, total_ns = call_trees.search(tree, "forward")
    assert frames == 1
    expect(page.get_by_text(f"{frames} frames contain the text: {units.duration(total_ns)}")).to_be_visible()
    settle(page)
    chart.locator("g.slice").filter(has_text="tracekit::forward").first.click()
    shown.wait("e.selected !== ''")
    longest = trace.ops.filter(name="tracekit::forward").sort("dur_ns", "start_ns", descending=[True, False])["id"][0]
    shown.wait(f"e.selected.endsWith('/{longest}') && e.details === 'shown'")
    expect(shown.root.locator(".details h4")).to_have_text("tracekit::forward")
    settle(page)
    open_again(page)
    page.locator(".js-plotly-plot").filter(has_text="tracekit::forward").wait_for()
    expect(page.get_by_label("Search frames")).to_have_value("forward")
    page.get_by_role("button", name="Close the flame graph").click()
    expect(page).not_to_have_url(re.compile("flame="))
    assert_clean(page)

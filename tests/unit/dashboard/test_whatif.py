"""The step time without causes on the page Diagnosis: it matches the command on real and simulated runs."""

import dataclasses
import gzip
import json
import re
from pathlib import Path

import pytest

from tests.browser import recorded
from tests.support import cli_runner, dashboard_pages
from tracekit.model import units
from tracekit.plan import hardware, models
from tracekit.simulate import faults, run
from tracekit.simulate.job import Job

SAMPLES = Path(__file__).parents[3] / "sample_traces"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Return a simulated run on GPUs whose streams take turns without need."""
    job = Job("fsdp1", models.find("llama2-7b", layers=2), hardware.find("a100-80"), 16, 2048, steps=3, seed=4)
    job = dataclasses.replace(job, ranks_written=2, micro_batches=1)
    folder = tmp_path_factory.mktemp("runs") / "in-turns"
    run.simulate(job, [faults.parse("serialized-communicators")], folder, arguments={}, force=True)
    return folder


def _page(path, **parameters):
    return dashboard_pages.page("diagnosis", path, **{"savings": "True"} | parameters)


def _command(path, *options):
    done = cli_runner.tracekit("whatif", path, *options, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _html(app):
    return "".join(element.proto.body for element in app.get("html"))


def _table(app):
    """Return the rows of the table of all causes, each the text of its cells."""
    (table,) = re.findall(r"<table.*?</table>", _html(app).partition("cannot be computed")[0], re.DOTALL)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.split("</tr>")]
    return [row for row in rows if row]


def _numbers(app):
    """Return the big numbers by their labels; of two with the same label the last."""
    found = re.findall(r"<div><b>([^<]*)</b><span>([^<]*)</span></div>", _html(app))
    return {label: value for value, label in found}


def _said(app):
    return " ".join(each.value for each in (*app.caption, *app.info, *app.warning)).replace("\\", "")


def test_the_page_shows_the_same_numbers_as_the_command():
    folder = SAMPLES / "faults" / "no-prefetch"
    shown, report = _page(folder), _command(folder)
    assert not shown.exception
    assert not shown.warning
    numbers = _numbers(shown)
    assert numbers["mean recorded step"] == units.duration(report["step_ns"])
    assert numbers["replayed without changes"] == units.duration(report["replayed_ns"])
    assert numbers["replay error, all steps"] == f"{report['replay_error_ratio']:+.1%}".replace("-", "−")
    first = report["without"][0]
    saved = f"{units.duration(first['saved_ns'])} shorter: {units.share(first['saved_ratio'])}"
    headline = f"Without {first['cause']}, the mean step would be {saved} of {units.duration(report['step_ns'])}"
    assert headline in _html(shown)
    keys = ("without_ns", "saved_ns")
    assert [(row[0], *row[2:6]) for row in _table(shown)] == [
        (
            each["cause"],
            *(units.duration(each[key]) for key in keys),
            units.share(each["saved_ratio"]),
            f"{each['confidence']:.0%}",
        )
        for each in report["without"]
    ]
    assert all(each["reason"] in _html(shown) for each in report["unknown"])


def test_a_change_in_the_address_is_shown_by_rank_and_step():
    folder = SAMPLES / "faults" / "no-prefetch"
    shown = _page(folder, without="straggler")
    (report,) = _command(folder, "--without", "straggler")["without"]
    assert not shown.exception
    assert _numbers(shown)["without straggler"] == units.duration(report["without_ns"])
    assert _numbers(shown)["saved"] == units.duration(report["saved_ns"])
    assert report["summary"][1:] in _said(shown)
    assert report["basis"] in _said(shown)
    steps = next(each.value for each in shown.dataframe if "without_ns" in each.value.columns)
    longest = steps.groupby("rank")[["replayed_ns", "without_ns"]].mean().max()
    assert longest["replayed_ns"] - longest["without_ns"] == pytest.approx(report["saved_ns"] / 1e6, abs=1e-5)
    ranks = next(each.value for each in shown.dataframe if "rank 0_ns" in each.value.columns)
    assert set(ranks.columns) == {"cause", "rank 0_ns", "rank 1_ns"}


def test_several_changes_together_match_the_command(simulated):
    shown = _page(simulated, without=["shared-queue", "communication"])
    report = _command(simulated, "--without", "shared-queue", "--without", "communication", "--together")
    assert not shown.exception
    assert report["together"]["causes"] == ["communication", "shared-queue"]
    assert _numbers(shown)["without communication and shared-queue"] == units.duration(report["together"]["without_ns"])
    for each in report["without"]:
        assert f"{units.duration(each['saved_ns'])} without {each['cause']}" in _said(shown)


def test_an_unavailable_answer_has_its_reason_and_an_unknown_name_is_ignored():
    folder = SAMPLES / "faults" / "late-launch"
    shown = _page(folder, without="late-gathers")
    assert "The step time without late-gathers cannot be computed: no all-gather" in _said(shown)
    other = _page(folder, without="<script>", predict="better", price="-1")
    assert not other.exception
    assert other.multiselect(key="without").value == []
    assert other.selectbox(key="predict").value == other.selectbox(key="predict").options[0]


def test_gpu_hours_and_money_are_those_of_the_command(simulated):
    shown = _page(simulated, price="2.5")
    report = _command(simulated, "--gpu-hour-price", "2.5")
    assert not shown.exception
    expected = [(f"{each['gpu_hours_per_day']:,.1f}", f"{each['money_per_day']:,.2f}") for each in report["without"]]
    assert [tuple(row[6:]) for row in _table(shown)] == expected
    assert "2 of 16 ranks have a trace" in _said(shown)
    caveats = {each["caveat"] for each in report["without"]} - {""}
    assert caveats
    assert all(each in _said(shown) for each in caveats)
    assert "shared-queue" in [row[0] for row in _table(shown)]


def test_a_prediction_matches_the_command_and_lists_its_assumptions(simulated):
    shown = _page(simulated, **{"predict": "hsdp", "node-gpus": "4", "node-bandwidth": "100"})
    options = ("--strategy", "hsdp", "--gpus-per-node", "4", "--node-bandwidth", "100e9")
    (report,) = _command(simulated, *options)["predictions"]
    assert not shown.exception
    assert _numbers(shown)["predicted, hsdp"] == units.duration(report["predicted_ns"])
    said = shown.markdown[-1].value.replace("\\", "")
    assert all(each in said for each in report["assumptions"])
    shown.selectbox(key="predict").select("another network").run()
    (report,) = _command(simulated, "--network-times", "2")["predictions"]
    assert _numbers(shown)["predicted, a network 2 times as fast"] == units.duration(report["predicted_ns"])
    shown.selectbox(key="predict").select("fewer recomputed layers").run()
    assert not shown.exception
    assert "cannot be predicted" in _said(shown)


def test_page_and_command_warn_if_the_replay_does_not_reproduce_the_run(tmp_path):
    recorded.write_run(tmp_path / "run", kernel="gemm")
    for file in (tmp_path / "run").glob("*.json.gz"):
        trace = json.loads(gzip.decompress(file.read_bytes()))
        for event in trace["traceEvents"]:
            if event.get("cat") in ("kernel", "gpu_memset") and event["ts"] < recorded.STEP_US:
                event["ts"] += 4000  # the first step's work starts late, and nothing in the trace says why
        file.write_bytes(gzip.compress(json.dumps(trace).encode()))
    shown = _page(tmp_path / "run")
    assert "does not reproduce this run" in shown.warning[0].value.replace("\\", "")
    text = cli_runner.tracekit("whatif", tmp_path / "run").stdout
    assert shown.warning[0].value.replace("\\", "") in " ".join(text.split())


def test_a_run_without_work_points_to_the_page_with_what_is_missing(tmp_path):
    trace = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": []}
    (tmp_path / "rank0.pt.trace.json").write_text(json.dumps(trace))
    shown = _page(tmp_path)
    assert not shown.exception
    assert "without" not in {each.key for each in shown.multiselect}
    ranks = dashboard_pages.page("ranks", tmp_path)
    assert "Diagnosis shows what is missing" in _said(ranks)
    assert not ranks.selectbox


def test_of_many_ranks_only_those_that_are_replayed_are_read(tmp_path, monkeypatch):
    from dashboard import run_catalog, run_store
    from dashboard.run_store import what_if
    from tracekit.replay.graph import representative_ranks

    recorded.write_run(tmp_path / "run", kernel="gemm", ranks=(0, 1, 2, 3))
    (entry,) = run_catalog.list_runs([str(tmp_path / "run")]).entries
    monkeypatch.setattr(representative_ranks, "MAX_RANKS", 2)
    monkeypatch.setattr(representative_ranks, "_LEAST_RANKS", 2)
    run = run_store.open_run(entry)
    parts = []
    what_if.replay(run, lambda ratio, part: parts.append((ratio, part)))
    replayed = representative_ranks.run_of(run.run).ranks
    assert len(replayed) < 4
    # The check may have read them before.
    assert [part for _, part in parts].count("Reading the traces") <= len(replayed)
    assert all(0 <= ratio <= 1 for ratio, _ in parts)

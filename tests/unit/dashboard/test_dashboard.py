"""The dashboard's pages without a browser: their content, and the effect of choices."""

import gc
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from dashboard import run_catalog, run_store
from tests.browser import recorded
from tests.integration.test_cli_memory import run_on_a_device, simulated
from tests.support import dashboard_pages, simulated_history
from tests.support.dashboard_pages import TIMEOUT_S, component, html_of, page, testing
from tests.unit.simulate import jobs as simulated_jobs
from tracekit.cli.commands.dashboard import server_command
from tracekit.regression.history import store
from tracekit.regression.history.entry import Commit, history_entry
from tracekit.regression.thresholds import Verdict
from tracekit.report import json as report_json

caches = pytest.importorskip("streamlit.runtime.caching.cache_resource_api")
APP = str(Path(__file__).parents[3] / "dashboard" / "server" / "frame.py")
FAULTS = Path(__file__).parents[3] / "sample_traces" / "faults"
SAMPLE = Path(__file__).parents[3] / "sample_traces" / "demo-fsdp2"
runs = dashboard_pages.runs


@pytest.fixture
def app(monkeypatch):
    def opened_on(*paths, **params):
        monkeypatch.setattr(sys, "argv", ["frame.py", *map(str, paths)])
        shown = testing.AppTest.from_file(APP, default_timeout=TIMEOUT_S)
        shown.query_params.update(params)
        return shown.run()

    return opened_on


def test_without_a_run_the_app_shows_how_to_open_one(app):
    shown = app()
    assert not shown.exception
    assert "tracekit dashboard" in shown.code[0].value


def test_the_diagnosis_of_a_run_shows_verdict_numbers_findings_and_breakdown(app, runs):
    shown = app(runs / recorded.GOOD)
    assert not shown.exception
    html = html_of(shown)
    assert " tk-verdict" in html
    assert "COMM001" in html
    assert len(shown.get("plotly_chart")) == 1
    assert not shown.selectbox(key="run").options[1:]


def test_a_run_whose_files_change_shows_an_error_and_can_be_read_again(app, tmp_path, monkeypatch):
    monkeypatch.setattr(run_catalog, "LISTING_TTL_S", 600.0)
    run = tmp_path / "changing"
    recorded.write_run(run, kernel="gemm")
    run_store.check(run_catalog.list_runs([str(run)]).entries[0])
    shown = app(run)
    assert not shown.error
    time.sleep(0.01)  # file systems count time in ticks of some milliseconds
    os.utime(run / "rank00000.pt.trace.json.gz", (1, 1))
    # As a browser reports it that opens another page: AppTest can only open pages that are files.
    shown._page_hash = next(key for key, page in shown._registered_pages.items() if page["url_pathname"] == "kernels")
    shown.query_params["what"] = "operators"  # which a check does not measure
    shown.run()
    assert not shown.exception
    assert "changed since it was checked" in shown.error[0].value
    shown.button(key="read_after_error").click().run()
    assert not shown.exception
    assert not shown.error


def test_a_broken_run_shows_an_error_and_the_others_open(app, runs):
    shown = app(runs, run=recorded.TRUNCATED)
    assert len(shown.error) == 1
    assert not shown.exception
    shown.selectbox(key="run").select(recorded.GOOD).run()
    assert not shown.error
    assert "COMM001" in html_of(shown)


def test_a_missing_path_shows_an_error(app, tmp_path):
    shown = app(tmp_path / "missing")
    assert "no such file" in shown.error[0].value
    assert not shown.exception


def test_names_in_what_is_shown_are_escaped(app, runs):
    shown = app(runs / recorded.HOSTILE)
    assert not shown.exception
    everything = html_of(shown) + "".join(element.value for element in shown.markdown)
    ours = (SAMPLE.parents[1] / "dashboard" / "server" / "page.js").read_text(encoding="utf-8")
    plotly = r"window\.tracekitPlotly \?\?= '\./static/js/PlotlyChart\.[\w-]+\.js';"
    everything = re.sub(f"<script>{plotly}{re.escape(ours)}</script>", "", everything)
    assert "<script" not in everything
    assert "<img" not in everything


def _numbers(app):
    return {metric.label: metric.value for metric in app.metric}


def test_the_plan_follows_its_sliders_and_what_the_chosen_run_measured():
    shown = page("plan", SAMPLE)
    assert not shown.exception
    assert len(shown.get("plotly_chart")) == 3
    first = _numbers(shown)
    assert first["GPUs"] == "256"
    shown.select_slider(key="plan-pp").set_value(8)
    shown.select_slider(key="plan-interval").set_value(1800)
    shown.toggle(key="plan-buffered").set_value(True).run()
    assert not shown.exception
    then = _numbers(shown)
    assert (then["GPUs"], then["Size"]) == ("512", first["Size"])
    assert then["Training blocked"] != first["Training blocked"]
    assert "The burst buffer drains in" in "".join(caption.value for caption in shown.caption)
    shown.toggle(key="plan-measured").set_value(True).run()
    assert not shown.exception
    caption = "".join(caption.value for caption in shown.caption)
    assert "872 MB/s over 2 ranks, 12.1 bytes per parameter, medians of 2 saves" in caption
    assert _numbers(shown)["Write rate per node"] == "13.6 MB/s"  # 872 MB/s over 512 GPUs on 64 nodes
    assert "synced" not in caption


def test_the_plan_warns_that_an_unsynced_write_rate_may_be_that_of_the_page_cache(tmp_path):
    run = shutil.copytree(FAULTS / "small-tensors", tmp_path / "run")
    for log in run.glob("*.checkpoint.jsonl"):
        lines = [line for line in log.read_text().splitlines(keepends=True) if '"fsync"' not in line]
        log.write_text("".join(lines))
    shown = page("plan", run)
    shown.toggle(key="plan-measured").set_value(True).run()
    assert not shown.exception
    assert "saves, each blocking for" in "".join(caption.value for caption in shown.caption)
    assert "Not all of their files were synced" in "".join(caption.value for caption in shown.caption)


def test_the_breakdown_can_be_seen_by_step(app, runs):
    shown = app(runs / recorded.GOOD)
    shown.get("button_group")[0].set_value("by step").run()
    assert not shown.exception
    assert len(shown.get("plotly_chart")) == 2


def _message(shown):
    sent = component(shown, "timeline").bytes
    return json.loads(sent[4 : 4 + int.from_bytes(sent[:4], "little")])


def test_the_timeline_opens_on_the_whole_run_with_all_ranks_and_every_finding_marked(runs):
    shown = page("timeline", runs / recorded.GOOD)
    assert not shown.exception
    message = _message(shown)
    assert {track["rank"] for track in message["tracks"]} == {0, 1}
    assert message["view"] == {"from": 0, "to": message["span_ns"]}
    assert message["tile"]["start"] == 0
    assert message["tile"]["end"] == message["span_ns"]
    assert {band["name"] for band in message["tile"]["bands"] if band["kind"] == "step"} == {
        "step 3",
        "step 4",
        "step 5",
    }
    assert "COMM001 exposed-communication" in {mark["finding"] for mark in message["findings"]}
    assert {mark["rank"] for mark in message["findings"]} == {0, 1}


def test_choosing_a_finding_moves_the_timeline_to_its_evidence(runs):
    shown = page("timeline", runs / recorded.GOOD)
    finding = next(box for box in shown.selectbox if box.label == "Finding")
    finding.select(next(option for option in finding.options if "COMM001" in option)).run()
    assert not shown.exception
    message = _message(shown)
    marks = [mark for mark in message["findings"] if mark["finding"].startswith("COMM001")]
    longest_ns = max(mark["end"] - mark["start"] for mark in marks)
    shown_in_it = [
        mark for mark in marks if message["go"]["start"] < mark["start"] and mark["end"] < message["go"]["end"]
    ]
    assert longest_ns in {mark["end"] - mark["start"] for mark in shown_in_it}
    track = next(track for track in message["tracks"] if track["track"] == message["go"]["track"])
    assert track["rank"] in {mark["rank"] for mark in shown_in_it}
    assert "COMM001" in html_of(shown)


def test_a_moment_chosen_on_another_page_is_shown_on_the_clock_of_the_run(runs):
    begun_ns = 1_790_000_000_000_000_000  # of the trace, and the run's clock is rank 0's
    row = {"run": recorded.GOOD, "window": 0, "rank": 1, "start_ns": begun_ns + 200_000, "dur_ns": 5_000_000}
    message = _message(page("timeline", runs / recorded.GOOD, state={"shown_moment": row}))
    assert message["go"]["start"] < 200_000 < 5_200_000 < message["go"]["end"] < 20_000_000
    assert next(track for track in message["tracks"] if track["track"] == message["go"]["track"])["rank"] == 1


def test_ranks_are_named_and_grouped_by_their_places_in_the_mesh():
    shown = page("timeline", Path(__file__).parents[3] / "sample_traces" / "parallelism" / "pipeline-interleaved")
    assert not shown.exception
    by_number = _message(shown)
    assert by_number["places"]["3"] == "pp 1 · repl 1"
    assert list(dict.fromkeys(track["rank"] for track in by_number["tracks"])) == [0, 1, 2, 3]
    order = next(box for box in shown.selectbox if box.label == "Order of ranks")
    assert order.options == ["by number", "by groups of pp", "by groups of dp_replicate"]
    order.select("by groups of pp").run()
    assert not shown.exception
    by_pipeline = _message(shown)
    assert list(dict.fromkeys(track["rank"] for track in by_pipeline["tracks"])) == [0, 2, 1, 3]
    assert sorted(track["track"] for track in by_pipeline["tracks"]) == [t["track"] for t in by_number["tracks"]]


def test_ranks_outside_a_mesh_are_in_the_order_of_their_numbers(runs):
    shown = page("timeline", runs / recorded.GOOD)
    assert "Order of ranks" not in {box.label for box in shown.selectbox}
    assert _message(shown)["places"] == {}


def test_names_reach_the_timeline_inert_and_short(runs):
    message = _message(page("timeline", runs / recorded.HOSTILE))
    names = [*message["tile"]["names"], *(track["label"] for track in message["tracks"])]
    assert any("<script>" in name for name in names)
    assert not any("\u202e" in name or len(name) > 300 for name in names)


def test_kernels_have_short_labels_on_the_timeline_and_their_names_in_details(runs):
    tile = _message(page("timeline", runs / recorded.GOOD))["tile"]
    labels = {tile["names"][int(number)]: label for number, label in tile["labels"].items()}
    assert labels["gemm_kernel<float, 128>"] == "gemm_kernel"
    assert "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" in labels.values()
    assert not {"aten::mm", "Memset (Device)"} & labels.keys()


def test_a_timeline_that_cannot_be_read_says_why(runs):
    shown = page("timeline", runs / recorded.TRUNCATED)
    assert not shown.exception
    assert "truncated" in shown.error[0].value


def test_a_timeline_without_a_slice_says_so(tmp_path):
    trace = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": []}
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    shown = page("timeline", tmp_path)
    assert not shown.exception
    assert len(shown.info) + len(shown.error) == 1


def test_a_comparison_shows_medians_changes_and_verdicts(runs):
    shown = page("compare", runs)
    assert not shown.exception
    assert len(shown.error) == 1  # the truncated run
    assert [chart.key for chart in shown.get("plotly_chart")] == ["comparison-stacks", "comparison"]
    row = html_of(shown).split("exposed communication</td>")[1].split("</tr>")[0]
    assert "4 ms" in row
    assert "6 ms" in row
    assert "+50%" in row
    assert any(verdict.value in row for verdict in Verdict)
    share = html_of(shown).split("exposed share of step</td>")[1].split("</tr>")[0]
    assert " pt" in share
    explained = html_of(shown).split("of change</th>")[1]
    assert "gemm" in explained
    assert "idle (" in explained
    by_kernel = page("compare", runs, changed_by="kernel")
    assert not by_kernel.exception
    assert ">kernel</th>" in html_of(by_kernel)


def test_cached_results_of_an_uploaded_run_are_freed_with_its_session(runs, tmp_path):
    def script(path, uploaded):
        import weakref
        from dataclasses import replace
        from pathlib import Path

        import streamlit as st

        from dashboard import run_catalog, run_store
        from dashboard.run_store import memory, regression

        (named,) = run_catalog.list_runs([path]).entries
        private = run_catalog.entry("uploaded", Path(uploaded), (uploaded,), is_private=True)
        result = regression.check(named, private)
        assert regression.check(named, private) is result  # cached as long as the page is open
        opened = run_store.open_run(private)
        tables = memory.trace_tables(opened, 0, 0)
        assert memory.trace_tables(run_store.open_run(private), 0, 0) is tables
        made = opened.remember("made", lambda of: of.offsets.with_row_index())  # empty tables are shared by all runs
        renamed = regression.check(named, replace(named, name="again"))
        st.session_state["references"] = [weakref.ref(one) for one in (result, opened.run, made)]
        st.session_state["sources"] = [one.report.run.sources for one in (result, renamed)]

    recorded.write_run(tmp_path / "uploaded", kernel="gemm")
    folders = (str(runs / recorded.GOOD), str(tmp_path / "uploaded"))
    shown = testing.AppTest.from_function(script, args=folders, default_timeout=TIMEOUT_S).run()
    assert not shown.exception
    assert shown.session_state["sources"] == [(), ()]
    references = shown.session_state["references"]
    assert all(one() is not None for one in references)
    caches.clear_session_cache("test session id")  # as Streamlit does where a page is closed
    gc.collect()
    assert [one() for one in references] == [None] * len(references)


def test_the_memory_page_draws_allocated_memory_of_a_trace_and_of_a_snapshot(tmp_path):
    run = run_on_a_device(tmp_path)
    simulated(run)
    shown = page("memory", run)
    assert not shown.exception
    assert len(shown.get("plotly_chart")) == 2
    assert "peak allocated" in html_of(shown)
    assert "40 MiB" in html_of(shown)
    source = next(box for box in shown.selectbox if box.label == "From")
    source.select(next(option for option in source.options if "snapshot of rank 0" in option)).run()
    assert not shown.exception
    assert len(shown.get("plotly_chart")) == 1  # its map: the simulated history has no times
    assert "Memory map at the snapshot" in [heading.value for heading in shown.subheader]


def test_the_memory_page_says_how_to_record_where_there_is_nothing_to_draw(runs):
    shown = page("memory", runs / recorded.GOOD)
    assert not shown.exception
    assert "profile_memory=True" in shown.info[0].value


def test_an_unreadable_snapshot_shows_an_error(tmp_path):
    run = run_on_a_device(tmp_path)
    (run / "rank00000.memory.pickle").write_bytes(b"cos\nsystem\n(X\x04\x00\x00\x00truetR.")
    shown = page("memory", run)
    source = next(box for box in shown.selectbox if box.label == "From")
    source.select(source.options[1]).run()
    assert "os.system" in shown.error[0].value.replace("\\", "")
    assert not shown.exception


def test_runs_of_different_size_are_compared_by_efficiency(tmp_path):
    for gpus in (8, 16):
        simulated_jobs.written(simulated_jobs.job(gpus=gpus, layers=2), tmp_path / f"gpus{gpus}")
    shown = page("compare", tmp_path)
    assert not shown.exception
    assert "scaling" in [chart.key for chart in shown.get("plotly_chart")]
    assert "on 2 times the GPUs: efficiency" in html_of(shown)
    row = html_of(shown).split("exposed communication</td>")[1].split("</tr>")[0]
    assert "+" in row


def test_runs_of_different_models_have_no_efficiency_and_no_green_verdict(tmp_path):
    # Their steps have different numbers of tokens, and the second is faster.
    shutil.copytree(FAULTS / "no-prefetch", tmp_path / "a")
    shutil.copytree(SAMPLE, tmp_path / "b")
    shown = page("compare", tmp_path)
    assert not shown.exception
    assert "scaling" not in [chart.key for chart in shown.get("plotly_chart")]
    assert any("model.name differs" in caption.value.replace("\\", "") for caption in shown.caption)
    colours = re.findall(r'class="tk-(?:headline|verdict) (\w+)"><b>The runs do different work\b', html_of(shown))
    assert len(colours) == 1  # the headline says it once
    assert "good" not in colours
    assert re.search(r'<td class="[^"]*\bworse\b', html_of(shown))
    assert not re.search(r'<td class="[^"]*\bbetter\b', html_of(shown))


def test_one_run_alone_is_not_compared(runs):
    shown = page("compare", runs / recorded.GOOD)
    assert "Compare with" in shown.info[0].value


def test_ranks_are_drawn_side_by_side_with_the_ranks_waited_for(runs):
    shown = page("ranks", runs / recorded.GOOD)
    assert not shown.exception
    assert any("clocks of the ranks" in caption.value for caption in shown.caption)
    whole = shown.dataframe[0].value
    assert whole["rank"].tolist() == sorted(whole["rank"])
    assert {"compute_ns", "transfer_ns", "waiting_ns", "idle_ns"} <= set(whole.columns)
    shown.selectbox[0].select("all").run()
    assert not shown.exception
    assert shown.dataframe[0].value["compute_ns"].sum() > whole["compute_ns"].sum()


def test_the_saves_of_a_run_are_judged_and_drawn():
    shown = page("memory", FAULTS / "small-tensors", tab="checkpoints")
    assert not shown.exception
    assert "CKPT002" in html_of(shown)
    assert len(shown.get("plotly_chart")) == 3
    assert shown.selectbox[0].options == ["step-000006"]


def test_without_a_checkpoint_log_the_page_says_how_to_record_one():
    shown = page("memory", FAULTS / "churn", tab="checkpoints")
    assert not shown.exception
    assert any("record\\_save" in each.value for each in shown.caption)


def _history(path):
    def script(path):
        from pathlib import Path

        from dashboard.sections import trends

        trends.show(Path(path))

    return testing.AppTest.from_function(script, args=(str(path),), default_timeout=TIMEOUT_S).run()


def test_the_history_shows_each_metric_what_changed_and_the_run_that_is_picked(tmp_path):
    path = tmp_path / "history.duckdb"
    documents = [
        *simulated_history.slower_from(12, 18),
        *(simulated_history.report(number, world_size=8) for number in (30, 31)),
    ]
    texts = [f"Change {number}\n\n<b>why</b> ![x](http://192.0.2.1/x.png)" for number in range(len(documents))]
    store.add(
        path,
        [
            history_entry(
                each,
                report_json.comparison_side(each),
                commit=Commit(f"{number:02d}abcdef", text, "main"),
                failures=["<i>X"],
            )
            for number, (each, text) in enumerate(zip(documents, texts, strict=True))
        ],
    )
    shown = _history(path)
    assert not shown.exception
    assert "No metric changed its level." in [caption.value for caption in shown.caption]  # of the latest kind of run
    shown.selectbox(key="history_group").select(1).run()
    assert not shown.exception
    assert len(shown.get("plotly_chart")) == 3
    html = html_of(shown)
    assert "worse: step time" in html
    assert "11abcdef..12abcdef" in html
    assert "COMM001 exposed-communication" in html
    assert "versions.torch 2.12.0 → 2.13.0" in html
    run = next(box for box in shown.selectbox if box.label.startswith("Run, or"))
    run.select(3).run()
    # st.text knows no markup.
    assert "Change 3\n\n<b>why</b> ![x](http://192.0.2.1/x.png)" in [text.value for text in shown.text]
    assert "<b>why" not in html_of(shown)
    assert not any("<i>X" in each.value for each in shown.markdown)


def test_an_unreadable_history_shows_an_error(tmp_path):
    (tmp_path / "history.duckdb").write_text("no database")
    shown = _history(tmp_path / "history.duckdb")
    assert not shown.exception
    assert "cannot be read as a history" in shown.error[0].value.replace("\\", "")


def test_the_history_page_is_listed_for_a_named_history_or_one_in_the_folder_of_runs(tmp_path):
    assert run_catalog.history_file([str(tmp_path)]) is None
    store.add(tmp_path / "history.duckdb", [])
    assert run_catalog.history_file([str(tmp_path)]) == tmp_path / "history.duckdb"
    assert run_catalog.history_file([str(tmp_path), "--history=/elsewhere"]) == Path("/elsewhere")
    words = server_command(["runs"], port=1, browser=False, history=Path("/h.duckdb"))
    assert words[words.index("--") + 1 :][-1] == "--history=/h.duckdb"


def test_streamlit_offers_no_skills_over_the_pages(monkeypatch):
    config, skills = pytest.importorskip("streamlit.config"), pytest.importorskip("streamlit.web.skills")
    words = server_command(["runs"], port=1, browser=True)
    flags = words[3 : words.index("--")]
    options = zip(flags[::2], flags[1::2], strict=True)
    given = {name.removeprefix("--"): {"true": True, "false": False}.get(value, value) for name, value in options}
    monkeypatch.setattr(config, "get_option", lambda name: given[name])
    assert skills.nudge_suppression_reason()


def test_the_runs_page_does_not_read_a_log_that_links_outside(app, tmp_path):
    log = tmp_path / "elsewhere.jsonl"
    log.write_text('{"step": 7, "loss": 4.2, "step_time_ns": 123000000, "rank": 0}\n')
    (tmp_path / "runs").mkdir()
    for name in ("inside", "outside"):
        recorded.write_run(tmp_path / "runs" / name, kernel="gemm")
    (tmp_path / "runs" / "inside" / "rank00000.metrics.jsonl").write_text(log.read_text())
    (tmp_path / "runs" / "outside" / "rank00000.metrics.jsonl").symlink_to(log)
    shown = app(tmp_path / "runs")
    assert not shown.exception
    progress = [caption.value for caption in shown.caption if "is at step" in caption.value]
    assert [text.partition("**")[2].partition("**")[0] for text in progress] == ["inside"]


def test_a_table_shows_the_columns_that_have_a_value():
    def script():
        import polars as pl

        from dashboard import widgets

        table = pl.DataFrame({"rank": [0, 1], "drift_ns": [None, None], "op": [None, "mm"]}, strict=False)
        widgets.frame(table, key="part")
        widgets.frame(table.clear(), key="empty")

    shown = testing.AppTest.from_function(script, default_timeout=TIMEOUT_S).run()
    assert not shown.exception
    part, empty = shown.dataframe
    assert list(part.value.columns) == ["rank", "op"]
    assert list(empty.value.columns) == ["rank", "drift_ns", "op"]


def test_a_figure_has_the_colours_of_the_page_there_and_none_in_what_is_shared():
    def script():
        import plotly.graph_objects as go
        import streamlit as st

        from dashboard import sharing, widgets

        sharing.begin("a page")
        widgets.title("run")
        figure = go.Figure(go.Bar(x=[1], y=[2])).update_layout(font_size=13)
        widgets.chart(figure, key="bars")
        st.session_state["shared"] = [part.figure.layout.font.to_plotly_json() for part in sharing.finish().parts]

    shown = testing.AppTest.from_function(script, default_timeout=TIMEOUT_S).run()
    assert not shown.exception
    (chart,) = shown.get("plotly_chart")
    assert set(json.loads(chart.proto.spec)["layout"]["font"]) == {"color", "family", "size"}
    assert shown.session_state["shared"] == [{"size": 13}]

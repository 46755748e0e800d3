"""Memory snapshots without traces in the dashboard: drawn by the page Memory, named by others, private if uploaded."""

import gc
import gzip
import io
from pathlib import Path

import pytest

from dashboard import run_catalog, runs_table, uploads
from tests.support.dashboard_pages import TIMEOUT_S, html_of, page, testing
from tracekit.ingest import loader

caches = pytest.importorskip("streamlit.runtime.caching.cache_resource_api")
RECORDINGS = Path(__file__).parents[2] / "recordings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a recorded snapshot, and no trace."""
    made = tmp_path_factory.mktemp("oom")
    packed = RECORDINGS / "out_of_memory" / "leak" / "rank00000.memory.pickle.gz"
    (made / "rank00000.memory.pickle").write_bytes(gzip.decompress(packed.read_bytes()))
    return made


@pytest.mark.parametrize("name", ["", "rank00000.memory.pickle"])
def test_the_page_memory_draws_them_with_the_categories_at_the_peak(folder, name):
    shown = page("memory", folder / name)
    assert not shown.exception
    assert not shown.error
    assert "memory snapshots without traces" in html_of(shown)
    assert shown.selectbox[0].options[0].startswith("memory snapshot of rank 0")
    said = html_of(shown)
    assert "128 MiB on device 0 of rank 0, by aten::sum_dim_IntList in the backward pass." in said
    assert "Out of memory: memory grows by 16 MiB a step, which aten::clone in &lt;module&gt; (oom.py:36)" in said
    headings = [each.value for each in shown.subheader]
    assert headings[:2] == ["Allocated when memory ran out", "Memory that grows from step to step"]
    assert "Other settings, replayed" in headings
    charts = [each.proto.spec for each in shown.get("plotly_chart")]
    assert len(charts) == 4  # over time, map, lifetimes, categories
    assert any("parameters" in chart and "activations" in chart for chart in charts)
    shown.button[0].click().run()  # replay
    assert not shown.exception
    assert not shown.error


@pytest.mark.parametrize("address", ["diagnosis", "timeline"])
def test_other_pages_say_which_page_shows_them(folder, address):
    shown = page(address, folder)
    assert not shown.exception
    assert not shown.error
    assert "1 memory snapshot and no trace" in shown.info[0].value
    assert shown.button[0].label == "Open the page Memory and checkpoints"


def test_a_configuration_next_to_them_is_not_taken_for_a_trace(folder, tmp_path):
    (tmp_path / "rank00000.memory.pickle").write_bytes((folder / "rank00000.memory.pickle").read_bytes())
    (tmp_path / "torch.json").write_text('{"torch": "2.13.0"}')
    entry = run_catalog.Catalog((str(tmp_path),)).listing().entries[0]
    assert (entry.files, entry.snapshots) == (0, 1)
    assert runs_table.verdict(entry) == runs_table.SNAPSHOT
    assert runs_table.table([entry])["open"].to_list() == [f"./memory?run={entry.name}"]
    (tmp_path / "torch.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    assert run_catalog.Catalog((str(tmp_path),)).listing().entries[0].files == 1


def test_a_file_that_is_no_snapshot_is_one_message(tmp_path):
    (tmp_path / "bad.memory.pickle").write_bytes(b"\x80\x04not a snapshot")
    shown = page("memory", tmp_path)
    assert not shown.exception
    assert len(shown.error) == 1


@pytest.mark.parametrize("is_private", [True, False])
def test_what_is_made_of_an_uploaded_snapshot_is_freed_with_its_session(folder, is_private):
    def script(path, is_private):
        import weakref
        from pathlib import Path

        import streamlit as st

        from dashboard import run_catalog
        from dashboard.run_store import memory

        entry = run_catalog.entry("uploaded: oom", Path(path), (path,), is_private=is_private)
        (file,) = memory.snapshots_of_entry(entry)
        tables = memory.snapshot_tables(entry, file, None)
        assert memory.snapshot_tables(entry, file, None) is tables
        st.session_state["made"] = weakref.ref(tables["over_time"])

    shown = testing.AppTest.from_function(script, args=(str(folder), is_private), default_timeout=TIMEOUT_S).run()
    assert not shown.exception
    made = shown.session_state["made"]
    assert made() is not None
    caches.clear_session_cache("test session id")  # as Streamlit does where a page is closed
    gc.collect()
    assert (made() is None) == is_private


def test_an_uploaded_io_log_is_joined_with_the_trace_of_its_process(tmp_path):
    folder = uploads.UploadFolder(tmp_path)
    files = [
        *(RECORDINGS / "dftracer").glob("rank0000[01].pt.trace.json.gz"),
        *(RECORDINGS / "dftracer").glob("*.pfw.gz"),
    ]
    assert len(files) > 3
    folder.update([Upload(path.read_bytes(), path.name) for path in files])
    assert not folder.problems()
    run = loader.load(tmp_path, cache=False)
    expected = loader.load(RECORDINGS / "dftracer")
    for rank in (0, 1):
        found = run.trace(rank).io_calls
        assert found.height
        assert found.equals(expected.trace(rank).io_calls)


class Upload(io.BytesIO):
    """A file as Streamlit's widget gives it."""

    def __init__(self, content, name):
        super().__init__(content)
        self.name, self.file_id, self.size = name, name, len(content)

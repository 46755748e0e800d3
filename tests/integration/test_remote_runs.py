"""Runs behind URLs: on a real S3 server that the test starts, and on a web server; and the faults of networks."""

import gzip
import importlib
import json
import pickle
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess as Done

import pyarrow as pa
import pytest
import s3fs

from tests.support import object_stores, sample_snapshots
from tests.support.cli_runner import in_a_process, tracekit
from tests.support.kineto_files import trace, write
from tests.support.object_stores import BUCKET, Fault, Server, times
from tests.support.python_path import REPOSITORY
from tracekit.conventions import object_storage
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import discovery, disk_cache, files
from tracekit.ingest.loader import load
from tracekit.replay.allocator.run_snapshots import pools

SAMPLE = REPOSITORY / "sample_traces" / "faults" / "healthy-fsdp2"
HEAD_BYTES = 64 << 10
RESET = Fault(cut_after_bytes=1000)
SLOW = Fault(wait_s=1.5)


@pytest.fixture(scope="module")
def near(tmp_path_factory) -> str:
    """The report of the local sample run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(disk_cache.DIRECTORY_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        return report(SAMPLE)


@pytest.fixture(scope="module")
def server():
    with object_stores.s3_server() as server:
        object_stores.upload(SAMPLE, f"runs/{SAMPLE.name}")
        yield server


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(object_storage.TIMEOUT_VARIABLE, "20")  # what a server on a busy machine may need
    monkeypatch.setenv(object_storage.ATTEMPTS_VARIABLE, "3")


@pytest.fixture
def s3(server, tmp_path):
    """The S3 server with the sample run, without faults; requests of before are forgotten."""
    server.fault = lambda _: None
    server.requests.clear()
    return server


SAMPLE_URL = f"s3://{BUCKET}/runs/{SAMPLE.name}"


def report(run: str | Path, *options: str, start: Callable[..., Done] = tracekit) -> str:
    """Return the JSON report of a run, without its path."""
    done = start("check", run, "--format", "json", "--fail-on", "never", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(run), "RUN")


# The same as a local run ---------------------------------------------------------------------------------------------


def test_the_report_of_a_remote_run_is_that_of_the_local_run_and_a_second_command_fetches_nothing(
    s3: Server, near: str
) -> None:
    assert report(SAMPLE_URL) == near
    first = s3.traces_fetched()
    heads = [each for each in first if each.range == f"bytes=0-{HEAD_BYTES - 1}"]
    assert len(heads) == 2, first
    assert len([each for each in first if each.range is None]) == 2
    s3.requests.clear()
    assert report(SAMPLE_URL, start=in_a_process) == near
    assert not s3.got("GET", ".gz")
    assert not s3.got("GET", ".jsonl")
    assert not s3.got("GET", "run.json")
    assert {each.method for each in s3.requests} <= {"GET", "HEAD"}
    assert all(not urlpath(each.path) or "list-type" in each.path for each in s3.got("GET")), s3.got("GET")


def urlpath(path: str) -> str:
    """Return the key in a request's path; empty for a listing."""
    return path.partition("?")[0].strip("/").partition("/")[2]


def test_without_the_cache_the_report_is_the_same(s3: Server, near: str) -> None:
    assert report(SAMPLE_URL, "--no-cache") == near
    assert len([each for each in s3.traces_fetched() if each.range is None]) == 2


@pytest.mark.parametrize("named", ["rank00001.pt.trace.json.gz", "rank*.json.gz"])
def test_a_file_and_a_glob_are_read_as_locally(s3: Server, named: str) -> None:
    near, far = load(sorted(SAMPLE.glob(named))), load(f"{SAMPLE_URL}/{named}")
    assert far.ranks == near.ranks
    for rank in near.ranks:
        assert far.trace(rank).metrics.equals(near.trace(rank).metrics)
        assert far.trace(rank).activities.equals(near.trace(rank).activities)


def test_a_list_of_urls_is_one_run(s3: Server) -> None:
    run = load([f"{SAMPLE_URL}/rank0000{rank}.pt.trace.json.gz" for rank in (0, 1)])
    assert (run.ranks, run.path) == ((0, 1), SAMPLE_URL)


def test_the_logs_of_a_window_are_in_the_folder_above(s3: Server, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "window001"
    write(folder / "rank00000.json", trace(0))
    (tmp_path / "run" / "rank00000.metrics.jsonl").write_text('{"step": 3, "loss": 0.5}\nnot JSON\n')
    url = object_stores.upload(tmp_path / "run", "runs/windows")
    for place in (url, f"{url}/window001"):
        far, near = load(place).trace(0), load(place.replace(url, str(tmp_path / "run"))).trace(0)
        assert far.metrics.equals(near.metrics)
        assert far.metrics.height == 1
        renamed = [text.replace(str(tmp_path / "run"), url) for text in near.data_quality["message"]]
        assert far.data_quality["message"].to_list() == renamed


def test_merged_files_and_files_without_a_stated_rank_are_the_same(s3: Server, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    events = [
        {**event, "args": {**event.get("args", {}), "rank": rank}}
        for rank in (0, 1)
        for event in trace(rank)["traceEvents"]
    ]
    write(merged / "both.json", {"traceEvents": events})
    silent = tmp_path / "silent"
    for number in (3, 4):
        write(
            silent / f"host{number}.json", {key: value for key, value in trace(0).items() if key != "distributedInfo"}
        )
    for folder in (merged, silent):
        url = object_stores.upload(folder, f"runs/{folder.name}")
        near, far = load(folder), load(url)
        assert far.ranks == near.ranks
        assert far.data_quality["kind"].to_list() == near.data_quality["kind"].to_list()
        assert [far.trace(r).ops.equals(near.trace(r).ops) for r in near.ranks] == [True] * len(near.ranks)
        s3.requests.clear()
        assert [load(url).trace(rank).ops.height for rank in near.ranks]
        assert not s3.got("GET", ".json"), folder


def test_the_header_of_a_zstd_file_is_in_its_first_bytes(s3: Server, tmp_path: Path) -> None:
    plain = gzip.decompress((SAMPLE / "rank00001.pt.trace.json.gz").read_bytes())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace.json.zst").write_bytes(pa.compress(plain, codec="zstd", asbytes=True))
    url = object_stores.upload(tmp_path / "run", "runs/zstd")
    s3.requests.clear()
    assert discovery.read_header(files.find(url).traces[0], cache=False)[1][0].rank == 1
    assert [each.range for each in s3.got("GET", ".zst")] == [f"bytes=0-{HEAD_BYTES - 1}"]


def test_a_source_can_be_sent_to_another_process(s3: Server) -> None:
    for source in load(SAMPLE_URL).sources:
        sent = pickle.loads(pickle.dumps(source))
        assert sent.read().activities.equals(source.read().activities)
        assert sent.origin.sha256() == source.origin.sha256()


def test_a_changed_log_or_trace_is_read_again(s3: Server, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank00000.json", trace(0))
    log = tmp_path / "run" / "rank00000.metrics.jsonl"
    for count in (1, 2):
        log.write_text('{"step": 1, "loss": 2}\n' * count)
        url = object_stores.upload(tmp_path / "run", "runs/changed")
        assert load(url).trace(0).metrics.height == count


def test_a_checkpoint_log_is_read_as_locally(s3: Server) -> None:
    folder = SAMPLE.with_name("healthy-save")
    far, near = load(object_stores.upload(folder, "runs/saved")).trace(0), load(folder).trace(0)
    assert near.checkpoints.height
    assert far.checkpoints.equals(near.checkpoints)


def test_a_memory_snapshot_is_read_from_a_url_and_from_a_remote_run(s3: Server, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank00000.json", trace(0))
    snapshot = tmp_path / "run" / "rank00000.memory.pickle"
    segment = sample_snapshots.segment(0x1000, [(2 << 20, "active_allocated")])
    snapshot.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[]]}, protocol=4))
    url = object_stores.upload(tmp_path / "run", "runs/snapshots")
    near = tracekit("memory", snapshot, "--format", "json")
    assert near.returncode == 0, near.stderr
    far = tracekit("memory", f"{url}/{snapshot.name}", "--format", "json")
    assert far.stdout.replace(url, "RUN") == near.stdout.replace(str(snapshot.parent), "RUN")
    assert pools(load(url)).equals(pools(load(tmp_path / "run")))
    s3.requests.clear()
    assert tracekit("memory", f"{url}/{snapshot.name}").returncode == 0
    assert not s3.got("GET", ".pickle")
    assert "no such file or folder" in error("memory", f"{url}/rank00009.memory.pickle")


def test_a_baseline_and_a_report_may_be_behind_a_url(s3: Server, near: str, tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    assert tracekit("check", SAMPLE, "--format", "json", "--out", saved, "--fail-on", "never").returncode == 0
    assert tracekit("baseline", "save", SAMPLE, "--out", tmp_path / "baseline.json").returncode == 0
    for name in ("report.json", "baseline.json"):
        object_stores.client().put_object(Bucket=BUCKET, Key=name, Body=(tmp_path / name).read_bytes())
    done = tracekit("check", SAMPLE, "--baseline", f"s3://{BUCKET}/baseline.json", "--fail-on", "never")
    expected = tracekit("check", SAMPLE, "--baseline", tmp_path / "baseline.json", "--fail-on", "never")
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    done = tracekit("compare", f"s3://{BUCKET}/report.json", SAMPLE)
    assert (done.returncode, done.stdout) == (0, tracekit("compare", saved, SAMPLE).stdout), done.stderr


# Google Cloud Storage ------------------------------------------------------------------------------------------------


def test_a_run_on_google_cloud_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_stores.gcs_server(monkeypatch) as system:
        system.put(f"{SAMPLE}/", f"{BUCKET}/runs/{SAMPLE.name}/", recursive=True)
        far, near = load(f"gs://{BUCKET}/runs/{SAMPLE.name}"), load(SAMPLE)
        assert far.manifest == near.manifest
        for rank in near.ranks:
            assert far.trace(rank).activities.equals(near.trace(rank).activities)
            assert far.trace(rank).metrics.equals(near.trace(rank).metrics)
        assert all(source.origin.state for source in far.sources)
        with pytest.raises(InputError, match="no such file or folder"):
            load(f"gs://{BUCKET}/nothing")


# Faults --------------------------------------------------------------------------------------------------------------


def _expect_slow_answers(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Set a time limit below the wait of a fault that is slow."""
    if fault.wait_s:
        monkeypatch.setenv(object_storage.TIMEOUT_VARIABLE, "1")


@pytest.mark.parametrize(
    "fault",
    [RESET, Fault(status=503), SLOW, Fault(status=500), Fault(status=429)],
    ids=["cut", "503", "slow", "500", "429"],
)
def test_what_passes_is_retried(s3: Server, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    _expect_slow_answers(monkeypatch, fault)
    s3.fault = times(1, fault, ".gz")
    run = load(SAMPLE_URL)
    assert run.data_quality.is_empty()
    s3.fault = times(1, fault, ".gz")
    assert run.trace(0).activities.equals(load(SAMPLE).trace(0).activities)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (RESET, "the connection was cut"),
        (Fault(status=503), "the server is busy or failed"),
        (SLOW, "no answer within 1 s in 3 attempts; check the network"),
        (Fault(status=403), "access denied (403)"),
    ],
    ids=["cut", "503", "slow", "403"],
)
def test_one_unreadable_trace_of_several_is_an_issue(
    s3: Server, fault: Fault, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _expect_slow_answers(monkeypatch, fault)
    s3.fault = times(9, fault, "rank00001.pt.trace.json.gz")
    run = load(SAMPLE_URL)
    assert run.ranks == (0,)
    (issue,) = run.data_quality.filter(run.data_quality["kind"] == "unreadable").rows(named=True)
    assert issue["rank"] == 1
    assert says in issue["message"]
    assert issue["message"].startswith(f"{SAMPLE_URL}/rank00001.pt.trace.json.gz: ")


def test_a_trace_that_vanishes_or_changes_after_listing_is_left_out(s3: Server, tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        write(tmp_path / "run" / f"rank{rank}.json", trace(rank))
    url = object_stores.upload(tmp_path / "run", "runs/vanishing")
    run = load(url)
    object_stores.client().delete_object(Bucket=BUCKET, Key="runs/vanishing/rank1.json")
    object_stores.client().put_object(Bucket=BUCKET, Key="runs/vanishing/rank2.json", Body=b"{}" * 400)
    assert [t.rank for t in run.traces()] == [0]
    messages = run.data_quality["message"].to_list()
    assert f"{url}/rank1.json: no such file or folder; check the address" in messages
    assert f"{url}/rank2.json: changed while it was being analysed; run the command again" in messages


def test_a_log_or_manifest_that_a_running_training_replaces_is_read_as_it_is_now(s3: Server, tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank00000.json", trace(0))
    write(tmp_path / "run" / "rank00001.json", trace(1))
    log, manifest = (tmp_path / "run" / name for name in ("rank00000.metrics.jsonl", "run.json"))
    log.write_text('{"step": 1, "loss": 2}\n')
    manifest.write_text('{"strategy": "ddp"}')
    url = object_stores.upload(tmp_path / "run", "runs/growing")

    def replace(request: object_stores.Request) -> None:
        """Replace each file once, when its content is requested after the listing."""
        for path in (log, manifest):
            if request.method == "GET" and request.path.endswith(path.name) and path.exists():
                content = path.read_bytes() + b"\n" + (path.read_bytes() if path == log else b"")
                path.unlink()
                object_stores.client().put_object(Bucket=BUCKET, Key=f"runs/growing/{path.name}", Body=content)

    s3.fault = replace
    run = load(url)
    assert run.manifest == {"strategy": "ddp"}
    assert run.trace(0).metrics.height == 2
    assert run.ranks == (0, 1)
    assert run.data_quality.is_empty()


def test_a_run_that_is_being_uploaded_says_what_is_missing(s3: Server, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"world_size": 4}')
    url = object_stores.upload(tmp_path / "run", "runs/uploading")
    assert "no rank has written a trace yet" in error("check", url)
    for rank in range(3):
        write(tmp_path / "run" / f"rank0000{rank}.pt.trace.json.gz", trace(rank, 4))
    write(tmp_path / "run" / "window001" / "rank00000.pt.trace.json.gz", trace(0, 4, start_us=9e6))
    object_stores.upload(tmp_path / "run", "runs/uploading")
    assert load(url).data_quality["message"].to_list() == [
        "3 of 4 ranks have a trace (not 3); the others cannot be analyzed.",
        "Window 1 has no trace of rank 1-2, other windows do.",
    ]


def test_watch_refuses_a_url(s3: Server) -> None:
    assert f"{SAMPLE_URL}: watch reads logs while they grow" in error("watch", SAMPLE_URL)


# The dashboard -------------------------------------------------------------------------------------------------------


def test_the_dashboard_lists_and_opens_runs_behind_the_url_it_was_started_with(s3: Server, tmp_path: Path) -> None:
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    from dashboard import run_catalog
    from tracekit.rules import report_cache

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"world_size": 2, "strategy": "ddp"}')
    for folder in ("", "window001/"):
        for rank in (0, 1):
            write(tmp_path / "run" / f"{folder}rank0000{rank}.pt.trace.json.gz", trace(rank))
    for name in ("a", "b/c"):
        object_stores.upload(tmp_path / "run", f"listed/{name}")
    url = f"s3://{BUCKET}/listed"
    first, second = run_catalog.list_runs([url]).entries
    assert [(each.name, each.path) for each in (first, second)] == [("a", f"{url}/a"), ("b/c", f"{url}/b/c")]
    assert (first.files, first.world_size, first.strategy, first.problem) == (4, 2, "ddp", "")
    assert first.is_live  # it was uploaded a moment ago
    assert not s3.traces_fetched()
    report_cache.report(first.path)
    first, second = run_catalog.list_runs([url]).entries
    assert first.summary is not None
    assert first.summary.ranks == 2
    assert second.summary is None
    s3.requests.clear()
    assert report_cache.report(first.path).run.ranks == (0, 1)
    assert not s3.traces_fetched()
    object_stores.upload(tmp_path / "run" / "window001", "listed/a/window002")
    changed = run_catalog.list_runs([url]).entries[0]
    assert changed.stamp != first.stamp
    assert changed.summary is None


def test_the_dashboard_says_why_a_url_cannot_be_listed(s3: Server) -> None:
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    from dashboard import run_catalog

    (entry,) = run_catalog.list_runs([f"s3://{BUCKET}/nothing"]).entries
    assert entry.problem == f"s3://{BUCKET}/nothing: no such file or folder; check the address"
    assert "no such file or folder" in error("dashboard", f"s3://{BUCKET}/nothing")


def test_a_half_written_file_is_read_as_far_as_locally(s3: Server, tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "half")
    victim = tmp_path / "half" / "rank00001.pt.trace.json.gz"
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) * 2 // 3])
    url = object_stores.upload(tmp_path / "half", "runs/half")
    near = report(tmp_path / "half")
    assert report(url) == near
    assert "DATA001" in near


@pytest.mark.parametrize("content", [b"", b"{}", gzip.compress(b'{"traceEvents": ')[:30], b"x" * 700_000], ids=len)
def test_files_that_are_no_traces_are_described_as_locally(s3: Server, tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "run" / "rank0.json", trace(0))
    (tmp_path / "run" / "rank1.json.gz").write_bytes(content)
    url = object_stores.upload(tmp_path / "run", f"runs/no-trace-{len(content)}")
    near, far = load(tmp_path / "run"), load(url)
    expected = [text.replace(str(tmp_path / "run"), url) for text in near.data_quality["message"]]
    assert far.data_quality["message"].to_list() == expected
    assert len(expected) == 1
    s3.requests.clear()
    assert load(url).data_quality.equals(far.data_quality)
    assert not s3.got("GET", "rank1.json.gz")


def error(*words: str) -> str:
    """Return what a command that fails prints: one line."""
    done = tracekit(*words)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_errors_of_a_listing_are_one_clear_line(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"s3://{BUCKET}/nothing: no such file or folder; check the address" in error(
        "check", f"s3://{BUCKET}/nothing"
    )
    assert "no such file or folder" in error("summary", "s3://no-such-bucket/run")
    s3.fault = lambda _: Fault(status=403)
    assert f"{SAMPLE_URL}: access denied (403); check which account is used" in error("check", SAMPLE_URL)
    s3.fault = lambda _: Fault(status=503)
    assert "the server is busy or failed" in error("check", SAMPLE_URL)
    assert "in 3 attempts" in error("check", SAMPLE_URL)
    with monkeypatch.context() as impatient:
        s3.fault = lambda _: SLOW
        _expect_slow_answers(impatient, SLOW)
        assert "no answer within 1 s in 3 attempts" in error("check", SAMPLE_URL)
    s3.fault = lambda _: Fault(status=403, body=b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>")
    assert "no valid credentials" in error("check", SAMPLE_URL)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert "cannot connect to the server" in error("check", SAMPLE_URL)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "AWS_PROFILE" in error("check", SAMPLE_URL)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(registered, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    said = error("check", SAMPLE_URL)
    assert f"{SAMPLE_URL}: the package for s3:// is not installed" in said
    assert "pip install 'torch-tracekit[remote]'" in said


def test_one_folder_that_cannot_be_listed_is_an_error_not_a_gap(s3: Server, tmp_path: Path) -> None:
    for window in ("window001", "window002"):
        write(tmp_path / "run" / window / "rank0.json", trace(0))
    url = object_stores.upload(tmp_path / "run", "runs/partly")
    s3.fault = lambda request: Fault(status=403) if "window002" in request.path else None
    with pytest.raises(InputError, match="access denied"):
        load(url)


def test_headers_are_read_concurrently(s3: Server, tmp_path: Path) -> None:
    for rank in range(8):
        write(tmp_path / "run" / f"rank{rank}.json", trace(rank))
    url = object_stores.upload(tmp_path / "run", "runs/eight")
    inside, most = 0, 0

    def counted(request: object) -> Fault | None:
        nonlocal inside, most
        if "rank" in request.path and request.method == "GET":
            inside += 1
            most = max(most, inside)
            barrier.wait(timeout=300)  # all eight arrive before one is answered
            inside -= 1
        return None

    barrier = threading.Barrier(8)
    s3.fault = counted
    assert load(url).ranks == tuple(range(8))
    assert most == 8


# Web servers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"has_ranges": False, "has_etags": False}, marks=pytest.mark.accuracy)],
    ids=["etags", "plain"],
)
def test_a_run_on_a_web_server_is_the_local_run(
    tmp_path: Path, near: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SAMPLE, tmp_path / "runs" / SAMPLE.name)
    write(tmp_path / "runs" / "other" / "rank7.json", trace(7))
    with object_stores.web_server(tmp_path, **options) as web:
        url = f"{web.address}/runs/{SAMPLE.name}"
        assert report(url) == near
        web.requests.clear()
        assert report(url) == near
        assert not web.traces_fetched()
        assert load(f"{url}/rank00001.pt.trace.json.gz").trace(1).metrics.height
        assert load(f"{url}/rank*.json.gz").ranks == (0, 1)
        web.fault = times(1, RESET, ".gz")
        assert load(url, cache=False).trace(1).activities.height
        web.fault = lambda _: Fault(status=403)
        assert "access denied (403)" in error("check", url)
        web.fault = lambda _: SLOW
        _expect_slow_answers(monkeypatch, SLOW)
        assert "no answer within 1 s in 3 attempts" in error("check", url)


def test_a_web_folder_without_index_page_says_so(tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank0.json", trace(0))
    with object_stores.web_server(tmp_path, has_index=False) as web:
        assert "403" in error("check", f"{web.address}/run/")
        assert "no such file or folder" in error("check", f"{web.address}/gone/rank0.json")
        assert load(f"{web.address}/run/rank0.json").ranks == (0,)
    (tmp_path / "empty").mkdir()
    with object_stores.web_server(tmp_path) as web:
        assert "the server lists no files there; name the trace files" in error("check", f"{web.address}/empty/")


def test_secrets_in_a_url_are_shown_nowhere(tmp_path: Path) -> None:
    write(tmp_path / "run" / "rank0.json", trace(0))
    with object_stores.web_server(tmp_path) as web:
        signed = f"{web.address}/run/rank0.json?X-Amz-Signature=abcsecret"
        done = tracekit("check", signed, "--format", "json", "--fail-on", "never")
        assert "abcsecret" not in done.stdout + done.stderr
        assert json.loads(done.stdout)["inputs"][0]["path"] == f"{web.address}/run/rank0.json"
        web.fault = lambda _: Fault(status=403)
        assert "abcsecret" not in error("check", signed)


def test_an_error_page_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text("<!doctype html><p>Please log in")
    with object_stores.web_server(tmp_path) as web, pytest.raises(BadTraceError, match="this is a web page"):
        load(f"{web.address}/rank0.json")

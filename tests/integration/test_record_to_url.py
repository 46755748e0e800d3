"""`tracekit record --out s3://…`: windows are uploaded while the training goes on, to a real S3 server."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests.integration.recorded import Done, command, do, finish, launched, script, start, wait_until
from tests.support import object_stores
from tests.support.object_stores import BUCKET, Fault, Server, keys, times
from tracekit.capture import Recorder, uploader
from tracekit.conventions import object_storage
from tracekit.ingest.loader import load

STEPS = ("--steps", "3:5", "--every", "10", "--warmup", "1")
SINGLE = script("plain_single.py")


@pytest.fixture(scope="module")
def server():
    with object_stores.s3_server() as server:
        yield server


@pytest.fixture
def s3(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The S3 server without faults; settings that no busy machine exceeds, and a temporary folder of this test."""
    server.fault = lambda _: None
    server.requests.clear()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv(object_storage.TIMEOUT_VARIABLE, "300")
    monkeypatch.setenv(object_storage.ATTEMPTS_VARIABLE, "3")
    return server


def recorded(folder: Path, url: str, training: list[str] = SINGLE, *options: str) -> Done:
    return do(command(*STEPS, *options, "--out", url, "--", *training), folder)


def left_over(folder: Path) -> list[str]:
    """Return the files that remain in the temporary folder."""
    return sorted(path.name for path in (folder / "tmp").rglob("*") if path.is_file() and "tracekit" in str(path))


def test_every_rank_uploads_its_files_and_nothing_remains_on_disk(s3: Server, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/runs/ddp"
    training = launched(2, "plain_ddp.py", "--steps", "16", "--accumulate", "1")
    done = recorded(tmp_path, url, training)
    assert done.code == 0, done.err
    names = [f"rank0000{rank}.{kind}" for rank in (0, 1) for kind in ("pt.trace.json.gz", "metrics.jsonl")]
    names += [f"window001/rank0000{rank}.pt.trace.json.gz" for rank in (0, 1)]
    names += [".training", "run.json", "attempts.jsonl"]
    is_logged = "runs/ddp/rank00000.checkpoint.jsonl" in keys()  # a save so small is logged only if it was slow
    names += ["rank00000.checkpoint.jsonl"] if is_logged else []
    assert keys("runs/ddp/") == sorted(f"runs/ddp/{name}" for name in names), done.err
    assert left_over(tmp_path) == []
    run = load(url, cache=False)
    assert {(source.window, source.rank) for source in run.sources} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert [window["first_step"] for window in run.manifest["windows"]] == [3, 13]
    assert run.trace(1, 0).metrics["step"].n_unique() == 16
    assert f"tracekit: recorded ranks 0, 1 in {url}" in done.said
    assert f"tracekit: next: tracekit check {url}" in done.said


def test_what_passes_is_retried_and_what_does_not_is_named(s3: Server, tmp_path: Path) -> None:
    object_stores.client().put_object(Bucket=BUCKET, Key="runs/busy/run.json", Body=b"{}")  # of another training
    s3.fault = times(2, Fault(status=503), method="PUT")
    done = recorded(tmp_path, f"s3://{BUCKET}/runs/busy", SINGLE, "--quiet")
    assert (done.code, done.said) == (0, []), done.err
    assert keys("runs/busy/") == ["runs/busy/run.json"]
    assert "runs/busy-2/window001/rank00000.pt.trace.json.gz" in keys()
    s3.fault = lambda request: Fault(status=403) if request.method == "PUT" and ".trace.json" in request.path else None
    done = recorded(tmp_path, f"s3://{BUCKET}/runs/denied", SINGLE, "--quiet")
    assert done.code == 0, done.err
    first, last = done.said
    assert "rank 0: rank00000.pt.trace.json.gz is not uploaded yet: s3://bucket/runs/denied/" in first
    assert "access denied (403)" in first
    folder = Path(last.partition("they are in ")[2].partition(": copy them")[0])
    assert (folder / "rank00000.pt.trace.json.gz").exists()
    assert (folder / "window001" / "rank00000.pt.trace.json.gz").exists()
    assert f"copy them to s3://{BUCKET}/runs/denied" in last
    assert {"runs/denied/run.json", "runs/denied/rank00000.metrics.jsonl"} <= set(keys("runs/denied/"))


def test_a_killed_rank_loses_no_complete_window(s3: Server, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/runs/killed"
    training = script("plain_single.py", "long")
    process = start(
        command(*STEPS[:2], "--every", "50", "--out", url, "--", "bash", "-c", f"{' '.join(training)} & echo $!; wait"),
        tmp_path,
    )
    pid = int(process.stdout.readline())
    # Lines of the metrics log reach the file about once a second: 200 steps take two, as each sleeps for 10 ms.
    wait_until(lambda: "runs/killed/window004/rank00000.pt.trace.json.gz" in keys("runs/killed/"), every_s=0.5)
    os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert "rank 0 was killed while recording" in done.err
    assert {"runs/killed/run.json", "runs/killed/rank00000.metrics.jsonl"} <= set(keys("runs/killed/"))
    assert load(url, cache=False).trace(0).metrics.height
    assert not [name for name in left_over(tmp_path) if name.endswith(".gz")]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://no-such-bucket/run", "no such file or folder"),
        ("https://host/run", "a web server takes no files"),
        ("nosuch://bucket/run", "nosuch://bucket/run: cannot be accessed (Protocol not known: nosuch"),
    ],
)
def test_an_unusable_url_ends_the_command_before_the_training_starts(
    s3: Server, tmp_path: Path, url: str, says: str
) -> None:
    done = recorded(tmp_path, url, ["touch", "started"])
    assert done.code == 2
    assert says in done.err
    assert not (tmp_path / "started").exists()


def train(recorder: Recorder, steps: int) -> None:
    weight = torch.zeros(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        weight.sum().backward()
        optimizer.step()
        recorder.step()


def test_no_step_waits_for_an_upload_and_what_waits_is_bounded(
    s3: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = threading.Event()

    def hold(request: object_stores.Request) -> None:
        if request.method == "PUT":
            answer.wait(300)

    s3.fault = hold
    recorder = Recorder(
        f"s3://{BUCKET}/runs/slow", steps=(1, 2), every=3, warmup=1, disk_budget_bytes=1, scratch=tmp_path / "local"
    )
    with recorder:
        train(recorder, 2)
        recorder._profiler.finish()  # the first window is written: more than one byte waits
        train(recorder, 8)
        assert not keys("runs/slow/")
        assert recorder.steps_done == 10  # while no upload was answered
        assert len(list(recorder.folder.rglob("*.gz"))) == 1
        answer.set()
    refusal = "rank 0: steps 4:5 are not recorded: RuntimeError: uploads to s3://bucket/runs/slow are 0 MiB behind"
    assert refusal in capfd.readouterr().err
    assert "runs/slow/rank00000.pt.trace.json.gz" in keys("runs/slow/")
    assert not recorder.folder.exists()


def test_the_wait_at_the_end_is_bounded(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = threading.Event()
    s3.fault = lambda request: answer.wait(300) and None
    monkeypatch.setenv(uploader.WAIT_VARIABLE, "0.2")
    with Recorder(f"s3://{BUCKET}/runs/late", steps=(1, 2), warmup=1, scratch=tmp_path / "local") as recorder:
        train(recorder, 3)
    said = capfd.readouterr().err
    assert "after 0.2 s the upload to s3://bucket/runs/late continues in process" in said
    assert str(recorder.folder) in said
    answer.set()
    wait_until(lambda: "runs/late/run.json" in keys("runs/late/"))
    wait_until(lambda: not recorder.folder.exists())


def test_a_rank_joins_a_folder_that_another_rank_claims_while_it_looks(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, look = f"s3://{BUCKET}/runs/race", uploader._has_files

    def upload_first(found: str) -> bool:
        monkeypatch.setattr(uploader, "_has_files", look)
        _upload(tmp_path / "one", url, rank=1)
        return look(found)

    monkeypatch.setattr(uploader, "_has_files", upload_first)
    _upload(tmp_path / "zero", url, rank=0)
    assert keys("runs/race") == [
        f"runs/race/{name}" for name in (".training", "rank00000.metrics.jsonl", "rank00001.metrics.jsonl")
    ]


def _upload(folder: Path, url: str, *, rank: int) -> None:
    folder.mkdir()
    log = folder / f"rank{rank:05}.metrics.jsonl"
    log.write_text("{}\n")
    uploader.Uploader(folder, url, rank, training="ours", leads=False).upload(log)

"""Files of other tools in a run that is shared: logs and execution traces are scrubbed, snapshots are not copied."""

import gzip
import shutil
from pathlib import Path

import tracekit
from tracekit.ingest import scrub

RECORDINGS = Path(__file__).parents[1] / "recordings"
HOST, USER = "gpu-node-17", "rosa"


def test_io_logs_come_without_the_host_users_and_folders_and_with_all_calls(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(RECORDINGS / "dftracer", run, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (run / "rank00000.memory.pickle").write_bytes(f"/home/{USER}/train.py".encode())
    for log in run.glob("*.pfw.gz"):
        text = gzip.decompress(log.read_bytes()).replace(b'"name":"host"', f'"name":"{HOST}"'.encode())
        text = text.replace(b"/home/user/", f"/home/{USER}/".encode()).replace(b"/data/run/", b"/mnt/secret-team/")
        log.write_bytes(gzip.compress(text))
    assert HOST.encode() in b"".join(gzip.decompress(log.read_bytes()) for log in run.glob("*.pfw.gz"))
    done = scrub.scrub(run, out)
    assert dict(done.left_out) == {"rank00000.memory.pickle": "a kind of file that cannot be scrubbed"}
    logs = sorted(out.glob("*.pfw.gz"))
    assert len(logs) == 3
    for content in (gzip.decompress(log.read_bytes()) for log in logs):
        assert not any(word.encode() in content for word in (HOST, USER, "secret-team"))
    there, back = (tracekit.load(path, cache=False).trace(0).io_calls for path in (run, out))
    same = ["name", "kind", "start_ns", "dur_ns", "bytes", "process", "thread"]
    assert back.select(same).equals(there.select(same))
    assert back["file"].n_unique() == there["file"].n_unique()


def test_execution_traces_come_with_the_shapes_that_they_add(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(RECORDINGS / "execution_traces" / "without_shapes", run)
    for file in run.glob("*.et.json.gz"):
        text = gzip.decompress(file.read_bytes()).replace(
            b'"outputs"', f'"kernel_file": "/home/{USER}/x.py", "outputs"'.encode(), 5
        )
        file.write_bytes(gzip.compress(text))
    scrub.scrub(run, out)
    for file in out.glob("*.et.json.gz"):
        assert USER.encode() not in gzip.decompress(file.read_bytes())
    there, back = (tracekit.load(path, cache=False).trace(0).ops for path in (run, out))
    assert back["shapes"].equals(there["shapes"])
    assert there["shapes"].null_count() < there.height

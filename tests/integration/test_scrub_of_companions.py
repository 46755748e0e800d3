"""Files of other tools in a run that is shared: logs, execution traces, snapshots; what cannot be scrubbed is named."""

import gzip
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tracekit.cli.commands import scrub as scrub_command
from tracekit.conventions import plain_pickles
from tracekit.ingest import scrub
from tracekit.ingest.readers import memory_snapshots
from tracekit.report.render import text as render_text

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
    assert dict(done.left_out) == {"rank00000.memory.pickle": "not a pickle of protocol 2 or later"}
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


def test_memory_snapshots_come_without_users_hosts_and_folders_and_with_all_blocks(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    packed = RECORDINGS / "out_of_memory" / "leak" / "rank00000.memory.pickle.gz"
    snapshot = pickle.loads(gzip.decompress(packed.read_bytes()))
    secret = f"/home/{USER}/secret-team/train.py"
    for event in (e for trace in snapshot["device_traces"] for e in trace):
        for frame in event.get("frames", []):
            frame["filename"] = secret if frame["filename"].endswith(".py") else frame["filename"]
    path = run / "rank00000.memory.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    assert USER.encode() in path.read_bytes()
    done = scrub.scrub(run, out)
    assert not done.left_out
    copy = out / path.name
    assert not any(word.encode() in copy.read_bytes() for word in (USER, "secret-team"))
    there, back = (memory_snapshots.read(str(of)) for of in (path, copy))
    assert there.events.height > 100
    for name in ("segments", "blocks", "events", "stacks"):
        assert back.tables[name].equals(there.tables[name])
    assert back.frames.drop("file").equals(there.frames.drop("file"))
    assert back.frames["file"].str.ends_with("/train.py").sum() == (there.frames["file"] == secret).sum() > 0


def test_one_snapshot_can_be_scrubbed_alone(tmp_path):
    path, out = tmp_path / "oom.pickle", tmp_path / "shared"
    path.write_bytes(pickle.dumps({"segments": [], "name": f"/home/{USER}/a/train.py"}, protocol=2))
    scrub.scrub(path, out)
    assert pickle.loads(out.read_bytes()) == {"segments": [], "name": "<path1>/train.py"}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 90), 1 << 90) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner, inner, inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=60, deadline=None)
@given(value=PLAIN, protocol=st.integers(2, 5))
def test_any_plain_values_come_back_from_the_copy_if_nothing_is_hidden(value, protocol):
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "a.pickle"), Path(folder, "b.pickle")
        source.write_bytes(pickle.dumps([value, value], protocol=protocol))
        assert not plain_pickles.why_not(source)
        plain_pickles.write(source, target, lambda text: text)
        assert pickle.loads(target.read_bytes()) == [value, value]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.pickle", pickle.dumps(Path("x")), "a pickle with objects or bytes"),
        ("a.pickle", pickle.dumps({"env": b"/home/rosa"}), "a pickle with objects or bytes"),
        ("a.pickle", b"\x80\x04\x8c\xff", "a damaged pickle"),
        ("a.pickle", b"\x80\x04}", "a damaged pickle"),
        ("a.pickle", b"\x80\x04G123", "a damaged pickle"),
        ("a.pickle", pickle.dumps({"a": 1})[:-1] + b"\xfe", "a damaged pickle"),
        ("a.sqlite", b"SQLite format 3\0", "a database, such as an export of Nsight Systems"),
        ("a.nsys-rep", b"x", "a database, such as an export of Nsight Systems"),
        ("a.pftrace.gz", b"x", "scrub the run that it was exported from"),
        ("a.tar.gz", b"x", "an archive: unpack it"),
        ("rank0.json.zst", b"x", "decompress it"),
        ("a.bin", b"x", "a kind of file that cannot be scrubbed"),
    ],
)
def test_what_cannot_be_scrubbed_is_not_copied_and_named_in_one_line(tmp_path, name, content, reason):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / name).write_bytes(content)
    text = render_text.render(scrub_command.document(scrub.scrub(run, out)), width=100)
    assert [path.name for path in out.iterdir()] == ["run.json"]
    (line,) = [line for line in text.splitlines() if line.startswith(f"  left out {name}: ")]
    assert reason in line

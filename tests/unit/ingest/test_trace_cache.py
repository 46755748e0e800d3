import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import polars as pl
import pytest

from tests.support import drawn_traces
from tracekit.errors import BadTraceError
from tracekit.ingest import disk_cache, loader, trace_cache
from tracekit.ingest.disk_cache import DiskCache
from tracekit.ingest.trace_cache import TraceCache
from tracekit.model import schema
from tracekit.model.source import Source

TINY = {
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 5.5},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 8.0, "dur": 2.0},
    ],
    "distributedInfo": {"rank": 0, "world_size": 1},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(disk_cache.MAX_BYTES_VARIABLE, raising=False)
    return tmp_path / "cache" / "store"


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "rank00000.pt.trace.json").write_text(json.dumps(TINY))
    return run


class Counted:
    """A source of one trace that counts how often it was read."""

    def __init__(self, path, trace):
        self.reads = 0
        self._trace = trace
        self.source = Source(trace.rank, trace.window, str(path), 0, self.read)

    def read(self):
        self.reads += 1
        return self._trace


def _trace(path, name="aa"):
    trace = drawn_traces.trace(f"step 0000\ncompute .{name}.")
    return dataclasses.replace(trace, path=str(path), header={"world_size": 8, "text": "日本\ud800"})


def _tables(trace):
    return {name: table.rows() for name, table in trace.tables.items()}


def cache_in(folder, max_bytes=disk_cache.DEFAULT_MAX_BYTES):
    """Return a cache of traces in a folder."""
    return TraceCache(DiskCache(folder, ".trace", max_bytes))


def _entries(folder):
    return sorted(folder.glob("*.trace"))


def _files(folder):
    """Return the names of all files of a cache but its lock."""
    return sorted(file.name for file in folder.iterdir() if file.name != ".lock")


def test_a_trace_from_the_cache_is_the_trace_that_was_read(folder, run):
    first = loader.load(run).trace(0)
    second = loader.load(run).trace(0)
    assert type(second) is trace_cache.StoredTrace
    assert type(first) is not trace_cache.StoredTrace
    for name, table in schema.TABLES.items():
        assert getattr(second, name).schema == table.schema
        assert getattr(second, name).equals(getattr(first, name))
    assert (second.rank, second.window, second.path, second.header) == (0, 0, first.path, first.header)


def test_a_table_is_read_on_first_access_and_then_retained(folder, tmp_path):
    (tmp_path / "t.json").write_text("{}")
    counted = Counted(tmp_path / "t.json", _trace(tmp_path / "t.json"))
    source = trace_cache.cached_source(counted.source)
    source.read()
    trace = source.read()
    assert counted.reads == 1
    assert not any(isinstance(value, pl.DataFrame) for value in vars(trace).values())
    assert trace.activities is trace.activities
    assert [name for name, value in vars(trace).items() if isinstance(value, pl.DataFrame)] == ["activities"]


def test_a_stored_trace_can_be_changed_and_sent_like_any_other(folder, run):
    loader.load(run)
    trace = loader.load(run).trace(0)
    assert dataclasses.replace(trace, rank=5).activities.equals(trace.activities)
    source = dataclasses.replace(loader.load(run).sources[0])
    sent = pickle.loads(pickle.dumps(source.read()))
    assert _tables(sent) == _tables(trace)
    with pytest.raises(AttributeError, match="no attribute 'kernels'"):
        trace.kernels  # noqa: B018


def test_a_run_with_the_cache_left_out_neither_reads_nor_writes_it(folder, run):
    loader.load(run, cache=False)
    assert not folder.exists()


def test_the_cache_is_this_users_alone(folder, run):
    before = os.umask(0)
    try:
        loader.load(run)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(entry.stat().st_mode) for entry in _entries(folder)] == [0o600]


def test_a_folder_open_to_others_is_closed(folder, run):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    loader.load(run)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# What is stale --------------------------------------------------------------------------------------------------------


def _touch(run):
    os.utime(run / "rank00000.pt.trace.json", ns=(1, 1))


def _same_size_and_time(run):
    path = run / "rank00000.pt.trace.json"
    times = path.stat()
    path.write_text(path.read_text().replace("aten::mm", "aten::xx"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _new_metrics(run):
    (run / "rank00000.metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n')


def _new_checkpoints(run):
    line = {"checkpoint": "a", "operation": "save", "stage": "total", "start_ns": 1, "dur_ns": 2, "rank": 0}
    (run / "rank00000.checkpoint.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize("change", [_touch, _same_size_and_time, _new_metrics, _new_checkpoints])
def test_what_changed_on_disk_is_read_again(folder, run, change):
    loader.load(run)
    change(run)
    assert type(loader.load(run).trace(0)) is not trace_cache.StoredTrace
    fresh, stored = loader.load(run, cache=False).trace(0), loader.load(run).trace(0)
    assert type(stored) is trace_cache.StoredTrace
    assert _tables(stored) == _tables(fresh)


def test_a_log_that_grows_is_read_again(folder, run):
    _new_metrics(run)
    loader.load(run)
    with (run / "rank00000.metrics.jsonl").open("a") as log:
        log.write('{"step": 1, "loss": 1.25}\n')
    assert loader.load(run).trace(0).metrics["value"].to_list() == [1.5, 1.25]


def test_a_log_in_the_folder_above_a_window_counts(folder, run):
    window = run / "window001"
    window.mkdir()
    (window / "rank00000.pt.trace.json").write_text(json.dumps(TINY))
    loader.load(run)
    _new_metrics(run)
    assert loader.load(run).trace(0, window=1).metrics.height == 1


def test_another_version_of_the_code_reads_again(folder, run, monkeypatch):
    loader.load(run)
    monkeypatch.setattr(trace_cache, "_code", lambda: "the next version")
    assert type(loader.load(run).trace(0)) is not trace_cache.StoredTrace


def test_the_code_that_reads_is_part_of_the_key(monkeypatch, tmp_path):
    trace_cache._code.cache_clear()
    before = trace_cache._code()
    package = Path(trace_cache.__file__).parents[1]
    for pattern in trace_cache._READING_CODE:
        for file in package.glob(pattern):
            target = tmp_path / file.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    monkeypatch.setattr(trace_cache, "__file__", str(tmp_path / "ingest" / "trace_cache.py"))
    trace_cache._code.cache_clear()
    assert trace_cache._code() == before
    with (tmp_path / "ingest" / "readers" / "kineto" / "reader.py").open("a") as reader:
        reader.write("# changed\n")
    trace_cache._code.cache_clear()
    assert trace_cache._code() != before
    monkeypatch.undo()
    trace_cache._code.cache_clear()


def test_a_file_that_changes_while_it_is_read_is_not_stored(folder, tmp_path):
    path = tmp_path / "t.json"
    path.write_text("{}")

    def read():
        path.write_text("{} ")
        return _trace(path)

    trace_cache.cached_source(Source(0, 0, str(path), 0, read)).read()
    assert not folder.exists()


def test_ranks_and_windows_of_one_file_are_entries_of_their_own(folder, tmp_path):
    (tmp_path / "t.json").write_text("{}")
    trace = _trace(tmp_path / "t.json")
    for rank, window in ((0, 0), (1, 0), (0, 1)):
        placed = dataclasses.replace(trace, rank=rank, window=window)
        trace_cache.cached_source(Counted(tmp_path / "t.json", placed).source).read()
    assert len(_entries(folder)) == 3


# What cannot be trusted -----------------------------------------------------------------------------------------------


def _flip(entry):
    raw = bytearray(entry.read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    entry.write_bytes(raw)


def _cut(entry):
    entry.write_bytes(entry.read_bytes()[:-40])


def _empty(entry):
    entry.write_bytes(b"")


def _rubbish(entry):
    entry.write_bytes(os.urandom(4096))


def _link(entry):
    target = entry.with_name("elsewhere")
    entry.rename(target)
    entry.symlink_to(target)


def _pipe(entry):
    entry.unlink()
    os.mkfifo(entry)


@pytest.mark.parametrize("damage", [_flip, _cut, _empty, _rubbish, _link, _pipe])
def test_an_entry_that_cannot_be_trusted_is_dropped_and_the_trace_read_again(folder, run, damage):
    loader.load(run)
    (entry,) = _entries(folder)
    damage(entry)
    whole = _tables(loader.load(run, cache=False).trace(0))
    assert _tables(loader.load(run).trace(0)) == whole
    assert _tables(loader.load(run).trace(0)) == whole
    stored = loader.load(run).trace(0)
    assert type(stored) is trace_cache.StoredTrace
    assert _tables(stored) == whole
    assert not entry.is_symlink()


def test_a_table_of_another_shape_is_not_used(folder, tmp_path):
    store = cache_in(folder)
    trace = _trace("t")
    store.put("key", dataclasses.replace(trace, lanes=trace.activities))
    stored = store.get("key", lambda: trace)
    assert stored is not None
    assert stored.lanes.equals(trace.lanes)
    assert _entries(folder) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file somebody else's")
@pytest.mark.parametrize("whose", ["entry", "folder"])
def test_files_of_other_users_are_not_trusted(folder, run, whose):
    loader.load(run)
    os.chown(_entries(folder)[0] if whose == "entry" else folder, 12345, 12345)
    assert type(loader.load(run).trace(0)) is not trace_cache.StoredTrace


def test_an_entry_that_disappears_while_its_trace_is_in_use_is_read_again(folder, tmp_path):
    (tmp_path / "t.json").write_text("{}")
    counted = Counted(tmp_path / "t.json", _trace(tmp_path / "t.json"))
    source = trace_cache.cached_source(counted.source)
    source.read()
    cached = source.read()
    _entries(folder)[0].unlink()
    assert cached.activities.equals(counted.read().activities)
    assert cached.lanes.height == 1
    assert counted.reads == 3


def test_a_file_that_changed_is_not_mixed_with_its_cached_trace(folder, run, wording):
    loader.load(run)
    cached = loader.load(run).trace(0)
    _touch(run)
    _entries(folder)[0].unlink()
    with wording.raises(BadTraceError):
        cached.ops  # noqa: B018


# Where it cannot be had -----------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_is_logged_once(run, tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv(disk_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    caplog.set_level(logging.DEBUG, "tracekit.ingest.disk_cache")
    for _ in range(3):
        assert loader.load(run).trace(0).ops.height == 2
    assert len(caplog.records) == 1
    assert "continuing without it" in caplog.text


def test_a_full_disk_leaves_nothing_behind(folder, tmp_path):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # no file beyond 100 bytes: writing fails in the middle
    try:
        cache_in(folder).put("key", _trace("t"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert _files(folder) == []


def test_a_trace_that_json_cannot_represent_is_not_stored(folder):
    cache_in(folder).put("key", dataclasses.replace(_trace("t"), header={"odd": object()}))
    assert _files(folder) == []


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    cache = TraceCache(DiskCache.of_user("traces", {}))
    cache.put("key", _trace("t"))
    assert cache.get("key", pytest.fail) is None
    assert cache.disk.folder == disk_cache.NOWHERE


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HOME": "/h"}, Path.home() / ".cache/tracekit/store"),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/tracekit/store")),
        ({"XDG_CACHE_HOME": "/x", "TRACEKIT_CACHE_DIR": "/own"}, Path("/own/store")),
    ],
)
def test_the_environment_names_the_folder(environment, folder):
    assert DiskCache.of_user("traces", environment) == cache_in(folder).disk


def test_the_environment_bounds_the_size():
    environment = {"TRACEKIT_CACHE_DIR": "/c", "TRACEKIT_CACHE_MAX_BYTES": "5"}
    assert DiskCache.of_user("traces", environment) == cache_in(Path("/c/store"), 5).disk


def test_all_kinds_share_the_limit_and_what_was_used_last_stays(folder):
    traces, answers = (DiskCache(folder, disk_cache.KINDS[kind], 100) for kind in ("traces", "answers"))
    traces.put("first", lambda file: file.write(b"x" * 60))
    answers.put("second", lambda file: file.write(b"x" * 30))
    assert traces.get("first", lambda file: file.read()) is not None
    os.utime(answers.path("second"), ns=(1, 1))
    answers.put("third", lambda file: file.write(b"x" * 30))
    assert [cache.size_bytes() for cache in (traces, answers)] == [60, 30]
    assert answers.get("second", lambda file: file.read()) is None


# Bounds ---------------------------------------------------------------------------------------------------------------


def _size_of_one(folder):
    cache_in(folder).put("probe", _trace("t"))
    size = cache_in(folder).disk.size_bytes()
    cache_in(folder).disk.clear()
    return size


def test_the_least_recently_used_go_first(folder):
    size = _size_of_one(folder)
    store = cache_in(folder, max_bytes=3 * size + size // 2)
    for index, key in enumerate("abc"):
        store.put(key, _trace("t"))
        os.utime(folder / f"{key}.trace", ns=(index, index))
    assert store.get("a", lambda: _trace("t")) is not None  # now the most recently used
    store.put("d", _trace("t"))
    assert [entry.stem for entry in _entries(folder)] == ["a", "c", "d"]
    assert store.disk.size_bytes() <= store.disk.max_bytes


def test_what_is_larger_than_the_whole_cache_is_not_stored_and_evicts_nothing(folder):
    cache_in(folder).put("small", _trace("t"))
    cache_in(folder, max_bytes=10).put("large", _trace("t"))
    assert [entry.stem for entry in _entries(folder)] == []  # "small" is past the new bound as well
    cache_in(folder, max_bytes=0).put("none", _trace("t"))
    assert _files(folder) == []


def test_clearing_frees_all_entries(folder):
    store = cache_in(folder)
    store.put("a", _trace("t"))
    size = store.disk.size_bytes()
    assert size > 0
    assert store.disk.clear() == size
    assert store.disk.size_bytes() == 0
    assert cache_in(folder / "missing").disk.clear() == 0


# Concurrent processes -------------------------------------------------------------------------------------------------

# Programs of other processes; `cache_in`, `_trace` and `_large_trace` are those of this module.
_IMPORTS = """
import os, sys
from pathlib import Path
from tests.unit.ingest.test_trace_cache import _large_trace, _trace, cache_in
folder = Path(sys.argv[1])
"""
_WRITE_THREE_KEYS = """
store = cache_in(folder)
for index in range(30):
    store.put(f"key{index % 3}", _trace("t"))
    cached = store.get(f"key{(index + 1) % 3}", lambda: _trace("t"))
    assert cached is None or cached.activities["name"].to_list() == ["a"]
"""
_WRITE_UNTIL_KILLED = """
store, trace = cache_in(folder), _large_trace()
while True:
    store.put("key", trace)
"""
_EVICT_IN_EACH_PUT = """
from tracekit.ingest.disk_cache import DiskCache
evict = DiskCache._evict

def logged(cache):
    log = os.open(folder.parent / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, b"begin %d\\n" % os.getpid())
    for _ in range(20):  # so that another process would have the time to begin
        evict(cache)
    os.write(log, b"end %d\\n" % os.getpid())

DiskCache._evict = logged
store = cache_in(folder, max_bytes=int(sys.argv[2]))
for index in range(20):
    store.put(f"{os.getpid()}-{index}", _trace("t"))
"""
_HOLD_THE_LOCK = """
import fcntl
lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
_WRITE_FOR_LONG = """
with cache_in(folder).disk.writing("slow") as file:
    file.write(b"first half, ")
    file.flush()
    print("written", flush=True)
    sys.stdin.read()
    file.write(b"second half")
"""


def _start(program, folder, *arguments):
    """Start another process. Not by multiprocessing: it would import the `__main__` of the test session."""
    command = [sys.executable, "-c", _IMPORTS + program, str(folder), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[3]), *sys.path))}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def _running(program, folder):
    """Start another process, wait for its first line, and let it end afterwards."""
    with _start(program, folder) as process:
        assert process.stdout.readline()
        yield process
        process.communicate()
    assert process.returncode == 0


def test_concurrent_writers_leave_complete_entries(folder):
    writers = [_start(_WRITE_THREE_KEYS, folder) for _ in range(3)]
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert _files(folder) == ["key0.trace", "key1.trace", "key2.trace"]
    for key in ("key0", "key1", "key2"):
        cached = cache_in(folder).get(key, lambda: pytest.fail("read again"))
        assert _tables(cached) == _tables(_trace("t"))


def test_two_processes_never_evict_at_once(folder):
    size = _size_of_one(folder)
    limit = 3 * size + size // 2
    writers = [_start(_EVICT_IN_EACH_PUT, folder, str(limit)) for _ in range(3)]
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    log = (folder.parent / "log").read_text().splitlines()
    begins, ends = log[::2], log[1::2]
    assert [line.split()[0] for line in log] == ["begin", "end"] * len(begins)
    assert [line.split()[1] for line in begins] == [line.split()[1] for line in ends]
    assert len({line.split()[1] for line in begins}) == 3
    assert 0 < cache_in(folder).disk.size_bytes() <= limit


def test_an_entry_is_stored_while_another_process_has_the_lock_and_evicted_later(folder):
    size = _size_of_one(folder)
    store = cache_in(folder, max_bytes=size + size // 2)
    with _running(_HOLD_THE_LOCK, folder):
        for index, key in enumerate("ab"):
            store.put(key, _trace("t"))
            os.utime(folder / f"{key}.trace", ns=(index, index))
        assert _files(folder) == ["a.trace", "b.trace"]
    store.put("c", _trace("t"))
    assert _files(folder) == ["c.trace"]


def test_a_file_that_a_process_writes_for_long_is_neither_evicted_nor_cleared(folder):
    store = cache_in(folder, max_bytes=1)
    with _running(_WRITE_FOR_LONG, folder):
        (partial,) = folder.glob("*.partial")
        os.utime(partial, ns=(1, 1))
        store.put("other", _trace("t"))
        store.disk.clear()
        assert _files(folder) == [partial.name]
    assert (folder / "slow.trace").read_bytes() == b"first half, second half"


def test_what_a_killed_process_left_is_removed(folder):
    with _start(_WRITE_FOR_LONG, folder) as writer:
        assert writer.stdout.readline()
        writer.kill()
    (partial,) = folder.glob("*.partial")
    os.utime(partial, ns=(1, 1))
    cache_in(folder).put("other", _trace("t"))
    assert _files(folder) == ["other.trace"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_evicted_without_them(folder, monkeypatch, code):
    size = _size_of_one(folder)

    def no_locks(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    store = cache_in(folder, max_bytes=size + size // 2)
    for index, key in enumerate("ab"):
        store.put(key, _trace("t"))
        os.utime(folder / f"{key}.trace", ns=(index, index))
    assert _files(folder) == ["b.trace"]


def _large_trace():
    rows = pl.DataFrame({"at_ns": pl.int_range(400_000, eager=True).shuffle(1)})
    return dataclasses.replace(_trace("t"), allocations=schema.ALLOCATIONS.conform(rows))


def test_a_writer_that_is_killed_breaks_nothing(folder):
    """kill -9 at random moments, each while a partial file exists."""
    for _ in range(2):
        writer = _start(_WRITE_UNTIL_KILLED, folder)
        _wait_for(lambda: any(f.stat().st_size for f in folder.glob("*.partial")) and _entries(folder), writer)
        writer.kill()
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
    cached = cache_in(folder).get("key", lambda: pytest.fail("read again"))
    assert _tables(cached)["allocations"] == _tables(_large_trace())["allocations"]


def test_old_temporary_files_are_removed(folder):
    store = cache_in(folder)
    store.put("a", _trace("t"))
    old, new = folder / "a.dead.partial", folder / "a.busy.partial"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, ns=(1, 1))
    disk_cache._room_bytes.clear()  # as in another process
    store.put("b", _trace("t"))
    assert (old.exists(), new.exists()) == (False, True)


def _wait_for(happened, process, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if happened():
                return
        except FileNotFoundError:  # renamed between listing and looking
            continue
    pytest.fail("the writer wrote nothing")


def test_threads_share_a_stored_trace(folder, run):
    loader.load(run)
    trace = loader.load(run).trace(0)
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(trace.ops)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(table) for table in seen}) == 1


def test_a_run_is_one_entry_however_its_path_is_written(folder, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    first = loader.load("run").trace(0)
    (run.parent / "link").symlink_to(run)
    for path in (run, "run", "../" + run.parent.name + "/run", "link"):
        source = loader.load(path).sources[0]
        trace = source.read()
        assert type(trace) is trace_cache.StoredTrace
        assert trace.path == source.path
        assert _tables(trace) == _tables(first)
    assert len(_entries(folder)) == 1


def test_issues_of_a_cached_trace_name_its_file_as_it_is_read(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.json").write_text("{}")
    issue = {"kind": "truncated", "message": "t.json: cut off at 81%"}
    trace = _trace("t.json").replace(data_quality=schema.DATA_QUALITY.conform(pl.DataFrame([issue])))
    trace_cache.cached_source(Counted("t.json", trace).source).read()
    for path in ("t.json", str(tmp_path / "t.json")):
        cached = trace_cache.cached_source(Counted(path, _trace("not read")).source).read()
        assert cached.data_quality["message"].to_list() == [f"{path}: cut off at 81%"]


def test_files_are_added_up_again_once_a_share_of_the_free_room_is_used(folder, monkeypatch):
    size = _size_of_one(folder)
    counts = []
    add_up = DiskCache._files
    monkeypatch.setattr(DiskCache, "_files", lambda *arguments: counts.append(1) or add_up(*arguments))
    store = cache_in(folder, max_bytes=64 * 10 * size)
    for index in range(30):
        store.put(f"key{index}", _trace("t"))
    assert 3 <= len(counts) <= 6
    tight = cache_in(folder, max_bytes=12 * size + size // 2)
    for index in range(30):
        tight.put(f"other{index}", _trace("t"))
        assert len(_entries(folder)) <= 12

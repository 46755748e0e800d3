"""Reading CUDA memory snapshots: what comes out, of every protocol, and what is refused."""

import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.support import sample_snapshots
from tests.support.rule_examples import program_on_streams, run_with_snapshots
from tests.support.sample_snapshots import MIB, document, event, frame, recorded, segment, write
from tracekit.analysis.memory import snapshot_files
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import pickle_child
from tracekit.ingest.readers import memory_snapshots
from tracekit.model import schema
from tracekit.model.trace import MemorySnapshot

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
REAL = ("expandable_segments_bf16", "from_empty_fwd_bf16", "from_empty_init_model_rank1", "segments_only")


def simulated() -> dict:
    """Three allocations of two stacks, one of which is freed, and an out-of-memory event."""
    inner, outer, main = frame("simulated_inner"), frame("simulated_outer", 7), frame("main", 9)
    stack = [inner, main]
    history = [
        event("segment_alloc", 2 << 30, 20 * MIB, at_us=5, frames=stack),
        event("alloc", 2 << 30, 5 * MIB - 3, at_us=6, frames=stack),
        event("alloc", (2 << 30) + 5 * MIB, 3 * MIB, at_us=7, frames=[outer, main]),
        event("free_requested", 2 << 30, 5 * MIB - 3, at_us=8, frames=stack),
        event("free_completed", 2 << 30, 5 * MIB - 3, at_us=9, frames=[inner, main]),
        event("alloc", 2 << 30, 4 * MIB, at_us=10, frames=[outer, main], stream=94_000_000_000_000),
    ]
    oom = {"action": "oom", "device_free": 77, "size": 1 << 40, "stream": 0, "time_us": 11, "frames": []}
    blocks = [(5 * MIB, "active_allocated"), (3 * MIB, "active_allocated"), (12 * MIB, "inactive")]
    reserved = segment(2 << 30, blocks, segment_pool_id=(0, 3))
    reserved["blocks"][0]["frames"] = stack
    marks = [{"stage": "START", "name": "Optimizer.step", "device": 1, "time_us": 12}]
    return document([reserved], [], [*history, oom], annotations=marks)


def read(data: bytes, tmp_path: Path) -> MemorySnapshot:
    path = tmp_path / "rank00000.memory.pickle"
    path.write_bytes(data)
    return memory_snapshots.read(path)


def as_dict(snapshot: MemorySnapshot) -> dict:
    """Return the snapshot's history and blocks with their stacks written out."""
    frames = {number: (name, file, line) for number, name, file, line in snapshot.frames.iter_rows()}
    stacks: dict[int | None, list] = {}
    for stack, _, number in snapshot.stacks.sort("stack", "depth").iter_rows():
        stacks.setdefault(stack, []).append(frames[number])
    events = [(*row[:-2], stacks.get(row[-2], []), row[-1]) for row in snapshot.events.iter_rows()]
    return {"events": events, "blocks": [(*row[:-1], stacks.get(row[-1], [])) for row in snapshot.blocks.iter_rows()]}


def expected_of(path: Path) -> dict:
    """Return the same by the standard library's unpickler: only for files of our own and known ones."""
    root = pickle.loads(path.read_bytes())
    places = lambda data: [(f["name"], f["filename"], f["line"]) for f in data["frames"]]  # noqa: E731
    free = lambda data: data.get("device_free")  # noqa: E731
    events = [
        (device, e["time_us"] * 1000, e["action"], e.get("addr"), e["size"], e["stream"], places(e), free(e))
        for device, trace in enumerate(root["device_traces"])
        for e in trace
    ]
    blocks = [
        (s["device"], s["address"], b["address"], b["size"], b["requested_size"], b["state"], places(b))
        for s in root["segments"]
        for b in s["blocks"]
    ]
    return {"events": events, "blocks": blocks}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_snapshot_of_any_protocol_reads_as_the_standard_library_reads_it(protocol, tmp_path):
    path = write(tmp_path / "a.pickle", simulated(), protocol)
    snapshot = memory_snapshots.read(path)
    assert as_dict(snapshot) == expected_of(path)
    assert snapshot.segments.row(0)[:7] == (0, 2 << 30, 0, "0:3", "large", False, 20 * MIB)
    assert snapshot.annotations.rows() == [(1, 12_000, "START", "Optimizer.step")]
    assert snapshot.settings["max_split_size"] == -1


def test_a_pickle_of_libtorch_reads_the_same(tmp_path):
    data = simulated()
    path = write(tmp_path / "a.pickle", data)
    assert as_dict(read(sample_snapshots.as_libtorch(data), tmp_path)) == expected_of(path)


@pytest.mark.parametrize("name", REAL)
def test_a_recorded_snapshot_reads_as_the_standard_library_reads_it(name):
    path = recorded(f"{name}.pickle")
    assert as_dict(memory_snapshots.read(path)) == expected_of(path)


def test_the_same_frames_in_the_same_order_are_one_stack_however_they_are_written(tmp_path):
    snapshot = read(pickle.dumps(simulated()), tmp_path)
    assert snapshot.stacks["stack"].n_unique() == 2
    assert snapshot.events["stack"].to_list() == [0, 0, 1, 0, 0, 1, None]


@pytest.mark.parametrize("depth", [999, 1000, 1001, 2500])
def test_a_stack_deeper_than_a_batch_has_all_its_frames(depth, tmp_path):
    frames = [frame(f"f{i}") for i in range(depth)]
    history = [event("alloc", 512 * i, 512, frames=frames[: depth - i % 2]) for i in range(4)]
    snapshot = read(pickle.dumps(document([], history)), tmp_path)
    assert snapshot.stacks.group_by("stack", maintain_order=True).len()["len"].to_list() == [depth, depth - 1]


def test_many_events_across_buffers_lose_nothing(tmp_path):
    frames = [frame(f"f{i}") for i in range(300)]
    history = [
        event("alloc", (1 << 45) + i * 512, i, at_us=(1 << 50) + i, frames=list(frames[i % 97 :]))
        for i in range(12_000)
    ]
    path = write(tmp_path / "a.pickle", document([], history))
    assert path.stat().st_size > 4 << 20
    events = memory_snapshots.read(path).events
    assert events["address"].to_list() == [data["addr"] for data in history]
    assert events["bytes"].to_list() == list(range(12_000))
    assert events["stack"].to_list() == [i % 97 for i in range(12_000)]


def test_consecutive_events_of_several_forms_are_all_read(tmp_path):
    rng = random.Random(5)
    frames = [frame(f"f{i}") for i in range(90)]
    stacks = [frames[i : i + 1 + i % 7] for i in range(80)]
    history = []
    for number in range(6000):
        size = rng.choice((0, 255, 256, 65_535, 65_536, 1 << 31, (1 << 40) + number))
        data = event("alloc", rng.randrange(1 << 47), size, stream=rng.choice((0, 1 << 44)), at_us=(1 << 50) + number)
        data["action"] = rng.choice(("alloc", "free_requested", f"action{rng.randrange(4)}"))
        # The very list again, a list of its own with the same frames, or none.
        stack = rng.choice(stacks)
        data["frames"] = rng.choice((stack, list(stack), []))
        if rng.random() < 0.1:
            del data["compile_context"]
        if rng.random() < 0.1:
            data["user_metadata"] = f"text {number % 9}"
        if rng.random() < 0.02:
            data["time_us"] = number
        history.append(data)
    path = write(tmp_path / "a.pickle", document([], history[:2500], history[2500:]))
    assert as_dict(memory_snapshots.read(path)) == expected_of(path)


def test_damage_within_a_run_of_events_is_refused(tmp_path):
    frames = [frame(f"f{i}") for i in range(9)]
    history = [event("alloc", (1 << 45) + i, 512, at_us=(1 << 50) + i, frames=frames[i % 5 :]) for i in range(900)]
    whole = pickle.dumps(document([], history))
    time = whole.index(((1 << 50) + 600).to_bytes(7, "little"))
    for place, other in ((time - 2, b"\x96"), (time - 2, b"c"), (time + 9, b"\x93"), (time + 40, b"\x81R")):
        spoiled = whole[:place] + other + whole[place + len(other) :]
        with pytest.raises(BadTraceError, match=r"a\.pickle"):
            memory_snapshots.read(_file(tmp_path, spoiled))


def test_old_snapshots_without_history_pools_or_addresses_of_blocks_are_read(tmp_path):
    blocks = [{"size": 512, "state": "active_allocated"}, {"size": 1536, "state": "inactive"}]
    old = {"device": 0, "address": 4096, "total_size": 2048, "allocated_size": 512, "active_size": 512, "stream": 0}
    snapshot = read(pickle.dumps([old | {"segment_type": "small", "blocks": blocks}], 2), tmp_path)
    assert snapshot.blocks["address"].to_list() == [4096, 4608]
    assert snapshot.segments["pool"].to_list() == ["0:0"]
    assert snapshot.events.is_empty()


def test_all_tables_have_the_columns_of_the_schema(tmp_path):
    for snapshot in (read(pickle.dumps(simulated()), tmp_path), read(pickle.dumps(document([])), tmp_path)):
        for name, table in snapshot.tables.items():
            assert table.schema == schema.SNAPSHOT_TABLES[name].schema, name


# What is refused ------------------------------------------------------------------------------------------------------
class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_the_exploits_here_are_real(tmp_path):
    for protocol in PROTOCOLS:
        touched = tmp_path / f"touched{protocol}"
        pickle.loads(pickle.dumps(Runs(f"touch {touched}"), protocol))
        assert touched.exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_that_runs_a_command_is_refused_by_name_and_runs_nothing(protocol, tmp_path, wording):
    touched = tmp_path / "touched"
    hidden = simulated()
    hidden["segments"][0]["blocks"][0]["frames"] = [frame("a"), Runs(f"touch {touched}")]
    for data in (Runs(f"touch {touched}"), hidden):
        with wording.raises(BadTraceError):
            read(pickle.dumps(data, protocol), tmp_path)
    assert not touched.exists()


GLOBAL_EVAL = b"cbuiltins\neval\n(X\x08\x00\x00\x00print(1)tR."
STACK_GLOBAL_EVAL = b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x08print(1)\x85R."
EXPLOITS = {
    "GLOBAL": (GLOBAL_EVAL, "would import builtins.eval and could run code"),
    "STACK_GLOBAL": (STACK_GLOBAL_EVAL, "would import builtins.eval and could run code"),
    "INST": (b"(X\x02\x00\x00\x00idios\nsystem\n.", "would import os.system and could run code"),
    "REDUCE": (b"\x80\x04N)R.", "not callable"),
    "BUILD": (b"\x80\x04}}b.", "no attribute '__dict__'"),
    "OBJ": (b"(NNo.", "not callable"),
    "NEWOBJ": (b"\x80\x04N)\x81.", "must be a type"),
    "NEWOBJ_EX": (b"\x80\x04N)}\x92.", "must be a type"),
    "EXT1": (b"\x80\x02\x82\x01.", "unregistered extension code 1"),
    "EXT2": (b"\x80\x02\x83\x01\x00.", "unregistered extension code 1"),
    "EXT4": (b"\x80\x02\x84\x01\x00\x00\x00.", "unregistered extension code 1"),
    "PERSID": (b"Pname\n.", "objects outside of it and could run code"),
    "BINPERSID": (b"NQ.", "objects outside of it and could run code"),
    "BYTEARRAY8": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".", "more than 256 MiB of memory"),
    "NEXT_BUFFER": (b"\x80\x05\x97.", "out-of-band data"),
    "EMPTY_SET": (b"\x80\x04\x8f.", "not a CUDA memory snapshot"),
    "BINBYTES8": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".", "more than 256 MiB of memory"),
    "0xff": (b"\xff.", "invalid load key"),
}


@pytest.mark.parametrize("name", EXPLOITS)
def test_every_opcode_that_imports_calls_or_builds_is_refused(name, tmp_path):
    data, reason = EXPLOITS[name]
    with pytest.raises(BadTraceError, match=rf"a\.pickle: .*{reason}"):
        memory_snapshots.read(_file(tmp_path, data))


def test_an_exploit_nested_in_a_history_is_refused_too(tmp_path):
    whole = pickle.dumps(document([], [event("alloc", 512, 512) for _ in range(3000)]))
    inner = STACK_GLOBAL_EVAL[2:-1]
    with pytest.raises(BadTraceError, match=r"would import builtins\.eval"):
        memory_snapshots.read(_file(tmp_path, whole[:-1] + inner + b"."))


def test_the_child_can_import_nothing_and_has_no_registered_extensions(tmp_path):
    for unpickler in (pickle_child.PlainUnpickler, pickle_child.MetadataUnpickler):
        for module, name in (("os", "system"), ("builtins", "eval"), ("torch", "load"), ("copyreg", "_reconstructor")):
            with pytest.raises(pickle_child.RefusedError, match=rf"{module}\.{name}"):
                unpickler(io.BytesIO()).find_class(module, name)


def test_text_that_no_encoding_can_represent_is_read_with_a_question_mark(tmp_path):
    history = [event("alloc", 512, 512, frames=[frame("bad \ud800 name")])]
    assert read(pickle.dumps(document([], history)), tmp_path).frames["name"].to_list() == ["bad ? name"]


def test_a_list_of_events_cannot_be_that_of_many_devices(tmp_path, wording):
    history = [event("alloc", 512, 512)] * 1000
    with wording.raises(BadTraceError):
        read(pickle.dumps(document([], *[history] * 1000)), tmp_path)


def test_devices_beyond_those_that_pytorch_numbers_are_refused(tmp_path):
    history = [event("alloc", 512, 512)]
    most = memory_snapshots._MAX_DEVICES
    assert len(read(pickle.dumps(document([], *[list(history) for _ in range(most)])), tmp_path).devices) == most
    with pytest.raises(BadTraceError, match="129 devices"):
        read(pickle.dumps(document([], *[list(history) for _ in range(most + 1)])), tmp_path)


BOMBS = {
    "a memo that leaps": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a memo that leaps, written out": b"(lp999999999\n.",
    "a text of 2^60 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "a text of 4 GiB": b"\x80\x04X\xff\xff\xff\xffx.",
    "an integer of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "an integer of 255 bytes": b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".",
    "an integer of many digits": b"I" + b"9" * 50_000 + b"\n.",
    "a line without end": b"V" + b"x" * 200_000,
    "marks without end": b"(" * 5_000_000,
    "a reference to what never was": b"\x80\x04]h\x07a.",
    "a negative reference": b"]g-1\na.",
    "lists that double by reference": b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(200)) + b".",
    "a list that holds itself": b"\x80\x04]\x94h\x00a.",
    "items without a list": b"\x80\x04}(K\x01e.",
    "items without a dict": b"\x80\x04](K\x01K\x02u.",
    "an odd number of items": b"\x80\x04}(K\x01u.",
    "a key that is a list": b"\x80\x04}(]K\x01u.",
    "appending to nothing": b"a.",
    "no end": b"\x80\x04}",
    "a key of tuples nested a million deep": b"\x80\x04})" + b"\x85" * 1_000_000 + b"K\x01s.",
    "nothing": b"",
    "a text file": b"hello, world\n",
    "a number that is no int64": b"\x80\x04](}(\x8c\x06action\x8c\x01a\x8c\x04addr\x8a\x09" + b"\xff" * 8 + b"\x00uea.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_damaged_and_memory_filling_pickles_are_refused_in_little_memory(name, tmp_path):
    path = _file(tmp_path, BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(BadTraceError, match=r"a\.pickle"):
            memory_snapshots.read(path)
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


READ_ALL = """
import resource, sys
from tracekit.errors import BadTraceError
from tracekit.ingest.readers import memory_snapshots
for path in sys.argv[1:]:
    try:
        memory_snapshots.read(path)
    except BadTraceError:
        pass
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_no_bomb_makes_the_child_take_more_than_its_limit(tmp_path):
    for number, data in enumerate(BOMBS.values()):
        (tmp_path / f"{number}.pickle").write_bytes(data)
    command = [sys.executable, "-c", READ_ALL, *map(str, sorted(tmp_path.iterdir()))]
    kib = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert kib << 10 < (256 + 24 * 5) * MIB  # the largest bomb is of 5 MB


def test_a_snapshot_truncated_anywhere_is_refused_with_its_name(tmp_path):
    whole = pickle.dumps(simulated())
    for end in range(0, len(whole) - 1, 37):
        with pytest.raises(BadTraceError, match=r"a\.pickle"):
            memory_snapshots.read(_file(tmp_path, whole[:end]))


def test_damaged_snapshots_are_read_or_refused_on_one_line(tmp_path):
    rng = random.Random(3)
    whole = [
        *(pickle.dumps(simulated(), protocol) for protocol in PROTOCOLS),
        sample_snapshots.as_libtorch(simulated()),
    ]
    refused = []
    for _ in range(50):  # `make fuzz` damages more, with fresh seeds
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randrange(1, 4)):
            place, other = (
                rng.randrange(len(data)),
                rng.choices(b"(]}eusa.\x94hjq0tN\x88\x8cKMJ\x8a", k=rng.randrange(3)),
            )
            data[place : place + rng.randrange(3)] = other
        try:
            memory_snapshots.read(_file(tmp_path, bytes(data)))
        except BadTraceError as error:
            refused.append(str(error))
    assert 12 < len(refused) < 50
    assert not any("\n" in data for data in refused)


_OF_SEGMENTS = ("device", "address", "stream", "segment_type", "total_size", "requested_size")


@pytest.mark.parametrize("field", _OF_SEGMENTS)
def test_a_segment_with_a_container_that_contains_itself_is_refused_and_crashes_nothing(field, tmp_path):
    endless: dict = {}
    endless["endless"] = endless
    whole = simulated()
    whole["segments"][0][field] = endless
    with pytest.raises(BadTraceError, match=r"a\.pickle"):
        memory_snapshots.read(_file(tmp_path, pickle.dumps(whole)))


def test_a_pickle_that_is_not_a_snapshot_is_refused(tmp_path, wording):
    for data in (3, "text", {"a": 1}, {"segments": 4}, [1, 2], {"segments": [], "device_traces": [[1]]}, None):
        with wording.raises(BadTraceError):
            memory_snapshots.read(_file(tmp_path, pickle.dumps(data)))


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        memory_snapshots.read(tmp_path / "absent.pickle")


READ_AND_SAY = """
import resource, sys
from tracekit.ingest import pickle_child
from tracekit.ingest.readers import memory_snapshots
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
height = memory_snapshots.read(sys.argv[1]).events.height
print(height, *(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)), before)
"""


def test_a_large_snapshot_is_read_in_three_times_its_size_at_most(tmp_path):
    # A stack's list is new for each event, as torch makes them: that is what plain unpickling drowns in.
    frames = [frame(f"f{i}") for i in range(300)]
    history = [
        event("alloc", (1 << 45) + i * 512, i, at_us=(1 << 50) + i, frames=frames[i % 200 : i % 200 + 60])
        for i in range(15_000)
    ]
    path = write(tmp_path / "a.pickle", document([], history))
    data = subprocess.run([sys.executable, "-c", READ_AND_SAY, str(path)], capture_output=True, text=True, check=True)
    events, kib, child_kib, before_kib = map(int, data.stdout.split())
    assert events == 15_000
    assert kib - before_kib << 10 < 3 * path.stat().st_size + 40 * MIB  # of which the buffers, whatever the size
    # What a child took counts from what its parent had when it was started.
    assert child_kib - before_kib << 10 < 3 * path.stat().st_size + 40 * MIB


def _file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "a.pickle"
    path.write_bytes(data)
    return path


def test_a_snapshots_time_is_part_of_its_key_and_a_dangling_link_has_none():
    run = run_with_snapshots(program_on_streams((0, 90)))
    (before,) = snapshot_files.files(run)
    os.utime(before.path, ns=(1, 1))
    (after,) = snapshot_files.files(run)
    assert (after.path, after.size_bytes, after.modified_ns) == (before.path, before.size_bytes, 1)
    assert after != before  # results cached for one are not used for the other
    Path(run.path, "rank00001.memory.pickle").symlink_to("nowhere")
    assert snapshot_files.files(run) == (after,)

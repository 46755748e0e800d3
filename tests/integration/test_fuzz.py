"""Damaged traces: no traceback, no hang, and nothing lost in silence. Every damage is drawn with a fixed seed.

`python -m tests.fuzz`, which `make accuracy` runs for ten minutes, draws others.
"""

import copy
import gzip
import json
import math
import random
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from tests.fuzz import losses, mutations
from tests.fuzz.losses import LOSSY, lenient
from tests.support.kineto_files import trace as device_trace
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.errors import BadTraceError
from tracekit.ingest import decompression
from tracekit.ingest.loader import load
from tracekit.ingest.readers.kineto import reader, scan

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "demo-fsdp2" / "rank00000.pt.trace.json.gz"
SIZE = 200_000
SEED = 20_261_121
ODD = (
    *(None, True, -1, 0, 7, 1 << 40, 1 << 70, -(1 << 63), 1.5, 1e300, math.nan, math.inf, "", "7", "NaN", "stream 7"),
    *("\ud800", "\x00", [], [1], [[1, "a"], None], {}, {"ph": "X"}, {"name": {"name": 1}}),
)
pytestmark = pytest.mark.timeout(240)


# What is damaged ------------------------------------------------------------------------------------------------------


def cut_down(text: str) -> str:
    """Return a trace of the first 200 KB of one step: header, metadata and whole events as their writer wrote them."""
    decode = json.JSONDecoder().raw_decode
    first = text.index("[", text.index('"traceEvents"')) + 1
    at, pieces = first, []
    while text[at : at + 8].strip()[:1] != "]":
        begin = text.index("{", at)
        event, at = decode(text, begin)
        pieces.append((event, text[begin:at]))
    step = next(event for event, _ in pieces if event["name"].startswith("ProfilerStep#"))
    chosen, size = set(), 0
    for i in sorted(range(len(pieces)), key=lambda i: (pieces[i][0]["ph"] != "M", float(pieces[i][0].get("ts", 0)))):
        event, piece = pieces[i]
        if event["ph"] == "M" or (float(event["ts"]) >= float(step["ts"]) and size < SIZE):
            chosen.add(i)
            size += len(piece)
    return text[:first] + "\n  " + ",\n  ".join(pieces[i][1] for i in sorted(chosen)) + text[at:]


@pytest.fixture(scope="module")
def real() -> bytes:
    """A real CPU run, as Kineto prints it."""
    return cut_down(gzip.decompress(SAMPLE.read_bytes()).decode()).encode()


@pytest.fixture(scope="module")
def drawn() -> bytes:
    """A drawn device run on one line, its header last."""
    return json.dumps(device_trace(steps=80, last=True), separators=(",", ":")).encode()


@pytest.fixture(params=[None, 1 << 12], ids=["one batch", "many batches"])
def batches(request, monkeypatch):
    """Files of 200 KB are one batch to the reader; with smaller ones damage also lies at the edges of batches."""
    if request.param:
        monkeypatch.setattr(scan, "_BATCH_BYTES", request.param)
        monkeypatch.setattr(decompression, "_READ_BYTES", request.param)
        monkeypatch.setattr(decompression, "BLOCK_BYTES", request.param)


class Damaged:
    """Reads one damaged file after the other, and judges what came of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, data: bytes, *, packed: bool = False):
        """Return counts, reference counts and the kinds of doubt (None: refused); asserts that nothing is silent."""
        self.path.write_bytes(data)
        reference = lenient(data) if not packed else None
        try:
            trace, counts = reader.read_counted(str(self.path), rank=0)
        except BadTraceError:
            return Counter(), reference, None
        kinds = set(trace.data_quality["kind"])
        if not packed:
            assert counts == reference or kinds & LOSSY, f"silent loss: {reference - counts}, {counts - reference}"
        return counts, reference, kinds


PARTS = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")


@pytest.fixture
def damaged(tmp_path):
    return Damaged(tmp_path / "trace.json")


# Tests ----------------------------------------------------------------------------------------------------------------


def test_the_trace_that_is_damaged_is_whole_before(damaged, real, drawn):
    assert 150_000 < len(real) < 260_000
    for data in (real, drawn):
        counts, reference, kinds = damaged.read(data)
        assert counts == reference == Counter((e["ph"], e.get("cat")) for e in json.loads(data)["traceEvents"])
        assert not kinds & LOSSY


def test_a_file_truncated_anywhere_is_read_up_to_the_last_complete_event(damaged, real, drawn, batches):
    random_ = random.Random(SEED)
    for data in (real, drawn):
        first = data.index(b"[", data.index(b'"traceEvents"')) + 1
        last = data.rindex(b"]", 0, len(data) - (0 if data is real else 100))
        for at in [random_.randrange(len(data)) for _ in range(24 if data is real else 8)]:
            counts, reference, kinds = damaged.read(data[:at])
            assert counts == reference, at
            if kinds is None:
                assert at < first + 2000
                assert not reference, at
            elif at < last:
                assert "truncated" in kinds, at


@pytest.mark.parametrize("which", ["real", "drawn"])
def test_a_flipped_byte_loses_at_most_two_events_and_is_reported(damaged, which, request, batches):
    whole = request.getfixturevalue(which)
    random_ = random.Random(SEED + 1)
    for at, byte in [flipped(whole, random_) for _ in range(24 if which == "real" else 8)]:
        counts, reference, kinds = damaged.read(whole[:at] + bytes([byte]) + whole[at + 1 :])
        assert kinds is not None, (at, byte)
        assert sum((reference - counts).values()) <= 2, (at, byte)


def flipped(whole, random_):
    """Return a place and the byte that stands there instead: one bit flipped, or any."""
    at = random_.randrange(len(whole))
    return at, whole[at] ^ (1 << random_.randrange(8)) if random_.random() < 0.5 else random_.randrange(256)


@pytest.mark.parametrize("which", ["real", "drawn"])
def test_missing_fields_and_values_of_other_types_lose_no_event(damaged, which, request):
    whole = request.getfixturevalue(which)
    for seed in range(16):
        random_ = random.Random(f"{SEED + 2} {seed}")
        document = json.loads(whole)
        for _ in range(random_.randrange(1, 6)):
            swap(document, random_)
        counts, reference, kinds = damaged.read(json.dumps(document).encode())
        assert counts == reference, seed
        assert kinds is not None, seed
        if which == "drawn":
            trace = reader.read(str(damaged.path), rank=0)
            wrong = breakdown.by_step(trace).filter(pl.sum_horizontal(PARTS) != pl.col("duration_ns"))
            assert wrong.is_empty(), seed
            assert trace_quality.data_quality(trace).height >= trace.data_quality.height, seed


def swap(document, random_):
    """Delete a field of a random event, of its arguments or of the header, or give it a value of any type."""
    event = random_.choice(document["traceEvents"])
    places = [event, event, event.get("args"), document]
    place = random_.choice([p for p in places if isinstance(p, dict) and p])
    key = random_.choice([k for k in place if k != "traceEvents"] or ["args"])
    if random_.random() < 0.3:
        place.pop(key, None)
    else:
        place[key] = copy.deepcopy(random_.choice(ODD))


def test_headers_of_any_values_leave_a_run_that_loads(tmp_path):
    group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "nccl", "pg_size": 2, "ranks": [0, 1]}
    for seed in range(10):
        random_ = random.Random(f"{SEED + 4} {seed}")
        for rank in (0, 1):
            device = {"id": 0, "name": "H100", "totalGlobalMem": 1 << 36}
            document = device_trace(rank, steps=2, start_us=100 + rank, deviceProperties=[device])
            document["distributedInfo"] |= {"pg_count": 1, "pg_config": [copy.deepcopy(group)]}
            for _ in range(random_.randrange(3)):
                info = document.get("distributedInfo")
                listed = info.get("pg_config") if isinstance(info, dict) else None
                inner = [document, info, *(listed if isinstance(listed, list) else []), device]
                place = random_.choice([p for p in inner if isinstance(p, dict) and len(p) > 1])
                key = random_.choice([key for key in place if key != "traceEvents"])
                place[key] = copy.deepcopy(random_.choice(ODD))
            (tmp_path / f"rank{rank}.json").write_text(json.dumps(document))
        run = load(tmp_path, cache=False)
        assert sum(trace.activities.height for trace in run.traces()) in (4, 8), seed
        run.table(trace_quality.data_quality)


def test_a_header_may_contain_lone_surrogates(tmp_path):
    document = device_trace(steps=2)
    document["distributedInfo"] |= {"pg_config": [{"pg_name": "\ud800", "pg_desc": "a\udfff", "ranks": [0]}]}
    (tmp_path / "rank0.json").write_text(json.dumps(document))
    (trace,) = load(tmp_path, cache=False).traces()
    assert trace.groups.select("group", "description").rows()[0] == ("?", "a?")


def test_truncated_or_damaged_compression_is_reported(damaged, real):
    packed = gzip.compress(real, 6)
    whole = lenient(real)
    random_ = random.Random(SEED + 3)
    for at, bit in [(random_.randrange(len(packed)), random_.randrange(8)) for _ in range(16)]:
        for data in (packed[:at], packed[:at] + bytes([packed[at] ^ (1 << bit)]) + packed[at + 1 :]):
            counts, _, kinds = damaged.read(data, packed=True)
            assert kinds is None or counts == whole or kinds & LOSSY, (at, bit)
            assert not counts - whole or kinds & LOSSY, (at, bit)


def test_what_is_read_of_damaged_gzip_is_what_zlib_reads_or_reported(tmp_path, real):
    path, random_ = tmp_path / "trace.json.gz", random.Random(SEED + 5)
    half = len(real) // 2
    packed = gzip.compress(b"") + gzip.compress(real[:half], 6) + gzip.compress(real[half:], 6) + bytes(9)
    path.write_bytes(packed)
    assert losses.unpacked(packed) == real
    assert losses.silent(path) == ""
    for at, bit in [(random_.randrange(len(packed)), random_.randrange(8)) for _ in range(16)]:
        path.write_bytes(packed[:at] + bytes([packed[at] ^ (1 << bit)]) + packed[at + 1 :])
        assert losses.silent(path) == "", (at, bit)


def test_a_category_that_is_bounded_in_depth_is_no_loss(tmp_path, real):
    content = json.loads(real)
    deep = []
    for _ in range(600):
        deep = [deep]
    content["traceEvents"][-1]["cat"] = deep
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    assert losses.silent(path) == ""


def test_an_event_that_the_reader_does_not_count_is_a_silent_loss(tmp_path, real, monkeypatch):
    """GIVEN a reader that counts no metadata, WHEN it reads a whole trace, THEN the fuzzer names the events."""
    read_counted = reader.read_counted

    def forgetful(path, *, rank):
        trace, counts = read_counted(path, rank=rank)
        return trace, Counter({kind: count for kind, count in counts.items() if kind[0] != "M"})

    (tmp_path / "trace.json").write_bytes(real)
    monkeypatch.setattr(reader, "read_counted", forgetful)
    assert losses.silent(tmp_path / "trace.json").startswith("lost {('M', ")


def test_whole_events_of_a_damaged_file_are_read_or_stated_as_lost(tmp_path, real):
    path = tmp_path / "trace.json"
    for seed in range(16):
        path.write_bytes(mutations.text(real, random.Random(f"{SEED + 6} {seed}")))
        assert losses.silent(path) == "", seed


def test_more_lost_events_than_a_finding_states_are_a_silent_loss(tmp_path, real, monkeypatch):
    """GIVEN a reader that counts no metadata, WHEN it reads a damaged trace, THEN the fuzzer names the events."""
    read_counted = reader.read_counted

    def forgetful(path, *, rank):
        trace, counts = read_counted(path, rank=rank)
        return trace, Counter({kind: count for kind, count in counts.items() if kind[0] != "M"})

    path, damaged_at = tmp_path / "trace.json", real.rindex(b"{", 0, real.index(b'"ph": "X"'))
    path.write_bytes(real[:damaged_at] + b"?" + real[damaged_at + 1 :])
    assert losses.silent(path) == ""
    monkeypatch.setattr(reader, "read_counted", forgetful)
    assert losses.silent(path).startswith("lost {('M', ")


@pytest.mark.parametrize("rank", [-1, 1 << 20, 1 << 40, 1 << 62, 1 << 70])
def test_events_of_a_rank_that_no_job_has_are_left_out_and_reported(tmp_path, rank):
    events = [
        {**event, "args": {**event.get("args", {}), "rank": of}}
        for of in (0, 1)
        for event in device_trace(of, steps=2)["traceEvents"]
    ]
    events[5]["args"]["rank"] = rank
    (tmp_path / "merged.json").write_text(json.dumps({"traceEvents": events}))
    run = load(tmp_path, cache=False)
    assert run.ranks == (0, 1)
    (message,) = run.trace(0).data_quality.filter(kind="rankless_events")["message"]
    assert message == "1 events of the merged file name no rank from 0 to 1,048,575 and were left out."
    assert losses.silent_of_ranks(tmp_path / "merged.json") == ""

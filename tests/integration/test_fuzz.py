"""Damaged traces: no traceback, no hang, and nothing lost in silence. Every damage is drawn with a fixed seed.

All of them are tried in every run; their seeds are fixed.
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


# The reference: another way to read what is left of a trace -----------------------------------------------------------


def lenient(data: bytes) -> Counter:
    """Count events per (ph, cat): each object of the array by itself; after damage, the next that has a ph."""
    text = data.decode("utf-8", "replace")
    key = text.find('"traceEvents"')
    at = text.find("[", key) + 1 if key >= 0 else text.find('{"ph"')
    found: Counter = Counter()
    lost = False
    decode = json.JSONDecoder(strict=False).raw_decode
    while 0 <= at < len(text):
        if text[at] in " \t\r\n,":
            at += 1
        elif text[at] == "]" and not lost:
            break
        else:
            item, at, lost = one(decode, text, at, lost)
            if item is not None:
                found[text_of(item.get("ph")), text_of(item.get("cat"))] += 1
    return found


def one(decode, text, at, lost):
    try:
        item, end = decode(text, at)
    except (ValueError, RecursionError):
        return None, next_brace(text, at), True
    if isinstance(item, dict) and ("ph" in item or not lost):
        return item, end, False
    return None, next_brace(text, at) if lost else end, lost


def next_brace(text, at):
    found = text.find("{", at + 1)
    return len(text) if found < 0 else found


def text_of(value):
    if value is None or isinstance(value, str):
        return None if value is None else value.encode("utf-8", "replace").decode()
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


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


LOSSY = {"truncated", "damaged_events", "repeated_events", "damaged_header"}
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
        for at in [random_.randrange(len(data)) for _ in range(80 if data is real else 15)]:
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
    for at, byte in [flipped(whole, random_) for _ in range(80 if which == "real" else 15)]:
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
    for seed in range(50 if which == "real" else 40):
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
    for seed in range(20):
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
    for at, bit in [(random_.randrange(len(packed)), random_.randrange(8)) for _ in range(40)]:
        for data in (packed[:at], packed[:at] + bytes([packed[at] ^ (1 << bit)]) + packed[at + 1 :]):
            counts, _, kinds = damaged.read(data, packed=True)
            assert kinds is None or counts == whole or kinds & LOSSY, (at, bit)
            assert not counts - whole or kinds & LOSSY, (at, bit)

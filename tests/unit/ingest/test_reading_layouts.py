"""One trace in every layout that writers use reads as one trace; damage is reported."""

import gzip
import json

import pyarrow as pa
import pytest

import tracekit
from tests.support.kineto_files import slice_, trace
from tracekit.errors import BadTraceError
from tracekit.ingest import decompression
from tracekit.ingest.readers.kineto import header as kineto_header
from tracekit.ingest.readers.kineto import reader, scan

CONTENT = trace(0, steps=3)
TABLES = ("lanes", "steps", "ops", "activities", "collectives", "groups", "data_quality")


def header_and_events(content):
    return {k: v for k, v in content.items() if k != "traceEvents"}, content["traceEvents"]


def as_kineto_prints_it(content):
    header, events = header_and_events(content)
    keys = "".join(f"    {json.dumps(k)}: {json.dumps(v)},\n" for k, v in header.items())
    return " {\n" + keys + '    "traceEvents": [\n' + ",\n".join(map(kineto_event, events)) + "\n  ]}\n"


def kineto_event(event):
    fields = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in event.items() if k != "args"]
    args = ",".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in event["args"].items())
    return "  {\n    " + ",\n    ".join(fields) + '\n    ,\n    "args": {\n      ' + args + "\n    }\n  }"


def with_keys(content, order):
    events = [dict(order(list(event.items()))) for event in content["traceEvents"]]
    return json.dumps(content | {"traceEvents": events})


def in_members(data, count=4):
    size = len(data) // count + 1
    return b"".join(gzip.compress(data[at : at + size]) for at in range(0, len(data), size))


def in_frames(data):
    half = len(data) // 2
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (data[:half], data[half:]))


def one_event_a_line(content):
    header, events = header_and_events(content)
    lines = ",\n".join(json.dumps(event) for event in events)
    return json.dumps(header)[:-1] + ', "traceEvents": [\n' + lines + "\n]}"


PLAIN = json.dumps(CONTENT).encode()
WHOLE = {
    "one line": PLAIN,
    "one line without blanks": json.dumps(CONTENT, separators=(",", ":")).encode(),
    "pretty-printed": json.dumps(CONTENT, indent=4).encode(),
    "pretty-printed with tabs and CRLF": json.dumps(CONTENT, indent="\t").replace("\n", "\r\n").encode(),
    "as Kineto prints it": as_kineto_prints_it(CONTENT).encode(),
    "one event a line": one_event_a_line(CONTENT).encode(),
    "events' keys sorted": with_keys(CONTENT, sorted).encode(),
    "events' keys reversed": with_keys(CONTENT, lambda items: items[::-1]).encode(),
    "header after the events": json.dumps(dict(reversed(CONTENT.items()))).encode(),
    "header on both sides": json.dumps(
        {"schemaVersion": 1, "traceEvents": CONTENT["traceEvents"], **header_and_events(CONTENT)[0]}
    ).encode(),
    "comma before the bracket": PLAIN.replace(b"}], ", b"},], ").replace(b"}]}", b"},]}"),
    "byte order mark": b"\xef\xbb\xbf" + PLAIN,
    "blank lines around": b"\n \n" + PLAIN + b"\n\n",
    "gzip": gzip.compress(PLAIN),
    "gzip of many members": in_members(PLAIN),
    "gzip padded with zeros": gzip.compress(PLAIN) + bytes(1000),
    "zstd": pa.compress(PLAIN, codec="zstd", asbytes=True),
    "zstd of two frames": in_frames(PLAIN),
}


def read(folder, data, name="trace.json"):
    path = folder / name
    path.write_bytes(data)
    return reader.read(str(path), rank=0)


@pytest.mark.parametrize("layout", WHOLE)
def test_every_layout_is_the_same_trace(tmp_path, layout):
    expected, found = read(tmp_path, PLAIN), read(tmp_path, WHOLE[layout])
    for table in TABLES:
        assert getattr(found, table).equals(getattr(expected, table)), table
    assert expected.activities.height == 6
    assert expected.data_quality.is_empty()
    for key, value in header_and_events(CONTENT)[0].items():
        assert found.header[key] == value


@pytest.mark.parametrize("layout", WHOLE)
def test_small_batches_change_nothing(tmp_path, layout, monkeypatch):
    expected = read(tmp_path, PLAIN)
    for size in (64, 700):
        monkeypatch.setattr(scan, "_BATCH_BYTES", size)
        monkeypatch.setattr(decompression, "_READ_BYTES", size)
        monkeypatch.setattr(decompression, "BLOCK_BYTES", size)
        found = read(tmp_path, WHOLE[layout])
        for table in TABLES:
            assert getattr(found, table).equals(getattr(expected, table)), table


@pytest.mark.parametrize("layout", WHOLE)
def test_a_known_first_block_is_followed_by_the_same_blocks(tmp_path, layout):
    path = tmp_path / "trace.json"
    path.write_bytes(WHOLE[layout])
    blocks = list(decompression.Blocks(str(path)))
    assert list(decompression.Blocks(str(path), blocks[0])) == blocks
    assert next(iter(decompression.Blocks("a missing file", b"first"))) == b"first"


@pytest.mark.parametrize("indent", [None, 1])
def test_a_bare_array_of_events_is_a_trace_without_a_header(tmp_path, indent):
    expected = read(tmp_path, json.dumps({"traceEvents": CONTENT["traceEvents"]}).encode())
    found = read(tmp_path, json.dumps(CONTENT["traceEvents"], indent=indent).encode())
    for table in TABLES:
        assert getattr(found, table).equals(getattr(expected, table)), table
    assert found.header == {}
    assert found.activities["start_ns"].min() == 150_000


def test_a_bare_array_without_an_end_is_read_and_reported(tmp_path):
    # The format allows it: a writer that dies leaves a file that viewers open.
    for end in (b"", b",", b",\n"):
        found = read(tmp_path, json.dumps(CONTENT["traceEvents"]).encode()[:-1] + end)
        assert found.activities.height == 6
        assert found.data_quality["kind"].to_list() == ["truncated"]


@pytest.mark.parametrize("last", [False, True], ids=["before the events", "after the events"])
def test_a_header_of_megabytes_costs_no_event(tmp_path, last):
    modules = {f"layers.{i}": "x" * 100 for i in range(20_000)}
    content = {"moduleHierarchy": modules, **CONTENT} if not last else {**CONTENT, "moduleHierarchy": modules}
    found = read(tmp_path, json.dumps(content).encode())
    assert found.activities.equals(read(tmp_path, PLAIN).activities)
    assert found.header["moduleHierarchy"] == modules
    assert found.data_quality.is_empty()


@pytest.mark.parametrize("last", [False, True], ids=["before the events", "after the events"])
def test_a_header_that_is_too_long_to_be_parsed_is_searched_for_what_matters(tmp_path, monkeypatch, last):
    monkeypatch.setattr(kineto_header, "PARSED_BYTES", 1 << 19)
    deep = '"stackFrames": ' + '[{"args":' * 99 + "1" + "}]" * 99
    frames = ", ".join([deep] * 3_000)  # 3 MB, of which each MB would take 30 MB as objects
    stated = '"distributedInfo": {"rank": 5, "world_size": 8}'
    events = f'"traceEvents": {json.dumps(CONTENT["traceEvents"])}'
    parts = [stated, frames, events] if not last else [events, frames, stated]
    trace = read(tmp_path, f"{{{', '.join(parts)}}}".encode())
    assert trace.activities.height == 6
    assert trace.header == {"distributedInfo": {"rank": 5, "world_size": 8}}
    assert "damaged_header" in trace.data_quality["kind"].to_list()


def test_a_trace_without_events_is_read_as_empty(tmp_path):
    found = read(tmp_path, b'{"schemaVersion": 1, "traceEvents": []}')
    assert found.ops.is_empty()
    assert found.activities.is_empty()
    assert found.data_quality["kind"].to_list() == ["no_steps"]


def test_an_event_of_megabytes_is_an_event(tmp_path):
    long = slice_("cpu_op", "aten::cat", 1.0, 1.0, tid=1, **{"Input Dims": [[1, 2]] * 400_000})
    content = {"traceEvents": [*CONTENT["traceEvents"][:3], long, *CONTENT["traceEvents"][3:]]}
    found = read(tmp_path, json.dumps(content).encode())
    assert found.ops["name"].to_list().count("aten::cat") == 1
    assert found.activities.height == 6
    assert found.data_quality.is_empty()


def test_a_second_array_of_events_is_left_out_and_reported(tmp_path):
    again = json.dumps(CONTENT["traceEvents"][:4])
    found = read(tmp_path, PLAIN[:-1] + f', "traceEvents": {again}}}'.encode())
    assert found.activities.height == 6
    assert found.data_quality["kind"].to_list() == ["repeated_events"]
    assert "4 events" in found.data_quality["message"][0]


@pytest.mark.parametrize("between", ["", "\n", " \r\n"], ids=["nothing", "line", "lines"])
def test_documents_that_follow_the_first_one_are_left_out_and_reported(between, tmp_path):
    found = read(tmp_path, between.encode().join([PLAIN] * 3))
    assert found.activities.height == 6
    assert found.data_quality["kind"].to_list() == ["repeated_events"]
    later = 2 * len(CONTENT["traceEvents"])
    assert found.data_quality["affected_ratio"][0] == pytest.approx(2 / 3)
    assert f"{later:,} events" in found.data_quality["message"][0]


NOT_TRACES = {
    b"": "empty; record it again",
    b"  \n": "empty; record it again",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0": "git lfs pull",
    b"<!DOCTYPE html><html>": "download",
    b'{"schemaVersion": 1, "deviceProp': "ends before its first event",
    b'{"lr": 0.1}': "no traceEvents array",
    b"[1, 2, 3]": "no traceEvents array",
    b'{"data": {"traceEvents": []}}': "a traceEvents array within another value",
    b"\x1f\x8b\x08\x00": "gzip file ends early",
    b"\x28\xb5\x2f\xfd\x00": "zstd file",
    b'{"traceEvents": [{"ph": "X", "na': "no complete event",
    b"\x80\x04\x95pickle": "CUDA memory snapshot (pickle), not a trace; analyze it with: tracekit memory",
    b"PK\x03\x04checkpoint": "the zip archive is damaged or truncated",
    b'{\n"schema":"tracekit.baseline/1",': "a baseline that tracekit wrote",
}


@pytest.mark.parametrize("data", NOT_TRACES, ids=range(len(NOT_TRACES)))
def test_a_file_that_is_not_a_trace_is_named_for_what_it_is(tmp_path, data):
    (tmp_path / "trace.json").write_bytes(data)
    with pytest.raises(BadTraceError) as caught:
        tracekit.load(tmp_path / "trace.json", cache=False)
    assert NOT_TRACES[data] in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stray_bytes_lose_letters_of_a_name_and_no_event(tmp_path):
    found = read(tmp_path, PLAIN.replace(b"gemm", b"ge\xffmm", 1))
    assert found.activities["name"].to_list()[0] == "ge\ufffdmm"
    assert found.activities.height == 6
    assert found.data_quality["kind"].to_list() == ["stray_bytes"]


def test_letters_of_all_scripts_survive(tmp_path):
    name = "größe Ω 核 🔥"
    for written in (json.dumps(name, ensure_ascii=False), json.dumps(name)):
        found = read(tmp_path, PLAIN.replace(b'"gemm"', written.encode()))
        assert found.activities["name"].to_list()[0] == name
        assert found.data_quality.is_empty()


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_truncated_file_is_read_up_to_its_last_complete_event(tmp_path, pack):
    events = CONTENT["traceEvents"]
    for count in (1, 7, len(events) - 1):
        whole = b'{"traceEvents": ' + json.dumps(events[:count]).encode()[:-1]
        found = read(tmp_path, pack(whole + b', {"ph": "X", "cat": "kernel", "name": "lost", "ts": 5'))
        assert len(found.ops) + len(found.activities) == count
        assert "truncated" in found.data_quality["kind"].to_list()
        assert f"{count} complete events" in found.data_quality["message"][0]


def test_damage_in_the_middle_loses_only_the_damaged_event(tmp_path):
    found = read(tmp_path, PLAIN.replace(b'"name": "gemm"', b'"name": "gemm', 1))
    assert found.activities.height == 5
    doubt = found.data_quality.row(0, named=True)
    assert doubt["kind"] == "damaged_events"
    assert 0 < doubt["affected_ratio"] < 0.1


def test_array_members_that_are_not_events_are_reported(tmp_path):
    odd = [*CONTENT["traceEvents"], 5, None, "event", [1]]
    found = read(tmp_path, json.dumps({"traceEvents": odd}).encode())
    assert found.activities.height == 6
    assert found.data_quality["kind"].to_list() == ["damaged_events"]
    assert "at least 4 events are lost" in found.data_quality["message"][0]

"""What Perfetto files of other tools have besides slices: counters, packed packets, Chrome's events, kernels of AMD."""

import zlib

import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

import tracekit
from tests.support import kineto_files, perfetto_files

schema = perfetto_files.schema
BASE_NS = 10**18
COUNTER = 4


def load(path):
    return tracekit.load(path, cache=False).trace(0)


def file_of(events, tmp_path, name="run.pftrace"):
    path = tmp_path / name
    path.write_bytes(events.SerializeToString())
    return path


def recorded(rank=0, **options):
    events = kineto_files.trace(rank)["traceEvents"]
    return schema.Trace.FromString(perfetto_files.of_kineto(events, BASE_NS, **options))


def add_counter(trace, uuid, name, values, *, parent=0, **described):
    packet = trace.packet.add(trusted_packet_sequence_id=9)
    packet.track_descriptor.uuid, packet.track_descriptor.name = uuid, name
    packet.track_descriptor.parent_uuid = parent
    for key, value in {"unit": 0, **described}.items():
        setattr(packet.track_descriptor.counter, key, value)
    for at_ns, value in values:
        packet = trace.packet.add(trusted_packet_sequence_id=9, timestamp=BASE_NS + at_ns)
        packet.track_event.type, packet.track_event.track_uuid = COUNTER, uuid
        field = "double_counter_value" if isinstance(value, float) else "counter_value"
        setattr(packet.track_event, field, value)


def test_counter_tracks_are_counters_with_their_units(tmp_path):
    trace = recorded()
    add_counter(trace, 50, "power", [(30, 7.5), (10, 1.25)], unit_name="W")
    add_counter(trace, 51, "free", [(10, 3), (20, -4)], unit=3, unit_multiplier=1024)
    add_counter(trace, 52, "batches", [(10, 2), (20, 5), (30, 1)], unit=2, is_incremental=True)
    add_counter(trace, 53, "plain", [(10, 0), (20, 1.5), (30, float("nan"))])
    found = load(file_of(trace, tmp_path))
    rows = [
        ("batches [count]", 10, 2.0), ("batches [count]", 20, 7.0), ("batches [count]", 30, 8.0),
        ("free [bytes]", 10, 3072.0), ("free [bytes]", 20, -4096.0),
        ("plain", 10, 0.0), ("plain", 20, 1.5),
        ("power [W]", 10, 1.25), ("power [W]", 30, 7.5),
    ]  # fmt: skip
    assert found.counters.select("name", pl.col("at_ns") - BASE_NS, "value").rows() == rows
    assert found.counters["device"].null_count() == len(rows)
    without = load(file_of(recorded(), tmp_path))
    assert without.counters.is_empty()
    for name in ("ops", "activities", "steps"):
        assert_frame_equal(getattr(found, name), getattr(without, name))


def test_counters_of_a_file_of_several_ranks_are_those_of_the_ranks_own_processes(tmp_path):
    trace = schema.Trace()
    for rank in (2, 5):
        part = recorded(rank, process=f"python rank {rank}")
        for packet in part.packet:
            packet.trusted_packet_sequence_id = rank
            for field, inner in (("track_event", "track_uuid"), ("track_descriptor", "uuid")):
                if packet.HasField(field):
                    setattr(getattr(packet, field), inner, getattr(getattr(packet, field), inner) + 1000 * rank)
        trace.packet.extend(part.packet)
        parent = next(p.track_descriptor.uuid for p in part.packet if p.HasField("track_descriptor"))
        add_counter(trace, 50 + rank, "power", [(10, rank)], parent=parent)
    run = tracekit.load(file_of(trace, tmp_path), cache=False)
    assert {rank: run.trace(rank).counters["value"].to_list() for rank in run.ranks} == {2: [2.0], 5: [5.0]}


@pytest.mark.parametrize("packed", ["zstd_compressed_packets", "compressed_packets", "both"])
def test_packets_packed_by_zstd_or_zlib_are_read(tmp_path, packed):
    expected = load(file_of(recorded(), tmp_path))
    plain, trace = recorded(), schema.Trace()
    half = len(plain.packet) // 2
    for number, packets in enumerate((plain.packet[:half], plain.packet[half:])):
        content = schema.Trace(packet=packets).SerializeToString()
        if packed == "compressed_packets" or (packed == "both" and number):
            trace.packet.add().compressed_packets = zlib.compress(content)
        else:
            trace.packet.add().zstd_compressed_packets = pa.compress(content, codec="zstd", asbytes=True)
    found = load(file_of(trace, tmp_path, "packed.pftrace"))
    for name in ("ops", "activities", "steps", "collectives"):
        assert_frame_equal(getattr(found, name), getattr(expected, name))


def test_damaged_zstd_packets_are_left_out(tmp_path):
    trace = recorded()
    expected = load(file_of(trace, tmp_path)).ops.height
    content = pa.compress(recorded().SerializeToString(), codec="zstd", asbytes=True)
    trace.packet.add().zstd_compressed_packets = content[:20] + b"\xff" * 40
    trace.packet.add().zstd_compressed_packets = b"no zstd"
    assert load(file_of(trace, tmp_path, "damaged.pftrace")).ops.height == expected


def test_complete_events_of_chrome_are_slices(tmp_path):
    """Chrome's events state a phase, and complete ones their duration, where Perfetto's have a type."""
    events = [each for each in kineto_files.trace(0)["traceEvents"] if each["ph"] == "X"]
    expected = load(file_of(recorded(), tmp_path))
    whole = recorded()
    tracks = {d.thread.tid: d.uuid for d in (p.track_descriptor for p in whole.packet) if d.HasField("thread")}
    trace = schema.Trace(packet=[packet for packet in whole.packet if not packet.HasField("track_event")])
    for number, event in enumerate(events):
        packet = trace.packet.add(trusted_packet_sequence_id=perfetto_files.SEQUENCE)
        packet.timestamp = BASE_NS + round(event["ts"] * 1000)
        of = packet.track_event
        of.track_uuid, of.name = tracks[int(event["tid"])], event["name"]
        of.categories.append(event["cat"])
        for key, value in event.get("args", {}).items():
            argument = of.debug_annotations.add(name=key)
            perfetto_files.state(argument, value)
        if number % 2:
            of.legacy_event.phase, of.legacy_event.duration_us = ord("X"), round(event["dur"])
            continue
        of.legacy_event.phase = ord("B")
        end = trace.packet.add(trusted_packet_sequence_id=perfetto_files.SEQUENCE)
        end.timestamp = BASE_NS + round((event["ts"] + event["dur"]) * 1000)
        end.track_event.track_uuid, end.track_event.legacy_event.phase = of.track_uuid, ord("E")
        end.track_event.categories.append(event["cat"])
    found = load(file_of(trace, tmp_path, "chrome.pftrace"))
    for name in ("ops", "activities", "steps"):
        assert_frame_equal(getattr(found, name), getattr(expected, name))


def test_kernels_and_copies_of_rocprofv3_are_device_work_of_their_calls(tmp_path):
    """AMD tells users of PyTorch to record so: rocprofv3 --sys-trace --output-format pftrace -- python3 train.py.

    Categories, track names, arguments and flows are those of its source/lib/output/generatePerfetto.cpp.
    """
    trace = schema.Trace()
    rows = [
        (11, "hip_api", "hipLaunchKernel", 1000, 2000, 5, {"tid": 7, "corr_id": 5}),
        (21, "kernel_dispatch", "Cijk_Ailk_Bljk", 3000, 9000, 5, {"agent": "Agent-4", "queue": 2, "corr_id": 5}),
        (11, "hip_api", "hipMemcpyAsync", 2100, 2300, 6, {"tid": 7, "corr_id": 6}),
        (22, "memory_copy", "MEMORY_COPY_HOST_TO_DEVICE", 9000, 9500, 6, {"copy_bytes": 64, "corr_id": 6}),
        (11, "rccl_api", "ncclAllReduce", 2400, 2900, 7, {"tid": 7, "corr_id": 7}),
        (
            21,
            "kernel_dispatch",
            "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
            9500,
            9900,
            7,
            {"queue": 2},
        ),
    ]
    for uuid, name in ((11, "THREAD 1 (7)"), (21, "COMPUTE AGENT [4] STREAM [0] (GPU)"), (22, "COPY to AGENT [4]")):
        trace.packet.add(trusted_packet_sequence_id=1).track_descriptor.MergeFrom(
            schema.TrackDescriptor(uuid=uuid, name=name)
        )
    for uuid, category, name, start_ns, end_ns, flow, args in rows:
        packet = trace.packet.add(trusted_packet_sequence_id=1, timestamp=BASE_NS + start_ns)
        begun = packet.track_event
        begun.type, begun.track_uuid, begun.name = perfetto_files.BEGIN, uuid, name
        begun.categories.append(category)
        begun.flow_ids.append(flow)
        for key, value in args.items():
            perfetto_files.state(begun.debug_annotations.add(name=key), value)
        end = trace.packet.add(trusted_packet_sequence_id=1, timestamp=BASE_NS + end_ns)
        end.track_event.type, end.track_event.track_uuid = perfetto_files.END, uuid
    found = load(file_of(trace, tmp_path, "rocprofv3.pftrace"))
    calls = found.ops.select(launch_id="id", call="name")
    work = found.activities.join(calls, on="launch_id").sort("start_ns")
    assert work.select("call", "kind", "dur_ns", "bytes").rows() == [
        ("hipLaunchKernel", "compute", 6000, None),
        ("hipMemcpyAsync", "memcpy", 500, 64),
        ("ncclAllReduce", "communication", 400, None),
    ]
    assert work["lane"].n_unique() == 2


def test_times_on_a_clock_without_a_snapshot_are_those_of_the_main_clock(tmp_path):
    trace = schema.Trace()
    snapshot = trace.packet.add(trusted_packet_sequence_id=1).clock_snapshot
    snapshot.clocks.add(clock_id=perfetto_files.BOOTTIME, timestamp=0)
    for at_ns, kind in ((1000, perfetto_files.BEGIN), (5000, perfetto_files.END)):
        packet = trace.packet.add(trusted_packet_sequence_id=perfetto_files.SEQUENCE, timestamp=at_ns)
        packet.timestamp_clock_id = perfetto_files.OWN_CLOCK
        packet.track_event.type, packet.track_event.track_uuid = kind, 1
        if kind == perfetto_files.BEGIN:
            packet.track_event.name = "aten::mm"
            packet.track_event.categories.append("cpu_op")
    ops = load(file_of(trace, tmp_path, "clock.pftrace")).ops
    assert ops.select("name", "dur_ns").rows() == [("aten::mm", 4000)]

"""Hostile inputs: those that were not handled once, by name, and a share of the fuzzer's with fixed seeds.

`make fuzz` draws fresh ones.
"""

import copy
import functools
import gzip
import itertools
import json
import pickle
import re
import zipfile

import pytest

from tests.fuzz import inputs, runner, specified
from tests.support import cli_runner, kineto_files
from tests.support.selection import others_in_accuracy
from tracekit.ingest import budget, files, untrusted_json
from tracekit.ingest.readers.kineto import header

TRACE = json.dumps(kineto_files.trace(0, 1, steps=2))
SHARE = 1
"""Inputs of each kind in every run of the tests; `python -m tests.fuzz`, of `make accuracy`, draws more."""


def check(folder, **files):
    (folder / "rank00000.pt.trace.json").write_text(TRACE, encoding="utf-8")
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return cli_runner.tracekit("check", folder, "--format", "json", "--no-cache", "--fail-on", "never")


NUMBERS = ("1e999999999", "1e999990", "1e400", "0.1e-999999999", "9" * 5000)
PLACES = ('"ts": 100.0', '"dur": 300', '"ts": 150.0')


def test_numbers_beyond_all_types_are_bad_times_at_once(tmp_path):
    """Each rank has another number at another place: one check reads them all."""
    cases = [*itertools.product(PLACES, NUMBERS)]
    for rank, (place, number) in enumerate(cases):
        text = json.dumps(kineto_files.trace(rank, len(cases), steps=2))
        assert place in text
        text = text.replace(place, f"{place.partition(':')[0]}: {number}")
        (tmp_path / f"rank{rank}.pt.trace.json").write_text(text, encoding="utf-8")
    done = cli_runner.tracekit("check", tmp_path, "--format", "json", "--no-cache", "--fail-on", "never")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["inputs"]) == len(cases)


NAMES_WITH_NUMBERS = [
    ("user_annotation", "ProfilerStep#@", {}),
    ("user_annotation", "PP:@F1", {}),
    ("user_annotation", "PP:0SEND_F@", {}),
    ("user_annotation", "PP:(0F@;1B0)OVERLAP_F_B", {}),
    ("user_annotation", "Forward @", {}),
    ("python_function", "train.py(@): step", {"Python id": 1}),
    ("kernel", "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nn_align@", {"grid": [132, 2, 1]}),
    ("kernel", "void deep_gemm::fp8_gemm_kernel<@u, 7168u, 128u>(float*)", {"grid": [132, 2, 1]}),
    ("kernel", "gemm_128x256", {"grid": ["@", 1, 1]}),
]


def test_a_number_in_a_name_may_be_beyond_all_types(tmp_path):
    trace = kineto_files.trace(0, 1, steps=3)
    numbers = (str((1 << 63) - 1), str(1 << 64), "9" * 5000)
    for place, (number, (category, pattern, args)) in enumerate(itertools.product(numbers, NAMES_WITH_NUMBERS)):
        of_stream = {"device": 0, "stream": 7} if category == "kernel" else {}
        given = json.loads(json.dumps(args).replace("@", number))
        name, at_us = pattern.replace("@", number), 150 + 3 * place
        trace["traceEvents"].append(kineto_files.slice_(category, name, at_us, 2, tid=7, **given, **of_stream))
    (tmp_path / "rank0.pt.trace.json").write_text(json.dumps(trace), encoding="utf-8")
    for command in (("check", "--format", "json", "--fail-on", "never"), ("summary",), ("whatif", "--critical-path")):
        done = cli_runner.tracekit(command[0], tmp_path, *command[1:], "--no-cache")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", others_in_accuracy([1_200_000_000, 10**14], [10**14]))
def test_steps_of_a_training_may_have_any_number(tmp_path, number):
    for path in sorted((cli_runner.ROOT / "sample_traces" / "faults" / "healthy-ddp").glob("*.json.gz")):
        text = re.sub(
            r'"ProfilerStep#(\d+)"',
            lambda found: f'"ProfilerStep#{number + int(found[1])}"',
            gzip.decompress(path.read_bytes()).decode(),
        )
        assert f"#{number}"[:5] in text
        (tmp_path / path.name.removesuffix(".gz")).write_text(text, encoding="utf-8")
    done = cli_runner.tracekit("check", tmp_path, "--format", "json", "--no-cache", "--fail-on", "never")
    assert done.returncode == 0, done.stderr
    assert {row["step"] for row in json.loads(done.stdout)["summary"]} == {number + 3, number + 4, None}


SIZES = ((1 << 63) - 1, -(1 << 63), 1 << 62, str((1 << 63) - 1))
SIZE_NAMES = ("Bytes", "Total Allocated", "Total Reserved", "bytes")
EVERYDAY_SIZES = [("Bytes", SIZES[0]), ("Bytes", SIZES[1]), ("Total Allocated", SIZES[0]), ("bytes", SIZES[0])]


@pytest.mark.parametrize(("name", "number"), others_in_accuracy(itertools.product(SIZE_NAMES, SIZES), EVERYDAY_SIZES))
def test_a_size_in_a_trace_may_be_beyond_all_memory(tmp_path, name, number):
    trace = kineto_files.trace(0, 1, steps=3)
    args = {"Device Type": 1, "Device Id": 0, "Addr": 1 << 40, "Bytes": 512, "Total Allocated": 512} | {name: number}
    place = {"pid": 1, "tid": 1, "s": "t", "args": args}
    trace["traceEvents"] += [
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 160 + i, **place} for i in range(4)
    ]
    copy_args = {"device": 0, "stream": 9, "bytes": args.get("bytes", 64)}
    trace["traceEvents"].append(kineto_files.slice_("gpu_memcpy", "Memcpy HtoD", 720, 30, tid=9, **copy_args))
    (tmp_path / "rank0.pt.trace.json").write_text(json.dumps(trace), encoding="utf-8")
    for command in (("check", "--format", "json", "--fail-on", "never"), ("memory", "--format", "json")):
        done = cli_runner.tracekit(command[0], tmp_path, *command[1:], "--no-cache")
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def saved_report():
    """The report of the sample run, as text."""
    return cli_runner.tracekit("check", "--sample", "--format", "json").stdout


@pytest.mark.parametrize("number", [1 << 63, 1 << 200])
@pytest.mark.parametrize("key", ["rank", "window", "steps"])
def test_a_number_beyond_64_bits_in_a_saved_report_is_refused(tmp_path, saved_report, key, number):
    report = json.loads(saved_report)
    series = report["samples"][0]
    series[key] = [number] * len(series["steps"]) if key == "steps" else number
    (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
    done = cli_runner.tracekit("history", "add", tmp_path / "report.json", "--db", tmp_path / "runs.duckdb")
    assert done.returncode == 2
    assert "report.json: is not a complete report" in cli_runner.only_line(done)


def test_names_are_ordered_by_numbers_of_any_length():
    names = ["rank" + "9" * 5000, "rank10", "rank0009", "rank1", "a", "rank", "10"]
    assert sorted(names, key=files.natural_key) == [
        "10",
        "a",
        "rank",
        "rank1",
        "rank0009",
        "rank10",
        "rank" + "9" * 5000,
    ]


def test_a_settings_file_with_a_number_of_5000_digits_is_refused(tmp_path):
    (tmp_path / "tracekit.toml").write_text("[budget]\nstep_time = " + "9" * 5000, encoding="utf-8")
    done = cli_runner.tracekit("check", "--sample", "--config", tmp_path / "tracekit.toml")
    assert done.returncode == 2
    assert "tracekit.toml" in cli_runner.only_line(done)


def test_scrub_names_a_gzip_file_with_damage_in_its_middle(tmp_path):
    packed = bytearray(gzip.compress(TRACE.encode() * 50))
    packed[len(packed) // 2 : len(packed) // 2 + 40] = bytes(40)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rank0.pt.trace.json.gz").write_bytes(packed)
    done = cli_runner.tracekit("scrub", tmp_path / "in", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert "cannot be read to its end" in done.stdout + done.stderr


def test_scrub_refuses_text_that_cannot_be_split(tmp_path):
    (tmp_path / "rank0.pt.trace.json").write_bytes(b'{"traceEvents": [' + b" " * (80 << 20) + b"]}")
    done = cli_runner.tracekit("scrub", tmp_path / "rank0.pt.trace.json", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert "no end of a line" in done.stdout + done.stderr


def test_values_of_a_wrong_type_in_a_checkpoint_log_are_left_out_and_said(tmp_path):
    line = '{"step": 1, "stage": "write", "start_ns": 5, "dur_ns": @, "bytes": @, "files": 1}\n'
    values = ["{}", "[]", '{"a": {"b": [1]}}', "[[1]]", '"x"', "true", "1e400", "9" * 400]
    done = check(tmp_path, rank00000__checkpoint__jsonl="".join(line.replace("@", value) for value in values))
    assert done.returncode == 0, done.stderr
    assert "16 values have a wrong type or size and were left out" in done.stdout


def test_times_that_no_step_takes_are_left_out_of_a_metrics_log_and_said(tmp_path):
    times = ["5", "1.6e60", "-1e300", "9223372036854775808", "5"]
    lines = [f'{{"step": {step}, "step_time_ns": {time}}}' for step, time in enumerate(times)]
    save = '{"step": 1, "stage": "total", "start_ns": 5, "dur_ns": 9, "bytes": 4, "blocking": true}'
    done = check(tmp_path, rank00000__metrics__jsonl="\n".join(lines), rank00000__checkpoint__jsonl=save)
    assert done.returncode == 0, done.stderr
    assert "3 values have a wrong type or size and were left out" in done.stdout


def test_a_step_of_a_wrong_type_in_a_metrics_log_is_left_out_and_said(tmp_path):
    lines = ['{"step": 0, "step_time_ns": 5}', '{"step": {}, "step_time_ns": 6}', '{"step": true, "loss": 7}']
    done = check(tmp_path, rank00000__metrics__jsonl="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert "2 values have a wrong type or size and were left out" in done.stdout


@pytest.mark.parametrize("depth", [budget.MAX_DEPTH + 1, 900, 20_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")])
def test_json_beyond_a_depth_is_refused(depth, brackets):
    text = brackets[0] * depth + ("1" if brackets[0] != "[" else "") + brackets[1] * depth
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        untrusted_json.parse(text)


@pytest.mark.parametrize("depth", [967, 5000])
@pytest.mark.parametrize("field", ["ph", "cat", "name", "args"])
def test_an_event_beyond_the_depth_ends_the_command_in_one_line(tmp_path, depth, field):
    trace = kineto_files.trace(0, steps=1)
    event = json.dumps({**kineto_files.slice_("cpu_op", "aten::mm", 150, 20, tid=1), field: 0})
    deep = event.replace(f'"{field}": 0', f'"{field}": {"[" * depth + "]" * depth}')
    text = json.dumps(trace).replace('"traceEvents": [', f'"traceEvents": [{deep}, ')
    (tmp_path / "rank0.json").write_text(text)
    done = cli_runner.tracekit("check", tmp_path / "rank0.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"nested more than {budget.MAX_DEPTH} levels deep" in cli_runner.only_line(done)


def test_json_at_the_depth_is_read():
    depth = budget.MAX_DEPTH
    assert untrusted_json.parse("[" * depth + "]" * depth)
    assert untrusted_json.parse(json.dumps("[" * 500)) == "[" * 500


@pytest.mark.parametrize(
    "header",
    ["{}", "[]", "3", '{"a": 1}', '{"a": {"data_offsets": [0]}}', '{"a": {"data_offsets": ["x", 1]}}', "[" * 90_000],
)
def test_a_header_of_another_shape_is_a_damaged_checkpoint(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    done = cli_runner.tracekit("checkpoint", "verify", tmp_path)
    assert done.returncode in (1, 2), done.stderr
    assert "internal error" not in done.stderr


ENTRIES = ['{"bytes": 1}', '{"bytes": 1e400, "sha256": "x"}', "[]", '{"bytes": {}, "sha256": 3}']


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_seal_with_another_entry_is_damaged(tmp_path, entry):
    seal = '{"sha256": "x", "files": {"a": ENTRY}}'.replace("ENTRY", entry)
    (tmp_path / "seal.json").write_text(seal, encoding="utf-8")
    done = cli_runner.tracekit("checkpoint", "verify", tmp_path)
    assert done.returncode == 1, done.stderr
    assert "is damaged" in done.stdout + done.stderr


@pytest.mark.parametrize("rank", ["null", "-1", "1e400", "{}"])
def test_a_merged_file_of_one_kind_of_event_is_read_or_named(tmp_path, rank):
    event = '{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 5, "dur": 2, "args": {"rank": 0}}'
    other = event.replace('"rank": 0', f'"rank": {rank}')
    for name, events in (("some", [event] * 20 + [other]), ("none", [other] * 20)):
        (tmp_path / f"{name}.json").write_text(f'{{"traceEvents": [{", ".join(events)}]}}', encoding="utf-8")
        done = cli_runner.tracekit("check", tmp_path / f"{name}.json", "--format", "json", "--no-cache")
        assert done.returncode in (1, 2), done.stderr
        assert "internal error" not in done.stderr


SNAPSHOT = {
    "segments": [
        {
            "device": 0, "address": 1 << 30, "total_size": 1 << 21, "allocated_size": 512, "active_size": 512,
            "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "blocks": [{"address": 1 << 30, "size": 1 << 21, "state": "active_allocated", "frames": []}],
        }
    ],
    "device_traces": [[{"action": "alloc", "addr": 1 << 30, "size": 9, "stream": 0, "time_us": 5, "frames": []}]],
}  # fmt: skip
FIELDS = [
    *(("segments", 0, name) for name in SNAPSHOT["segments"][0] if name != "requested_size"),
    *(("segments", 0, "blocks", 0, name) for name in SNAPSHOT["segments"][0]["blocks"][0]),
    *(("device_traces", 0, 0, name) for name in SNAPSHOT["device_traces"][0][0]),
]


HALVES = {"even fields": 0, "odd fields": 1}


OF_ANOTHER_TYPE = {
    "null": None, "-1": -1, "1e400": 1e400, "long": 1 << 200, "longer": 1 << 20_000, "x": "x", "digits": "9" * 400,
    "list": [], "object": {}, "objects": [{}],
}  # fmt: skip
# Each field has a value of two kinds.
EVERYDAY_HALVES = [("even fields", "null"), ("odd fields", "longer"), ("odd fields", "x"), ("even fields", "objects")]


@pytest.mark.parametrize(
    ("half", "value"), others_in_accuracy(itertools.product(HALVES, OF_ANOTHER_TYPE), EVERYDAY_HALVES)
)
def test_any_field_of_a_snapshot_may_be_of_another_type(tmp_path, half, value):
    for field in FIELDS[HALVES[half] :: 2]:
        changed = copy.deepcopy(SNAPSHOT)
        holder = functools.reduce(lambda at, key: at[key], field[:-1], changed)
        holder[field[-1]] = OF_ANOTHER_TYPE[value]
        (tmp_path / "a.pickle").write_bytes(pickle.dumps(changed, 4))
        done = cli_runner.tracekit("memory", tmp_path / "a.pickle", "--format", "json")
        assert done.returncode in (0, 2), (field, done.stderr)


DUMP = {
    "version": "2.9", "rank": 0,
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {
            "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1, "profiling_name": "gloo:all_reduce",
            "process_group": ["0", "default_pg"], "time_created_ns": 9, "input_sizes": [[2]], "output_sizes": [[2]],
            "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "scheduled", "timeout_ms": 5,
            "is_p2p": False, "retired": False, "frames": [{"name": "step", "filename": "train.py", "line": 3}],
        },
    ],
    "tracekit": {
        "reason": "timeout", "error": "", "rank": 0, "world_size": 2, "pid": 7, "host": "node", "written_ns": 99,
        "stalled_ns": 50, "dead_ranks": [1],
        "threads": [
            {
                "name": "MainThread", "is_main": True, "cpu_ratio": 0.5, "system_call": {"name": "read", "path": "x"},
                "frames": [{"name": "step", "filename": "train.py", "line": 3}],
            }
        ],
    },
}  # fmt: skip


def fields_of(value, *place):
    """Yield the place of each item in a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*place, key)
        yield from fields_of(value[key], *place, key)


@pytest.mark.parametrize(
    ("half", "value"), others_in_accuracy(itertools.product(HALVES, OF_ANOTHER_TYPE), EVERYDAY_HALVES)
)
def test_any_field_of_a_hang_dump_may_be_of_another_type(tmp_path, half, value):
    for field in [*fields_of(DUMP)][HALVES[half] :: 2]:
        changed = copy.deepcopy(DUMP)
        holder = functools.reduce(lambda at, key: at[key], field[:-1], changed)
        holder[field[-1]] = OF_ANOTHER_TYPE[value]
        (tmp_path / "rank0.pickle").write_bytes(pickle.dumps(changed, 4))
        done = cli_runner.tracekit("hang", tmp_path, "--format", "json")
        assert done.returncode in (0, 1, 2), (field, done.stderr)


SEGMENT_ACTIONS = ["segment_alloc", "segment_free", "segment_map", "segment_unmap"]


@pytest.mark.parametrize("action", [*SEGMENT_ACTIONS, "alloc", "free_requested", "free_completed", "oom"])
@pytest.mark.parametrize("name", ["addr", "size", "stream", "time_us", "frames"])
def test_an_event_of_a_snapshot_may_lack_any_field(tmp_path, action, name):
    changed = copy.deepcopy(SNAPSHOT)
    whole = {"action": action, "addr": 1 << 30, "size": 512, "stream": 0, "time_us": 4, "frames": []}
    changed["device_traces"][0] += [whole, {key: value for key, value in whole.items() if key != name}]
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(changed, 4))
    done = cli_runner.tracekit("memory", tmp_path / "a.pickle", "--format", "json")
    assert done.returncode in (0, 2), done.stderr


INPUTS = {
    "Input Dims": [[8, 16], [16, 4], []], "Input type": ["float", "float", "Scalar"],
    "Input Strides": [[16, 1], [4, 1], []], "Concrete Inputs": ["", "", "1"],
}  # fmt: skip
OPS = (
    "aten::mm", "aten::add", "aten::convolution", "aten::copy_", "aten::fill_", "aten::sum", "aten::embedding",
    "aten::cat", "aten::native_layer_norm", "aten::_foreach_add_",
)  # fmt: skip
OTHER_VALUES = [None, -1, 0, 1 << 62, 1 << 63, 10**40, 10**400, 1e308, "x", [], [[]], {}, [[["a"]]], True]


EVERYDAY_VALUES = [None, -1, 10**400, [[["a"]]]]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(value, marks=() if value in EVERYDAY_VALUES else pytest.mark.accuracy, id=repr(value)[:8])
        for value in OTHER_VALUES
    ],
)
def test_the_inputs_of_an_operator_may_be_of_any_kind(tmp_path, value):
    """GIVEN calls that launch kernels, WHEN a part of their inputs is something else, THEN they are counted without."""
    changed = [{**INPUTS, key: value} for key in INPUTS]
    changed += [{**INPUTS, key: [value, *INPUTS[key][1:]]} for key in INPUTS]
    changed += [{**INPUTS, "Input Dims": [[value, 16], [16, 4], []]}, {**INPUTS, "Input Strides": [[value], [4], []]}]
    trace = kineto_files.trace(0, 1, steps=1)
    for number, (op, given) in enumerate(itertools.product(OPS, changed)):
        launch = {"correlation": 9000 + number}
        trace["traceEvents"] += [
            kineto_files.slice_("cpu_op", op, 100 + number, 0.9, tid=1, **given),
            kineto_files.slice_("cuda_runtime", "cudaLaunchKernel", 100.1 + number, 0.2, tid=1, **launch),
            kineto_files.slice_("kernel", "gemm", 200 + number, 0.5, tid=7, device=0, stream=7, **launch),
        ]
    (tmp_path / "rank00000.pt.trace.json").write_text(json.dumps(trace), encoding="utf-8")
    done = cli_runner.tracekit("check", tmp_path, "--format", "json", "--no-cache", "--fail-on", "never")
    assert done.returncode == 0, done.stderr


def test_a_trace_of_copies_and_kernels_only_is_read(tmp_path):
    events = [
        kineto_files.slice_("kernel", "gemm", 100, 20, tid=7, device=0, stream=7),
        kineto_files.slice_("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 200, 30, tid=9, device=0, stream=9),
    ]
    trace = {**kineto_files.trace(0, 1, steps=1), "traceEvents": events}
    (tmp_path / "rank00000.pt.trace.json").write_text(json.dumps(trace), encoding="utf-8")
    done = cli_runner.tracekit("check", tmp_path, "--format", "json", "--no-cache", "--fail-on", "never")
    assert done.returncode == 0, done.stderr


def test_a_run_without_work_has_no_critical_path(tmp_path):
    event = {"ph": "B", "cat": "user_annotation", "name": "step", "pid": 1, "tid": 1, "ts": 800}
    trace = {**kineto_files.trace(0, 1, steps=1), "traceEvents": [event]}
    (tmp_path / "rank00000.pt.trace.json").write_text(json.dumps(trace), encoding="utf-8")
    done = cli_runner.tracekit("whatif", "--critical-path", tmp_path, "--no-cache")
    assert done.returncode == 2
    assert "no step has work that can be replayed" in cli_runner.only_line(done)


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 1 << 200])
def test_an_integer_beyond_64_bits_in_a_baseline_is_refused(tmp_path, number):
    document = json.loads((cli_runner.ROOT / "sample_traces" / "ci" / "baseline.json").read_bytes())
    places = [(document["fingerprint"], "world_size"), (document["recordings"][0], "created_ns")]
    places.append((document["recordings"][0]["steps"][0], 0))
    for holder, key in places:
        before, holder[key] = holder[key], number
        (tmp_path / "baseline.json").write_text(json.dumps(document), encoding="utf-8")
        holder[key] = before
        done = cli_runner.tracekit("check", "--sample", "--baseline", tmp_path / "baseline.json")
        assert done.returncode in (2, 4), done.stderr
        assert "internal error" not in done.stderr


def test_a_file_without_a_name_in_a_zip_archive_is_left_out_with_a_finding(tmp_path):
    trace = json.dumps(kineto_files.trace(0, steps=1))
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr("rank00000.pt.trace.json", trace)
        archive.writestr(zipfile.ZipInfo(""), trace)
    done = cli_runner.tracekit("check", tmp_path / "run.zip", "--format", "json", "--no-cache", "--fail-on", "never")
    assert done.returncode == 0, done.stderr
    assert "a file without a name was left out" in done.stdout


def _tiled_kernel(folder, grid):
    """Write a trace of a device with 108 SMs and a kernel whose name has a tile, launched with a grid."""
    trace = kineto_files.trace(0, 1, steps=1, deviceProperties=[{"id": 0, "name": "NVIDIA A100", "numSms": 108}])
    work = {"device": 0, "stream": 7, "correlation": 90, "grid": "GRID", "block": [256, 1, 1]}
    trace["traceEvents"] += [
        kineto_files.slice_("cpu_op", "aten::mm", 700, 30, tid=1, **INPUTS),
        kineto_files.slice_("cuda_runtime", "cudaLaunchKernel", 710, 5, tid=1, correlation=90),
        kineto_files.slice_("kernel", "ampere_sgemm_128x64_nn", 720, 50, tid=7, **work),
    ]
    text = json.dumps(trace).replace('"GRID"', grid)
    (folder / "rank00000.pt.trace.json").write_text(text, encoding="utf-8")


DAMAGED_TEXTS = {b"300x1x1": b"x300x1x", b"[[8, 16], [16, 4], []]": b"[[8, 16}, [16, 4], []]"}


@pytest.mark.parametrize("command", others_in_accuracy(["check", "kernels", "kernels --of host", "whatif"], ["check"]))
def test_texts_of_an_export_may_be_no_grid_and_no_array(tmp_path, command):
    _tiled_kernel(tmp_path, "[300, 1, 1]")
    file = tmp_path / "run.pftrace"
    assert cli_runner.tracekit("export", tmp_path, "-o", file, "--no-cache").returncode == 0
    exported = file.read_bytes()
    for text, damaged in DAMAGED_TEXTS.items():
        assert text in exported
        exported = exported.replace(text, damaged)
    file.write_bytes(exported)
    done = cli_runner.tracekit(*command.split(), file, "--format", "json", "--no-cache")
    assert done.returncode in (0, 1), done.stderr


def test_ranks_of_a_pipeline_may_mark_different_steps(tmp_path):
    for rank, name in ((0, b"another#"), (1, b"ProfilerStep#")):
        sample = cli_runner.ROOT / f"sample_traces/parallelism/pipeline-1f1b/rank{rank:05}.pt.trace.json.gz"
        content = gzip.decompress(sample.read_bytes())
        assert b"ProfilerStep#" in content
        (tmp_path / sample.stem).write_bytes(content.replace(b"ProfilerStep#", name))
    done = cli_runner.tracekit("check", tmp_path, "--format", "json", "--no-cache", "--fail-on", "never")
    assert done.returncode == 0, done.stderr


def test_steps_that_take_no_time_have_no_critical_path(tmp_path):
    trace = kineto_files.trace(0, 1, steps=1)
    instants = [{**event, "dur": 0} for event in trace["traceEvents"]]
    (tmp_path / "rank00000.pt.trace.json").write_text(
        json.dumps({**trace, "traceEvents": instants[:3]}), encoding="utf-8"
    )
    for options in (("--critical-path",), ()):
        done = cli_runner.tracekit("whatif", tmp_path, *options, "--no-cache")
        assert done.returncode == 2, done.stderr
        assert "can be replayed" in cli_runner.only_line(done)


LISTS = ',"a":[1]' * 130_000


@pytest.mark.parametrize("end", [",x}", "}}", ',"a":{"a":[1]' * 500 + "}"])
def test_the_end_of_events_is_searched_once_in_a_file_cut_behind_a_list(end):
    assert header.end_of_events("[1]" + LISTS + end) is None


def test_the_end_of_events_is_before_the_last_keys():
    text = '{"args": {"Input Dims": [[1]], "Input type": [""]}}], "traceName": "x", "INFO": [1, 2]}'
    assert header.end_of_events(text) == text.index('], "traceName"')
    assert header.end_of_events(text + " \n") == text.index('], "traceName"')
    assert header.end_of_events(text[:-1]) is None
    assert header.end_of_events(text[: text.index("}], ") + 1]) is None


@pytest.fixture(scope="module")
def worker():
    """The process of the fuzzer that runs the inputs; on a busy machine, an input takes twice as much CPU time."""
    with runner.worker(cpu_s=60) as started:
        yield started


def test_slices_of_a_perfetto_trace_may_lack_their_names(worker):
    made = inputs.drawn("Perfetto trace", 2028114548)  # its interned names are damaged
    assert worker.outcome(made.kind, made.seed).failure is None


@pytest.mark.parametrize("commands", others_in_accuracy(["of every kind of file", "others"], ["of every kind of file"]))
def test_inputs_with_fixed_seeds_are_handled(worker, commands):
    kinds = [kind for kind in inputs.KINDS if (kind in inputs.OTHER_COMMANDS) == (commands == "others")]
    kinds += specified.KINDS if commands != "others" else ()
    failed = [worker.outcome(kind, seed).failure for kind in kinds for seed in range(SHARE)]
    assert [failure for failure in failed if failure] == []


@pytest.mark.parametrize(("kind", "seed"), [("specified packets", 156), ("specified packets", 316)])
def test_clocks_whose_difference_is_no_64_bit_integer_are_handled(worker, kind, seed):
    assert worker.outcome(kind, seed).failure is None


def test_the_fuzzer_finds_what_is_not_handled(worker, monkeypatch):
    """GIVEN a limit that no command keeps, WHEN an input is run, THEN it is a failure: the fuzzer can fail."""
    monkeypatch.setattr(runner, "MAX_GROWTH_MIB", -1)
    failure = worker.outcome("manifest", 1).failure
    assert failure is not None
    assert failure.reason == "more than -1 MiB"


def test_a_number_of_5000_digits_after_the_events_hides_none_of_them(tmp_path):
    document = json.loads(TRACE)
    text = json.dumps({"traceEvents": document["traceEvents"], "distributedInfo": 0})
    (tmp_path / "rank0.pt.trace.json").write_text(
        text.replace('"distributedInfo": 0', '"distributedInfo": ' + "9" * 5000)
    )
    done = cli_runner.tracekit("summary", tmp_path, "--format", "json", "--no-cache")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("digits", others_in_accuracy([20, 400, 4000, 5000], [20, 5000]))
@pytest.mark.parametrize("is_first", [True, False])
def test_a_base_of_times_beyond_all_types_is_none(tmp_path, digits, is_first):
    events = {"traceEvents": json.loads(TRACE)["traceEvents"]}
    base = {"baseTimeNanoseconds": 0}
    for rank in (0, 1):
        document = {"distributedInfo": {"rank": rank, "world_size": 2}} | (base | events if is_first else events | base)
        text = json.dumps(document).replace(
            '"baseTimeNanoseconds": 0', f'"baseTimeNanoseconds": {"9" * digits if rank else 0}'
        )
        (tmp_path / f"rank{rank}.pt.trace.json").write_text(text)
    done = cli_runner.tracekit("check", tmp_path, "--format", "json", "--no-cache", "--fail-on", "never")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        r'"distributedInfo": {"backend": "nccl", "world_size": "\ud800"}, "x',
        r'"distributedInfo": {"backend": "\udfff"}',
    ],
)
def test_half_a_surrogate_pair_in_a_damaged_header_is_a_question_mark(text):
    keys, is_whole = header.parse_start(f'{{"schemaVersion": 1, "broken: 2, {text}'.encode())
    assert not is_whole
    assert "?" in keys["distributedInfo"].values()
    json.dumps(keys, ensure_ascii=False).encode()

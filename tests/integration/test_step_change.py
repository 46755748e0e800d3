"""`tracekit compare --by` on recorded runs, beside HTA's trace diff, and with a change put into a recording."""

import csv
import gzip
import io
import json
from pathlib import Path

import polars as pl
import pytest

import tracekit
from benchmarks import injected_changes
from tests.support import loaded_runs
from tests.support.cli_runner import only_line
from tests.support.cli_runner import tracekit as command
from tracekit.analysis.compute import step_charges

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"
TRACES = ROOT.parent / "shared" / "traces"
PAIR = (SAMPLES / "demo-fsdp2", SAMPLES / "demo-yafsdp")

runs_loaded_once = loaded_runs.runs_loaded_once
pytestmark = [pytest.mark.filterwarnings("ignore::Warning"), pytest.mark.usefixtures("runs_loaded_once")]


def compared(*arguments: object) -> str:
    done = command("compare", *PAIR, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_contributions_sum_to_the_change_of_the_step_of_compare() -> None:
    metrics = {change["metric"]: change for change in json.loads(compared("--format", "json"))["changes"]}
    found = json.loads(compared("--by", "operator", "--format", "json"))
    step = metrics["step_time_ns"]
    assert found["change_ns"] == pytest.approx(step["candidate"] - step["reference"])
    assert sum(row["change_ns"] for row in found["rows"]) == pytest.approx(found["change_ns"], rel=1e-3)
    assert sum(row["contribution_ratio"] for row in found["rows"]) == pytest.approx(1, rel=1e-3)
    assert (found["schema"], found["by"], found["verdict"]) == ("tracekit.step_change/1", ["operator"], step["verdict"])
    assert {row["verdict"] for row in found["rows"]} <= {"better", "worse", "same", "inconclusive"}
    gone = {row["name"] for row in found["rows"] if row["status"] == "gone"}
    assert {"fsdp::all_gather_copy_in", "fsdp::chunk_cat"} <= gone


RESNETS = ("kineto_resnet_v100_memory", "hta_nccl_args_a100", "merged_ddp_mi300_4ranks")


_V100_A100, _A100_MI300, _V100_MI300 = RESNETS[:2], RESNETS[1:], RESNETS[::2]
_GRADIENTS = "aten::cudnn_convolution_backward_input + aten::cudnn_convolution_backward_weight"
_LIBRARIES = {
    _V100_A100: {"aten::cudnn_convolution", "aten::cudnn_batch_norm", "aten::cudnn_batch_norm_backward",
                 f"{_GRADIENTS} → aten::convolution_backward"},
    _A100_MI300: {"aten::cudnn_convolution → aten::miopen_convolution", "aten::convolution_backward",
                  "aten::cudnn_batch_norm → aten::miopen_batch_norm",
                  "aten::cudnn_batch_norm_backward → aten::miopen_batch_norm_backward"},
    _V100_MI300: {"aten::cudnn_convolution → aten::miopen_convolution", f"{_GRADIENTS} → aten::convolution_backward",
                  "aten::cudnn_batch_norm → aten::miopen_batch_norm",
                  "aten::cudnn_batch_norm_backward → aten::miopen_batch_norm_backward"},
}  # fmt: skip


@pytest.mark.parametrize(
    "pair",
    [_V100_A100, *(pytest.param(pair, marks=pytest.mark.accuracy) for pair in (_A100_MI300, _V100_MI300))],
    ids="-".join,
)
def test_contributions_sum_for_public_recordings_of_resnet50_under_different_settings(pair) -> None:
    """One process on V100, DDP on A100, DDP in 16 bits on MI300X: 53 convolutions and batch norms a step in each."""
    folders = [TRACES / name for name in pair]
    if not all(folder.is_dir() for folder in folders):
        pytest.skip("the downloaded traces are not in ../shared")
    done = command("compare", *folders, "--by", "operator", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for sums, whole in (
        ("change_ns", "change_ns"),
        ("before_ns", "reference_step_ns"),
        ("after_ns", "candidate_step_ns"),
    ):
        assert sum(row[sums] for row in found["rows"]) == pytest.approx(found[whole], rel=1e-9)
    assert sum(row["contribution_ratio"] for row in found["rows"]) == pytest.approx(1, rel=1e-9)
    counts = {row["name"]: (row["before_count"], row["after_count"]) for row in found["rows"]}
    assert counts["aten::threshold_backward"] == (49, 49)
    compute = {row["name"]: row for row in found["rows"] if row["part"] == "compute"}
    layers = {name for name in compute if "convolution" in name or "batch_norm" in name}
    assert layers == _LIBRARIES[pair]
    assert not {compute[name]["status"] for name in layers} & {"new", "gone"}
    assert all(counts[name] == (53, 53) for name in layers if "batch_norm" in name)


def test_every_format_has_the_same_rows() -> None:
    rows = json.loads(compared("--by", "kernel,shapes", "--format", "json"))["rows"]
    written = list(csv.DictReader(io.StringIO(compared("--by", "kernel,shapes", "--format", "csv"))))
    assert [(row["name"], float(row["change_ns"])) for row in written] == [
        (row["name"], pytest.approx(row["change_ns"])) for row in rows
    ]
    text = compared("--by", "operator", "--top", "3")
    assert text.startswith("demo-yafsdp is 24% faster (334 → 253 ms a step")
    assert text.count("cannot tell") >= 1
    assert "and 65 more" in text
    markdown = compared("--by", "operator", "--top", "3", "--format", "markdown").splitlines()
    assert len([line for line in markdown if line.startswith("| c10d")]) == 1


def test_the_metrics_are_written_as_csv_too() -> None:
    rows = {row["metric"]: row for row in csv.DictReader(io.StringIO(compared("--format", "csv")))}
    # Rank 1, from the first op of step 26 to the end of its mark.
    assert float(rows["step_time_ns"]["reference"]) == pytest.approx(333_976_384)


def test_a_limit_counts_with_by_too() -> None:
    done = command("compare", *PAIR[::-1], "--by", "operator", "--fail-if", "sent_bytes>1%")
    assert done.returncode == 1
    assert "limit exceeded" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--by", "color"), "--by color: expected some of operator, kernel, module"),
        (("--by", ""), "--by: expected some of operator, kernel, module"),
    ],
)
def test_an_unknown_key_is_refused(arguments: tuple[str, ...], part: str) -> None:
    done = command("compare", *PAIR, *arguments)
    assert done.returncode == 2
    assert part in only_line(done)


def test_a_saved_report_has_no_operators(tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    command("check", PAIR[0], "--format", "json", "--out", saved)
    done = command("compare", saved, PAIR[1], "--by", "operator")
    assert done.returncode == 2
    assert "needs the traces of both runs" in only_line(done)


# A change put into a recording ----------------------------------------------------------------------------------------


@pytest.mark.accuracy
@pytest.mark.parametrize("seed", [1, 5])
def test_an_operator_that_was_slowed_down_in_a_recording_is_first(seed: int, tmp_path: Path) -> None:
    folder = TRACES / "torchrec_v100_4ranks"
    if not folder.is_dir():
        pytest.skip("no traces of other projects next to this checkout")
    draw = injected_changes.measure(folder, seed, tmp_path)
    assert draw.is_first
    assert draw.step_change_ratio > 0.01
    assert draw.off_ratio < 1e-3


# HTA's trace diff -----------------------------------------------------------------------------------------------------


def hta_counts(files: list[Path]) -> dict[str, tuple[float, float, float, float]]:
    """Return the count and µs of each kernel in two files, as HTA's trace diff has them."""
    pytest.importorskip("hta", reason="needs the extra [hta]")
    from hta.common.trace import Trace as HtaTrace
    from hta.configs.env_options import HTAEnvOptions
    from hta.trace_diff import DeviceType, LabeledTrace, TraceDiff

    sides = []
    for name, file in zip("ab", files, strict=True):
        HTAEnvOptions.instance()._options["HTA_DISABLE_NS_ROUNDING"] = True
        loaded = HtaTrace(trace_files={0: str(file)})
        loaded.load_traces(use_multiprocessing=False, include_last_profiler_step=True)  # it forks, threads are running
        HTAEnvOptions.instance()._options["HTA_DISABLE_NS_ROUNDING"] = False
        loaded.parse_traces = lambda: None  # they are parsed
        sides.append(LabeledTrace(name, loaded))
    table = TraceDiff.compare_traces(
        *sides, control_rank=0, test_rank=0, control_iteration=sides[0].iterations(),
        test_iteration=sides[1].iterations(), device_type=DeviceType.GPU,
    )  # fmt: skip
    columns = ["a_counts", "b_counts", "a_total_duration", "b_total_duration"]
    return {str(name): tuple(row) for name, row in zip(table.index, table[columns].to_numpy().tolist(), strict=True)}


@pytest.mark.accuracy
def test_counts_and_durations_of_kernels_equal_those_of_hta(tmp_path: Path) -> None:
    files = [_mended(file, tmp_path) for file in sorted((TRACES / "nanogpt_h100_8ranks").glob("rank[04]-*"))]
    if not files:
        pytest.skip("no traces of other projects next to this checkout")
    expected = hta_counts(files)
    sums = [
        tracekit.load(file, cache=False).table(step_charges.step_charges).group_by("kernel").agg(
            pl.col("count", "work_ns").sum()
        )
        for file in files
    ]  # fmt: skip
    a, b = ({name: (count, work_ns) for name, count, work_ns in own.drop_nulls("kernel").iter_rows()} for own in sums)
    assert a.keys() | b.keys() == expected.keys()
    for name, (a_count, b_count, a_us, b_us) in expected.items():
        counts, durations = zip(a.get(name, (0, 0)), b.get(name, (0, 0)), strict=True)
        assert counts == (a_count, b_count), name
        assert durations == pytest.approx((1e3 * a_us, 1e3 * b_us), abs=1), name
    assert len(expected) > 100


def _mended(file: Path, folder: Path) -> Path:
    """Return a copy without the events that HTA mistakes for work on the device (docs/hta.md)."""
    document = json.loads(gzip.decompress(file.read_bytes()))
    kept = [event for event in document["traceEvents"] if event.get("cat") != "gpu_user_annotation"]
    document["traceEvents"] = [_without_stream(event) for event in kept]
    copy = folder / file.name
    copy.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return copy


def _without_stream(event: dict[str, object]) -> dict[str, object]:
    arguments = event.get("args")
    if event.get("cat") != "cpu_op" or not isinstance(arguments, dict):
        return event
    return {**event, "args": {name: value for name, value in arguments.items() if name != "stream"}}

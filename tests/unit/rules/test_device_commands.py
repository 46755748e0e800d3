"""Commands in fixes: those of the vendor whose devices the run used."""

import re
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.drawn_hosts import time_sliced
from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import Vendor
from tracekit.rules import device_commands, engine
from tracekit.rules.device_slowdowns import DeviceStall

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared"
RULES = sorted((ROOT / "tracekit" / "rules").glob("*.py"))


def stalled(call):
    """Return a run whose device another process has at times, launched by this call."""
    trace = time_sliced((5, 10, 15, 24, 31))
    return drawn_traces.run(trace.replace(ops=trace.ops.with_columns(name=pl.lit(call), kind=pl.lit("runtime"))))


@pytest.mark.parametrize(
    ("call", "vendor", "command", "foreign"),
    [
        ("cudaLaunchKernel", Vendor.NVIDIA, "nvidia-smi pmon", "amd-smi"),
        ("hipLaunchKernel", Vendor.AMD, "amd-smi process", "nvidia-smi"),
        ("aclrtLaunchKernel", Vendor.ASCEND, "npu-smi info", "nvidia-smi"),
    ],
)
def test_a_fix_names_the_commands_of_the_vendor(call, vendor, command, foreign):
    run = stalled(call)
    assert workload.vendor(run) is vendor
    (finding,) = engine.check(run, [DeviceStall()]).findings
    assert command in finding.fix
    assert foreign not in finding.fix
    assert ("MIG" in finding.fix) == (vendor is Vendor.NVIDIA)


@pytest.mark.parametrize("vendor", [Vendor.AMD, Vendor.ASCEND])
@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_each_command_of_a_rule_has_one_of_each_vendor(path, vendor):
    text = re.sub(r'"\n\s*f?"', "", path.read_text(encoding="utf-8"))
    for sentence in re.findall(r'"([^"\n]*nvidia-smi[^"\n]*)"', text):
        other = device_commands.of_vendor(sentence, vendor)
        assert "nvidia-smi" not in other
        # What follows a command is a sentence, and no rest of its options.
        assert not re.search(r"(?:amd-smi|npu-smi)[^.,;:()]* (?:PERFORMANCE|CLOCK|topo -m|EXCLUSIVE)", other), other


def test_commands_of_nvidia_stay_in_runs_without_calls():
    run = tracekit.load(str(ROOT / "sample_traces" / "demo-fsdp2"))
    assert workload.vendor(run) is Vendor.NVIDIA


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("folder", "vendor"),
    [
        ("traces/merged_ddp_mi300_4ranks", Vendor.AMD),
        ("cases/npu_device", Vendor.ASCEND),
        ("traces/hta_nccl_args_a100", Vendor.NVIDIA),
    ],
)
def test_the_vendor_of_public_recordings(folder, vendor):
    run = tracekit.load(str(SHARED / folder))
    assert workload.vendor(run) is vendor
    if vendor is not Vendor.NVIDIA:
        assert not [finding.code for finding in engine.check(run).findings if "nvidia-smi" in finding.fix]

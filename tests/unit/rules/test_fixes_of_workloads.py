"""Fixes that agree with the trace: inference, 16-bit gradients, tensor parallelism."""

from pathlib import Path

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tests.support.rule_examples import EXAMPLES, late_launch_run
from tracekit.analysis.communication import issuers
from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import DDP, FSDP1, FSDP2, YAFSDP
from tracekit.ingest.loader import load
from tracekit.model.run import Run
from tracekit.rules import collective_batching, communication
from tracekit.rules.communication import ExposedCommunication
from tracekit.rules.engine import check
from tracekit.rules.host import LateLaunch
from tracekit.rules.memory_footprint import PeakOwner
from tracekit.rules.memory_reuse import ChangingSizes
from tracekit.rules.rule import Rule, Severity
from tracekit.rules.slow_collectives import SlowLink

OTHERS = Path(__file__).parents[3].parent / "shared" / "traces"


def host_run(*doing, kernel="gemm"):
    """Return a run of one kernel, launched late, whose host ran the ops `doing`."""
    slices = tuple((name, "cpu_op", 0, 8) for name in doing)
    picture = "step 00000000000000000000\ncompute  aaaaaaaa........bbbb"
    return drawn_traces.run(drawn_hosts.trace(picture, {"a": 0, "b": 15}, slices, columns={"a": {"name": kernel}}))


@pytest.mark.parametrize(
    ("run", "infers"),
    [
        (lambda: host_run("aten::mm"), True),
        (lambda: host_run("aten::mm", "autograd::engine::evaluate_function: MmBackward0"), False),
        (lambda: host_run("aten::mm", "Optimizer.step#SGD.step"), False),
        (lambda: host_run("aten::native_dropout"), False),
        # The forward of a function that also has a backward.
        (lambda: host_run("LinearWithGradAccumulationAndAsyncCommunication"), True),
        # Without host ops nothing is known; a step in a CUDA graph has only the kernels of its gradients.
        (lambda: host_run(), False),
        (lambda: host_run("aten::copy_", kernel="flash_bwd_dq_dk_dv_loop"), False),
    ],
)
def test_a_run_infers_if_nothing_in_it_trains(run, infers):
    assert workload.is_inference(run()) == infers


def test_a_manifest_of_a_training_says_that_it_trains():
    plain = host_run("aten::mm").trace(0)
    assert not workload.is_inference(drawn_traces.run(plain, strategy="ddp"))


def test_launch_bound_inference_is_not_told_to_fuse_its_optimizer():
    (found,) = check(host_run("aten::mm"), [LateLaunch()]).findings
    assert "larger batches" in found.fix
    assert "optimizer" not in found.fix
    (found,) = check(late_launch_run(late_by=7), [LateLaunch()]).findings
    assert "fused optimizers" in found.fix


def fix(**more):
    return communication.fix_for(
        **{"strategy": None, "op": "all_reduce", "gloo": False, "overlapped_ratio": 0.3} | more
    )


@pytest.mark.parametrize(
    ("strategy", "op"),
    [(DDP, "all_reduce"), (FSDP1, "reduce_scatter"), (FSDP2, "reduce_scatter"), (YAFSDP, "reduce_scatter")],
)
def test_gradients_of_16_bits_are_not_compressed_to_16_bits(strategy, op):
    long = fix(strategy=strategy, op=op, in_backward=True)
    assert "bf16" in long or "bfloat16" in long
    short = fix(strategy=strategy, op=op, in_backward=True, is_short=True)
    assert "bf16" not in short
    assert "bfloat16" not in short


def test_an_all_reduce_of_activations_is_not_started_earlier():
    for known in ({"in_backward": False}, {"infers": True}, {"strategy": DDP, "in_backward": False}):
        assert "cannot start earlier" in fix(**known)
    assert "no_sync" in fix(strategy=DDP, in_backward=True)
    assert "If these all-reduces reduce gradients" in fix(in_backward=None)


def test_inference_is_not_told_about_gradients():
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        advice = fix(op=op, strategy=FSDP2, infers=True)
        assert not [word for word in ("gradient", "no_sync", "reduce_dtype") if word in advice]


def shared(name):
    folder = OTHERS / name
    if not folder.is_dir():
        pytest.skip(f"needs ../shared/traces/{name}, which is not part of the project")
    return load(folder)


def test_a_recorded_inference_gets_no_activation_checkpointing(wording):
    (found,) = check(shared("tracelens_h100_memory_stacks"), [PeakOwner()]).findings
    wording(found.fix)


def test_recorded_tensor_parallelism_is_told_what_the_group_can_do(wording):
    # 81 all-reduces of activations in a forward pass.
    (found,) = check(shared("megatron_tp8_a100_8ranks"), [ExposedCommunication(max_exposed_ratio=0.0)]).findings
    wording(found.fix)
    assert "gradient" not in found.fix
    assert "dtype" not in found.evidence.columns
    assert found.evidence.schema["exposed_ns"] == pl.Int64


def test_a_wrapper_is_told_to_batch_only_the_collectives_that_it_starts():
    def fix(strategy, op, issuer=None, *, in_model=False):
        return collective_batching._batch_fix(
            strategy, {"op": op, "issuer": issuer, "line": "train.py(12): log", "in_model": in_model}
        )

    assert "bucket_cap_mb" in fix(DDP, "all_reduce")
    assert "bucket_cap_mb" not in fix(DDP, "all_gather")
    assert "FSDP" not in fix(None, "all_gather")
    # Who issued them is better known than the strategy of the run.
    assert "train.py(12): log" in fix(DDP, "all_reduce", issuers.PROGRAM)
    assert "bucket_cap_mb" in fix(DDP, "all_reduce", issuers.PROGRAM, in_model=True)
    assert "fully_shard" in fix(DDP, "all_gather", issuers.FSDP)
    assert "optimizer" in fix(FSDP2, "all_gather", issuers.OPTIMIZER)


@pytest.mark.parametrize(
    ("kernel", "call", "says", "says_not"),
    [
        ("gemm", "cudaLaunchKernel", "torch.compile, mode", "each CUDA graph"),
        ("triton_poi_fused_add_0", "cudaLaunchKernel", 'mode="reduce-overhead"', "torch.compile"),
        ("triton_poi_fused_add_0", "cudaGraphLaunch", "more of the step in each CUDA graph", "reduce-overhead"),
    ],
)
def test_a_launch_bound_run_is_not_told_to_use_what_it_uses(kernel, call, says, says_not):
    picture = "step 00000000000000000000\ncompute  aaaaaaaa........bbbb"
    doing = (("aten::mm", "cpu_op", 0, 1), (call, "runtime", 14, 15))
    trace = drawn_hosts.trace(picture, {"a": 0, "b": 15}, doing, columns={"a": {"name": kernel}})
    (found,) = check(drawn_traces.run(trace), [LateLaunch()]).findings
    assert says in found.fix
    assert says_not not in found.fix


def window(picture, launched):
    whole = pl.DataFrame({"step": [None], "start_ns": [0], "end_ns": [20 * drawn_hosts.UNIT_NS], "device": [0]})
    return drawn_traces.run(drawn_hosts.trace(picture, launched, steps=whole))


def test_one_pause_in_a_recording_without_steps_is_information(wording):
    once = window("compute  aa........bb..cc..dd", {"a": 0, "b": 10, "c": 14, "d": 18})
    (found,) = check(once, [LateLaunch()]).findings
    assert found.severity == Severity.INFO
    wording(found.message)
    often = window("compute  aa....bb....cc....dd", {"a": 0, "b": 6, "c": 12, "d": 18})
    (found,) = check(often, [LateLaunch()]).findings
    assert found.severity == Severity.WARNING
    assert "One pause" not in found.message


def _on_the_host(run: Run) -> Run:
    """Return the run as one whose streams are threads of the host."""
    no_device = [pl.lit(None, pl.Int64).alias(name) for name in ("device", "stream")]
    return drawn_traces.run(
        *(
            trace.replace(
                lanes=trace.lanes.with_columns(no_device),
                steps=trace.steps.with_columns(no_device[0]),
                allocations=trace.allocations.with_columns(no_device[0]),
            )
            for trace in run.traces()
        )
    )


@pytest.mark.parametrize(
    ("rule", "of_device", "of_host"),
    [(SlowLink(), "nccl-tests", "iperf3"), (ChangingSizes(), "PYTORCH_CUDA_ALLOC_CONF", "Pad or bucket")],
)
def test_a_fix_for_the_host_names_no_tool_of_gpus(rule: Rule, of_device: str, of_host: str) -> None:
    run = EXAMPLES[rule.code].fires()
    (on_device, *_), (on_host, *_) = ([found.fix for found in rule.check(each)] for each in (run, _on_the_host(run)))
    assert of_device in on_device
    assert of_host in on_host
    assert of_device not in on_host

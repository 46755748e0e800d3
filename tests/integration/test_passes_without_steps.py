"""What repeats in recordings whose steps are not marked: iterations, or the layers of one pass, by the evidence."""

import json
from pathlib import Path

import pytest

import tracekit
from tests.support.kineto_files import slice_
from tracekit.conventions.read_settings import ReadSettings
from tracekit.errors import InputError
from tracekit.ingest.loader import load
from tracekit.ingest.readers.kineto import reader
from tracekit.rules.engine import check

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "tests" / "recordings" / "passes"
CASE = ROOT.parent / "shared" / "cases" / "layers_not_iterations"

ITERATIONS = {
    "accumulation": (3, "forward and backward work"),
    "annotated_forwards": (4, "annotation model_inference is around each"),
    "decoding": (6, "looks up tokens"),
    "diffusion": (8, "makes a part of its input"),
    "evaluation": (4, "a batch is loaded for each"),
    "serving": (8, "annotation execute_context is around each"),
    "accumulation_stacks": (3, "the same modules"),
    "annotated_forwards_stacks": (4, "the same modules"),
    "decoding_stacks": (6, "the same modules"),
    "diffusion_stacks": (8, "the same modules"),
    "evaluation_stacks": (4, "the same modules"),
    "forwards_stacks": (4, "the same modules"),
    "serving_stacks": (8, "annotation execute_context is around each"),
}
LAYERS = {
    "annotated_blocks": "each is a transformer_block",
    "annotated_forward": "annotation model_inference is around all",
    "bare_blocks": "little shows",
    "experts": "little shows",
    "forward_backward": "apart from each other",
    "one_forward": "frees none",
    "one_forward_without_gradients": "little shows",
    "shared_block": "frees none",
    "annotated_blocks_stacks": "calls other modules",
    "annotated_forward_stacks": "one call of Model_0",
    "bare_blocks_stacks": "calls other modules",
    "experts_stacks": "one call of Experts_0",
    "forward_backward_stacks": "apart from each other",
    "one_forward_stacks": "one call of Model_0",
    "one_forward_without_gradients_stacks": "one call of Model_0",
    "shared_block_stacks": "one call of Model_0",
}


def reading(trace):
    """The steps of a trace, and the issue that says how they were found."""
    issues = dict(trace.data_quality.select("kind", "message").iter_rows())
    kinds = {"steps_from_repetition", "one_pass", "no_steps"} & issues.keys()
    return trace.steps["step"].to_list(), *((kind, issues[kind]) for kind in kinds)


@pytest.mark.parametrize("name", ITERATIONS)
def test_iterations_are_steps(name):
    count, reason = ITERATIONS[name]
    steps, (kind, message) = reading(reader.read(str(RECORDINGS / f"{name}.json.gz"), rank=0))
    assert (steps, kind) == (list(range(count)), "steps_from_repetition")
    assert reason in message


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_one_pass(name):
    steps, (kind, message) = reading(reader.read(str(RECORDINGS / f"{name}.json.gz"), rank=0))
    assert (steps, kind) == ([None], "one_pass")
    assert LAYERS[name] in message


def test_one_forward_pass_of_others_has_no_outlier_and_no_growing_memory():
    if not CASE.is_dir():
        pytest.skip("needs ../shared/cases, which is not part of the project")
    run = load(CASE)
    report = check(run)
    steps, (kind, message) = reading(run.trace(0))
    assert (steps, kind) == ([None], "one_pass")
    assert "SwitchTransformer_0 covers all 10" in message
    assert not {"STEP001", "STEP002", "MEM010"} & {finding.code for finding in report.findings}
    assert not [finding for finding in report.findings if finding.is_of_iterations or finding.steps]


class Gpu:
    """A host thread that launches kernels of 5 µs, and spans around launches."""

    def __init__(self):
        self.events, self.at_us, self.calls = [], 0.0, 0

    def launch(self, *kernels, call="cudaLaunchKernel", op="aten::op", size=None):
        """Launch kernels by one call of an op."""
        self.calls += 1
        self.events += [slice_("cpu_op", op, self.at_us, 4, tid=1)]
        self.events += [slice_("cuda_runtime", call, self.at_us + 1, 2, tid=1, correlation=self.calls)]
        for kernel in kernels:
            kind = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
            arguments = {"bytes": size} if size else {}
            where = {"device": 0, "stream": 7, "correlation": self.calls, **arguments}
            self.events += [slice_(kind, kernel, self.at_us + 5, 5, tid=7, **where)]
            self.at_us += 5
        self.at_us += 5

    def layer(self):
        """One layer of a transformer."""
        for kernel in ("norm", "gemm_qkv", "rotary_embedding", "attention", "gemm_out", "gemm_up", "gelu", "gemm_down"):
            self.launch(kernel)

    def span(self, kind, name, work):
        """Do work inside a slice."""
        begin_us = self.at_us
        self.at_us += 1
        work()
        self.at_us += 1
        self.events.append(slice_(kind, name, begin_us, self.at_us - begin_us, tid=1))

    def read(self, folder):
        path = folder / "trace.json"
        path.write_text(json.dumps({"traceEvents": self.events}))
        return reader.read(str(path), rank=0)


def repeat(count, work):
    for _ in range(count):
        work()


def test_one_launch_of_a_graph_with_all_layers_is_one_pass(tmp_path):
    gpu = Gpu()
    gpu.launch(*["norm", "gemm", "attention", "gemm_up", "gelu"] * 8, call="cudaGraphLaunch")
    steps, (kind, message) = reading(gpu.read(tmp_path))
    assert (steps, kind) == ([None], "one_pass")
    assert "cudaGraphLaunch" in message


def test_replays_of_a_graph_with_input_copies_are_iterations(tmp_path):
    gpu = Gpu()
    for _ in range(5):
        gpu.launch("Memcpy HtoD (Pageable -> Device)", call="cudaMemcpyAsync", size=4096)
        gpu.launch(*["norm", "gemm", "attention", "gemm_up", "gelu"] * 8, call="cudaGraphLaunch")
    assert reading(gpu.read(tmp_path))[0] == [0, 1, 2, 3, 4]


def test_layers_that_copy_a_constant_to_the_device_are_no_iterations(tmp_path):
    gpu = Gpu()
    for _ in range(12):
        gpu.layer()
        gpu.launch("Memcpy HtoD (Pageable -> Device)", call="cudaMemcpyAsync", size=4)
    assert reading(gpu.read(tmp_path))[0] == [None]


def test_layers_without_any_sign_are_one_pass_and_steps_that_the_device_ends_are_iterations(tmp_path):
    gpu = Gpu()
    repeat(12, gpu.layer)
    assert reading(gpu.read(tmp_path))[0] == [None]
    gpu = Gpu()
    for _ in range(6):
        gpu.layer()
        gpu.events += [slice_("cuda_runtime", "cudaDeviceSynchronize", gpu.at_us, 3, tid=1)]
        gpu.at_us += 5
    assert reading(gpu.read(tmp_path))[0] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [
        ("python_function", "nn.Module: Encoder_0", 1),
        ("user_annotation", "model_inference", 1),
        ("python_function", "model.py(7): forward", 1),
        ("python_function", "nn.Module: Encoder_0", 4),
        ("user_annotation", "model_inference", 4),
    ],
)
def test_spans_around_several_layers_are_the_passes(kind, name, count, tmp_path):
    gpu = Gpu()
    repeat(count, lambda: gpu.span(kind, name, lambda: repeat(6, gpu.layer)))
    assert reading(gpu.read(tmp_path))[0] == (list(range(count)) if count > 1 else [None])


def test_blocks_of_a_backward_pass_that_run_the_forward_pass_again_are_layers(tmp_path):
    gpu = Gpu()
    node = "autograd::engine::evaluate_function: CheckpointFunctionBackward"

    def block():
        gpu.layer()
        for kernel in ("gemm_dgrad", "gemm_wgrad", "norm_backward", "attention_backward"):
            gpu.launch(kernel)

    repeat(6, gpu.layer)
    repeat(6, lambda: gpu.span("cpu_op", node, block))
    assert reading(gpu.read(tmp_path))[0] == [None]


def test_optimizer_kernels_in_each_make_iterations_of_a_recording_without_host(tmp_path):
    gpu = Gpu()
    for _ in range(4):
        repeat(3, gpu.layer)
        gpu.launch("multi_tensor_apply_kernel")
    gpu.events = [event for event in gpu.events if event["cat"] == "kernel"]
    assert reading(gpu.read(tmp_path))[0] == [0, 1, 2, 3]


def test_a_span_that_a_user_names_is_a_step(tmp_path):
    gpu = Gpu()
    for _ in range(3):
        gpu.span("user_annotation", "generate", lambda: repeat(2, gpu.layer))
        gpu.layer()
    gpu.read(tmp_path)
    trace = load(tmp_path, cache=False, settings=ReadSettings(step_name="generate")).trace(0)
    begins_ns = [1000 * event["ts"] for event in gpu.events if event["name"] == "generate"]
    assert trace.steps["host_start_ns"].to_list() == begins_ns
    assert trace.activities.group_by("step").len().sort("step").rows() == [(None, 24), (0, 16), (1, 16), (2, 16)]
    assert trace.ops.filter(trace.ops["name"] == "generate")["step"].to_list() == [0, 1, 2]
    assert "one_pass" not in trace.data_quality["kind"]


def test_numbers_that_end_a_name_are_those_of_the_steps(tmp_path):
    gpu = Gpu()
    for number in (7, 8):
        gpu.span("user_annotation", f"batch {number}", gpu.layer)
    gpu.read(tmp_path)
    assert tracekit.load(tmp_path, cache=False, step_name="batch").trace(0).steps["step"].to_list() == [7, 8]


def test_a_name_without_spans_is_an_error_that_lists_similar_names(tmp_path):
    gpu = Gpu()
    repeat(2, lambda: gpu.span("user_annotation", "model_inference", gpu.layer))
    gpu.read(tmp_path)
    with pytest.raises(InputError, match=r"no span is named 'model_inferrence'.*model_inference \(2 times\)"):
        tracekit.load(tmp_path, cache=False, step_name="model_inferrence")

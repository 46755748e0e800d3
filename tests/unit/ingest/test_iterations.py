"""Iterations of recordings without step marks, found by repetition: on devices, in CUDA graphs, on the CPU."""

import json

import pytest

from tests.support.kineto_files import slice_
from tracekit.analysis.quality import trace_quality
from tracekit.ingest.readers.kineto import reader

LAYERS = 8
TO_HOST = "Memcpy DtoH (Device -> Pageable)"


class Recording:
    """A host thread that launches kernels of 5 µs on one stream, one after another."""

    def __init__(self):
        self.events, self.at_us, self.calls = [], 0.0, 0

    def launch(self, *kernels, call="cudaLaunchKernel", op="aten::op"):
        """Launch kernels by one call, inside one op."""
        self.calls += 1
        if call is not None:
            self.events += [slice_("cpu_op", op, self.at_us, 4, tid=1)]
            self.events += [slice_("cuda_runtime", call, self.at_us + 1, 2, tid=1, correlation=self.calls)]
        for kernel in kernels:
            kind = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
            where = {"device": 0, "stream": 7, "correlation": self.calls}
            self.events += [slice_(kind, kernel, self.at_us + 5, 5, tid=7, **where)]
            self.at_us += 5
        self.at_us += 5

    def read(self, folder):
        path = folder / "trace.json"
        path.write_text(json.dumps({"traceEvents": self.events}))
        return reader.read(str(path), rank=0)


def issue(trace):
    return dict(trace.data_quality.select("kind", "message").iter_rows())


def decode(recording):
    """One token by a CUDA graph: the kernels of all layers have one launch. Then the token is copied to the host."""
    recording.launch("embedding")
    recording.launch(*["norm", "gemv", "decode_attention"] * LAYERS, call="cudaGraphLaunch")
    recording.launch("softmax")
    recording.launch("sample")
    recording.launch(TO_HOST, call="cudaMemcpyAsync")


def prefill(recording):
    """Many tokens without a graph, by other kernels."""
    for kernel in ["embedding_many", *["norm_many", "gemm", "flash_attention", "rotary", "write_cache"] * LAYERS]:
        recording.launch(kernel)


def test_graph_launches_of_a_decode_loop_are_iterations(tmp_path, wording):
    recording = Recording()
    for _ in range(5):
        decode(recording)
    trace = recording.read(tmp_path)
    assert trace.steps["step"].to_list() == [0, 1, 2, 3, 4]
    embeddings = trace.activities.filter(trace.activities["name"] == "embedding")
    assert trace.steps["start_ns"].to_list() == embeddings["start_ns"].to_list()
    assert trace.activities["step"].null_count() == 0
    assert trace.ops["step"].null_count() == 0
    message = issue(trace)["steps_from_repetition"]
    wording(message)


def test_the_prefill_before_the_decode_iterations_belongs_to_none(tmp_path):
    recording = Recording()
    prefill(recording)
    for _ in range(6):
        decode(recording)
    trace = recording.read(tmp_path)
    assert trace.steps["step"].to_list() == [0, 1, 2, 3, 4, 5]
    outside = trace.activities.filter(trace.activities["step"].is_null())
    assert outside.height == 1 + 5 * LAYERS
    assert set(outside["name"]) == {
        "embedding_many", "norm_many", "gemm", "flash_attention", "rotary", "write_cache"
    }  # fmt: skip


@pytest.mark.parametrize(("is_idle", "is_warm_up"), [(False, False), (True, True)])
def test_a_first_pass_that_computes_for_longer_is_a_prefill_and_one_that_idles_is_warm_up(
    tmp_path, is_idle, is_warm_up
):
    recording = Recording()
    for iteration in range(8):
        first_event, begin_us = len(recording.events), recording.at_us
        decode(recording)
        if iteration:
            continue
        for event in recording.events[first_event:]:  # the same kernels, each ten times as long, or as far apart
            event["ts"] = begin_us + 10 * (event["ts"] - begin_us)
            event["dur"] *= 1 if is_idle else 10
        recording.at_us = begin_us + 10 * (recording.at_us - begin_us)
    trace = recording.read(tmp_path)
    assert trace.steps["step"].to_list() == list(range(8))
    assert ("warm_up_inside" in trace_quality.data_quality(trace)["kind"]) == is_warm_up


def test_the_layers_of_one_forward_pass_are_no_iterations(tmp_path):
    recording = Recording()
    prefill(recording)
    for kernel in ("norm_many", "head", "softmax", "sample"):
        recording.launch(kernel)
    trace = recording.read(tmp_path)
    assert trace.steps["step"].to_list() == [None]
    assert "8 repetitions" in issue(trace)["one_pass"]


def test_one_kernel_again_and_again_is_no_iteration(tmp_path):
    recording = Recording()
    for _ in range(50):
        recording.launch("gemm")
    assert recording.read(tmp_path).steps["step"].to_list() == [None]


def test_iterations_are_found_on_the_device_where_no_host_was_recorded(tmp_path):
    recording = Recording()
    for _ in range(4):
        for kernel in ("embedding", "gemm", "attention", "norm", "gemm", "softmax", "sample"):
            recording.launch(kernel, call=None)
    trace = recording.read(tmp_path)
    assert trace.steps.select("step", "host_start_ns").rows() == [(step, None) for step in range(4)]
    assert trace.activities["step"].to_list() == [step for step in range(4) for _ in range(7)]
    starts = trace.activities.filter(trace.activities["name"] == "embedding")["start_ns"].to_list()
    assert trace.steps["start_ns"].to_list() == starts


def test_an_iteration_begins_with_the_slice_around_its_first_launch(tmp_path):
    recording = Recording()
    begins = []
    for _ in range(4):
        recording.at_us += 20
        begins.append(recording.at_us - 10)
        decode(recording)
        recording.events.append(slice_("user_annotation", "execute_model", begins[-1], 60, tid=1))
    whole = slice_("user_annotation", "serve", 0, recording.at_us + 10, tid=1)
    recording.events.append(whole)
    trace = recording.read(tmp_path)
    assert trace.steps["host_start_ns"].to_list()[1:] == [1000 * begin for begin in begins[1:]]


def test_iterations_are_found_in_a_recording_of_the_cpu(tmp_path):
    events, at_us = [], 0.0
    for _ in range(4):
        for name in ("embedding", "linear", "relu", "linear", "softmax", "sort", "index"):
            events.append(slice_("cpu_op", f"aten::{name}", at_us, 8, tid=1))
            at_us += 10
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = reader.read(str(path), rank=0)
    assert trace.steps["step"].to_list() == [0, 1, 2, 3]
    assert trace.activities["step"].to_list() == [step for step in range(4) for _ in range(7)]


# Names that vLLM, SGLang and TensorRT-LLM give to the passes of their servers: with numbers of requests and tokens.
@pytest.mark.parametrize(
    "name",
    [
        "execute_context_{prompts}({tokens})_generation_{number}({number})",
        "execute_model context_{prompts}({tokens}) generation_{number}(sq1sk{tokens})",
        "step[{kind} bs={number} toks={tokens}]",
        "[Executor] _forward_step {number}: {prompts} ctx reqs, 4 gen reqs",
        "execute_model",
    ],
)
def test_annotated_prompts_and_tokens_of_a_server_are_iterations(tmp_path, name):
    recording, begins = Recording(), []
    for number in range(9):
        is_prompt = number % 4 == 0
        recording.at_us += 20
        begins.append(recording.at_us - 5)
        prefill(recording) if is_prompt else decode(recording)
        kind = "EXTEND" if is_prompt else "DECODE"
        text = name.format(kind=kind, prompts=int(is_prompt), number=number, tokens=1 + 511 * is_prompt)
        recording.events.append(slice_("user_annotation", text, begins[-1], recording.at_us - begins[-1] - 5, tid=1))
    trace = recording.read(tmp_path)
    assert trace.steps["step"].to_list() == list(range(9))
    assert trace.steps["host_start_ns"].to_list()[1:] == [1000 * begin for begin in begins[1:]]
    assert "annotation" in issue(trace)["steps_from_repetition"]


def test_prompts_and_tokens_that_call_one_model_are_iterations(tmp_path):
    recording = Recording()
    for number in range(9):
        begin = recording.at_us
        prefill(recording) if number % 4 == 0 else decode(recording)
        span = slice_("python_function", "nn.Module: Llama_0", begin, recording.at_us - begin - 2, tid=1)
        layer = slice_("python_function", f"nn.Module: Layer_{number % 4}", begin + 15, 10, tid=1)
        recording.events += [span, layer]
    trace = recording.read(tmp_path)
    assert trace.steps["step"].to_list() == list(range(9))
    assert "Llama_0" in issue(trace)["steps_from_repetition"]


def test_annotated_phases_of_passes_are_no_iterations(tmp_path):
    recording = Recording()
    for _ in range(4):
        for name, kernel in (("encode", "gemm"), ("decode", "gemv")):
            begin = recording.at_us
            for _ in range(LAYERS):
                recording.launch(kernel)
            recording.events.append(slice_("user_annotation", name, begin, recording.at_us - begin - 1, tid=1))
    assert len(recording.read(tmp_path).steps) in {1, 4}


@pytest.mark.parametrize("mark", ["ProfilerStep#3", "Optimizer.step#SGD.step"])
def test_marks_take_precedence_over_repetitions(tmp_path, mark):
    recording = Recording()
    for _ in range(4):
        decode(recording)
    recording.events.append(slice_("user_annotation", mark, 0, recording.at_us, tid=1))
    trace = recording.read(tmp_path)
    assert trace.steps["step"].n_unique() == 1
    assert "steps_from_repetition" not in issue(trace)

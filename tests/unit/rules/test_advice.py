"""Advice follows what is recorded: training or inference with PyTorch, or a program without PyTorch."""

import json

import polars as pl
import pytest

from tests.support import drawn_traces
from tests.support.kineto_files import slice_
from tests.support.rule_examples import EXAMPLES
from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import Program
from tracekit.analysis.quality import contents
from tracekit.ingest.loader import load
from tracekit.model import environment
from tracekit.rules import late_work, outlier_steps
from tracekit.rules.advice import suit_to_program
from tracekit.rules.engine import check
from tracekit.rules.registry import RULES
from tracekit.rules.rule import TIMED_FAMILIES, Report, family

PYTORCH = (
    "torch", ".item()", ".cpu()", "DataLoader", "Python", "gc.", "optimizer", "profiler.step", "ProfilerStep",
    "non_blocking", "fused=", "micro-batch", "PYTORCH", "losses", "tokens", "(print", "Recorder", "record_", "aten",
    "no_sync", "FSDP", "DDP", "DistributedDataParallel", "autograd", "tensor.", "nn.",
)  # fmt: skip
TRAINING = ("DataLoader", "optimizer", "gradient", "loss", "training")


def record(folder, *, op, kernel, last_kernel, header):
    """A device that is idle before each of the kernels: the host waits for a copy, and then launches late."""
    events, at_us = [], 0.0
    for call in range(1, 200):
        name = last_kernel if call % 10 == 0 else f"{kernel}_{call % 10}"
        if call % 5 == 0:
            events.append(slice_("cuda_runtime", "cudaMemcpyAsync", at_us, 40, tid=1, correlation=1000 + call))
            where = {"device": 0, "stream": 7, "correlation": 1000 + call, "bytes": 4096}
            events.append(slice_("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", at_us + 30, 5, tid=7, **where))
            events.append(
                slice_("cuda_runtime", "cudaStreamSynchronize", at_us + 40, 5, tid=1, correlation=2000 + call)
            )
            at_us += 50
        if op:
            events.append(slice_("cpu_op", op, at_us + 100, 30, tid=1))
        events.append(slice_("cuda_runtime", "cudaLaunchKernel", at_us + 110, 5, tid=1, correlation=call))
        events.append(slice_("kernel", name, at_us + 120, 60, tid=7, device=0, stream=7, correlation=call))
        at_us += 200
    (folder / "trace.json").write_text(json.dumps({**header, "traceEvents": events}))
    return load(folder, cache=False)


@pytest.mark.parametrize(
    ("program", "op", "kernel", "last_kernel"),
    [
        (Program.TRAINING, "aten::mm", "void at::native::elementwise", "multi_tensor_apply_kernel"),
        (Program.INFERENCE, "aten::mm", "void at::native::elementwise", "softmax"),
        (Program.OTHER, None, "jacobi", "residual"),
    ],
)
def test_advice_names_only_what_the_program_has(program, op, kernel, last_kernel, tmp_path):
    header = {"nsight_systems_version": "2025.1"} if op is None else {}
    run = record(tmp_path, op=op, kernel=kernel, last_kernel=last_kernel, header=header)
    assert workload.program(run) is program
    fixes = {finding.code: finding.fix for finding in check(run).findings}
    assert {"HOST001", "HOST002"} & fixes.keys()
    words = {Program.TRAINING: (), Program.INFERENCE: TRAINING, Program.OTHER: PYTORCH}[program]
    about_the_program = [fix for code, fix in fixes.items() if not code.startswith("DATA")]
    # The fixes of stalls and of slow hosts, too, whether or not this run has any.
    stalls = [*outlier_steps._FIXES.values(), outlier_steps._FIX_ONE, outlier_steps._FIX_ALL, outlier_steps._FIX_GRAPH]
    about_the_program += [advice.suited_to(run) for advice in (*stalls, late_work.SLOW_HOST)]
    assert not [fix for fix in about_the_program for word in words if word in fix]


def without_pytorch(run):
    """Return the run as a recorder of any program states it."""
    header = {environment.RECORDS_ANY_PROGRAM: True}
    return drawn_traces.run(*(run.trace(rank).replace(header=header) for rank in run.ranks))


def texts(finding):
    """Return all texts that a report shows of a finding."""
    cells = [
        str(value)
        for name in finding.evidence.select(pl.selectors.string()).columns
        for value in finding.evidence[name]
    ]
    return [finding.claim, finding.message, finding.fix, *cells]


@pytest.fixture(scope="module")
def cuda_run():
    return without_pytorch(drawn_traces.run(drawn_traces.trace("step 01\ncompute ab")))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_no_rule_gives_advice_of_pytorch_to_another_program(rule, cuda_run):
    example = EXAMPLES[rule.code]
    findings = tuple(rule(**example.thresholds).check(example.fires()))
    report = Report(cuda_run, findings, (), (), "")
    fixes = {finding.fix for finding in suit_to_program(report, [rule]).findings}
    assert not [(word, fix) for fix in fixes for word in PYTORCH if word in fix]
    assert not [word for word in PYTORCH if word in rule.fix_without_pytorch]


def test_rules_on_what_any_program_does_have_a_fix_for_it():
    of_networks = ("PIPE", "TP", "EP")  # pipeline stages, tensor parallelism, experts
    # Operators of CPU runs, Python's garbage collector and interpreter, and streams of side work in PyTorch.
    of_pytorch = ("COMP006", "COMP007", "COMP008", "COMP009", "COMP010", "COMP011", "HOST006", "HOST008")
    rules = [rule for rule in RULES if family(rule.code) in TIMED_FAMILIES and family(rule.code) not in of_networks]
    assert not [rule.code for rule in rules if not rule.fix_without_pytorch and rule.code not in of_pytorch]


@pytest.mark.parametrize("code", ["HOST001", "HOST002", "HOST004", "MEM001", "COMM001", "RANK001", "STREAM001"])
def test_reports_on_programs_without_pytorch_do_not_speak_of_it(code):
    example = EXAMPLES[code]
    run = without_pytorch(example.fires())
    assert workload.program(run) is Program.OTHER
    (rule,) = (rule for rule in RULES if rule.code == code)
    report = check(run, [rule(**example.thresholds)])
    assert code in {finding.code for finding in report.findings}
    shown = [text for finding in report.findings for text in texts(finding)] + list(report.notes)
    missing = run.table(contents.missing)
    shown += [str(text) for name in ("consequence", "how_to_record") for text in missing[name]]
    assert not [(word, text) for text in shown for word in PYTORCH if word in text]

"""Contention rules: suspicions from few samples, and fixes that agree with the strategy of the run."""

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tests.support.gpu_hosts import GpuHost
from tests.support.rule_examples import EXAMPLES, overlap_run
from tracekit.ingest.loader import load
from tracekit.rules.contention import ComputeSlowedByCopies, ContendedCompute, StarvedCollectives
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity


def judge(run, rule):
    (found,) = check(run, [rule]).findings
    return found


def contended(times, **manifest):
    """Return a run in which a takes 4 during x and 2 alone, drawn `times` times."""
    picture = f"step {'0' * 8 * times}\ncompute {'aaaa.aa.' * times}\ncomm {'.xxx....' * times}"
    return drawn_traces.run(drawn_traces.trace(picture), **manifest)


def test_kernels_slowed_in_many_samples_are_a_warning():
    assert judge(contended(20), ContendedCompute()).severity == Severity.WARNING


def test_kernels_slowed_in_few_samples_are_a_suspicion(wording):
    found = judge(contended(8), ContendedCompute())
    assert found.severity == Severity.INFO
    wording(found.message)


def test_a_slowdown_that_may_be_anything_is_a_suspicion():
    # a takes 2 alone; during x, 3 in eight steps and 60 in two: without these it would be 1.5 times.
    parts = [(step, "a" * (60 if step > 7 else 3)) for step in range(10) for _ in range(12 if step > 7 else 6)]
    compute = "".join(f"{part}.aa." for _, part in parts)
    comm = "".join("x" * len(part) + "...." for _, part in parts)
    steps = "".join(str(step) * (len(part) + 4) for step, part in parts)
    found = judge(
        drawn_traces.run(drawn_traces.trace(f"step {steps}\ncompute {compute}\ncomm {comm}")), ContendedCompute()
    )
    assert found.severity == Severity.INFO


def test_a_lower_bar_for_samples_makes_it_a_warning():
    assert judge(contended(8), ContendedCompute(min_calls=2)).severity == Severity.WARNING


def test_collectives_slowed_on_one_of_several_ranks_are_a_suspicion():
    # The other ranks have no trace, so x may only wait for them.
    run = EXAMPLES["STREAM004"].fires()
    found = judge(run, StarvedCollectives(min_calls=2))
    assert found.severity == Severity.INFO
    assert "suspicion" in found.message


def test_collectives_slowed_on_all_ranks_in_few_samples_are_a_suspicion():
    groups = {"group": ["0"], "ranks": [[0]]}
    trace = drawn_hosts.trace(
        f"step {'0' * 56}\ncompute {'aaa.b..' * 8}\ncomm {'xxxx.yy' * 8}", {"a": 0, "b": 0}, groups=pl.DataFrame(groups)
    )
    alone = trace.replace(collectives=trace.collectives.with_columns(group_size=1))
    found = judge(drawn_traces.run(alone), StarvedCollectives(min_calls=9))
    assert found.severity == Severity.INFO
    assert judge(drawn_traces.run(alone), StarvedCollectives(min_calls=8)).severity == Severity.WARNING


WORDS = {None: "send fewer bytes.", "ddp": "no_sync()", "fsdp1": "HYBRID_SHARD", "fsdp2": "fully_shard"}


@pytest.mark.parametrize("strategy", WORDS)
def test_fixes_name_only_what_the_run_uses(strategy):
    run = contended(20, **({"strategy": strategy} if strategy else {}))
    assert WORDS[strategy] in judge(run, ContendedCompute()).fix


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp1", "fsdp2"])
def test_only_fsdp2_is_advised_to_prefetch_modules(strategy):
    trace = overlap_run("aaa.b..", "xxxx.yy").trace(0)
    run = drawn_traces.run(trace, **({"strategy": strategy} if strategy else {}))
    assert ("set_modules_to_forward_prefetch" in judge(run, StarvedCollectives()).fix) == (strategy == "fsdp2")


def copying_run(folder, slowed_us, *, copies_in=range(6)):
    """Return a run of six steps of 40 kernels; beside every second one of some steps another stream copies to it.

    Kernels without a copy take 100 µs, those with one `slowed_us`.
    """
    host = GpuHost()
    for step in range(6):
        with host.step(step):
            host.wait()
            for number in range(40):
                is_copied = number % 2 == 1 and step in copies_in
                start_us, end_us = host.kernel("gemm", slowed_us if is_copied else 100.0)
                if is_copied:
                    host.free_us[8] = start_us
                    host.copy_beside(end_us - start_us, stream=8)
    host.wait()
    host.write(folder)
    return load(folder, cache=False)


def test_compute_that_copies_slow_costs_what_it_takes_longer(tmp_path):
    (found,) = check(copying_run(tmp_path, 150.0), [ComputeSlowedByCopies()]).findings
    assert found.severity is Severity.WARNING
    assert found.cost_ns == pytest.approx(20 * 50_000, rel=0.05)


def test_copies_that_slow_no_kernel_are_no_finding(tmp_path):
    assert check(copying_run(tmp_path, 103.0), [ComputeSlowedByCopies()]).findings == ()


def test_a_copy_costs_only_the_steps_that_have_it(tmp_path):
    (found,) = check(copying_run(tmp_path, 150.0, copies_in=(1, 3, 5)), [ComputeSlowedByCopies()]).findings
    assert found.cost_ns == pytest.approx(20 * 50_000 / 2, rel=0.05)

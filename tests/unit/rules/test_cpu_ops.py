"""Ops of a CPU run that take longer than they need to in every call."""

from collections.abc import Sequence

import pytest

from tests.support import drawn_cpu_ops, drawn_kernels, drawn_traces
from tests.support.drawn_cpu_ops import NODE, Op
from tests.support.rule_examples import CAST, FAST_OPS
from tracekit.rules.cpu_ops import AnomalyMode, DeterministicFills, RepeatedCasts, SlowArithmetic, SmallOps
from tracekit.rules.engine import check
from tracekit.rules.rule import Rule, Severity

US = drawn_cpu_ops.US


def findings(ops: Sequence[Op], rule: Rule, **options: int):
    return check(drawn_cpu_ops.run(ops, **options), [rule]).findings


def test_ops_many_times_as_slow_as_others_of_their_size_are_denormal_or_strided(wording):
    (finding,) = findings([*FAST_OPS, Op("aten::mul", 260)], SlowArithmetic())
    # add takes 13 µs for as many bytes.
    assert finding.cost_ns == pytest.approx(247 * US, rel=0.05)
    assert finding.severity is Severity.WARNING
    assert "set_flush_denormal" in finding.fix
    wording(finding.message, finding.sentence)


@pytest.mark.parametrize(
    "ops",
    [
        [*FAST_OPS, Op("aten::mul", 50)],  # four times as long
        [*FAST_OPS, Op("aten::mul", 260, (64, 64))],  # smaller than 64 KiB
        [*FAST_OPS, Op("aten::mul", 260, (4096, 1024))],  # no other op of this size
        [*FAST_OPS, Op("aten::mul", 260, dtype="c10::BFloat16")],  # no other op of this type
        [*FAST_OPS, Op("aten::exp", 260)],  # not limited by memory
        [*FAST_OPS[:1], Op("aten::mul", 260)],  # one of two: nothing shows which is usual
    ],
)
def test_other_slow_ops_are_not(ops):
    assert findings(ops, SlowArithmetic()) == ()


def test_one_slow_call_of_a_kind_is_no_slow_kind():
    assert findings([*FAST_OPS, *[Op("aten::mul", 13)] * 3, Op("aten::mul", 2000)], SlowArithmetic()) == ()


def test_a_call_that_was_interrupted_costs_what_its_kind_does():
    """Other programs may take the core in one of many slow calls: that is no arithmetic."""
    (finding,) = findings([*FAST_OPS, *[Op("aten::mul", 260)] * 3, Op("aten::mul", 3000)], SlowArithmetic())
    assert finding.cost_ns == pytest.approx((3 * 247 + 507) * US, rel=0.05)


def test_casts_that_are_reverted_warn(wording):
    (finding,) = findings([*FAST_OPS, *CAST], RepeatedCasts())
    assert finding.severity is Severity.WARNING
    assert finding.cost_ns == (20 + 30 + 2) * US  # with the pauses before them
    wording(finding.message, finding.sentence)


def test_casts_in_one_direction_are_information():
    (finding,) = findings([*FAST_OPS, CAST[0], *FAST_OPS, CAST[0]], RepeatedCasts())
    assert finding.severity is Severity.INFO


def test_casts_of_other_shapes_do_not_revert():
    smaller = CAST[1]._replace(shape=(256, 128))
    (finding,) = findings([*FAST_OPS, CAST[0], smaller], RepeatedCasts())
    assert finding.severity is Severity.INFO


def test_hundreds_of_small_ops_cost_their_time_and_that_of_python_between_them(wording):
    loop = [Op("aten::split", 100), *[Op("aten::mul_", 3, (512,))] * 250]
    (finding,) = findings([Op("aten::mm", 1000), *loop], SmallOps(), pause_us=2)
    assert finding.cost_ns == (102 + 250 * 5) * US
    assert finding.severity >= Severity.WARNING
    wording(finding.message, finding.sentence)


@pytest.mark.parametrize(
    "loop",
    [
        [Op("aten::mul_", 3, (512,))] * 150,  # few
        [Op("aten::mul_", 3, (512, 512))] * 250,  # on large tensors
        [Op("aten::mul_", 30, (512,))] * 250,  # not small
    ],
)
def test_few_or_larger_ops_are_no_loop_of_small_ones(loop):
    assert findings([Op("aten::mm", 1000), *loop], SmallOps()) == ()


def test_checks_for_nan_that_autograd_makes_are_anomaly_mode(wording):
    checks = [Op("aten::isnan", 20, node=NODE), Op("aten::_is_any_true", 10, node=NODE)]
    (finding,) = findings([Op("aten::mm", 100), *checks], AnomalyMode())
    assert finding.cost_ns == 32 * US
    wording(finding.message, finding.sentence)


def test_checks_for_nan_of_the_program_are_its_own():
    assert findings([Op("aten::mm", 100), Op("aten::isnan", 20)], AnomalyMode()) == ()


CHECKS = [Op("aten::isnan", 20, node=NODE), Op("aten::any", 8, node=NODE), Op("aten::is_nonzero", 2, node=NODE)]


def test_stacks_of_forward_cost_what_the_cheapest_needed_op_takes_beyond_others_of_its_name():
    view = Op("aten::t", 54, inner="aten::as_strided", self_us=52, is_needed=True)
    unneeded = Op("aten::t", 4, inner="aten::as_strided", self_us=2)
    layer = Op("aten::linear", 900, inner="aten::addmm", self_us=300, is_needed=True)
    (finding,) = findings([view, layer, unneeded, *CHECKS], AnomalyMode())
    assert finding.cost_ns == (2 * 50 + 30 + 3) * US  # two stacks; checks with the pauses before them


def test_needed_ops_record_no_stacks_without_anomaly_mode():
    view = Op("aten::t", 54, inner="aten::as_strided", self_us=52, is_needed=True)
    assert findings([view, Op("aten::isnan", 20)], AnomalyMode()) == ()


@pytest.mark.parametrize(
    ("allocation", "argument"),
    [
        ("aten::empty", "nan"),
        ("aten::empty_strided", "9223372036854775807"),  # of integers
        ("aten::new_empty", "nan"),
        ("aten::resize_", ""),  # without recorded arguments
        ("aten::index_select", "nan"),  # allocates its result itself
    ],
)
def test_fills_within_ops_that_allocate_are_deterministic_mode(allocation, argument):
    fill = Op(allocation, 20, inner="aten::fill_", argument=argument, self_us=3)
    (finding,) = findings([Op("aten::mm", 100), fill], DeterministicFills())
    assert finding.cost_ns == 17 * US
    assert "fill_uninitialized_memory" in finding.fix


def test_the_finding_on_deterministic_mode_names_the_op_with_most_fills(wording):
    ops = [Op("aten::mm", 100), *[Op("aten::empty", 9, inner="aten::fill_", argument="nan")] * 3]
    (finding,) = findings(ops, DeterministicFills())
    wording(finding.message, finding.sentence)


@pytest.mark.parametrize(
    ("is_on", "severity", "confidence"),
    [
        (True, Severity.WARNING, 1.0),
        (False, Severity.INFO, 0.4),
        (None, Severity.WARNING, 0.9),
        ("yes", Severity.WARNING, 0.9),
    ],
)
def test_what_run_json_states_of_deterministic_mode_decides_how_sure_the_finding_is(is_on, severity, confidence):
    trace = drawn_cpu_ops.trace([Op("aten::mm", 100), *[Op("aten::empty", 9, inner="aten::fill_", argument="nan")] * 3])
    run = drawn_traces.run(trace, determinism={"deterministic_algorithms": is_on})
    (finding,) = check(run, [DeterministicFills()]).findings
    assert (finding.severity, finding.confidence) == (severity, confidence)


@pytest.mark.parametrize("name", ["aten::zeros", "aten::full", "aten::ones_like", "aten::sum"])
def test_fills_with_a_value_of_the_program_are_no_deterministic_mode(name):
    assert findings([Op("aten::mm", 100), Op(name, 20, inner="aten::fill_", argument="1")], DeterministicFills()) == ()


def test_a_program_that_fills_with_nan_itself_is_not_in_deterministic_mode():
    assert findings([Op("aten::mm", 100), Op("aten::fill_", 20)], DeterministicFills()) == ()


def test_on_a_device_the_kernels_of_such_fills_count():
    fill = drawn_kernels.Kernel("aten::fill_", 40)
    (finding,) = check(drawn_kernels.run(fill, around="aten::empty"), [DeterministicFills()]).findings
    assert finding.cost_ns == 40 * US
    assert check(drawn_kernels.run(fill, around="aten::zeros"), [DeterministicFills()]).findings == ()

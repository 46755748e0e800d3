"""Ops of a CPU run that take longer than they need to in every call."""

from collections.abc import Sequence

import pytest

from tests.support import drawn_cpu_ops
from tests.support.drawn_cpu_ops import Op
from tests.support.rule_examples import CAST, FAST_OPS, NODE
from tracekit.rules.cpu_ops import AnomalyMode, RepeatedCasts, SlowArithmetic, SmallOps
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

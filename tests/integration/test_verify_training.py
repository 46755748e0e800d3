"""`tracekit verify-training` finds right trainings right, and names the first value of a wrong one."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instrumented_trainers.verification import processes
from instrumented_trainers.verification.case import NATIVE, ONE_PROCESS, Case
from instrumented_trainers.verification.difference import difference, is_scale
from instrumented_trainers.verification.run import Settings, verify
from tests.support import cli_runner
from tracekit.errors import InputError
from tracekit.report import training_verification as report
from tracekit.report.training_verification import FAILED, REFUSED, RIGHT, WRONG, Difference, Result

SCRIPT = Path(__file__).parent / "scripts" / "verified_trainings.py"
ALL = ("ddp", "fsdp2", "yafsdp")


@functools.cache
def verified(function: str, *strategies: str, steps: int = 2) -> dict[str, list[Result]]:
    settings = Settings(f"{SCRIPT}:{function}", strategies or ALL, steps=steps, timeout_s=300)
    return report.by_strategy(report.read(json.dumps(verify(settings)).encode()))


def first(function: str, strategy: str) -> Difference:
    return verified(function, strategy)[strategy][0].differences[0]


@pytest.mark.parametrize("function", ["right", "tied_and_frozen"])
def test_a_right_training_is_right_under_every_strategy(function: str) -> None:
    results = verified(function)
    assert {name: report.verdict(of_strategy) for name, of_strategy in results.items()} == dict.fromkeys(ALL, RIGHT)
    for fp64, native in results.values():
        assert fp64.compared_count > 50
        assert fp64.largest < 1e-13 < native.largest


def test_a_loss_that_sums_over_samples_is_of_another_scale() -> None:
    difference = first("summed_loss", "ddp")
    assert (difference.step, difference.quantity) == (1, "loss")
    assert difference.ratio == pytest.approx(0.5)


def test_gradients_that_are_summed_over_ranks_are_twice_as_large() -> None:
    fp64 = verified("summed_gradients", "ddp")["ddp"][0]
    assert (fp64.differences[0].step, fp64.differences[0].quantity) == (1, "gradient")
    gradients = [each for each in fp64.differences if (each.step, each.quantity) == (1, "gradient")]
    assert len(gradients) == 10
    assert {round(each.ratio or 0, 9) for each in gradients} == {2.0}


def test_an_unsynchronized_buffer_is_the_first_difference() -> None:
    difference, *others = verified("unsynchronized_buffer", "fsdp2")["fsdp2"][0].differences
    assert (difference.step, difference.quantity, difference.name) == (1, "buffer", "last.mean")
    later = {(each.step, each.name) for each in others}
    assert (2, "last") in later
    assert (2, "layers.1") not in later


def test_statistics_of_a_rank_s_own_samples_differ_in_the_layer_that_has_them() -> None:
    difference = first("batch_norm", "ddp")
    assert (difference.step, difference.quantity, difference.name) == (1, "output", "last.norm")
    assert difference.module == "BatchNorm1d"
    assert difference.ratio is None


def test_tied_weights_that_were_split_are_named_with_the_gradient_that_differs() -> None:
    fp64 = verified("untied_by_sharding", "ddp")["ddp"][0]
    assert (fp64.differences[0].step, fp64.differences[0].quantity) == (1, "gradient")
    assert fp64.differences[0].name in ("embedding.weight", "head.weight")
    assert any("embedding.weight, head.weight" in note for note in fp64.notes)


def test_tied_weights_in_two_units_are_refused_by_name() -> None:
    results = verified("tied_over_units", "fsdp2", "yafsdp")
    assert {name: report.verdict(of_strategy) for name, of_strategy in results.items()} == {
        "fsdp2": REFUSED, "yafsdp": REFUSED,
    }  # fmt: skip
    assert "head.weight" in str(results["fsdp2"][0].error)
    assert "tied" in str(results["yafsdp"][0].error)


def test_a_model_that_fsdp2_refuses_is_named_and_right_elsewhere() -> None:
    results = verified("scalar_parameter")
    assert {name: report.verdict(of_strategy) for name, of_strategy in results.items()} == {
        "ddp": RIGHT, "fsdp2": REFUSED, "yafsdp": RIGHT,
    }  # fmt: skip
    assert "factor" in str(results["fsdp2"][0].error)


def test_an_optimizer_of_whole_tensors_is_verified_as_one() -> None:
    results = verified("whole_tensors", "yafsdp")
    assert report.verdict(results["yafsdp"]) == RIGHT
    assert any("WholeTensorOptimizer" in note for note in results["yafsdp"][0].notes)


def test_weights_that_depend_on_the_rank_differ_before_the_first_step() -> None:
    difference = first("other_weights_on_rank_1", "fsdp2")
    assert (difference.step, difference.quantity, difference.rank) == (0, "initial weight", 1)


def test_without_fp64_the_model_s_own_precision_decides() -> None:
    settings = Settings(f"{SCRIPT}:only_in_fp32", ("ddp",), steps=1, timeout_s=300)
    verification = report.read(json.dumps(verify(settings)).encode())
    assert verification.fp64_error is not None
    assert [result.precision for result in verification.results] == [NATIVE]
    assert report.verdict(verification.results) == RIGHT


@pytest.mark.parametrize(("function", "words"), [("sleeps", "no answer within 1 s"), ("is_killed", "exit code -9")])
def test_a_rank_without_an_answer_is_ended_and_named(function: str, words: str, tmp_path: Path) -> None:
    case = Case(
        f"{SCRIPT}:{function}", ONE_PROCESS, NATIVE, 1, 2, 1, str(tmp_path), 1.0 if function == "sleeps" else 60
    )
    assert processes.answers(case)[0]["error"].startswith(words) or words in processes.answers(case)[0]["error"]


def test_a_rank_that_exits_is_the_reason_that_the_others_fail() -> None:
    results = verified("exits_on_rank_1", "ddp")["ddp"]
    assert report.verdict(results) == FAILED
    assert (results[0].error_rank, results[0].error) == (1, "ended with exit code 7")


@pytest.mark.parametrize(
    "target",
    [
        *(
            f"{SCRIPT}:{function}"
            for function in ("random_loss", "odd_batches", "no_training", "missing", "infinite_loss")
        ),
        *("missing.py:training", "no_such_module:training", "train.py", "tracekit:"),
    ],
)
def test_what_cannot_be_verified_is_an_error_that_names_it(target: str) -> None:
    verification = json.dumps(verify(Settings(target, ("ddp",), steps=1, timeout_s=300))).encode()
    with pytest.raises(InputError) as error:
        report.read(verification)
    assert target.partition(":")[0] in str(error.value)


def test_an_error_of_the_user_s_code_is_one_line() -> None:
    done = cli_runner.tracekit("verify-training", f"{SCRIPT}:raises", "--strategy", "ddp", "--steps", "1")
    assert done.returncode == 2
    assert "KeyError: 'corpus' (verified_trainings.py, line" in cli_runner.only_line(done)


def test_the_exit_code_says_whether_all_strategies_are_right() -> None:
    verified_right = cli_runner.tracekit(
        *("verify-training", "scripts.verified_trainings:right"),
        *("--strategy", "yafsdp", "--steps", "1", "--format", "json"),
        cwd=SCRIPT.parents[1],
    )
    assert verified_right.returncode == 0, verified_right.stderr
    assert json.loads(verified_right.stdout)["verdicts"] == {"yafsdp": RIGHT}
    differs = cli_runner.tracekit("verify-training", f"{SCRIPT}:summed_loss", "--strategy", "ddp", "--steps", "1")
    assert differs.returncode == 1
    assert "0.5 times" in differs.stdout


_RESULT = {
    "strategy": "ddp", "precision": "fp64", "error": None, "error_rank": None, "phase": None, "is_refused": False,
    "differences": [], "difference_count": 0, "compared_count": 9, "largest": 1e-16, "notes": [],
}  # fmt: skip
_DIFFERENCE = {"step": 1, "quantity": "loss", "name": "", "rank": 0, "relative": 0.5, "ratio": 0.5, "tolerance": 1e-9}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, RIGHT),
        ({"differences": [_DIFFERENCE]}, WRONG),
        ({"error": "ValueError: …", "is_refused": True}, REFUSED),
        ({"error": "no answer"}, FAILED),
        ({"error": "raised later", "differences": [_DIFFERENCE]}, WRONG),
    ],
)
def test_the_verdict_follows_from_the_results(changed: dict[str, Any], expected: str) -> None:
    results = msgspec.convert([_RESULT, {**_RESULT, "precision": "native", **changed}], list[Result])
    assert report.verdict(results) == expected


numbers = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20)


@given(numbers, st.floats(-8, 8).filter(lambda ratio: abs(ratio - 1) > 1e-3))
def test_a_constant_factor_is_found(values: list[float], ratio: float) -> None:
    reference = torch.tensor(values, dtype=torch.float64)
    if not reference.any():
        return
    compared = difference(reference * ratio, reference)
    assert compared.ratio == pytest.approx(ratio, abs=1e-9)
    assert compared.relative == pytest.approx(abs(ratio - 1))


@given(numbers, numbers)
def test_the_difference_is_the_largest_over_the_largest_reference(values: list[float], others: list[float]) -> None:
    size = min(len(values), len(others))
    pairs = list(zip(values, others, strict=False))
    largest, scale = max(abs(value - other) for value, other in pairs), max(abs(other) for _, other in pairs)
    compared = difference(torch.tensor(values[:size]), torch.tensor(others[:size]))
    expected = 0.0 if not largest else math.inf if not scale else largest / scale
    assert compared.relative == pytest.approx(expected, rel=1e-5)


def test_shapes_and_infinities_are_no_rounding() -> None:
    ones = torch.ones(3)
    assert difference(ones, torch.ones(4)).relative == math.inf
    assert difference(torch.tensor([1.0, math.nan, 1.0]), ones).relative == math.inf
    infinite = torch.tensor([1.0, math.inf])
    assert difference(infinite, infinite).relative == 0
    assert difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])).ratio is None


def test_of_a_single_number_only_factors_of_the_ranks_are_scale() -> None:
    assert is_scale(0.5, elements=1, ranks=2)
    assert is_scale(3.0, elements=1, ranks=3)
    assert not is_scale(1.7, elements=1, ranks=2)
    assert is_scale(1.7, elements=10, ranks=2)
    assert not is_scale(None, elements=10, ranks=2)

"""What the recorded order predicts. Units are letters here; a forward pass is a word."""

from instrumented_trainers.parallelism.yafsdp.execution_order import ExecutionOrder


def forward(order: ExecutionOrder[str], word: str) -> str:
    """Run a forward pass; return what was predicted before the first unit and after each, "." where nothing was."""
    order.begin_forward()
    predicted = ["".join(order.next_forward(1)) or "."]
    for unit in word:
        order.record_forward(unit)
        predicted.append("".join(order.next_forward(1)) or ".")
    return "".join(predicted)


def backward(order: ExecutionOrder[str], word: str) -> str:
    """Run a backward pass through the units as they come; return what was predicted before and after each."""
    order.reset_backward()
    predicted = ["".join(order.next_backward(1)) or "."]
    for unit in word:
        order.record_backward(unit)
        predicted.append("".join(order.next_backward(1)) or ".")
    return "".join(predicted)


def test_the_first_pass_predicts_nothing_and_the_second_what_the_first_did() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    assert forward(order, "abcd") == "....."
    assert forward(order, "abcd") == "abcd."


def test_the_first_backward_pass_is_predicted_from_its_forward_pass() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    forward(order, "abcd")
    assert backward(order, "dcba") == "dcba."


def test_prediction_skips_units_that_did_not_run() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    forward(order, "abcd")
    assert forward(order, "acd") == "abd."  # b was expected after a; after c it is d again
    assert backward(order, "dca") == "dca."


def test_an_unexpected_unit_does_not_change_the_prediction() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    forward(order, "abc")
    assert forward(order, "axbc") == "abbc."


def test_a_unit_that_runs_twice_is_predicted_twice() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    forward(order, "abab")
    assert forward(order, "abab") == "abab."
    assert backward(order, "baba") == "baba."


def test_a_repeated_begin_of_backward_is_counted_once() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    forward(order, "abc")
    order.reset_backward()
    assert [order.record_backward("c"), order.record_backward("c"), order.record_backward("b")] == [True, False, True]


def test_two_backward_passes_after_two_forward_passes_both_start_from_the_end() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    forward(order, "abc")
    forward(order, "abc")
    assert backward(order, "cba") == "cba."
    assert backward(order, "cba") == "cba."


def test_as_many_units_are_predicted_as_requested() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    forward(order, "abcd")
    order.begin_forward()
    order.record_forward("a")
    assert order.next_forward(2) == ["b", "c"]
    assert order.next_backward(2) == ["a"]

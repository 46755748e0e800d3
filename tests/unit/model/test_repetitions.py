"""Passes of a loop in a sequence of tokens, and sequences in which nothing repeats."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.model import repetitions

FORWARD, BACKWARD, OPTIMIZER = [1, *[2, 3, 4] * 6, 5], [6, *[7, 8] * 6], [9, 9, 9, 10]
STEP = [*FORWARD, *BACKWARD, *OPTIMIZER]


def starts(tokens):
    found = repetitions.find(np.array(tokens, np.int64))
    return [] if found is None else found.starts.tolist()


def test_layers_and_micro_batches_are_not_the_passes_of_the_outer_loop():
    micro_batches = [*FORWARD, *BACKWARD, *FORWARD, *BACKWARD, *OPTIMIZER]
    assert starts(STEP * 4) == [len(STEP) * k for k in range(4)]
    assert starts(micro_batches * 3) == [len(micro_batches) * k for k in range(3)]


def test_a_recording_cut_in_the_middle_has_only_whole_passes():
    #  time    | backward 0 |   step 1   |   step 2   |   step 3   | forward 4 |
    #  passes    ----- 0 ----- ----- 1 ----- ----- 2 ----- - cut -
    tokens = [*STEP[len(FORWARD) :], *STEP * 3, *FORWARD[:9]]
    found = repetitions.find(np.array(tokens))
    assert found is not None
    assert found.starts.tolist() == [0, len(STEP), 2 * len(STEP)]
    assert (found.end, found.alike_ratio) == (3 * len(STEP), 1.0)


def test_what_runs_before_the_loop_belongs_to_no_pass():
    setup = [20, 21, 22, 23]
    assert starts([*setup, *STEP * 3]) == [4 + len(STEP) * k for k in range(3)]


def test_a_pass_with_more_work_is_one_pass():
    logging = [*STEP[:20], 30, 31, 32, *STEP[20:]]
    assert starts([*STEP, *STEP, *logging, *STEP]) == [0, len(STEP), 2 * len(STEP), 3 * len(STEP) + 3]


def test_a_kernel_in_every_second_step_does_not_make_two_steps_one_pass():
    step = list(range(40))
    assert starts([*step, *step, 50, *step, *step, 50, *step]) == [0, 40, 81, 121, 162]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], list(range(50)), STEP])
def test_what_does_not_repeat_is_not_alike(tokens):
    found = repetitions.find(np.array(tokens, np.int64))
    assert found is None or found.alike_ratio < 0.5


def test_a_stack_of_layers_leaves_out_what_comes_before_and_after_it():
    embedding, layer, head = [1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11, 12]
    found = repetitions.find(np.array([*embedding, *layer * 32, *head]))
    assert found is not None
    assert (found.count, found.alike_ratio, found.alike_within_ratio) == (32, 0.5, 1.0)


@given(seed=st.integers(0, 1 << 32), before=st.integers(50, 400))
def test_what_comes_before_the_loop_is_no_pass_although_it_shares_tokens_with_it(seed, before):
    rng = np.random.default_rng(seed)
    loop = rng.permutation(40)
    found = repetitions.find(np.concatenate([rng.integers(30, 70, before), np.tile(loop, 40)]))
    assert found is not None
    assert 39 <= found.count <= 41
    # By chance one pass may seem to begin among the tokens that the loop shares.
    assert abs(found.starts[0] - before) <= 2 * len(loop)
    assert set(np.diff(found.starts)[2:].tolist()) == {len(loop)}


@given(
    unit=st.lists(st.integers(0, 40), min_size=12, max_size=60, unique=True),
    passes=st.integers(3, 12),
    lost=st.lists(st.integers(0, 10_000), max_size=3),
)
def test_passes_are_counted_although_some_tokens_are_missing(unit, passes, lost):
    tokens = unit * passes
    # Never the first pass's first token, from which the passes are counted.
    for at in lost:
        del tokens[1 + at % (len(tokens) - 1)]
    found = repetitions.find(np.array(tokens))
    assert found is not None
    assert passes - 1 <= found.count <= passes
    assert found.alike_ratio > 0.7
    assert (np.diff(found.starts) > 0).all()
    assert found.end <= len(tokens)


@given(seed=st.integers(0, 1 << 32), length=st.integers(40, 600), names=st.integers(8, 60))
def test_random_sequences_do_not_repeat(seed, length, names):
    tokens = np.random.default_rng(seed).integers(0, names, length)
    found = repetitions.find(tokens)
    assert found is None or found.alike_ratio < (0.75 if found.count > 2 else 0.9)


@given(st.lists(st.integers(0, 5), max_size=80))
def test_any_sequence_is_read(tokens):
    found = repetitions.find(np.array(tokens, np.int64))
    if found is not None:
        assert found.count >= 2
        assert 0 <= found.starts[0] < found.starts[-1] < found.end <= len(tokens)
        assert 0 <= found.alike_ratio <= found.alike_within_ratio <= 1

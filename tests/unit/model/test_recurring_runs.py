import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.model import repetitions

TOKENS = st.integers(1, 5).flatmap(lambda kinds: st.lists(st.integers(0, kinds - 1), max_size=25))


def found(tokens: list[int], parts: list[int], longest: int) -> list[tuple[int, list[int]]]:
    runs = repetitions.recurring_runs(np.array(tokens, np.int64), np.array(parts, np.int64), longest=longest)
    return [(run.length, run.starts.tolist()) for run in runs]


def by_trying_all(tokens: list[int], parts: list[int], longest: int) -> list[tuple[int, list[int]]]:
    """Return what `found` does, by counting each run of each length anew after each choice."""
    used: set[int] = set()
    chosen = []
    while True:
        candidates = []
        for run, places in _places(tokens, parts, longest).items():
            kept: list[int] = []
            for at in places:
                if not used & set(range(at, at + len(run))) and (not kept or at >= kept[-1] + len(run)):
                    kept.append(at)
            if len(kept) > 1:
                candidates.append((-len(kept) * len(run), -len(run), places[0], kept))
        if not candidates:
            return chosen
        _, length, _, kept = min(candidates)
        chosen.append((-length, kept))
        used |= {at + offset for at in kept for offset in range(-length)}


def _places(tokens: list[int], parts: list[int], longest: int) -> dict[tuple[int, ...], list[int]]:
    places: dict[tuple[int, ...], list[int]] = {}
    for length in range(2, longest + 1):
        for at in range(len(tokens) - length + 1):
            if parts[at] == parts[at + length - 1]:
                places.setdefault(tuple(tokens[at : at + length]), []).append(at)
    return places


def test_layers_that_repeat_are_one_run():
    # tokens   9 1 2 3 1 2 3 1 2 3 8      the layer 1 2 3, three times
    assert found([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8], [0] * 11, longest=5) == [(3, [1, 4, 7])]


def test_a_run_ends_where_its_part_does():
    assert found([1, 2, 1, 2], [0, 1, 1, 1], longest=4) == []
    assert found([1, 2, 1, 2], [0, 0, 1, 1], longest=4) == [(2, [0, 2])]


def test_tokens_that_one_run_has_are_in_no_other():
    # tokens   1 2 3 1 2 3 2 3      1 2 3 is as much as 2 3, and longer; one 2 3 is left, which then occurs once
    assert found([1, 2, 3, 1, 2, 3, 2, 3], [0] * 8, longest=3) == [(3, [0, 3])]


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.integers(1, 4), st.integers(2, 7))
def test_runs_are_those_found_by_trying_all(tokens: list[int], part: int, longest: int):
    parts = [at * part // max(len(tokens), 1) for at in range(len(tokens))]
    assert found(tokens, parts, longest) == by_trying_all(tokens, parts, longest)


def test_at_most_so_many_runs_are_chosen():
    tokens = np.tile(np.arange(40), 2)
    assert len(repetitions.recurring_runs(tokens, np.zeros(80, np.int64), longest=2, max_runs=3)) == 3

"""Which delays a training can be given: their places, and their lengths. Without torch, for the command line."""

from collections.abc import Iterable

from tracekit import conventions

DELAY_RATIO = 0.02
"""Length of a delay over the median step. A trial has one delay in four steps: the job slows down by 0.5%."""
MAX_DELAY_RATIO = 0.05


def parse_places(places: Iterable[str]) -> tuple[str, ...]:
    """Places in the order of `conventions.PERTURBED_PLACES`, all of them for "all". Raises ValueError for others.

    >>> parse_places(["optimizer", "data"])
    ('data', 'optimizer')
    """
    names = {places} if isinstance(places, str) else set(places)
    if invalid := names.difference(conventions.PERTURBED_PLACES, ["all"]):
        raise ValueError(
            f"no delay can be injected before {', '.join(map(repr, sorted(invalid)))}; the places are "
            f"{', '.join(conventions.PERTURBED_PLACES)}, or all"
        )
    return tuple(place for place in conventions.PERTURBED_PLACES if names & {place, "all"})

"""What `verify-training` found as a document: which strategies compute what one process computes, and where not."""

from collections.abc import Mapping, Sequence

import msgspec

from tracekit.errors import InputError
from tracekit.model import units
from tracekit.report.document import Cells, Document, Emphasis, Line, Section, line

FP64 = "fp64"
RIGHT, WRONG, REFUSED, FAILED = "right", "wrong", "refused", "failed"
_EMPHASES = {RIGHT: Emphasis.GOOD}
_NEAR = 1e-3
_LARGEST_SHOWN = 3


class Difference(msgspec.Struct, frozen=True):
    """A value that is not that of one process. `relative` is null where it is not finite, or of another shape."""

    step: int
    quantity: str
    name: str
    rank: int
    relative: float | None
    ratio: float | None
    """The factor that explains the difference."""
    tolerance: float
    module: str | None = None
    """Class of the module that returned it, or that has it."""


class Result(msgspec.Struct, frozen=True):
    """A strategy in one precision. Differences are in the order of computation, and at most some of them all."""

    strategy: str
    precision: str
    error: str | None
    error_rank: int | None
    phase: str | None
    is_refused: bool
    differences: list[Difference]
    difference_count: int
    compared_count: int
    largest: float
    notes: list[str]


class Model(msgspec.Struct, frozen=True):
    """The user's model: its class, number of parameters, names of frozen and tied ones and of buffers."""

    name: str
    parameters: int
    frozen: list[str]
    tied: list[list[str]]
    buffers: list[str]
    optimizer: str = ""
    dtype: str = ""


class Verification(msgspec.Struct, frozen=True):
    """What the ranks reported."""

    target: str
    ranks: int
    steps: int
    model: Model | None
    error: str | None
    fp64_error: str | None
    notes: list[str]
    results: list[Result]


def read(data: bytes) -> Verification:
    """Verification in JSON. Raises InputError where nothing could be verified, with the reason."""
    try:
        verification = msgspec.json.decode(data, type=Verification)
    except msgspec.DecodeError as error:
        raise InputError(
            f"the ranks reported something else than a verification ({error}); run it again with --debug"
        ) from error
    if verification.error is not None:
        raise InputError(verification.error)
    return verification


def verdict(results: Sequence[Result]) -> str:
    """Verdict on the results of a strategy: in fp64, where that is possible, and in the model's own precision."""
    if any(result.error is not None and result.is_refused for result in results):
        return REFUSED
    if any(result.differences for result in results):
        return WRONG
    return FAILED if any(result.error is not None for result in results) else RIGHT


def by_strategy(verification: Verification) -> dict[str, list[Result]]:
    """Results of each strategy, fp64 first."""
    strategies: dict[str, list[Result]] = {}
    for result in verification.results:
        strategies.setdefault(result.strategy, []).append(result)
    return strategies


def document(verification: Verification) -> Document:
    """Headline, a row per strategy, what is wrong with each, and the model."""
    strategies = by_strategy(verification)
    verdicts = {strategy: verdict(results) for strategy, results in strategies.items()}
    details = [part for strategy, results in strategies.items() for part in _details(strategy, results, verification)]
    sections: tuple[Section, ...] = ([line(headline(verification, verdicts))], [_table(verification, verdicts)])
    if details:
        sections = (*sections, details)
    if verification.model is not None:
        sections = (*sections, [line(_model_line(verification.model))])
    notes = [*verification.notes]
    if verification.fp64_error is not None:
        notes.append(f"fp64 is not possible, so rounding and small errors look alike: {verification.fp64_error}")
    values = {**msgspec.to_builtins(verification), "verdicts": verdicts}
    return Document(sections, tuple(notes), values=values)


def headline(verification: Verification, verdicts: Mapping[str, str]) -> str:
    """Which strategies train as one process does, and which do not."""
    right = [strategy for strategy, word in verdicts.items() if word == RIGHT]
    amount = f"{units.count(verification.steps, 'step')} on {verification.ranks} ranks"
    if len(right) == len(verdicts):
        return f"{verification.target} trains as in one process under {_enumeration(right)} ({amount})."
    others = ", ".join(f"{strategy} {_PREDICATES[word]}" for strategy, word in verdicts.items() if word != RIGHT)
    rest = f"; right under {_enumeration(right)}" if right else ""
    return f"{verification.target}: {others}{rest} ({amount})."


_PREDICATES = {WRONG: "differs from one process", REFUSED: "refuses it", FAILED: "fails"}


def explanation(first: Difference, ranks: int) -> str:
    """What the first difference shows, and what to do; "" where it shows no more than where to look."""
    if first.quantity == "initial weight":
        return "The function draws other weights on this rank: seed it alike on all ranks"
    if first.module is not None and "BatchNorm" in first.module:
        return "Its statistics are of each rank's samples: use SyncBatchNorm (on GPUs), or a norm without the batch"
    if first.quantity == "buffer":
        return "It depends on each rank's samples, and no strategy averages buffers: average it over ranks in forward"
    if first.quantity == "weight":
        return (
            "Its gradient is right, so the optimizer steps it otherwise: does it need whole tensors, or other groups?"
        )
    if first.ratio is None:
        return ""
    if abs(first.ratio * ranks - 1) < _NEAR:
        return "A factor of 1/ranks: strategies average over ranks, so a loss must be a mean over samples, not a sum"
    if abs(first.ratio / ranks - 1) < _NEAR:
        return "A factor of the number of ranks: something sums over ranks what the strategy averages"
    return ""


def _details(strategy: str, results: Sequence[Result], verification: Verification) -> list[Line]:
    """What is wrong with a strategy, or what it needed; in fp64 where that shows it."""
    lines = [line(f"{strategy}: {note}") for note in dict.fromkeys(note for result in results for note in result.notes)]
    if differing := next((result for result in results if result.differences), None):
        first, ranks = differing.differences[0], verification.ranks
        only = (
            ""
            if differing.precision == FP64 or verification.fp64_error
            else ", but right in fp64: larger than rounding is"
        )
        lines.append(line(f"{strategy}: first in step {first.step}, {_place(first)}: {_amount(first)}{only}."))
        if text := explanation(first, ranks):
            lines.append(line(f"{text}.", indent=2))
        if others := differing.differences[1 : 1 + _LARGEST_SHOWN]:
            names = ", ".join(f"{_place(other)} {_amount(other)}" for other in others)
            lines.append(
                line(
                    f"{differing.difference_count} of {differing.compared_count} values differ: then {names}.", indent=2
                )
            )
    if failing := next((result for result in results if result.error is not None), None):
        place = failing.phase or f"rank {failing.error_rank}"
        lines.append(line(f"{strategy}, {place}: {failing.error}"))
    return lines


def _place(difference: Difference) -> str:
    if difference.quantity == "loss":
        return "the loss"
    return f"{difference.quantity} of {difference.name or 'the model'}"


def _amount(difference: Difference) -> str:
    if difference.ratio is not None:
        return f"{difference.ratio:.4g} times that of one process"
    if difference.relative is None:
        return "not finite, or of another shape"
    return f"off by {difference.relative:.2g} (relative, rank {difference.rank})"


def _table(verification: Verification, verdicts: Mapping[str, str]) -> Cells:
    dtype = verification.model.dtype if verification.model is not None else ""
    rows = []
    for strategy, results in by_strategy(verification).items():
        by_precision = {result.precision: result for result in results}
        cells = [_largest(by_precision.get(precision)) for precision in (FP64, "native")]
        rows.append((strategy, *cells, verdicts[strategy]))
    emphases = tuple(_EMPHASES.get(word, Emphasis.WORSE) for word in verdicts.values())
    return Cells(("", FP64, dtype or "own precision", "verdict"), tuple(rows), numbers=(1, 2), emphases=emphases)


def _largest(result: Result | None) -> str:
    """The largest difference, relative; "" where the strategy did not get so far."""
    if result is None or (result.error is not None and not result.differences):
        return ""
    if not result.differences:
        return f"{result.largest:.1e}"
    sizes = [difference.relative for difference in result.differences]
    return "∞" if None in sizes else f"{max(size for size in sizes if size is not None):.1e}"


def _model_line(model: Model) -> str:
    parts = [
        f"{units.count(model.parameters, 'parameter')} in {model.dtype or 'its own precision'}",
        model.optimizer or "no optimizer",
    ]
    parts += [f"tied: {' = '.join(names)}" for names in model.tied]
    if model.frozen:
        parts.append(f"frozen: {_first_names(model.frozen)}")
    if model.buffers:
        parts.append(f"buffers: {_first_names(model.buffers)}")
    return f"{model.name}: {'; '.join(parts)}."


def _first_names(names: Sequence[str]) -> str:
    more = len(names) - _LARGEST_SHOWN
    return ", ".join(names[:_LARGEST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _enumeration(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))

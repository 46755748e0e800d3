"""Pipeline schedules: the order in which a rank runs the actions of its stages.

Sources: GPipe: arXiv 1811.06965. 1F1B and interleaved 1F1B: 2104.04473, section 2.2 (and Megatron-LM's order of
micro-batches). ZB-H1: 2401.10241, section 3.1. ZBV: 2405.15362. DualPipeV: github.com/deepseek-ai/DualPipe. The last
two run in the order of torch.distributed.pipelining (ScheduleZBVZeroBubble, ScheduleDualPipeV).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV, DUALPIPEV = (
    "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev",
)  # fmt: skip
SPLIT_BACKWARD = (ZB_H1, ZBV, DUALPIPEV)
"""Schedules in which input gradients and weight gradients are actions of their own."""
V_SHAPED = (ZBV, DUALPIPEV)
"""Schedules with two stages per rank, in a V: the first rank runs the first stage and the last."""
FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"


class Action(NamedTuple):
    """One pass of a stage over a micro-batch; `kind` is F, B (whole backward), I (input gradient) or W (weight's)."""

    stage: int
    kind: str
    micro_batch: int

    @property
    def name(self) -> str:
        """Return the span's name, as torch.distributed.pipelining writes it.

        >>> Action(1, "F", 3).name
        'PP:1F3'
        """
        return f"PP:{self.stage}{self.kind}{self.micro_batch}"


class Shape(NamedTuple):
    """The size of a pipeline: ranks along pp, stages per rank, micro-batches per step."""

    ranks: int
    virtual_stages: int
    micro_batches: int


def usual_stages_per_rank(schedule: str) -> int:
    """Return the number of stages of a rank under a schedule: of interleaved ones the fewest."""
    return 2 if schedule in (INTERLEAVED, *V_SHAPED) else 1


def place_of(schedule: str, stage: int, ranks: int) -> int:
    """Return the place on the pp axis, of `ranks` ranks, that runs a stage.

    >>> [place_of("interleaved", stage, 2) for stage in range(4)], [place_of("zbv", stage, 2) for stage in range(4)]
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    if schedule in V_SHAPED:
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks


def stages_at(schedule: str, stages: int, ranks: int, place: int) -> tuple[int, ...]:
    """Return the stages, of `stages` in all, that the rank at a place of the pp axis runs.

    >>> stages_at("zbv", 8, 4, 1)
    (1, 6)
    """
    return tuple(stage for stage in range(stages) if place_of(schedule, stage, ranks) == place)


def refusal(schedule: str, shape: Shape) -> str | None:
    """Return why a schedule cannot run so many stages and micro-batches, or None if it can."""
    ranks, stages, micro_batches = shape
    if schedule not in _ORDERS:
        return f"the schedule is {schedule!r}; known are {', '.join(SCHEDULES)}"
    if schedule in V_SHAPED and stages != 2:
        return f"{schedule} has 2 stages on each rank, not {stages}"
    if schedule == INTERLEAVED and stages < 2:
        return "the interleaved schedule has 2 stages or more on each rank (--virtual-stages)"
    if schedule not in (INTERLEAVED, *V_SHAPED) and stages > 1:
        return f"{schedule} has 1 stage on each rank, not {stages}; --schedule interleaved has more"
    if schedule == INTERLEAVED and micro_batches % ranks:
        return f"the interleaved schedule needs a multiple of {ranks} micro-batches; there are {micro_batches}"
    fewest = {ZBV: 2 * ranks - 1, DUALPIPEV: 2 * ranks}.get(schedule, 1)
    if micro_batches < fewest:
        return f"{schedule} on {ranks} ranks needs {fewest} micro-batches or more; there are {micro_batches}"
    return None


def order(schedule: str, shape: Shape, rank: int) -> list[Action]:
    """Return the actions that the rank at place `rank` of the pp axis runs in a step.

    >>> " ".join(action.name[3:] for action in order("1f1b", Shape(2, 1, 3), 0))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    return _ORDERS[schedule](shape, rank)


def _gpipe(shape: Shape, rank: int) -> list[Action]:
    passes = range(shape.micro_batches)
    return [Action(rank, FORWARD, i) for i in passes] + [Action(rank, BACKWARD, i) for i in passes]


def _one_f_one_b(shape: Shape, rank: int) -> list[Action]:
    forwards, backwards = ([Action(rank, kind, i) for i in range(shape.micro_batches)] for kind in "FB")
    return _alternate(forwards, backwards, min(shape.ranks - 1 - rank, shape.micro_batches))


def _interleaved_actions(shape: Shape, rank: int) -> list[Action]:
    ranks, stages, _ = shape
    total = stages * shape.micro_batches
    forwards, backwards = [], []
    for index in range(total):
        block, place = divmod(index, ranks * stages)
        chunk, micro_batch = place // ranks, block * ranks + place % ranks
        forwards.append(Action(chunk * ranks + rank, FORWARD, micro_batch))
        backwards.append(Action((stages - 1 - chunk) * ranks + rank, BACKWARD, micro_batch))
    return _alternate(forwards, backwards, min(2 * (ranks - rank - 1) + (stages - 1) * ranks, total))


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Return so many forward passes, then one forward and one backward pass in turns, then the rest."""
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def _zb_h1(shape: Shape, rank: int) -> list[Action]:
    """Return 1F1B with its backward passes split: a rank postpones as many weight gradients as ranks are before it.

    So gradients reach the ranks before it earlier, and its weight gradients fill the time in which it would wait.
    """
    actions: list[Action] = []
    weights = 0
    for action in _one_f_one_b(shape, rank):
        actions.append(action if action.kind == FORWARD else action._replace(kind=INPUT_GRADIENT))
        if action.kind == BACKWARD and action.micro_batch >= rank:
            actions.append(Action(rank, WEIGHT_GRADIENT, weights))
            weights += 1
    return actions + [Action(rank, WEIGHT_GRADIENT, i) for i in range(weights, shape.micro_batches)]


class _Chunks:
    """The actions of a rank's two stages (chunks 0 and 1) under a V-shaped schedule; micro-batches count up by kind."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.actions: list[Action] = []
        self.next: Counter[tuple[int, str]] = Counter()
        """The next micro-batch by chunk and kind; whole backward passes count as gradients of the input."""
        self._stages = (rank, 2 * shape.ranks - 1 - rank)
        self._postponed: list[tuple[int, int]] = []

    def repeat(self, times: int, steps: str) -> None:
        """Append actions such as "0F 1I 1W" so many times; "W" is the oldest weight gradient of both chunks."""
        for step in times * steps.split():
            if step.endswith(WEIGHT_GRADIENT):
                self._weight_gradient({int(step[0])} if len(step) > 1 else {0, 1})
                continue
            chunk, kind = int(step[0]), step[1]
            key = chunk, INPUT_GRADIENT if kind == BACKWARD else kind
            self.actions.append(Action(self._stages[chunk], kind, self.next[key]))
            if kind == INPUT_GRADIENT:
                self._postponed.append((chunk, self.next[key]))
            self.next[key] += 1

    def _weight_gradient(self, chunks: set[int]) -> None:
        postponed = next((entry for entry in self._postponed if entry[0] in chunks), None)
        if postponed is not None:
            self._postponed.remove(postponed)
            self.actions.append(Action(self._stages[postponed[0]], WEIGHT_GRADIENT, postponed[1]))


def _zbv(shape: Shape, rank: int) -> list[Action]:
    """Return forwards until the first micro-batch comes back, then forward, input's and weight's gradient in turns.

    At the end weight gradients fill the time in which the rank would wait.
    """
    ranks, _, micro_batches = shape
    chunks = _Chunks(shape, rank)
    chunks.repeat(2 * (ranks - rank) - 1, "0F")
    chunks.repeat(rank, "1F 0F")
    chunks.repeat(ranks - rank, "1F 1I 1W")
    while chunks.next[1, FORWARD] < micro_batches:
        chunks.repeat(int(chunks.next[0, FORWARD] < micro_batches), "0F")
        chunks.repeat(1, "0I 0W 1F 1I 1W")
    chunks.repeat(rank, "0I 1I")
    chunks.repeat(ranks - rank, "0I 0W")
    chunks.repeat(rank, "1W")
    chunks.repeat(rank, "0W")
    return chunks.actions


def _dualpipev(shape: Shape, rank: int) -> list[Action]:
    """Return the eight parts of DualPipeV. What it runs as one, a forward and a backward pass, follow each other."""
    ranks, _, micro_batches = shape
    after, chunks = ranks - rank - 1, _Chunks(shape, rank)
    chunks.repeat(2 * after, "0F")
    chunks.repeat(rank + 1, "0F 1F")
    chunks.repeat(after, "1I W 1F")
    chunks.repeat(micro_batches - 2 * ranks + rank + 1, "0F 1B 1F 0B")
    chunks.repeat(after, "1B 1F 0B")
    # From the middle of the last ones on, weight gradients are postponed: on odd ranks a pass earlier.
    half = (rank + 1) // 2
    chunks.repeat(half, "1B 0B")
    chunks.repeat(int(rank % 2 == 0), "1B 0I")
    chunks.repeat(rank // 2 if rank % 2 == 0 else rank + 1 - half, "1I 0I")
    chunks.repeat(after, "W 0I")
    chunks.repeat(rank + 1, "W")
    return chunks.actions


_ORDERS: Mapping[str, Callable[[Shape, int], list[Action]]] = {
    GPIPE: _gpipe,
    ONE_F_ONE_B: _one_f_one_b,
    INTERLEAVED: _interleaved_actions,
    ZB_H1: _zb_h1,
    ZBV: _zbv,
    DUALPIPEV: _dualpipev,
}
SCHEDULES = tuple(_ORDERS)

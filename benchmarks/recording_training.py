"""The training that `benchmarks.recording` times, a script of its own: on one thread of one process, on the CPU.

    recording_training.py turns WORK [RUN]             # as many steps as each line of stdin says, then what they took
    recording_training.py window WORK OPTION RUN COUNT # COUNT profiled windows, then what each cost

WORK is a step: ``model``, of a small Llama-style model, or ``empty``, of a single parameter. Of tracekit it imports the
recorder where RUN is given, and nothing otherwise.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

BEFORE_STEPS, WARM_UP_STEPS, WINDOW_STEPS = 5, 2, 5
EVERY_STEPS = 20
OPTIONS = {
    "plain": {},
    "shapes": {"shapes": True},
    "memory": {"memory": True},
    "stacks": {"stacks": True},
    "all": {"shapes": True, "memory": True, "stacks": True},
}
"""Additional trace content. By default it has memory, and on the CPU shapes too."""

_BATCH, _TOKENS = 2, 64
_STEPS_FIRST = 3

Step = Callable[[], torch.Tensor]


def model_step() -> Step:
    from torch.nn import functional

    from instrumented_trainers.model import Llama
    from instrumented_trainers.model_config import PRESETS

    config = PRESETS["tiny"]
    model = Llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = _forever(torch.utils.data.DataLoader(torch.randint(config.vocabulary, (512, _TOKENS + 1)), _BATCH))

    def step() -> torch.Tensor:
        tokens = next(batches)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def empty_step() -> Step:
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    batches = _forever(torch.utils.data.DataLoader([2.0] * 1000, batch_size=None))

    def step() -> torch.Tensor:
        loss = weight * next(batches)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


STEPS = {"model": model_step, "empty": empty_step}


def _forever(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


# Outside the window: in turns with others ----------------------------------------------------------------------------


def turns(step: Step, run: str | None) -> None:
    """Do as many steps as each line of stdin says and report what each took, CPU time of all threads and wall time."""
    with _open_recorder(run) as end_step:
        for _ in range(_STEPS_FIRST):
            end_step(step())
        answer({"pid": "ready"})
        for line in sys.stdin:
            cpu_ns, wall_ns = [time.process_time_ns()], [time.perf_counter_ns()]
            for _ in range(int(line)):
                end_step(step())
                cpu_ns.append(time.process_time_ns())
                wall_ns.append(time.perf_counter_ns())
            answer({"cpu_ns": _differences(cpu_ns), "wall_ns": _differences(wall_ns)})


@contextlib.contextmanager
def _open_recorder(run: str | None) -> Iterator[Callable[[torch.Tensor], None]]:
    if run is None:
        yield lambda _loss: None
        return
    from tracekit.capture import Recorder

    with Recorder(run, steps=None) as recorder:
        # A function: the loss is read one step later, which on a GPU stops nothing.
        yield lambda loss: recorder.step({"loss": lambda: loss.item()}, tokens=_BATCH * _TOKENS)


# Inside the window ---------------------------------------------------------------------------------------------------


def windows(step: Step, option: str, run: str, count: int) -> None:
    """Record windows, and report for each the thread's time in a step before and inside, and what it cost to write."""
    from tracekit.capture import Recorder

    settings = {"shapes": False, "memory": False, "stacks": False} | OPTIONS[option]
    first = EVERY_STEPS - WINDOW_STEPS
    steps_ns, calls_ns, blocked_ns, elsewhere_ns = [], [], [], []
    with Recorder(run, steps=(first, first + WINDOW_STEPS), every=EVERY_STEPS, **settings) as recorder:
        for _ in range(count * EVERY_STEPS + BEFORE_STEPS):
            all_ns, began_ns = time.process_time_ns(), time.thread_time_ns()
            loss = step()
            stepped_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
            recorder.step({"loss": lambda loss=loss: loss.item()})
            blocked_ns.append(time.perf_counter_ns() - wall_ns)
            ended_ns = time.thread_time_ns()
            steps_ns.append(stepped_ns - began_ns)
            calls_ns.append(ended_ns - stepped_ns)
            elsewhere_ns.append(time.process_time_ns() - all_ns - (ended_ns - began_ns))
    for number in range(count):
        begin = number * EVERY_STEPS + first
        end = begin + WINDOW_STEPS
        before = range(begin - WARM_UP_STEPS - BEFORE_STEPS, begin - WARM_UP_STEPS - 1)
        inside = range(begin, end - 1)  # the call after its last step writes the trace
        folder = Path(run) if number == 0 else Path(run) / f"window{number:03d}"
        answer(
            {
                "before_ns": _mean([steps_ns[n] + calls_ns[n] for n in before]),
                "call_ns": statistics.median(calls_ns[n] for n in before),
                "inside_ns": _mean([steps_ns[n] + calls_ns[n] for n in inside]),
                # The profiler is prepared, started, and stopped, its trace written in calls between steps.
                "blocked_ns": sum(blocked_ns[begin - WARM_UP_STEPS - 1 : end]),
                "background_ns": sum(elsewhere_ns[begin : begin + EVERY_STEPS]),
                "trace_bytes": (folder / "rank00000.pt.trace.json.gz").stat().st_size,
            }
        )


def _differences(values: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(values)]


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


def answer(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    what, work, *rest = sys.argv[1:]
    step = STEPS[work]()
    if what == "turns":
        turns(step, *(rest or [None]))
    else:
        option, run, count = rest
        windows(step, option, run, int(count))


if __name__ == "__main__":
    main()

"""Whether `compare --by operator` finds an injected change: the kernels of one operator take longer in a recording.

python benchmarks/injected_changes.py [--draws 20] [--traces ../shared/traces] draws a public recording, an operator and
a factor, replays the recording with the kernels of the operator that much longer (`perturbation_graph`), and compares
the result with the replay without a change. Printed is at which place of the rows the operator is, and how far the
contributions are from the change of the step.
"""

import argparse
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import tracekit  # noqa: E402
from benchmarks import perturbation_graph  # noqa: E402
from benchmarks.perturbation_events import RUNTIME, Event, Kernel  # noqa: E402
from benchmarks.perturbation_graph import Job, Rank  # noqa: E402
from tracekit.regression import step_change  # noqa: E402

FOLDERS = (
    "hta_ddp_v100_memory",
    "torchrec_v100_4ranks",
    "nanogpt_h100_8ranks",
    "hta_nccl_args_a100",
)
DRAWS = 20
MIN_OPERATOR_RATIO = 0.01
"""An operator is drawn whose kernels take at least this share of all kernels' time."""
MIN_GROWTH_RATIO, MAX_GROWTH_RATIO = 0.01, 0.2
"""The kernels of the operator take longer by so much of all kernels' time."""
_PARAMETERS = "record_param_comms"


@dataclass(frozen=True)
class Draw:
    """One injected change, and what the comparison makes of it."""

    folder: str
    operator: str
    factor: float
    step_change_ratio: float
    place: int
    """Of the operator among the rows, from 1."""
    off_ratio: float
    """How far the sum of contributions is from the change of the step, relative to it."""

    @property
    def is_first(self) -> bool:
        """Whether the operator has the largest change."""
        return self.place == 1


def measure(folder: Path, seed: int, scratch: Path) -> Draw:
    """Draw an operator and a factor, and return what the comparison makes of the change."""
    draw = random.Random(f"{folder.name} {seed}")  # a draw to be repeated, no secret
    job = perturbation_graph.load(folder.glob("*.json.gz"))
    operators = [kernels_by_operator(rank) for rank in job.ranks]
    operator = draw.choice(drawable(operators))
    own_us = sum(kernel.end - kernel.start for kernels in operators for kernel in kernels.get(operator, ()))
    growth = draw.uniform(MIN_GROWTH_RATIO, MAX_GROWTH_RATIO)
    factor = 1 + growth * sum(_taken_us(rank) for rank in job.ranks) / own_us
    before = _replay(job, scratch / "before")
    for kernels in operators:
        for kernel in kernels.get(operator, ()):
            kernel.stretch = factor
    after = _replay(job, scratch / "after")
    a, b = (step_change.RunSteps.of(tracekit.load(path, cache=False)) for path in (before, after))
    changed = step_change.step_change(a, b, allow_different=True)
    step = changed.step
    place = changed.rows["name"].to_list().index(operator) + 1
    off = abs(float(changed.rows["change_ns"].sum()) - step.difference)
    return Draw(folder.name, operator, factor, step.change or 0.0, place, off / max(abs(step.difference), 1.0))


def kernels_by_operator(rank: Rank) -> Mapping[str, list[Kernel]]:
    """Return the compute kernels of a rank by the innermost operator around their launch."""
    of_call = {event["args"]["correlation"]: event for event in rank.calls if "correlation" in event.get("args", {})}
    launches = {
        kernel.event["args"]["correlation"]: kernel
        for kernel in rank.kernels
        if kernel.event["cat"] == "kernel" and kernel.event.get("args", {}).get("correlation") in of_call
    }
    threads: dict[tuple[object, object], list[Event]] = defaultdict(list)
    for event in rank.host_slices:
        threads[event["pid"], event["tid"]].append(event)
    by_operator: dict[str, list[Kernel]] = defaultdict(list)
    for events in threads.values():
        around: list[Event] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            kernel = launches.get(event.get("args", {}).get("correlation"))
            if kernel is not None and event["cat"] in RUNTIME and around and not kernel.is_collective:
                by_operator[str(around[-1]["name"])].append(kernel)
            elif event["cat"] in ("cpu_op", "Operator") and event["name"] != _PARAMETERS:
                around.append(event)
    return by_operator


def drawable(operators: Sequence[Mapping[str, list[Kernel]]]) -> list[str]:
    sums: dict[str, float] = defaultdict(float)
    for kernels in operators:
        for name, operator_kernels in kernels.items():
            sums[name] += sum(kernel.end - kernel.start for kernel in operator_kernels)
    min_us = MIN_OPERATOR_RATIO * sum(sums.values())
    return sorted(name for name, taken_us in sums.items() if taken_us >= min_us and not name.startswith("ProfilerStep"))


def _taken_us(rank: Rank) -> float:
    return sum(kernel.end - kernel.start for kernel in rank.kernels if not kernel.is_collective)


def _replay(job: Job, folder: Path) -> str:
    job.replay()
    folder.mkdir(parents=True)
    for number, document in enumerate(job.documents()):
        perturbation_graph.write(document, folder / f"rank{number:05d}.pt.trace.json.gz")
    return str(folder)


def row(draw: Draw) -> str:
    """Return one draw as a row of the table in docs/lab/compare_accuracy.md."""
    return (
        f"| {draw.folder} | `{draw.operator}` | {draw.factor:.2f} | {100 * draw.step_change_ratio:+.1f}% "
        f"| {draw.place} | {100 * draw.off_ratio:.1g}% |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all draws, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces")
    options = parser.parse_args(arguments)
    draws = []
    print("| recording | operator | factor | step | place | off |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for seed in range(options.draws):
        with tempfile.TemporaryDirectory(prefix="tracekit-injected-") as scratch:
            draws.append(measure(options.traces / FOLDERS[seed % len(FOLDERS)], seed, Path(scratch)))
        print(row(draws[-1]), flush=True)
    print(f"\nfirst in {sum(draw.is_first for draw in draws)} of {len(draws)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

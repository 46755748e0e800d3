"""Record trainings that compile or collect garbage: ``python -m tests.recordings.host_phases.record [CASE…]``.

Their healthy twins, too. Gloo ranks on one CPU machine. Of the Python functions only the collector's calls are left.
"""

import gc
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

HERE = Path(__file__).parent
STEPS, WARM_STEPS = 6, 3
OBJECTS = 100_000
WIDTH = 64


def compiles_in_every_step(step: int, _rank: int) -> int:
    return 64 + 8 * step


def compiles_in_every_third_step(step: int, _rank: int) -> int:
    return 64 + 8 * (step // 3)


def compiles_in_first_steps(step: int, _rank: int) -> int:
    return 64 + 8 * min(step, WARM_STEPS + 2)


def compiles_never(_step: int, _rank: int) -> int:
    return 64


def collects_on_one_rank(step: int, rank: int) -> int:
    if rank == 1 and step % 3 == 1:
        gc.collect()
    return 64


def collects_on_all_ranks(_step: int, _rank: int) -> int:
    gc.collect()
    return 64


def collects_never(_step: int, _rank: int) -> int:
    return 64


CASES: dict[Callable[[int, int], int], int] = {  # with the number of ranks
    compiles_in_every_step: 1,
    compiles_in_every_third_step: 1,
    compiles_in_first_steps: 1,
    compiles_never: 1,
    collects_on_one_rank: 2,
    collects_on_all_ranks: 2,
    collects_never: 2,
}


class Cycle:
    """An object of a reference cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.me = self


def train(rank: int, case: Callable[[int, int], int], ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    collects = case.__name__.startswith("collects")
    model: Callable[..., torch.Tensor]
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)))
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    if collects:
        gc.disable()
        model = nn.parallel.DistributedDataParallel(module)
    else:
        torch._dynamo.config.recompile_limit = 64
        model = torch.compile(module, backend="eager", dynamic=False)
    cycles = [Cycle() for _ in range(OBJECTS if collects else 0)]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def train_step(step: int) -> None:
        rows = case(step, rank)
        model(torch.randn(rows, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(WARM_STEPS - 1):
        train_step(step)
    path = Path(folder) / f"rank{rank:05d}.pt.trace.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        with_stack=collects,
    ) as profiler:
        for step in range(WARM_STEPS - 1, WARM_STEPS + STEPS):
            train_step(step)
            profiler.step()
    assert not cycles or cycles[0].me is cycles[0]
    if ranks > 1:
        dist.destroy_process_group()


def keep(trace: Path, target: Path) -> None:
    """Write a trace without Python functions other than the collector, and without what names the machine."""
    recorded = json.loads(trace.read_text())
    recorded["traceEvents"] = [
        event
        for event in recorded["traceEvents"]
        if event.get("cat") != "python_function" or "collect>" in event["name"]
    ]
    recorded.pop("traceName", None)
    with gzip.GzipFile(target, "wb", mtime=0) as file:
        file.write(json.dumps(recorded, separators=(",", ":")).encode())


def record(case: Callable[[int, int], int], ranks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="host-phases-") as folder:
        torch.multiprocessing.spawn(train, (case, ranks, folder), nprocs=ranks)
        target = HERE / case.__name__
        target.mkdir(exist_ok=True)
        for trace in sorted(Path(folder).glob("*.json")):
            keep(trace, target / f"{trace.name}.gz")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    names = sys.argv[1:]
    for recorded_case, rank_count in CASES.items():
        if not names or recorded_case.__name__ in names:
            record(recorded_case, rank_count)
            print(recorded_case.__name__, flush=True)

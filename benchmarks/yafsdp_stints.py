"""Step times of several strategies in the same processes: short stints of training that take turns, unrecorded."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from instrumented_trainers.launch import share_gpus

_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Setting:
    """What is trained, and where; the rest is as the trainers do it by themselves."""

    device: str
    world_size: int
    model: str
    batch: int
    tokens: int
    precision: str = "fp32"
    share_gpus: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the setting as the trainers' command line takes it."""
        names = ("device", "world_size", "model", "batch", "tokens", "precision")
        values = tuple(word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(self, name))))
        return (*values, *(["--share-gpus"] if self.share_gpus else []))


def run(strategies: Sequence[str], setting: Setting, *, rounds: int, steps: int) -> list[dict[str, float]]:
    """Return by round and strategy the time of a step in ns, the mean over a stint of `steps` on rank 0.

    Which strategy goes first changes from round to round. Raises RuntimeError if a rank failed.
    """
    # As many threads as the trainers give a rank: those that spin on another rank's core cost more than they give.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // setting.world_size)))
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="stints-") as folder:
        store = str(Path(folder) / "rendezvous")
        arguments = (tuple(strategies), setting, rounds, steps)
        ranks = [
            spawn.Process(target=_serve, args=(rank, store, results, *arguments), daemon=True)
            for rank in range(setting.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"ranks ended with {[process.exitcode for process in ranks]}")
    measured: list[dict[str, float]] = results.get()
    return measured


def _serve(
    rank: int,
    store: str,
    results: "multiprocessing.SimpleQueue[list[dict[str, float]]]",
    strategies: tuple[str, ...],
    setting: Setting,
    rounds: int,
    steps: int,
) -> None:
    import torch
    import torch.distributed as dist

    if setting.device == "cuda":
        if setting.share_gpus:
            share_gpus(rank)
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if setting.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=setting.world_size)
    steppers = {name: _stepper(name, setting, rank) for name in strategies}
    for step in steppers.values():
        _stint(step, _WARM_UP_STEPS, setting.device)
    measured = []
    for number in range(rounds):
        order = strategies if number % 2 == 0 else tuple(reversed(strategies))
        measured.append({name: _stint(steppers[name], steps, setting.device) for name in order})
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def _stint(step: Callable[[], None], steps: int, device: str) -> float:
    """Return the mean time of a step in ns, all ranks together."""
    import torch
    import torch.distributed as dist

    def settled_ns() -> int:
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter_ns()

    began_ns = settled_ns()
    for _ in range(steps):
        step()
    return (settled_ns() - began_ns) / steps


def _stepper(strategy: str, setting: Setting, rank: int) -> Callable[[], None]:
    """Function that trains one step under the strategy: forward, backward, clipping, AdamW, as the trainers do."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn import functional

    from instrumented_trainers.model import Llama
    from instrumented_trainers.model_config import PRESETS
    from instrumented_trainers.parallelism import STRATEGIES, ShardOptions, clip_grad_norm, make_optimizer

    torch.manual_seed(0)
    config = PRESETS[setting.model]
    options = ShardOptions(torch.bfloat16, torch.float32) if setting.precision == "bf16" else ShardOptions()
    model = STRATEGIES[strategy](Llama(config), init_device_mesh(setting.device, (setting.world_size,)), options)
    optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
    shape = setting.batch, setting.tokens + 1
    tokens = torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(rank)).to(setting.device)

    def step() -> None:
        logits = model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step

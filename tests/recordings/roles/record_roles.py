"""Record a trainer of two ranks and a rollout worker that cooperate: ``python -m tests.recordings.roles.record_roles``.

The worker generates a batch with the weights of the last step, rank 0 of the trainer fetches it and sends it to rank 1.
"""

import shutil
import tempfile
from multiprocessing import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import record_function

from tracekit.capture import Recorder

WIDTH, BATCH, GENERATED, PASSES, STEPS = 256, 128, 8, 2, 6
FOLDER = Path(__file__).parent
_OPTIONS: dict[str, Any] = {"steps": "2:6", "warmup": 1, "memory": False, "device": "cpu"}


def model() -> torch.nn.Module:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers)


def generate(batches: Queue, weights: Queue, folder: Path) -> None:
    torch.set_num_threads(1)
    policy = model()
    with Recorder(folder / "rollout", role="rollout", **_OPTIONS) as recorder:
        for _ in range(STEPS):
            with record_function("wait for weights"):
                policy.load_state_dict(weights.get())
            with torch.no_grad(), record_function("generate"):
                tokens = torch.randn(4 * BATCH, WIDTH)
                for _ in range(GENERATED):
                    tokens = policy(tokens)
            batches.put(tokens[:BATCH].numpy())
            recorder.step()


def train(rank: int, meeting: str, batches: Queue, weights: Queue, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    policy = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    with Recorder(folder / "trainer", role="trainer", **_OPTIONS) as recorder:
        for _ in range(STEPS):
            batch = torch.zeros(BATCH, WIDTH)
            if rank == 0:
                weights.put({name: value.clone() for name, value in policy.module.state_dict().items()})
                with record_function("wait for rollouts"):
                    batch = torch.from_numpy(batches.get())
            dist.broadcast(batch, 0)
            for _ in range(PASSES):
                policy(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            recorder.step()
    dist.destroy_process_group()


def main(folder: Path = FOLDER) -> None:
    context = mp.get_context("spawn")
    batches, weights, meeting = context.Queue(), context.Queue(), tempfile.mktemp()
    for name in ("trainer", "rollout"):
        shutil.rmtree(folder / name, ignore_errors=True)
    processes = [context.Process(target=generate, args=(batches, weights, folder))]
    processes += [context.Process(target=train, args=(rank, meeting, batches, weights, folder)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for name in ("attempts.jsonl", "rank*.metrics.jsonl"):
        for file in folder.glob(f"*/{name}"):
            file.unlink()


if __name__ == "__main__":
    main()

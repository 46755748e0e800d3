"""One rank of a small training that hangs: ``python cases.py CASE FOLDER TIMEOUT_S [DEVICE]``, as torchrun starts it.

Each case goes three steps and then makes one real fault. The hang watch of tracekit writes the dumps. DEVICE is cpu,
with gloo, or cuda: then ranks share a GPU, and NCCL ends collectives after three times TIMEOUT_S and writes dumps too.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset

from instrumented_trainers.launch import share_gpus
from tracekit.capture.hangs import start

STEPS, WIDTH = 3, 8
DEVICE = sys.argv[4] if len(sys.argv) > 4 else "cpu"


def ones(size: int = WIDTH) -> torch.Tensor:
    return torch.ones(size, device=DEVICE)


def wait_for_device() -> None:
    """Wait as a loop does that reads its loss: NCCL's collectives return to the host at once."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def gradients(size: int = WIDTH) -> None:
    dist.all_reduce(ones(size))
    wait_for_device()


def statistics() -> None:
    dist.all_gather([ones(2) for _ in range(dist.get_world_size())], ones(2))
    wait_for_device()


def step() -> None:
    gradients()
    statistics()


def skipped_collective(rank: int) -> None:
    if rank != 2:
        gradients()
    statistics()


def opposite_groups(rank: int) -> None:
    """Rank 3 calls the collectives of two groups in the other order."""
    first, second = dist.new_group(group_desc="data"), dist.new_group(group_desc="tensor")
    for group in (second, first) if rank == 3 else (first, second):
        dist.all_reduce(ones(), group=group)
        wait_for_device()


def opposite_pairs(rank: int) -> None:
    """Two ranks wait in one group, two in the other: nobody is in the minority."""
    first, second = dist.new_group(group_desc="data"), dist.new_group(group_desc="tensor")
    for group in (second, first) if rank in (2, 3) else (first, second):
        dist.all_reduce(ones(), group=group)
        wait_for_device()


def opposite_barriers(rank: int) -> None:
    """The same in calls that block the host and that no flight recorder has, as NCCL's first call of a group does."""
    first, second = dist.new_group(group_desc="data"), dist.new_group(group_desc="tensor")
    for group in (second, first) if rank == 3 else (first, second):
        dist.monitored_barrier(group)


def different_sizes(rank: int) -> None:
    gradients(2 * WIDTH if rank == 1 else WIDTH)


def endless_loop(rank: int) -> None:
    if rank == 2:
        line_search()
    gradients()


def line_search() -> None:
    loss = 1.0
    while loss > 0:
        loss = loss * 0.5 + 0.5


def killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gradients()


class Stuck(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if dist.is_initialized() is False and index == 4:  # in a worker process
            threading.Event().wait()
        return torch.ones(WIDTH)


def data_loader(rank: int) -> None:
    batches = DataLoader(
        Stuck(), batch_size=4, num_workers=1 if rank == 3 else 0, multiprocessing_context="spawn" if rank == 3 else None
    )
    for batch in batches:
        dist.all_reduce(batch.sum().to(DEVICE))
        wait_for_device()


def dead_disk(rank: int) -> None:
    """Rank 0 saves to a file system that does not answer: here a FIFO that nobody reads."""
    if rank == 0:
        path = Path(sys.argv[2], "checkpoint.pt")
        os.mkfifo(path)
        with path.open("wb") as file:
            torch.save(torch.ones(WIDTH), file)
    gradients()


def uneven_steps(rank: int) -> None:
    if rank == 1:
        sys.exit(0)
    gradients()


def exception(rank: int) -> None:
    if rank == 2:
        raise ValueError("the batch has no label")
    gradients()


def lost_message(rank: int) -> None:
    """Rank 1 waits for activations that rank 0 sends to rank 2."""
    tensor = ones()
    if rank == 0:
        dist.send(tensor, 2)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)
    elif rank == 2:
        dist.recv(tensor, 0)
    wait_for_device()
    gradients()


def asynchronous(rank: int) -> None:
    """All ranks have an unfinished asynchronous call; rank 2 is in its own loop, not in the call."""
    work = None if rank == 1 else dist.all_reduce(ones(), async_op=True)
    if rank == 1:
        sleeping()
    if rank == 2:
        line_search()
    if work is not None:
        work.wait()
    wait_for_device()


def sleeping() -> None:
    time.sleep(1e6)


def running(rank: int) -> None:
    """No hang: the dumps are of a training that goes on."""
    for number in range(1000):
        step()
        if number == 10:
            WATCHES[0].write("request")


WATCHES = []
CASES = (skipped_collective, opposite_groups, different_sizes, endless_loop, killed, data_loader, dead_disk,
         opposite_pairs, opposite_barriers, uneven_steps, exception, lost_message, asynchronous, running)  # fmt: skip


def main() -> None:
    case, folder, timeout_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend, limit_s = "gloo", 1800.0
    if DEVICE == "cuda":
        share_gpus(rank)
        torch.cuda.set_device(rank % torch.cuda.device_count())
        os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = f"{folder}/nccl_trace_rank_"
        backend, limit_s = "nccl", 3 * timeout_s
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=limit_s)
    )
    WATCHES.append(start(folder, timeout_s))
    for _ in range(STEPS):
        step()
    next(each for each in CASES if each.__name__ == case)(rank)


if __name__ == "__main__":
    main()

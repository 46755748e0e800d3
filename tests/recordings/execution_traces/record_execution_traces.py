"""Record the traces of this folder: ``python -m tests.recordings.execution_traces.record_execution_traces``.

Two gloo ranks train a small model with DDP, once with record_shapes and once without, under torch.profiler with an
ExecutionTraceObserver. The name of the machine and the paths of the recording are replaced.
"""

import gzip
import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

HERE = Path(__file__).parent
FOLDERS = {"with_shapes": True, "without_shapes": False}
RANKS = 2


class Block(nn.Module):
    """A convolution, then attention of two heads and a linear layer."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, kernel_size=4, stride=4)
        self.query_key_value = nn.Linear(8, 24)
        self.out = nn.Linear(8, 16)

    def forward(self, x):
        tokens = self.convolution(x).flatten(2).transpose(1, 2)
        parts = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.query_key_value(tokens).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


def train(rank, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    tensor_parallel = dist.new_group([0, 1], group_desc="tp")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Block())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    observer = ExecutionTraceObserver().register_callback(f"{folder}/rank{rank}.et.json")
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=FOLDERS[Path(folder).name],
        schedule=schedule(wait=1, warmup=1, active=2),
        execution_trace_observer=observer,
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(f"{folder}/rank{rank}.pt.trace.json"),
    ) as recorded:
        for _ in range(4):
            model(torch.randn(4, 3, 16, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(torch.ones(10), group=tensor_parallel)
            recorded.step()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    for name in sys.argv[1:] or FOLDERS:
        with tempfile.TemporaryDirectory() as above:
            folder = Path(above, name)
            folder.mkdir()
            torch.multiprocessing.spawn(train, (str(folder), free_port()), nprocs=RANKS)
            target = HERE / name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            for path in folder.iterdir():
                text = path.read_text().replace(str(folder), "/data/run")
                text = re.sub(r'"host_name": "[^"]*"', '"host_name": "host"', text)
                (target / f"{path.name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()

"""One rank of a small training with DDP on the CPU, recorded once as it is and once with each constant trouble.

    python benchmarks/constant_trainings.py RANK PORT SIZE FOLDER [TROUBLE ...]

`benchmarks.constant_troubles` starts two of them. A trouble is a small change that costs time in every step. Each is
recorded right after a healthy twin, in the same processes, so that other load on the machine affects both alike.
"""

import contextlib
import copy
import gc
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tracekit.capture import Recorder

RANKS = 2
HEALTHY = "healthy"
SIZES = {"small": (128, 4, 512), "middle": (256, 4, 512), "large": (384, 4, 512)}
"""Width, blocks and rows of a batch."""
FIRST_PROFILED_STEP, LAST_STEP = 5, 13
_VOCABULARY = 1024
_TEXT = "A training run that is slower than it should be loses a little in every step. " * 40


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Samples(torch.utils.data.Dataset):
    """Batches that are made by one op, or sample by sample in Python, as often decoded as `decode_count` says."""

    def __init__(self, decode_count: int = 0) -> None:
        self._decode_count = decode_count

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, numbers: list[int]) -> torch.Tensor:
        if not self._decode_count:
            return torch.tensor(numbers).mul(7919).remainder(_VOCABULARY)
        return torch.stack([self._decode(number) for number in numbers])

    def _decode(self, number: int) -> torch.Tensor:
        for _ in range(self._decode_count):
            sum(byte * 31 % 257 for byte in _TEXT.encode())
        return torch.tensor(number * 7919 % _VOCABULARY)


def _nothing(*_: Any) -> None:
    pass


@dataclass
class Changes:
    """What a trouble changes in the loop: calls at some places of each step, and the data."""

    rank: int
    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch_rows: int
    dataset: Samples = field(default_factory=Samples)
    prepare_batch: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch
    after_forward: Callable[[torch.Tensor], None] = _nothing
    after_backward: Callable[[], None] = _nothing
    end_step: Callable[[int], None] = _nothing
    compute_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = functional.cross_entropy
    with_step: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


Trouble = Callable[[Changes], Any]
"""Changes the loop; a context manager where something has to be undone after the recording."""


def recompile(changes: Changes) -> None:
    compiled = torch.compile(functional.cross_entropy, backend="aot_eager", dynamic=False)

    def compute_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        torch.compiler.reset()
        return compiled(logits, target)

    changes.compute_loss = compute_loss


def gc_one_rank(changes: Changes) -> None:
    if changes.rank == 1:
        gc_all_ranks(changes)


def gc_all_ranks(changes: Changes) -> None:
    heap = [[number] for number in range(400_000)]

    def collect(_step: int) -> None:
        assert heap
        gc.collect()

    changes.end_step = collect


@contextlib.contextmanager
def threads(_changes: Changes) -> Iterator[None]:
    torch.set_num_threads(16)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@contextlib.contextmanager
def logging_every_step(changes: Changes) -> Iterator[None]:
    with (changes.folder / f"log{changes.rank}.txt").open("w") as log:

        def write(step: int) -> None:
            for name, parameter in changes.model.named_parameters():
                values = parameter.detach().flatten()[:2000].tolist()
                log.write(json.dumps({"step": step, "name": name, "values": values}) + "\n")
            log.flush()

        changes.end_step = write
        yield


def cpu_copies(changes: Changes) -> None:
    def copy_logits(logits: torch.Tensor) -> None:
        for _ in range(16):
            logits.detach().cpu().clone().double().cpu().numpy().copy()

    changes.after_forward = copy_logits


@contextlib.contextmanager
def one_core(_changes: Changes) -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    _pin({min(cores)})
    try:
        yield
    finally:
        _pin(cores)


def _pin(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), cores)


def tiny_all_reduces(changes: Changes) -> None:
    def reduce() -> None:
        for parameter in changes.model.parameters():
            dist.all_reduce(parameter.grad.square().sum())

    changes.after_backward = reduce


def one_all_reduce(changes: Changes) -> None:
    def reduce() -> None:
        dist.all_reduce(torch.stack([parameter.grad.square().sum() for parameter in changes.model.parameters()]))

    changes.after_backward = reduce


def parameter_loop(changes: Changes) -> None:
    averages = [parameter.detach().clone().flatten() for parameter in changes.model.parameters()]

    def average(_step: int) -> None:
        for parameter, mean in zip(changes.model.parameters(), averages, strict=True):
            values = parameter.detach().flatten()
            for part, mean_part in zip(values.split(512), mean.split(512), strict=True):
                mean_part.mul_(0.99).add_(part, alpha=0.01)

    changes.end_step = average


def loader_without_workers(changes: Changes) -> None:
    changes.dataset = Samples(decode_count=4)


def barriers(changes: Changes) -> None:
    def wait(*_: Any) -> None:
        for _ in range(6):
            dist.barrier()

    changes.after_forward, changes.end_step = wait, wait


def checkpoints(changes: Changes) -> None:
    def save(_step: int) -> None:
        state = {"model": changes.model.state_dict(), "optimizer": changes.optimizer.state_dict()}
        torch.save(state, changes.folder / f"checkpoint{changes.rank}.pt")

    changes.end_step = save


@contextlib.contextmanager
def profiler_hooks(changes: Changes) -> Iterator[None]:
    def observe(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        json.dumps([round(value, 3) for value in output.detach().flatten()[:4000].tolist()])

    hooks = [module.register_forward_hook(observe) for module in changes.model.modules()]
    yield
    for hook in hooks:
        hook.remove()


def anomaly_mode(changes: Changes) -> None:
    changes.with_step = partial(torch.autograd.set_detect_anomaly, mode=True)


def copied_logits(changes: Changes) -> None:
    def copy_logits(logits: torch.Tensor) -> None:
        copies = torch.empty(12, *logits.shape)
        for part in copies:
            part.copy_(logits.detach())

    changes.after_forward = copy_logits


@contextlib.contextmanager
def deterministic(changes: Changes) -> Iterator[None]:
    copied_logits(changes)
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


@contextlib.contextmanager
def slow_disk_log(changes: Changes) -> Iterator[None]:
    with (changes.folder / f"slow{changes.rank}.txt").open("w") as log:

        def write(step: int) -> None:
            for part in range(24):
                log.write(f"{step} {part}\n" * 1000)
                log.flush()
                os.fsync(log.fileno())

        changes.end_step = write
        yield


def denormals(changes: Changes) -> None:
    _add_scaled_logits(changes, 1e-41)


def normal_numbers(changes: Changes) -> None:
    _add_scaled_logits(changes, 1e-20)


def _add_scaled_logits(changes: Changes, scale: float) -> None:
    def compute_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        tiny = logits * scale
        for _ in range(12):
            tiny = tiny * 0.5 + tiny * 0.25
        return functional.cross_entropy(logits + tiny, target)

    changes.compute_loss = compute_loss


def tokenize(changes: Changes) -> None:
    def prepare(batch: torch.Tensor) -> torch.Tensor:
        words = [hash(word) % _VOCABULARY for _ in range(60) for word in re.findall(r"\w+|\S", _TEXT)]
        return torch.tensor(words[: len(batch)])

    changes.prepare_batch = prepare


def item_per_parameter(changes: Changes) -> None:
    def norms() -> None:
        for _ in range(30):
            sum(parameter.grad.norm().item() ** 2 for parameter in changes.model.parameters())

    changes.after_backward = norms


def dtype_casts(changes: Changes) -> None:
    def cast() -> None:
        for parameter in changes.model.parameters():
            for _ in range(8):
                parameter.grad = parameter.grad.double().float()

    changes.after_backward = cast


def evaluation(changes: Changes) -> None:
    def evaluate(_step: int) -> None:
        with torch.no_grad():
            for _ in range(2):
                changes.model(torch.arange(changes.batch_rows) % _VOCABULARY)

    changes.end_step = evaluate


def histograms(changes: Changes) -> None:
    def count(_step: int) -> None:
        for parameter in changes.model.parameters():
            torch.histc(parameter.detach(), 64)
            torch.histc(parameter.detach(), 64).tolist()

    changes.end_step = count


def copied_weights(changes: Changes) -> None:
    def copy_state(_step: int) -> None:
        for _ in range(8):
            copy.deepcopy(changes.model.state_dict())

    changes.end_step = copy_state


@contextlib.contextmanager
def background_saves(changes: Changes) -> Iterator[None]:
    saving: list[threading.Thread] = []

    def start(_step: int) -> None:
        for thread in saving:
            thread.join()
        weights = {name: tensor.clone() for name, tensor in changes.model.state_dict().items()}
        saving[:] = [threading.Thread(target=_save, args=(weights, changes.folder / f"background{changes.rank}.pt"))]
        saving[0].start()

    changes.end_step = start
    yield
    for thread in saving:
        thread.join()


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    for _ in range(6):
        torch.save(weights, path)


TROUBLES: dict[str, Trouble] = {
    trouble.__name__: trouble
    for trouble in (
        recompile, gc_one_rank, gc_all_ranks, threads, logging_every_step, cpu_copies, one_core, tiny_all_reduces,
        parameter_loop, loader_without_workers, barriers, checkpoints, profiler_hooks, anomaly_mode, deterministic,
        slow_disk_log, denormals, tokenize, item_per_parameter, dtype_casts, evaluation, histograms,
        copied_weights, background_saves,
    )
}  # fmt: skip

TWINS: dict[str, Trouble] = {
    "tiny_all_reduces": one_all_reduce, "deterministic": copied_logits, "denormals": normal_numbers,
}  # fmt: skip
"""Healthy twins that do the same in another way. The others do nothing of what their trouble does."""


def record(run: Path, size: str, rank: int, trouble: Trouble) -> None:
    """Record one training. Its runs of one size start from the same weights and do the same steps."""
    width, blocks, rows = SIZES[size]
    torch.manual_seed(0)
    model = Model(width, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    changes = Changes(rank, run.parent, model, optimizer, rows)
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    with contextlib.ExitStack() as stack:
        change = trouble(changes)
        if change is not None:
            stack.enter_context(change)
        order = torch.utils.data.SequentialSampler(changes.dataset)
        by_batch = torch.utils.data.BatchSampler(order, rows, drop_last=True)
        batches = iter(torch.utils.data.DataLoader(changes.dataset, batch_size=None, sampler=by_batch))
        dist.barrier()
        steps = f"{FIRST_PROFILED_STEP}:{LAST_STEP}"
        recorder = stack.enter_context(Recorder(run, steps=steps, rank=rank, world_size=RANKS))
        for step in range(LAST_STEP + 1):
            with changes.with_step():
                tokens = changes.prepare_batch(next(batches))
                logits = parallel(tokens)
                changes.after_forward(logits)
                changes.compute_loss(logits, tokens.flip(0)).backward()
                changes.after_backward()
                optimizer.step()
                optimizer.zero_grad()
            changes.end_step(step)
            recorder.step()
    dist.barrier()


def main() -> None:
    rank, port, size, folder, *names = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), RANKS, is_master=rank == "0")
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=RANKS)
    record(Path(folder, "warm-up"), size, int(rank), _nothing)
    for name in names or TROUBLES:
        for kind, trouble in ((HEALTHY, TWINS.get(name, _nothing)), ("trouble", TROUBLES[name])):
            record(Path(folder, name, kind), size, int(rank), trouble)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

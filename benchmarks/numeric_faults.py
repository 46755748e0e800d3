"""Whether a comparison names the step, rank and module of a numeric fault: trainings of two ranks, one with a fault.

    python -m benchmarks.numeric_faults [--out docs/lab/gate_accuracy.md]

Each fault is planted from a drawn step on, in a drawn module, on a drawn rank, into a data-parallel training that
reduces its gradients itself, records itself and logs loss, gradient norm and checksums.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import tracekit
from benchmarks.documents import put_between
from tracekit.capture import Recorder
from tracekit.capture.checksums import ModuleChecksums
from tracekit.regression import numbers
from tracekit.regression.numbers import Agreement

RANKS, STEPS, WIDTH, LAYERS, BATCH, TOKENS, VOCABULARY = 2, 10, 32, 3, 4, 16, 64
_FACTOR = 1.0001
_CLIP = 0.5


@dataclass(frozen=True)
class Place:
    """Where a fault is planted: its first step, its rank, and its module."""

    step: int
    rank: int
    module: str

    @classmethod
    def draw(cls, seed: int) -> "Place":
        """Return the place of a seed."""
        draws = random.Random(seed)
        module = f"blocks.{draws.randrange(LAYERS)}.{draws.choice(('up', 'down'))}"
        return cls(draws.randrange(2, STEPS - 3), draws.randrange(RANKS), module)


@dataclass(frozen=True)
class Fault:
    """A numeric fault: its name, and on which ranks and in which modules the first different number may be."""

    name: str
    title: str
    is_of_rank: bool = True
    is_of_module: bool = True


FAULTS = (
    Fault("none", "nothing (equal seeds)"),
    Fault("gradient", f"one gradient times {_FACTOR} on one rank"),
    Fault("loss_scale", f"the loss times {_FACTOR} before backward", is_of_rank=False, is_of_module=False),
    Fault("reduction", "no all-reduce of one parameter's gradient", is_of_rank=False),
    Fault("dropout", "another dropout seed on one rank", is_of_module=False),
    Fault("bfloat16", "one module in bfloat16", is_of_rank=False),
    Fault("stale_weight", "one module's weights of the step before on one rank"),
    Fault("data_order", "the next batch on one rank", is_of_module=False),
    Fault("weight_decay", "weight decay of one module", is_of_rank=False),
    Fault("clip", "no clipping of gradients", is_of_rank=False, is_of_module=False),
    Fault("skipped_batch", "a batch skipped on one rank", is_of_module=False),
    Fault("learning_rate", f"the learning rate times {_FACTOR}", is_of_rank=False, is_of_module=False),
    Fault("activation", f"one module's output times {_FACTOR} on one rank"),
)


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape, (batch, tokens, WIDTH)."""
        return rows + self.down(self.dropout(torch.relu(self.up(self.norm(rows)))))


class Model(nn.Module):
    """Predicts the next token by the ones so far, averaged: a small model with the modules of large ones."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next token, (batch, tokens, VOCABULARY)."""
        rows = self.embedding(tokens)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


class Training:
    """One rank's training, with a fault from a step on."""

    def __init__(self, fault: str, place: Place, rank: int) -> None:
        """Make the model with equal weights on all ranks."""
        torch.manual_seed(0)
        self.fault, self.place, self.rank = fault, place, rank
        self.model = Model()
        self.module = self.model.get_submodule(place.module)
        self.step = 0
        groups = [{"params": [*module.parameters()], "weight_decay": 0.01} for module in self._groups()]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        weight = next(self.module.parameters())
        weight.register_hook(lambda gradient: gradient * _FACTOR if self.has("gradient", of_rank=True) else None)
        self.module.register_forward_hook(self._change_output)
        self.module.register_forward_pre_hook(self._enter_bfloat16)

    def has(self, fault: str, *, of_rank: bool = False) -> bool:
        """Whether a fault acts in this step, on this rank."""
        is_here = not of_rank or self.rank == self.place.rank
        return self.fault == fault and self.step >= self.place.step and is_here

    def run_step(self) -> dict[str, float]:
        """Train a step and return its loss and gradient norm."""
        torch.manual_seed(1000 + 10 * self.step + self.rank + (5 if self.has("dropout", of_rank=True) else 0))
        stale = [weight.detach().clone() for weight in self.module.parameters()]
        loss = self._loss()
        for name, weight in self.model.named_parameters():
            if self.has("reduction") and name == f"{self.place.module}.weight":
                continue
            dist.all_reduce(weight.grad)
            weight.grad /= RANKS
        limit = float("inf") if self.has("clip") else _CLIP
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for group in self.optimizer.param_groups:
            if self.has("learning_rate"):
                group["lr"] = 1e-2 * _FACTOR
            if self.has("weight_decay") and any(weight is group["params"][0] for weight in self.module.parameters()):
                group["weight_decay"] = 0.05
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.fault == "stale_weight" and (self.step + 1, self.rank) == (self.place.step, self.place.rank):
            with torch.no_grad():
                for weight, old in zip(self.module.parameters(), stale, strict=True):
                    weight.copy_(old)
        return {"loss": loss, "grad_norm": float(norm)}

    def _loss(self) -> float:
        """Loss of the step's batch, whose gradients are computed; of a skipped batch, gradients are zero."""
        if self.has("skipped_batch", of_rank=True) and self.step == self.place.step:
            for weight in self.model.parameters():
                weight.grad = torch.zeros_like(weight)
            return 0.0
        ahead = 1 if self.has("data_order", of_rank=True) and self.step == self.place.step else 0
        draws = torch.Generator().manual_seed(100 * (self.step + ahead) + self.rank)
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=draws)
        scores = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        (loss * (_FACTOR if self.has("loss_scale") else 1.0)).backward()
        return float(loss.detach())

    def _groups(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if next(module.parameters(recurse=False), None) is not None]

    def _change_output(self, _module: nn.Module, _rows: object, output: torch.Tensor) -> torch.Tensor:
        if self.has("bfloat16"):
            return output.bfloat16().float()
        return output * _FACTOR if self.has("activation", of_rank=True) else output

    def _enter_bfloat16(self, _module: nn.Module, rows: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (rows[0].bfloat16().float(),) if self.has("bfloat16") else rows


def train(rank: int, fault: str, place: Place, folder: str, meeting: str, slow_s: float) -> None:
    """Train on one rank and record it; `slow_s` are added to each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    training = Training(fault, place, rank)
    checksums = ModuleChecksums(training.model)
    with Recorder(folder, steps=(1, STEPS - 2), warmup=0, device="cpu") as recorder:
        for step in range(STEPS):
            training.step = step
            values = training.run_step()
            with torch.profiler.record_function("slow") if slow_s else nullcontext():
                time.sleep(slow_s)
            recorder.step({**values, **checksums.of_step()}, last=step == STEPS - 1)
    dist.destroy_process_group()


def record(fault: str, place: Place, folder: Path, *, slow_s: float = 0.0) -> None:
    """Record a training of all ranks."""
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(train, (fault, place, str(folder), f"{meeting}/file", slow_s), nprocs=RANKS)


@dataclass(frozen=True)
class Outcome:
    """What a comparison says of a training with a fault."""

    fault: Fault
    place: Place
    agreement: Agreement

    @property
    def has_step(self) -> bool:
        """Whether the first step that differs is that of the fault; for no fault, whether none differs."""
        first = self.agreement.first
        if self.fault.name == "none":
            return first is None
        return first is not None and first.step == self.place.step

    @property
    def has_rank(self) -> bool:
        """Whether the ranks that differ first are those of the fault."""
        ranks = (self.place.rank,) if self.fault.is_of_rank else tuple(range(RANKS))
        first = self.agreement.first
        return self.fault.name == "none" or (first is not None and first.ranks == ranks)

    @property
    def has_module(self) -> bool:
        """Whether the module that differs first is that of the fault; true where the fault is of no one module."""
        first = self.agreement.first
        return (
            self.fault.name == "none"
            or not self.fault.is_of_module
            or (first is not None and first.metric.partition("/")[2] == self.place.module)
        )


def outcomes(seeds: Sequence[int], folder: Path) -> list[Outcome]:
    """Record a training without a fault, and one with each, and compare them."""
    record("none", Place.draw(0), folder / "reference")
    reference = numbers.run_numbers(tracekit.load(str(folder / "reference"), cache=False))
    results = []
    for seed in seeds:
        for fault in FAULTS:
            place, path = Place.draw(seed), folder / f"{fault.name}-{seed}"
            record(fault.name, place, path)
            agreement = numbers.agreement(reference, numbers.run_numbers(tracekit.load(str(path), cache=False)))
            assert agreement is not None
            results.append(Outcome(fault, place, agreement))
            sys.stderr.write(f"{fault.name} {place}: {agreement.first}\n")
    return results


def table(results: Sequence[Outcome]) -> str:
    """Row of each fault: how often its step, its ranks and its module were named."""
    lines = ["| what differs | trainings | step named | rank named | module named |", "|---|---:|---:|---:|---:|"]
    by_fault: Mapping[str, list[Outcome]] = {
        fault.name: [result for result in results if result.fault is fault] for fault in FAULTS
    }
    questions: tuple[Callable[[Outcome], bool], ...] = (
        lambda result: result.has_step,
        lambda result: result.has_rank,
        lambda result: result.has_module,
    )
    for fault in FAULTS:
        of_fault = by_fault[fault.name]
        counts = [sum(question(result) for result in of_fault) for question in questions]
        is_asked = (True, fault.name != "none", fault.is_of_module and fault.name != "none")
        cells = (str(count) if asked else "" for count, asked in zip(counts, is_asked, strict=True))
        lines.append(f"| {fault.title} | {len(of_fault)} | {' | '.join(cells)} |")
    return "\n".join((*lines, ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, compare, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numeric_faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="replace the table in FILE instead of printing it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results = outcomes(range(options.first_seed, options.first_seed + options.seeds), Path(folder))
    if options.out is None:
        sys.stdout.write(table(results))
    else:
        put_between(options.out, "benchmarks.numeric_faults", table(results).splitlines())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

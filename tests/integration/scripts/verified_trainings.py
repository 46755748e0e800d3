"""Trainings as users write them for `tracekit verify-training`: right ones, and ones with one fault each."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, VOCABULARY = 8, 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self, last=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = last
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.last is None else self.last(x))


def batches(count=3):
    return [{"tokens": torch.randint(VOCABULARY, (4, 6)), "shift": 1} for _ in range(count)]


def loss(model, batch, reduction="mean"):
    tokens, shift = batch["tokens"], batch["shift"]
    logits = model(tokens[:, :-shift])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, shift:].flatten(), reduction=reduction)


def right():
    return Model(nn.Dropout(0.3)), loss, batches()


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def tied_and_frozen():
    model = Model()
    model.head.weight = model.embedding.weight
    model.layers[0].requires_grad_(False)
    model.register_buffer("positions", torch.arange(5.0))
    return {"model": model, "loss": loss, "batches": batches(), "optimizer": adamw}


def tied_over_units():
    return {**tied_and_frozen(), "units": ["embedding", "head"]}


def untied_by_sharding():
    return {**tied_and_frozen(), "shard": ddp_that_unties}


def ddp_that_unties(model, strategy):
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())  # as weights that are made anew
    return DistributedDataParallel(model)


def summed_loss():
    return Model(), lambda model, batch: loss(model, batch, "sum"), batches()


def summed_gradients():
    return {"model": Model(), "loss": loss, "batches": batches(), "shard": ddp_that_sums}


def ddp_that_sums(model, strategy):
    assert strategy == "ddp"
    model = DistributedDataParallel(model)
    model.register_comm_hook(None, all_reduce_without_division)
    return model


def all_reduce_without_division(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda future: future.value()[0])


class RunningMean(nn.Module):
    """Subtracts a running mean of its inputs, which nobody averages over ranks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = x - self.mean
        if self.training and torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return y


def unsynchronized_buffer():
    return Model(RunningMean()), loss, batches()


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def batch_norm():
    return Model(BatchNorm()), loss, batches()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.factor


def scalar_parameter():
    return Model(Scale()), loss, batches()


class Lamb(torch.optim.Optimizer):
    """A step of the length of the weights, so of whole tensors."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm().clamp(min=1e-9)))


def whole_tensors():
    return {"model": Model(), "loss": loss, "batches": batches(), "optimizer": lambda model: Lamb(model.parameters())}


def other_weights_on_rank_1():
    torch.manual_seed(dist.get_rank())
    return Model(), loss, batches()


class OnlyFp32(nn.Module):
    def forward(self, x):
        return x @ torch.eye(WIDTH, dtype=torch.float32)


def only_in_fp32():
    return Model(OnlyFp32()), loss, batches()


def random_loss():
    return Model(), lambda model, batch: loss(model, batch) * torch.rand(()), batches()


def infinite_loss():
    return Model(), lambda model, batch: loss(model, batch) / 0, batches()


def odd_batches():
    return Model(), loss, [{"tokens": torch.randint(VOCABULARY, (3, 6)), "shift": 1}]


def no_training():
    return [1, 2]


def raises():
    raise KeyError("corpus")


def sleeps():
    time.sleep(3600)


def exits_on_rank_1():
    if dist.get_world_size() > 1 and dist.get_rank() == 1:
        os._exit(7)
    return right()


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

"""Train the trainers' own model under each strategy, on every rank of a process group. Not a test."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from instrumented_trainers import parallelism
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import ModelConfig
from instrumented_trainers.parallelism import STRATEGIES, ShardOptions

CONFIG = ModelConfig(width=32, layers=3, heads=4, key_value_heads=2, hidden_width=80, vocabulary=61)
SEQUENCES, TOKENS = 2, 12

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: parallelism.make_optimizer(model, torch.optim.SGD, lr=0.3),
    "adamw": lambda model: parallelism.make_optimizer(model, torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
    "fused adamw": lambda model: parallelism.make_optimizer(
        model, torch.optim.AdamW, lr=3e-3, weight_decay=0.1, fused=True
    ),
}


@dataclass(frozen=True)
class Training:
    """One way to train; the same seed gives the same weights and data whatever the strategy."""

    strategy: str
    optimizer: str = "adamw"
    steps: int = 50
    micro_batches: int = 1
    max_norm: float | None = None
    dtype: torch.dtype = torch.float64
    config: ModelConfig = CONFIG
    options: ShardOptions = field(default_factory=ShardOptions)
    alike: bool = False
    """Whether all ranks train on the same tokens, so that the loss doesn't depend on how many there are."""
    device: str = "cpu"
    replicas: int = 1
    """Over how many ranks each shard is replicated."""
    tokens: int = TOKENS


def build(training: Training, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the sharded model and its optimizer."""
    torch.manual_seed(seed)
    ranks = dist.get_world_size()
    shape = (ranks,) if training.replicas == 1 else (training.replicas, ranks // training.replicas)
    mesh = init_device_mesh(training.device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model: nn.Module = Llama(training.config).to(training.device, training.dtype)
    model = STRATEGIES[training.strategy](model, mesh, training.options)
    return model, OPTIMIZERS[training.optimizer](model)


def step(training: Training, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> tuple[float, float]:
    """Train one step; return the mean loss over ranks and the norm of the gradients (0 where they are not clipped)."""
    loss, norm = torch.zeros((), dtype=torch.float64, device=training.device), torch.zeros(())
    for index, tokens in enumerate(_batch(training, number)):
        with parallelism.accumulate(model, index == training.micro_batches - 1):
            logits = model(tokens[:, :-1]).to(torch.float64)
            part = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / training.micro_batches
            part.backward()
        loss += part.detach()
    if training.max_norm is not None:
        norm = parallelism.clip_grad_norm(model, training.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size(), norm.item()


def curve(training: Training) -> list[tuple[float, float]]:
    """Train from the start and return loss and norm of every step."""
    model, optimizer = build(training)
    return [step(training, model, optimizer, number) for number in range(training.steps)]


def save(training: Training, path: str) -> list[float]:
    """Train, save a checkpoint, and return the losses of two more steps."""
    model, optimizer = build(training)
    _run(training, model, optimizer, range(training.steps))
    checkpoint.save(parallelism.checkpoint_state(model, optimizer), checkpoint_id=path)
    return _run(training, model, optimizer, range(training.steps, training.steps + 2))


def save_while_training(training: Training, path: str) -> None:
    """Train, save in the background, and train on at once."""
    model, optimizer = build(training)
    _run(training, model, optimizer, range(training.steps))
    group = dist.new_group()  # the saving thread's collectives must not come between those of the training thread
    saving = checkpoint.async_save(
        parallelism.checkpoint_state(model, optimizer), checkpoint_id=path, process_group=group
    )
    _run(training, model, optimizer, range(training.steps, training.steps + 2))
    saving.result()


def load(training: Training, path: str, *, steps_before: int = 0, save_to: str | None = None) -> list[float]:
    """Load into a model of other weights that has trained some steps, maybe save that, and train two steps on."""
    model, optimizer = build(training, seed=1)
    _run(training, model, optimizer, range(steps_before))
    state = parallelism.checkpoint_state(model, optimizer)
    checkpoint.load(state, checkpoint_id=path)
    parallelism.restore_state(model, optimizer, state)
    if save_to is not None:
        checkpoint.save(parallelism.checkpoint_state(model, optimizer), checkpoint_id=save_to)
    return _run(training, model, optimizer, range(training.steps, training.steps + 2))


def _run(training: Training, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    return [step(training, model, optimizer, number)[0] for number in numbers]


def _batch(training: Training, number: int) -> Tensor:
    """Return this rank's tokens of a step, (micro-batches, B, T + 1). Five batches come again and again."""
    generator = torch.Generator().manual_seed(number % 5)
    shape = dist.get_world_size(), training.micro_batches, SEQUENCES, training.tokens + 1
    tokens = torch.randint(training.config.vocabulary, shape, generator=generator)
    return tokens[0 if training.alike else dist.get_rank()].to(training.device)

"""Small models that use a sharded unit in unusual ways, trained under YaFSDP and by one process. Not a test.

Each case gives the largest relative difference from one process, or raises what the engine says.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import stage
from torch.nn.utils import get_total_norm as imported_by_name

from instrumented_trainers.parallelism.yafsdp import (
    MixedPrecisionPolicy,
    YaFSDPModule,
    fully_shard,
    register_forward_method,
)
from instrumented_trainers.parallelism.yafsdp.module import units_in
from tests.integration import references
from tests.integration.parity import pairs, relative

WIDTH, DEPTH = 8, 4


class Layer(nn.Module):
    """A linear layer, a norm and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(self.norm(x))) * self.scale


class Model(nn.Module):
    """Layers one after the other, between a linear layer and another. Called with (B, WIDTH)."""

    def __init__(self, layer: type[nn.Module] = Layer, depth: int = DEPTH) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Attack:
    """One way to use a model. `loss` gets the model, the batch and the rank whose batch it is."""

    build: Callable[[], nn.Module] = Model
    loss: Callable[[Any, Tensor, int], Tensor] = lambda model, x, rank: model(x).square().mean()
    micro_batches: int = 1
    sync_last_only: bool = True
    step: "Callable[[Any, torch.optim.Optimizer], None]" = lambda model, optimizer: optimizer.step()
    shard: Callable[[nn.Module], nn.Module] = field(default=lambda model: shard_layers(model))
    steps: int = 3


def shard_layers(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each layer, then the model."""
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def difference(attack: Attack) -> float:
    """Train both in fp64 and return the largest relative difference of losses, gradients and weights."""
    torch.manual_seed(0)
    sharded = attack.shard(attack.build().double())
    torch.manual_seed(0)
    reference = attack.build().double()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (sharded, reference)]
    ranks = range(dist.get_world_size())
    largest = 0.0
    for step in range(attack.steps):
        loss = _train(attack, sharded, [dist.get_rank()], step)
        dist.all_reduce(loss)
        train = functools.partial(_train, attack, reference, ranks, step)
        expected = references.follow_first_rank(reference, train)
        largest = max(largest, relative(loss, expected), _largest(sharded, reference, gradients=True))
        attack.step(sharded, optimizers[0])
        optimizers[0].zero_grad()
        references.follow_first_rank(reference, functools.partial(_step, attack, reference, optimizers[1]))
        largest = max(largest, _largest(sharded, reference, gradients=False))
    return largest


def _step(attack: Attack, reference: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    attack.step(reference, optimizer)
    optimizer.zero_grad()


def _train(attack: Attack, model: nn.Module, ranks: Any, step: int) -> Tensor:
    """Run forward and backward on the batches of `ranks`; return their share of the mean loss over all ranks."""
    total, world_size = torch.zeros((), dtype=torch.float64), dist.get_world_size()
    is_sharded = isinstance(model, YaFSDPModule)
    for micro_batch in range(attack.micro_batches):
        if is_sharded and attack.sync_last_only:
            model.set_requires_gradient_sync(micro_batch == attack.micro_batches - 1)
        for rank in ranks:
            loss = attack.loss(model, batch(step, micro_batch, rank), rank) / attack.micro_batches
            (loss if is_sharded else loss / world_size).backward()
            total += loss.detach() / world_size
    return total


def batch(step: int, micro_batch: int, rank: int) -> Tensor:
    """Return the data of one rank's micro-batch: (3, WIDTH), fp64."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def _largest(sharded: nn.Module, reference: nn.Module, *, gradients: bool) -> float:
    largest = 0.0
    for shard, parameter, elements in pairs(sharded, reference):
        own, expected = (shard.grad, parameter.grad) if gradients else (shard.detach(), parameter.detach())
        own = own.to_local() if own is not None else None
        expected = expected.to_dense() if expected is not None and expected.is_sparse else expected
        assert (own is None) == (expected is None), "a gradient on one side only"
        if own is not None and expected is not None and own.numel():
            largest = max(largest, relative(own, expected.flatten()[elements], scale=expected))
    return largest


def outcome(name: str) -> float | str:
    """Return the difference of an attack, or the error's class and words."""
    return _outcome(SPECIAL[name]) if name in SPECIAL else outcome_of(ATTACKS[name])


def outcome_of(attack: Attack) -> float | str:
    """Return the difference of an attack, or the error's class and words."""
    return _outcome(functools.partial(difference, attack))


def _outcome(train: Callable[[], float]) -> float | str:
    try:
        return train()
    except AssertionError:
        raise
    except Exception as error:  # noqa: BLE001 -- the error is the result
        return f"{type(error).__name__}: {error}"


# a. Backward of a unit whose weights are not there -------------------------------------------------------------------


class StoresLoss(Layer):
    """Stores an auxiliary loss as an attribute, as MoE routers do."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.auxiliary = self.linear(x).square().mean()
        return y


def stored_losses(model: Any, x: Tensor, _: int) -> Tensor:
    return model(x).square().mean() + sum(layer.auxiliary for layer in model.layers)


def only_first_stored_loss(model: Any, x: Tensor, _: int) -> Tensor:
    model(x)
    return model.layers[0].auxiliary


class Box:
    """An object that pytree does not know."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class ReturnsObject(Layer):
    """Returns its output in an object of its own kind."""

    def forward(self, x: Any) -> Box:
        return Box(super().forward(x.value if isinstance(x, Box) else x))


class Unboxes(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.value)


def captured_activation(model: Any, x: Tensor, _: int) -> Tensor:
    stored: list[Tensor] = []
    handle = model.layers[1].linear.register_forward_hook(lambda _m, _a, output: stored.append(output))
    out = model(x)
    handle.remove()
    return stored[0].square().mean() + 0 * out.sum()


def captured_activation_alone(model: Any, x: Tensor, _: int) -> Tensor:
    stored: list[Tensor] = []
    handle = model.layers[1].linear.register_forward_hook(lambda _m, _a, output: stored.append(output))
    model(x)
    handle.remove()
    return stored[0].square().mean()


# b. A unit that returns its parameter or a view of it ---------------------------------------------------------------


class ReturnsParameter(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.scale


class ReturnsView(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.linear.weight.t()[0]


class ReturnsBoxedParameter(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Box]:
        return super().forward(x), Box(self.scale)


class StoresParameter(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["stored"] = self.scale
        return super().forward(x)


class SumsExtras(Model):
    def forward(self, x: Tensor) -> Tensor:
        x, extras = self.inlet(x), []
        for layer in self.layers:
            x, extra = layer(x)
            extras.append(extra.value if isinstance(extra, Box) else extra)
        return self.head(x) + sum(extras)


class SumsStored(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + sum(layer.stored for layer in self.layers)


# c. A loss over the parameters ---------------------------------------------------------------------------------------


def l2(model: Any, x: Tensor, _: int) -> Tensor:
    """A rank's parameters are its shards: it adds the gradient of the penalty to these, and has no value of it all."""
    penalty = 0.01 * sum(p.square().sum() for p in model.parameters())
    return model(x).square().mean() + penalty - penalty.detach()


# d, e. Functions that compute over all gradients ---------------------------------------------------------------------


def clip_by_torch(norm_type: float, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    optimizer.step()


def clip_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip by a function imported by name before anything was sharded; one gradient is set anew."""
    head = model.head.weight
    head.grad = head.grad.clone()
    norm = imported_by_name([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
    optimizer.step()


class Overflows(Model):
    """One element of one gradient is infinite where a batch is large."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.where(x.abs().max() > LARGE, torch.inf, 1.0)
        return super().forward(x) + self.head.bias[3] * factor


LARGE = 100.0


def difference_with_gradient_scaler() -> float:
    """Train both with a gradient scaler; in step 1 a gradient of the last rank overflows."""
    models = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        models.append(shard_layers(Overflows()) if is_sharded else Overflows())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in models]
    world_size, largest = dist.get_world_size(), 0.0
    for step in range(3):
        for model, scaler, optimizer in zip(models, scalers, optimizers, strict=True):
            ranks = [dist.get_rank()] if isinstance(model, YaFSDPModule) else range(world_size)
            for rank in ranks:
                x = batch(step, 0, rank).float()
                x[0, 0] += 2 * LARGE * (step == 1 and rank == world_size - 1)
                loss = model(x).tanh().square().mean() if step != 1 else model(x).sum()
                scaler.scale(loss / len(ranks)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        largest = max(largest, _largest(*models, gradients=False), abs(scalers[0].get_scale() - scalers[1].get_scale()))
    return largest


# h. Hooks on parameters ----------------------------------------------------------------------------------------------


def hook_before() -> nn.Module:
    model = Model()
    model.layers[1].linear.weight.register_hook(lambda gradient: gradient * 0)
    return model


def hook_after(model: nn.Module) -> nn.Module:
    sharded = shard_layers(model)
    sharded.layers[1].linear.weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[union-attr, index]
    return sharded


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def post_accumulate_after(model: nn.Module) -> nn.Module:
    sharded = shard_layers(model)
    for parameter in sharded.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return sharded


def post_accumulate_before() -> nn.Module:
    model = Model()
    model.layers[1].linear.weight.register_post_accumulate_grad_hook(halve)
    return model


def step_in_backward() -> float:
    """Step each parameter in a hook of its own as its gradient is done, under YaFSDP and on one process."""
    models = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        models.append(shard_layers(Model().double()) if is_sharded else Model().double())
    for parameter in models[0].parameters():
        parameter.register_post_accumulate_grad_hook(step_alone)
    for step in range(3):
        models[0](batch(step, 0, dist.get_rank())).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (models[1](batch(step, 0, rank)).square().mean() / dist.get_world_size()).backward()
        with torch.no_grad():
            for parameter in models[1].parameters():
                step_alone(parameter)
    return _largest(*models, gradients=False)


@torch.no_grad()
def step_alone(parameter: nn.Parameter) -> None:
    parameter -= 0.05 * parameter.grad
    parameter.grad = None


# i. Ranks that differ, and passes out of order -----------------------------------------------------------------------


class Expert(Layer):
    """Has an expert that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, use: bool = False) -> Tensor:
        x = super().forward(x)
        return x + self.expert(x) if use else x


class Reuses(Model):
    """The first layer runs three times, the others in between; its expert is used once, by rank 0."""

    def forward(self, x: Tensor) -> Tensor:
        on_rank_0 = bool(self.rank == 0)
        x = self.layers[0](self.inlet(x))
        for layer in self.layers[1:]:
            x = layer(self.layers[0](x, use=on_rank_0 and layer is self.layers[2]))
        return self.head(x)


class RoutesWithin(Model):
    """Layers whose output has a gradient on all ranks, but not their weights on rank 0."""

    def __init__(self) -> None:
        super().__init__(OnlyElsewhere)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x, use=self.rank != 0)
        return self.head(x)


class OnlyElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, use: bool) -> Tensor:
        return x + self.linear(x) if use else x * 1.5


class OtherOrder(Model):
    """The layers run in another order on the last rank."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        layers = list(self.layers)
        for layer in layers[::-1] if self.rank == dist.get_world_size() - 1 else layers:
            x = layer(x)
        return self.head(x)


def of_rank(model: Any, x: Tensor, rank: int) -> Tensor:
    model.rank = rank
    return model(x).square().mean()


def backward_around_a_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    loss = model(batch(0, 0, 0)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def cleared_between_micro_batches() -> float:
    """Clear gradients between a micro-batch without gradient sync and one with it: only the second counts."""
    torch.manual_seed(0)
    sharded = shard_layers(Model().double())
    torch.manual_seed(0)
    reference = Model().double()
    optimizer = torch.optim.SGD(sharded.parameters())
    for micro_batch in range(2):
        sharded.set_requires_gradient_sync(micro_batch == 1)  # type: ignore[operator]
        optimizer.zero_grad()
        sharded(batch(0, micro_batch, dist.get_rank())).square().mean().backward()
    for rank in range(dist.get_world_size()):
        (reference(batch(0, 1, rank)).square().mean() / dist.get_world_size()).backward()
    return _largest(sharded, reference, gradients=True)


def step_on_one_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, YaFSDPModule) or dist.get_rank() == 0:
        optimizer.step()


# j. Parameters of every kind -----------------------------------------------------------------------------------------


class WithEmpty(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scalar + self.nothing.sum()


def lora() -> nn.Module:
    model = Model()
    for layer in model.layers:
        layer.requires_grad_(False)
    model.layers[1].scale.requires_grad_(True)
    return model


class SparseEmbedding(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Embedding(16, WIDTH, sparse=True)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.abs() * 5).long().clamp(max=15)[:, 0])


def unfreeze_later(model: Any, x: Tensor, _: int) -> Tensor:
    passes = 1 if isinstance(model, YaFSDPModule) else dist.get_world_size()
    model.layers[2].requires_grad_(getattr(model, "seen", 0) // passes > 0)
    model.seen = getattr(model, "seen", 0) + 1
    return model(x).square().mean()


class OtherMethod(Layer):
    def encode(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x))


def encode_first(model: Any, x: Tensor, _: int) -> Tensor:
    """Call the first layer's other method within the model's forward, besides its forward."""
    handle = model.inlet.register_forward_hook(lambda _m, _a, output: model.layers[0].encode(output))
    loss: Tensor = model(x).square().mean()
    handle.remove()
    return loss


def shard_with_method(model: Any) -> nn.Module:
    sharded = shard_layers(model)
    register_forward_method(model.layers[0], "encode")
    return sharded


ATTACKS: dict[str, Attack] = {
    "a method other than forward": Attack(functools.partial(Model, OtherMethod), encode_first, shard=shard_with_method),
    "a method other than forward, not registered": Attack(functools.partial(Model, OtherMethod), encode_first),
    "a loss stored as an attribute": Attack(functools.partial(Model, StoresLoss), stored_losses),
    "only the loss stored by the first layer": Attack(functools.partial(Model, StoresLoss), only_first_stored_loss),
    "outputs in an object": Attack(functools.partial(Unboxes, ReturnsObject)),
    "a captured activation": Attack(Model, captured_activation),
    "a captured activation alone": Attack(Model, captured_activation_alone),
    "a parameter returned": Attack(functools.partial(SumsExtras, ReturnsParameter)),
    "a view of a parameter returned": Attack(functools.partial(SumsExtras, ReturnsView)),
    "a parameter returned in an object": Attack(functools.partial(SumsExtras, ReturnsBoxedParameter)),
    "a parameter stored as an attribute": Attack(functools.partial(SumsStored, StoresParameter)),
    "weight decay in the loss": Attack(Model, l2),
    "weight decay in the loss, micro-batches": Attack(Model, l2, micro_batches=3),
    "weight decay in the loss, micro-batches all synced": Attack(Model, l2, micro_batches=3, sync_last_only=False),
    "clip_grad_norm_ of torch": Attack(step=functools.partial(clip_by_torch, 2.0)),
    "clip_grad_norm_ of torch, largest": Attack(step=functools.partial(clip_by_torch, torch.inf)),
    "clip_grad_norm_ of torch, sum": Attack(step=functools.partial(clip_by_torch, 1.0)),
    "get_total_norm imported before": Attack(step=clip_by_name),
    "a gradient hook before sharding": Attack(hook_before),
    "a gradient hook after sharding": Attack(shard=hook_after),
    "a post-accumulate hook before sharding": Attack(post_accumulate_before),
    "a reused layer with a parameter of one rank": Attack(functools.partial(Reuses, Expert), of_rank),
    "layers whose weights one rank does not use": Attack(RoutesWithin, of_rank),
    "another order on one rank": Attack(OtherOrder, of_rank),
    "backward before and after a step": Attack(step=backward_around_a_step),
    "a step on one rank only": Attack(step=step_on_one_rank),
    "an empty parameter and a scalar": Attack(functools.partial(Model, WithEmpty)),
    "frozen weights": Attack(lora),
    "weights unfrozen later": Attack(loss=unfreeze_later),
    "a sparse embedding": Attack(SparseEmbedding),
    "reshard_after_forward=None": Attack(shard=functools.partial(shard_layers, reshard_after_forward=None)),
    "plain": Attack(),
    "plain, micro-batches": Attack(micro_batches=3),
}


def fp16_sums() -> float:
    """Gradients of which each fits fp16, as their mean does, but not their sum."""
    model = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    model(torch.full((1, WIDTH), 40_000.0)).sum().backward()
    return float((model.weight.grad - 40_000).abs().max())  # type: ignore[operator, union-attr]


def sums_of_many_micro_batches() -> float:
    """Gradients of bf16 weights that are reduced in fp32 add up there; return the difference of the rounded sum."""
    torch.manual_seed(0)
    whole = nn.Linear(WIDTH, WIDTH).bfloat16()
    reference = nn.Linear(WIDTH, WIDTH).bfloat16()
    reference.load_state_dict(whole.state_dict())
    model = fully_shard(whole, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    ranks, expected = range(dist.get_world_size()), torch.zeros(WIDTH, WIDTH)
    for micro_batch in range(16):
        model(batch(0, micro_batch, dist.get_rank()).bfloat16()).square().mean().backward()
        total = torch.zeros(WIDTH, WIDTH)
        for rank in ranks:
            reference.zero_grad()
            reference(batch(0, micro_batch, rank).bfloat16()).square().mean().backward()
            total += reference.weight.grad.float()  # type: ignore[union-attr]
        expected += total / len(ranks)
    gradient: Any = model.weight.grad
    return relative(gradient.full_tensor().float(), expected.bfloat16().float())


def reductions_of_frozen_layers() -> float:
    """Return how many collectives and gradient shards there are for layers without a trainable parameter."""
    model: Any = Model()
    for layer in model.layers:
        layer.requires_grad_(False)
    model = shard_layers(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
        model(batch(0, 0, 0).float()).sum().backward()
    names = [event.name for event in recording.events()]
    assert any(name == "YaFSDP::post_backward_reduce" for name in names)  # the root's
    shards = [flat.gradient for unit in units_in(model) if unit.name for flat in unit.flats]
    return 1.0 * sum("post_backward_reduce (layers" in name for name in names) + sum(s is not None for s in shards)


def zero_bubble() -> float:
    """Go backward as a zero-bubble schedule of torch does: to the inputs first, to the weights later."""
    model = shard_layers(Model().double())
    x = batch(0, 0, dist.get_rank()).requires_grad_()
    out = model(x)
    _, groups = stage.stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
    stage.stage_backward_weight(model.parameters(), groups)
    return float(all(parameter.grad is not None for parameter in model.parameters()))


def gradient_of_inputs_alone() -> float:
    """Ask autograd for the gradient of the inputs, as a gradient penalty does: the weights get none."""
    torch.manual_seed(0)
    sharded = shard_layers(Model().double())
    torch.manual_seed(0)
    reference = Model().double()
    x = batch(0, 0, dist.get_rank()).requires_grad_()
    found, expected = (torch.autograd.grad(model(x).square().sum(), x)[0] for model in (sharded, reference))
    assert all(parameter.grad is None for parameter in sharded.parameters())
    return relative(found, expected)


SPECIAL: dict[str, Callable[[], float]] = {
    "a gradient scaler": difference_with_gradient_scaler,
    "a step in backward": step_in_backward,
    "a zero-bubble schedule": zero_bubble,
    "gradients of inputs alone": gradient_of_inputs_alone,
    "fp16 sums": fp16_sums,
    "bf16 weights over many micro-batches": sums_of_many_micro_batches,
    "frozen layers are not reduced": reductions_of_frozen_layers,
    "gradients cleared between micro-batches": cleared_between_micro_batches,
}

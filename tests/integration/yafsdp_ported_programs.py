"""Things that a program does when it is ported to the engine, off the plain path, in training loops. Not a test.

Each program trains a sharded model on this rank's data and a plain one on all data; what it returns and the weights are
compared. Those in `REFUSED` cannot be right on a part of a weight: all ranks raise, with the reason.
"""

import contextlib
import copy
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW

from instrumented_trainers.parallelism.yafsdp import fully_shard
from tests.integration.yafsdp_attacks import WIDTH, Layer, Model, batch
from tests.integration.yafsdp_more_recipes import (
    Made,
    Recipe,
    Side,
    Through,
    drawn,
    linear,
    loop,
    of_model,
    outcome_of,
    parameter,
    squared,
    whole,
)


def sgd(model: Any, side: Side, change: Callable[[], Any] = lambda: None, steps: int = 3) -> list[Any]:
    """Train by SGD, and do something after each step."""
    return side.train(SGD(model.parameters(), lr=0.05, momentum=0.9), squared(model), change, steps)


def whole_weights(model: Any, side: Side) -> contextlib.AbstractContextManager[Any]:
    """Context in which modules have whole weights on either side, between steps."""
    return model.unshard() if side.is_sharded else contextlib.nullcontext()  # type: ignore[no-any-return]


# Weights that change between steps ------------------------------------------------------------------------------------


def adapted() -> nn.Module:
    def run(module: Any, x: Tensor) -> Tensor:
        return module.base(x) + x @ module.down @ module.up  # type: ignore[no-any-return]

    def layer() -> nn.Module:
        parts = {"down": parameter(WIDTH, 2, value=0.1), "up": parameter(2, WIDTH)}
        return Made(run, base=linear().requires_grad_(False), **parts)

    return Through(layer(), layer())


def merges_adapters(side: Side) -> list[Any]:
    """ReLoRA: adapters are added to the frozen weights after some steps, and begin again."""
    model = side.make(adapted)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    losses = []
    for _ in range(2):
        losses += side.train(AdamW(trained, lr=0.01, eps=1e-4), squared(model), steps=2)
        with whole_weights(model, side), torch.no_grad():
            for layer in model.layers:
                layer.base.weight += (layer.down @ layer.up).t()
                layer.up.zero_()
    return losses


def merges_adapters_on_shards(side: Side) -> list[Any]:
    model = side.make(adapted)
    with torch.no_grad():
        for layer in model.layers:
            layer.base.weight += (layer.down @ layer.up).t()
    return sgd(model, side)


def averages_checkpoints(model: Any, side: Side) -> list[Any]:
    """The weights at the end are the mean of those after each step."""
    snapshots: list[list[Tensor]] = []

    def keep() -> None:
        snapshots.append([weight.detach().clone() for weight in model.parameters()])

    losses = sgd(model, side, keep)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(sum(snapshot[number] for snapshot in snapshots) / len(snapshots))
    return losses


def frozen_in_turns(model: Any, side: Side) -> list[Any]:
    """Layers are trained in turns, with weight decay and momentum, which must rest where a layer is frozen."""
    optimizer, losses = AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4), []
    for step in range(4):
        for number, layer in enumerate(model.layers):
            layer.requires_grad_(number % 2 == step % 2)
        losses += side.train(optimizer, lambda _, rank, step=step: squared(model)(step, rank), steps=1)
    return losses


def vectors_alone_later(model: Any, side: Side) -> list[Any]:
    losses = sgd(model, side)
    for weight in model.parameters():
        weight.requires_grad_(weight.ndim == 1)
    return [*losses, *sgd(model, side)]


def shrinks(model: Any, side: Side) -> list[Any]:
    """A layer is taken away after some steps."""
    losses = sgd(model, side)
    del model.layers[1]
    return [*losses, *sgd(model, side)]


def grows(model: Any, side: Side) -> list[Any]:
    """A layer is stacked upon the others after some steps (progressive stacking)."""
    losses = sgd(model, side)
    torch.manual_seed(11)
    layer: nn.Module = Layer().double()
    model.layers.append(fully_shard(layer) if side.is_sharded else layer)
    return [*losses, *sgd(model, side)]


def another_module(model: Any, side: Side) -> list[Any]:
    """A head of another task takes the place of the first one."""
    sgd(model, side)
    torch.manual_seed(5)
    model.head = linear().double()
    return sgd(model, side)


def soft_prompt(model: Any, side: Side) -> list[Any]:
    """A parameter is added to the model after it was sharded."""
    model.prompt = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    model.register_forward_pre_hook(lambda module, args: (args[0] + module.prompt,))
    return sgd(model, side)


def tied_later(model: Any, side: Side) -> list[Any]:
    sgd(model, side)
    model.head.weight = model.inlet.weight
    return sgd(model, side)


def untied_later(side: Side) -> list[Any]:
    def tied() -> nn.Module:
        model = Model()
        model.head.weight = model.inlet.weight
        return model

    model = side.make(tied)
    sgd(model, side)
    model.head.weight = nn.Parameter(model.inlet.weight.detach().clone())
    return sgd(model, side)


def parametrized_later(model: Any, side: Side) -> list[Any]:
    sgd(model, side)
    for layer in model.layers:
        parametrize.register_parametrization(layer.linear, "weight", nn.Tanh())
    return sgd(model, side)


# Weights that a forward pass changes ----------------------------------------------------------------------------------


def clamped_in_forward(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.linear.weight.clamp_(-0.2, 0.2)
    return module.linear(x)  # type: ignore[no-any-return]


def renormalized_in_forward(module: Any, x: Tensor) -> Tensor:
    """As EEGNet's layers with a constraint do: new memory for the weight in each forward pass."""
    module.linear.weight.data = torch.renorm(module.linear.weight.data, p=2, dim=0, maxnorm=0.3)
    return module.linear(x)  # type: ignore[no-any-return]


def lowered_rank_in_forward(module: Any, x: Tensor) -> Tensor:
    """Writes through an alias, as code does that detaches first."""
    module.linear.weight.detach()[0].zero_()
    return module.linear(x)  # type: ignore[no-any-return]


def in_each_layer(run: Callable[[Any, Tensor], Tensor]) -> Recipe:
    """Recipe of layers that compute so. One forward pass a step, as each changes the weights."""
    return of_model(lambda: Through(*(Made(run, linear=linear()) for _ in range(3))), at_once=True)


# Gradients ------------------------------------------------------------------------------------------------------------


class KeepsOwnGradient(torch.autograd.Function):
    """A linear layer that writes the weight's gradient itself, as fused accumulation in Megatron does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].t() @ x
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return gradients[0] @ weight, None


class GradientInForward(torch.autograd.Function):
    """A loss of a linear layer whose gradients are computed in forward, in chunks, as Liger's kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            inputs, matrix = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = sum(functional.cross_entropy(row[None] @ matrix.t(), torch.tensor([1])) for row in inputs) / len(x)
            ctx.save_for_backward(*torch.autograd.grad(loss, (inputs, matrix)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        of_inputs, of_weight = ctx.saved_tensors
        return of_inputs * gradients[0], of_weight * gradients[0]


def fused_loss(side: Side) -> list[Any]:
    model = side.make(
        lambda: Through(linear(), linear(), Made(lambda m, x: GradientInForward.apply(x, m.head.weight), head=linear()))
    )
    return side.train(AdamW(model.parameters(), lr=0.01, eps=1e-4), lambda step, rank: model(batch(step, 0, rank)))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


def adversarial_domain(side: Side) -> list[Any]:
    """DANN: the features' gradient of a second head is reversed."""
    features, task, domain = (side.make(Model) for _ in range(3))
    optimizer = SGD([w for model in (features, task, domain) for w in model.parameters()], lr=0.05)

    def loss(step: int, rank: int) -> Tensor:
        values = features(batch(step, 0, rank))
        return task(values).square().mean() + (domain(Reversed.apply(values)) - 1).square().mean()

    return side.train(optimizer, loss)


def surgery_at_features(side: Side) -> list[Any]:
    """Gradients of two tasks meet at the features: each task's by autograd.grad, then one backward pass from there."""
    trunk, first, second = (side.make(Model) for _ in range(3))
    optimizer, norms = SGD([w for model in (trunk, first, second) for w in model.parameters()], lr=0.05), []
    for step in range(3):
        optimizer.zero_grad()
        for rank in side.ranks:
            features = trunk(batch(step, 0, rank))
            gradients = []
            for head in (first, second):
                leaf = features.detach().requires_grad_()
                (head(leaf).square().mean() / len(side.ranks)).backward()
                gradients.append(leaf.grad)
            a, b = gradients
            features.backward(a + b - (a * b).sum().clamp(max=0) / b.square().sum() * b)
        norms.append(sum(whole(weight.grad).square().sum() for weight in trunk.parameters()))
        optimizer.step()
    return norms


def scaled_by_hand(model: Any, side: Side) -> list[Any]:
    """Loss scaling as programs did before there was a scaler: a step is left out where a gradient overflows."""
    optimizer, scale, skipped = SGD(model.parameters(), lr=0.05), 1024.0, 0.0
    for step in range(4):
        optimizer.zero_grad()
        factor = torch.inf if step == 1 else 1.0
        (side.mean(squared(model), step) * scale * factor).backward()
        if not all(bool(weight.grad.isfinite().all()) for weight in model.parameters()):
            scale, skipped = scale / 2, skipped + 1
            continue
        for weight in model.parameters():
            weight.grad.div_(scale)
        optimizer.step()
    return [torch.tensor([scale, skipped])]


def gradients_left_out(model: Any, side: Side) -> list[Any]:
    """Some parameters' gradients are thrown away between backward and the step, others are kept for the next one."""
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4)
    for step in range(3):
        side.mean(squared(model), step).backward()
        for number, weight in enumerate(model.parameters()):
            if number % 3 == step:
                weight.grad = None
        optimizer.step()
        for number, weight in enumerate(model.parameters()):
            if number % 2:
                weight.grad = None
    return []


def batches_left_out(model: Any, side: Side) -> list[Any]:
    """A forward pass without backward, as where a loss is not a number, then a step as usual."""
    optimizer = SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        loss = side.mean(squared(model), step)
        if step % 2 == 0:
            continue
        loss.backward()
        optimizer.step()
    return []


def averaged_by_hand(model: Any, side: Side) -> list[Any]:
    """What is left of data parallelism by hand: an all-reduce of each gradient."""
    optimizer = SGD(model.parameters(), lr=0.05)
    side.mean(squared(model), 0).backward()
    for weight in model.parameters() if side.is_sharded else ():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
    optimizer.step()
    return []


def broadcast_by_hand(model: Any, side: Side) -> list[Any]:
    for weight in model.parameters() if side.is_sharded else ():
        dist.broadcast(weight.detach(), 0)
    return sgd(model, side)


def within_ddp(side: Side) -> list[Any]:
    """DDP around the sharded model, whose only weight has shards of equal sizes: it would find no difference."""
    model = side.make(lambda: nn.Linear(WIDTH, 2 * WIDTH, bias=False))
    return sgd(DistributedDataParallel(model), side)


def per_sample_gradients(model: Any, side: Side) -> list[Any]:
    """DP-SGD by torch.func: a gradient for each sample."""

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (sample[None],)).square().mean()  # type: ignore[no-any-return]

    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, batch(0, 0, 0))
    return list(gradients.values())


# Hooks and calls ------------------------------------------------------------------------------------------------------


def steered(model: Any, side: Side) -> list[Any]:
    """Forward hooks that change inputs and outputs of units, as steering and patching do."""
    direction = drawn(0, 0, WIDTH)
    model.layers[1].register_forward_hook(lambda _m, _a, output: output + 0.1 * direction * output.mean())
    model.layers[2].register_forward_pre_hook(lambda _m, args: (args[0].tanh(),))
    model.layers[0].linear.register_forward_hook(lambda _m, _a, output: output * 2)
    return sgd(model, side)


def scaled_in_backward(model: Any, side: Side) -> list[Any]:
    """Hooks of modules that change gradients on their way."""
    direction = drawn(1, 0, WIDTH)
    model.layers[1].register_full_backward_hook(lambda _m, into, _out: tuple(g * 0.5 for g in into))
    model.layers[2].register_full_backward_pre_hook(lambda _m, out: tuple(g * direction for g in out))
    return sgd(model, side)


def another_forward(model: Any, side: Side) -> list[Any]:
    """A forward that is replaced on the object, as patches of libraries do."""
    sgd(model, side)

    def forward(module: Any, x: Tensor) -> Tensor:
        return x + functional.silu(module.linear(module.norm(x))) * module.scale

    for layer in model.layers:
        layer.forward = types.MethodType(forward, layer)
    return sgd(model, side)


def functional_root(model: Any, side: Side) -> list[Any]:
    """Train while a perturbed copy of the weights is evaluated by functional_call."""
    perturbed = {name: weight * 1.1 for name, weight in model.named_parameters()}
    with torch.no_grad():
        value = torch.func.functional_call(model, perturbed, (batch(0, 0, side.ranks[0]),))
    return [value]


class CallsBlockWithOthers(Model):
    """The second layer runs with other weights than its own: they are made of its own ones."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.inlet(x))
        doubled = {name: 2 * weight for name, weight in self.layers[1].named_parameters()}
        return self.head(torch.func.functional_call(self.layers[1], doubled, (x,)))  # type: ignore[no-any-return]


class CallsPartWithOthers(Layer):
    """A layer inside a unit runs with weights that the unit makes."""

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.linear.weight * self.scale, "bias": self.linear.bias}
        return x + torch.func.functional_call(self.linear, weights, (self.norm(x),)).tanh()


def forward_mode(model: Any, side: Side) -> list[Any]:
    """Sliced score matching: a product with the Jacobian, by forward-mode differentiation, is a part of the loss."""

    def loss(step: int, rank: int) -> Tensor:
        x, v = batch(step, 0, rank), drawn(step, rank, 3, WIDTH)
        score, product = torch.func.jvp(model, (x,), (v,))
        return (v * product).sum(-1).mean() + 0.5 * score.square().sum(-1).mean()

    return side.train(SGD(model.parameters(), lr=0.01), loss)


def saved_on_host(model: Any, side: Side) -> list[Any]:
    """Tensors for backward are packed by hooks, as where they are offloaded to the host."""

    def loss(step: int, rank: int) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return squared(model)(step, rank)

    return side.train(SGD(model.parameters(), lr=0.05), loss)


def cached_parametrization(side: Side) -> list[Any]:
    """A parametrized weight is computed once for several forward passes."""

    def built() -> nn.Module:
        model = Model()
        for layer in model.layers:
            nn.utils.parametrizations.weight_norm(layer.linear)
        return model

    model = side.make(built)

    def loss(step: int, rank: int) -> Tensor:
        with parametrize.cached():
            return squared(model)(step, rank) + 0.5 * model(batch(step, 1, rank)).square().mean()

    return side.train(AdamW(model.parameters(), lr=0.01, eps=1e-4), loss)


class AddsInPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return x + torch.tanh(self.linear(self.norm(x)))


class WithCache(nn.Module):
    """Attention that keeps keys and values between calls, in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = linear(), linear(), linear()
        self.cache: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.key(x), self.value(x)
        if not self.training:
            self.cache.append((keys, values))
            keys, values = (torch.cat(parts) for parts in zip(*self.cache, strict=True))
        return x + functional.scaled_dot_product_attention(self.query(x), keys, values)


def cached_evaluation(side: Side) -> list[Any]:
    """Steps, then generation of a sequence with a cache of keys and values, then steps again."""
    model = side.make(lambda: Through(*(WithCache() for _ in range(3))))
    numbers = sgd(model, side)
    model.eval()
    with torch.no_grad():
        token = batch(9, 0, 0)[:1]
        for _ in range(4):
            token = model(token)
            numbers.append(token)
    model.train()
    for layer in model.layers:
        layer.cache.clear()
    return [*numbers, *sgd(model, side)]


# State ----------------------------------------------------------------------------------------------------------------


def renamed_state(model: Any, side: Side) -> list[Any]:
    """Hooks rename keys where state is saved, and rename them back where it is loaded."""

    def rename(_: Any, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}inlet.")]:
            state[name.replace("inlet.", "embed.")] = state.pop(name)

    def restore(_: Any, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}embed.")]:
            state[name.replace("embed.", "inlet.")] = state.pop(name)

    model.register_state_dict_post_hook(rename)
    model.register_load_state_dict_pre_hook(restore)
    state = copy.deepcopy(model.state_dict())
    assert "embed.weight" in state
    losses = sgd(model, side)
    model.load_state_dict(state)
    losses += sgd(model, side)
    model._state_dict_hooks.clear() if not side.is_sharded else model._state_dict_hooks.popitem()
    return losses


def loaded_in_part(model: Any, side: Side) -> list[Any]:
    """The weights of some layers come from another model's whole state, and the rest stay (strict=False)."""
    torch.manual_seed(21)
    state = {name: value for name, value in Model().double().state_dict().items() if "layers.1." in name}
    model.load_state_dict(state, strict=False)
    return sgd(model, side)


RECIPES: dict[str, Recipe] = {
    "adapters merged": merges_adapters,
    "adapters merged on shards": merges_adapters_on_shards,
    "checkpoints averaged": loop(averages_checkpoints),
    "frozen in turns": loop(frozen_in_turns),
    "vectors alone later": loop(vectors_alone_later),
    "a layer taken away": loop(shrinks),
    "a layer added": loop(grows),
    "a module replaced": loop(another_module),
    "a parameter added": loop(soft_prompt),
    "tied later": loop(tied_later),
    "untied later": untied_later,
    "parametrized later": loop(parametrized_later),
    "clamped in forward": in_each_layer(clamped_in_forward),
    "new memory in forward": in_each_layer(renormalized_in_forward),
    "written through an alias in forward": in_each_layer(lowered_rank_in_forward),
    "a gradient that a function writes": in_each_layer(lambda m, x: KeepsOwnGradient.apply(x, m.linear.weight)),
    "gradients computed in forward": fused_loss,
    "a reversed gradient": adversarial_domain,
    "surgery at the features": surgery_at_features,
    "scaled by hand": loop(scaled_by_hand),
    "gradients left out": loop(gradients_left_out),
    "batches left out": loop(batches_left_out),
    "gradients averaged by hand": loop(averaged_by_hand),
    "weights broadcast by hand": loop(broadcast_by_hand),
    "within DDP": within_ddp,
    "per-sample gradients": loop(per_sample_gradients),
    "steered": loop(steered),
    "scaled in backward": loop(scaled_in_backward),
    "another forward": loop(another_forward),
    "functional_call of the model": loop(functional_root),
    "functional_call of a block": of_model(CallsBlockWithOthers),
    "functional_call of a part": of_model(lambda: Model(CallsPartWithOthers)),
    "forward mode": loop(forward_mode),
    "saved on the host": loop(saved_on_host),
    "a cached parametrization": cached_parametrization,
    "added in place": of_model(lambda: Model(AddsInPlace)),
    "a cache of keys": cached_evaluation,
    "renamed state": loop(renamed_state),
    "loaded in part": loop(loaded_in_part),
}


def outcome(name: str) -> float | str:
    """Return the largest relative difference from one process, or the error's class and words."""
    return outcome_of(RECIPES[name])

"""Optimizers, losses and models as papers describe them, on sharded models and on plain ones. Not a test.

Optimizers are written as their authors' code is: a loop over parameters that reads `p.grad` and changes `p` in place.
"""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from tests.integration.yafsdp_attacks import WIDTH, Layer, Model, batch
from tests.integration.yafsdp_more_recipes import (
    STEPS,
    Loss,
    Made,
    Recipe,
    Side,
    Through,
    drawn,
    linear,
    of_model,
    outcome_of,
    parameter,
    squared,
)

# Optimizers -----------------------------------------------------------------------------------------------------------

Update = Callable[[Any, Tensor, dict[str, Any], int], Any]
"""Of a parameter, its gradient, its state and the number of the step, from 1: changes the parameter in place."""


class ByParameter(Optimizer):
    """Calls an update for each parameter."""

    def __init__(self, parameters: Any, update: Update) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    state["step"] = state.get("step", 0) + 1
                    self.update(weight, weight.grad, state, state["step"])
        return closure


def zeros(state: dict[str, Any], weight: Tensor, *names: str) -> list[Tensor]:
    """Tensors of the state, which begin as zeros of the weight's shape."""
    return [state.setdefault(name, torch.zeros_like(weight)) for name in names]


def sophia(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    mean, curvature = zeros(state, w, "mean", "curvature")
    mean.lerp_(g, 0.1)
    curvature.mul_(0.99).addcmul_(g, g, value=0.01)
    w.mul_(1 - 0.001).add_(mean.sign() * (mean.abs() / (0.03 * curvature + 1e-8)).clamp(max=1.0), alpha=-0.01)


def adan(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    mean, change, square = zeros(state, w, "mean", "change", "square")
    difference = g - state.get("previous", g)
    state["previous"] = g.clone()
    mean.lerp_(g, 0.02)
    change.lerp_(difference, 0.08)
    square.lerp_((g + 0.92 * difference).square(), 0.01)
    w.add_((mean + 0.92 * change) / (square.sqrt() + 1e-4), alpha=-0.01).div_(1 + 0.01 * 0.02)


def ademamix(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    fast, slow, square = zeros(state, w, "fast", "slow", "square")
    fast.lerp_(g, 0.1)
    slow.lerp_(g, 0.001)
    square.mul_(0.999).addcmul_(g, g, value=0.001)
    denominator = (square.sqrt() / math.sqrt(1 - 0.999**step)).add_(1e-4)
    w.add_((fast / (1 - 0.9**step) + 5 * slow) / denominator, alpha=-0.01)


def cautious(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    """AdamW that only moves where its mean has the gradient's sign, rescaled by how often that is so."""
    mean, square = zeros(state, w, "mean", "square")
    mean.lerp_(g, 0.1)
    square.mul_(0.99).addcmul_(g, g, value=0.01)
    mask = (mean * g > 0).to(g.dtype)
    w.add_(mean / (square.sqrt() + 1e-4) * mask / mask.mean().clamp(min=1e-3), alpha=-0.01)


def adam_mini(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    """One second moment for a whole tensor."""
    (mean,) = zeros(state, w, "mean")
    mean.lerp_(g, 0.1)
    state["square"] = 0.99 * state.get("square", 0.0) + 0.01 * g.square().mean()
    w.add_(mean / (state["square"].sqrt() + 1e-4), alpha=-0.01)


def novograd(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    (mean,) = zeros(state, w, "mean")
    norm = g.square().sum()
    state["norm"] = norm if step == 1 else 0.98 * state["norm"] + 0.02 * norm
    mean.mul_(0.95).add_(g / (state["norm"].sqrt() + 1e-4) + 0.001 * w)
    w.add_(mean, alpha=-0.01)


def lamb(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    mean, square = zeros(state, w, "mean", "square")
    mean.lerp_(g, 0.1)
    square.mul_(0.999).addcmul_(g, g, value=0.001)
    update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-4) + 0.01 * w
    of_weight, of_update = w.norm(), update.norm()
    ratio = 1.0 if of_weight == 0 or of_update == 0 else float(of_weight / of_update)
    w.add_(update, alpha=-0.01 * ratio)


def fromage(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    of_weight, of_gradient = w.norm().item(), g.norm().item()
    w.add_(g, alpha=-0.01 * (of_weight / of_gradient if of_weight and of_gradient else 1)).div_(math.sqrt(1 + 0.01**2))


def yogi(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    mean, square = zeros(state, w, "mean", "square")
    mean.lerp_(g, 0.1)
    square.addcmul_((square - g * g).sign(), g * g, value=-0.01)
    w.addcdiv_(mean, square.abs().sqrt().add_(1e-3), value=-0.01)


def adabelief(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    mean, square = zeros(state, w, "mean", "square")
    mean.lerp_(g, 0.1)
    square.mul_(0.99).add_((g - mean).square(), alpha=0.01)
    w.addcdiv_(mean, (square / (1 - 0.99**step)).sqrt().add_(1e-4), value=-0.01 / (1 - 0.9**step))


def adabound(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    mean, square = zeros(state, w, "mean", "square")
    mean.lerp_(g, 0.1)
    square.mul_(0.99).addcmul_(g, g, value=0.01)
    rate = (0.01 / (square.sqrt() + 1e-4)).clamp_(0.1 * (1 - 1 / step), 0.1 * (1 + 1 / step))
    w.sub_(rate * mean)


def adopt(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    mean, square = zeros(state, w, "mean", "square")
    if step > 1:
        mean.lerp_((g / square.sqrt().clamp(min=1e-4)).clamp(-step, step), 0.1)
        w.add_(mean, alpha=-0.01)
    square.mul_(0.99).addcmul_(g, g, value=0.01)


def grokfast(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    """Amplifies the slow part of the gradient, in place."""
    (slow,) = zeros(state, w, "slow")
    slow.lerp_(g, 0.1)
    g.add_(slow, alpha=2.0)
    w.add_(g, alpha=-0.01)


def madgrad(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    total, square = zeros(state, w, "total", "square")
    start = state.setdefault("start", w.clone())
    rate = 0.01 * math.sqrt(step)
    square.addcmul_(g, g, value=rate)
    total.add_(g, alpha=rate)
    w.mul_(0.9).add_(start - total / (square.pow(1 / 3) + 1e-3), alpha=0.1)


def amsgrad_by_hand(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    mean, square, largest = zeros(state, w, "mean", "square", "largest")
    mean.lerp_(g, 0.1)
    square.mul_(0.99).addcmul_(g, g, value=0.01)
    torch.maximum(largest, square, out=largest)
    w.addcdiv_(mean, largest.sqrt().add_(1e-4), value=-0.01)


def stable_adamw(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    """AdamW whose rate falls where the update's root mean square exceeds one (StableAdamW)."""
    mean, square = zeros(state, w, "mean", "square")
    mean.lerp_(g, 0.1)
    square.mul_(0.99).addcmul_(g, g, value=0.01)
    size = (g.square() / square.clamp(min=1e-8)).mean().sqrt()
    w.add_(mean / (square.sqrt() + 1e-4), alpha=-0.01 / max(1.0, size.item()))


def clip_by_history(w: Any, g: Tensor, state: dict[str, Any], step: int) -> None:
    """Clips each tensor at 1.2 times the mean of its last norms (ZClip, AutoClip)."""
    norms = state.setdefault("norms", [])
    norms.append(g.norm().item())
    limit = 1.2 * sum(norms) / len(norms) * (1 - 0.1 * (len(norms) > 1))
    w.add_(g * min(1.0, limit / norms[-1] if norms[-1] else 1.0), alpha=-0.05)


def by_update(update: Update) -> Recipe:
    def recipe(side: Side) -> list[Any]:
        model = side.make(Model)
        return side.train(ByParameter(model.parameters(), update), squared(model))

    return recipe


def prodigy(side: Side) -> list[Any]:
    """Estimates its rate from the way that all parameters have gone since the start."""
    model = side.make(Model)
    weights = list(model.parameters())
    starts = [weight.detach().clone() for weight in weights]
    distance, numerator = 1e-3, 0.0
    totals = [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def step() -> None:
        nonlocal distance, numerator
        size = 0.0
        for weight, start, total in zip(weights, starts, totals, strict=True):
            numerator += distance * (weight.grad * (start - weight)).sum().item()
            total.add_(weight.grad, alpha=distance)
            size += total.abs().sum().item()
        distance = max(distance, numerator / max(size, 1e-12))
        for weight in weights:
            weight.add_(weight.grad, alpha=-distance)

    numbers = []
    for number in range(STEPS):
        model.zero_grad()
        total = side.mean(squared(model), number)
        total.backward()
        step()
        numbers += [side.over_ranks(total), distance]
    return numbers


def schedule_free(side: Side) -> list[Any]:
    """Evaluates at the mean of all iterates, trains between it and the last one."""
    model = side.make(Model)
    weights = list(model.parameters())
    means, lasts = ([weight.detach().clone() for weight in weights] for _ in range(2))
    numbers = []
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for weight, mean, last in zip(weights, means, lasts, strict=True):
                weight.copy_(0.9 * mean + 0.1 * last)
        model.zero_grad()
        total = side.mean(squared(model), step)
        total.backward()
        numbers.append(side.over_ranks(total))
        with torch.no_grad():
            for weight, mean, last in zip(weights, means, lasts, strict=True):
                last.sub_(weight.grad, alpha=0.05)
                mean.lerp_(last, 1 / step)
    with torch.no_grad():
        for weight, mean in zip(weights, means, strict=True):
            weight.copy_(mean)
        return [*numbers, side.over_ranks(side.mean(squared(model), 9))]


def adaptive_sharpness(side: Side) -> list[Any]:
    """ASAM: climbs by what weights and gradients say together, descends from there."""
    model = side.make(Model)
    optimizer = SGD(model.parameters(), lr=0.05)
    numbers = []
    for step in range(STEPS):
        side.mean(squared(model), step).backward()
        with torch.no_grad():
            climbs = [(weight.abs() + 0.01) * weight.grad for weight in model.parameters()]
            norm = torch.stack([climb.square().sum() for climb in climbs]).sum().sqrt()
            climbs = [(weight.abs() + 0.01) * climb for weight, climb in zip(model.parameters(), climbs, strict=True)]
            for weight, climb in zip(model.parameters(), climbs, strict=True):
                weight.add_(climb * (0.5 / norm))
        optimizer.zero_grad()
        total = side.mean(squared(model), step)
        total.backward()
        with torch.no_grad():
            for weight, climb in zip(model.parameters(), climbs, strict=True):
                weight.sub_(climb * (0.5 / norm))
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(side.over_ranks(total))
    return numbers


def polyak_step(side: Side) -> list[Any]:
    """A rate of loss over squared norm of the gradient."""
    model = side.make(Model)
    rates = []
    for step in range(STEPS):
        model.zero_grad()
        total = side.mean(squared(model), step)
        total.backward()
        with torch.no_grad():
            square = sum(float(weight.grad.square().sum()) for weight in model.parameters())
            rates.append(min(0.1, side.over_ranks(total).item() / square))
            for weight in model.parameters():
                weight.sub_(weight.grad, alpha=rates[-1])
    return rates


def two_optimizers(side: Side) -> list[Any]:
    """DARTS of first order: weights and architecture of one model, on different data by turns."""
    model = side.make(lambda: Through(*(Made(mixed, a=linear(), b=linear(), choice=parameter(2)) for _ in range(3))))
    architecture = [weight for name, weight in model.named_parameters() if name.endswith("choice")]
    weights = [weight for name, weight in model.named_parameters() if not name.endswith("choice")]
    optimizers = AdamW(architecture, lr=0.05, betas=(0.5, 0.99), eps=1e-4), SGD(weights, lr=0.05, momentum=0.9)
    numbers = []
    for step in range(STEPS):
        for number, optimizer in enumerate(optimizers):
            model.zero_grad()
            total = side.mean(lambda s, rank, n=number: model(batch(s, n, rank)).square().mean(), step)
            total.backward()
            optimizer.step()
            numbers.append(side.over_ranks(total))
    return numbers


def mixed(module: Any, x: Tensor) -> Tensor:
    share = module.choice.softmax(0)
    return share[0] * module.a(x).tanh() + share[1] * module.b(x).relu()


# Losses ---------------------------------------------------------------------------------------------------------------


def trained(loss: Callable[[Any, Tensor, int, int], Tensor], build: Callable[[], nn.Module] = Model) -> Recipe:
    """Train by a loss of the model, a batch, the step and the rank."""

    def recipe(side: Side) -> list[Any]:
        model = side.make(build)
        of_model: Loss = lambda step, rank: loss(model, batch(step, 0, rank), step, rank)  # noqa: E731
        return side.train(AdamW(model.parameters(), lr=0.01, eps=1e-4), of_model)

    return recipe


def clip(side: Side) -> list[Any]:
    """Two towers and a learned temperature that is clamped after each step (CLIP)."""
    image, text = side.make(Model), side.make(functools.partial(Model, depth=2))
    scale = side.make(lambda: Through(Made(lambda m, x: x * m.scale.exp(), scale=parameter(value=2.6))))
    models = (image, text, scale)
    optimizer = AdamW([weight for model in models for weight in model.parameters()], lr=0.01)

    def loss(step: int, rank: int) -> Tensor:
        a, b = (functional.normalize(model(batch(step, n, rank)), dim=-1) for n, model in enumerate((image, text)))
        logits, target = scale(a @ b.t()), torch.arange(3)
        return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.t(), target)) / 2

    def clamp() -> None:
        for weight in scale.parameters():
            weight.data.clamp_(0, math.log(14))

    return side.train(optimizer, loss, clamp)


def simsiam(side: Side) -> list[Any]:
    encoder, predictor = side.make(Model), side.make(lambda: Through(linear(), nn.ReLU(), linear()))

    def loss(step: int, rank: int) -> Tensor:
        a, b = (encoder(batch(step, n, rank)) for n in range(2))
        guesses = predictor(a), predictor(b)
        pairs = ((guesses[0], b), (guesses[1], a))
        return torch.stack([-functional.cosine_similarity(p, z.detach()).mean() for p, z in pairs]).mean()

    return side.train(SGD([*encoder.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9), loss)


def vicreg(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    a, b = model(x), model(x + 0.1 * drawn(step, rank, 3, WIDTH))
    centered = a - a.mean(0)
    covariance = centered.t() @ centered / 2
    return (
        functional.mse_loss(a, b)
        + functional.relu(1 - (a.var(0) + 1e-4).sqrt()).mean()
        + (covariance - covariance.diagonal().diag()).square().sum() / WIDTH
    )


def autoencoder(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    """A variational autoencoder, whose noise is drawn for each rank."""
    code = model(x)
    mean, log_variance = code.chunk(2, dim=-1)
    z = mean + (0.5 * log_variance).exp() * drawn(step, rank, 3, WIDTH // 2)
    rebuilt = model(torch.cat([z, z], -1))
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
    return functional.mse_loss(rebuilt, x) + 0.1 * divergence


def flow(side: Side) -> list[Any]:
    """Affine coupling layers; the loss sums their log determinants."""

    def couple(module: Any, state: Tensor) -> Tensor:
        x, determinant = state[:, :WIDTH], state[:, WIDTH:]
        a, b = x.chunk(2, dim=-1)
        shift, scale = module.net(a).chunk(2, dim=-1)
        scale = scale.tanh()
        return torch.cat([b * scale.exp() + shift, a, determinant + scale.sum(-1, keepdim=True)], -1)

    model = side.make(lambda: Through(*(Made(couple, net=nn.Linear(WIDTH // 2, WIDTH)) for _ in range(4))))

    def loss(step: int, rank: int) -> Tensor:
        state = model(torch.cat([batch(step, 0, rank), torch.zeros(3, 1, dtype=torch.float64)], -1))
        return (0.5 * state[:, :WIDTH].square().sum(-1) - state[:, WIDTH]).mean()

    return side.train(AdamW(model.parameters(), lr=0.01), loss)


def policy_optimization(side: Side) -> list[Any]:
    """PPO: several epochs on one batch, of a ratio to the policy that drew it, with clipped gradients."""
    model = side.make(Model)
    optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-5)
    numbers = []
    for step in range(2):
        with torch.no_grad():
            before = {rank: model(batch(step, 0, rank)).log_softmax(-1) for rank in side.ranks}

        def loss(_: int, rank: int, step: int = step, before: dict[int, Tensor] = before) -> Tensor:
            logs = model(batch(step, 0, rank)).log_softmax(-1)
            action = torch.arange(3)[:, None]
            ratio = (logs - before[rank]).gather(1, action).exp()
            advantage = drawn(step, rank, 3, 1)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            return -surrogate.mean() - 0.01 * -(logs.exp() * logs).sum(-1).mean()

        for _ in range(3):
            optimizer.zero_grad()
            total = side.mean(loss, step)
            total.backward()
            numbers.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            numbers.append(side.over_ranks(total))
    return numbers


def preferences(side: Side) -> list[Any]:
    """DPO: a policy against its frozen copy, on chosen and rejected inputs."""
    policy, reference = side.make(Model), side.make(Model)
    reference.load_state_dict(policy.state_dict())
    reference.requires_grad_(False).eval()

    def loss(step: int, rank: int) -> Tensor:
        margins = []
        for model in (policy, reference):
            chosen, rejected = (model(batch(step, n, rank)).log_softmax(-1)[:, 0] for n in range(2))
            margins.append(chosen - rejected)
        return -functional.logsigmoid(0.5 * (margins[0] - margins[1].detach())).mean()

    return side.train(AdamW(policy.parameters(), lr=0.01), loss)


def value_learning(side: Side) -> list[Any]:
    """DQN: a target network that is overwritten every second step."""
    online, target = side.make(Model), side.make(Model).requires_grad_(False)
    target.load_state_dict(online.state_dict())
    steps = 0

    def loss(step: int, rank: int) -> Tensor:
        with torch.no_grad():
            value = 1 + 0.9 * target(batch(step, 1, rank)).amax(-1)
        return functional.smooth_l1_loss(online(batch(step, 0, rank))[:, 0], value)

    def follow() -> None:
        nonlocal steps
        steps += 1
        if steps % 2 == 0:
            target.load_state_dict(online.state_dict())

    return side.train(AdamW(online.parameters(), lr=0.01), loss, follow, steps=5)


def actor_and_critic(side: Side) -> list[Any]:
    """Two heads behind one body, one fed without gradient; and two optimizers that share nothing."""
    body, heads = side.make(Model), [side.make(lambda: Through(linear())) for _ in range(2)]
    optimizers = (
        AdamW([*body.parameters(), *heads[0].parameters()], lr=0.01),
        SGD(heads[1].parameters(), lr=0.05, momentum=0.9, nesterov=True),
    )
    numbers = []
    for step in range(STEPS):

        def loss(step: int, rank: int) -> Tensor:
            features = body(batch(step, 0, rank))
            value = heads[1](features.detach())
            return heads[0](features).square().mean() + (value - 1).abs().mean()

        for optimizer in optimizers:
            optimizer.zero_grad()
        total = side.mean(loss, step)
        total.backward()
        for optimizer in optimizers:
            optimizer.step()
        numbers.append(side.over_ranks(total))
    return numbers


def mean_teacher(side: Side) -> list[Any]:
    student, teacher = side.make(Model), side.make(Model).requires_grad_(False)

    def loss(step: int, rank: int) -> Tensor:
        with torch.no_grad():
            target = teacher(batch(step, 1, rank))
        guess = student(batch(step, 0, rank))
        return guess.square().mean() + min(1.0, step / 2) * functional.mse_loss(guess, target)

    steps = 0

    @torch.no_grad()
    def follow() -> None:
        nonlocal steps
        steps += 1
        rate = min(0.99, 1 - 1 / (steps + 1))
        for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
            own.mul_(rate).add_(other, alpha=1 - rate)

    return side.train(AdamW(student.parameters(), lr=0.01), loss, follow)


def dropped_layers(side: Side) -> list[Any]:
    """LayerDrop: all ranks leave out the same layers of a step; their weights stay as they are."""

    class Dropping(Model):
        step = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.inlet(x)
            for number, layer in enumerate(self.layers):
                x = x if (number + self.step) % 3 == 0 else layer(x)
            return self.head(x)

    model = side.make(Dropping)

    def advance() -> None:
        model.step += 1

    return side.train(SGD(model.parameters(), lr=0.05, momentum=0.9), squared(model), advance, steps=4)


def wasserstein(side: Side) -> list[Any]:
    """WGAN: a critic trained twice a step, a generator once, by RMSprop."""
    maker, critic = side.make(Model), side.make(Model)
    optimizers = [torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-4) for model in (maker, critic)]
    numbers = []
    for step in range(STEPS):

        def of_critic(step: int, rank: int) -> Tensor:
            with torch.no_grad():
                made = maker(drawn(step, rank, 3, WIDTH))
            return critic(made).mean() - critic(batch(step, 0, rank)).mean()

        def of_maker(step: int, rank: int) -> Tensor:
            return -critic(maker(drawn(step, rank, 3, WIDTH))).mean()

        for loss, optimizer in ((of_critic, 1), (of_critic, 1), (of_maker, 0)):
            maker.zero_grad()
            critic.zero_grad()
            total = side.mean(loss, step)
            total.backward()
            optimizers[optimizer].step()
            numbers.append(side.over_ranks(total))
    return numbers


def truncated(side: Side) -> list[Any]:
    """Backpropagation through time in chunks: the state goes on without its graph."""
    model = side.make(Model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    states = {rank: torch.zeros(3, WIDTH, dtype=torch.float64) for rank in side.ranks}

    def loss(step: int, rank: int) -> Tensor:
        state = states[rank].detach()
        outputs = []
        for number in range(2):
            state = model(state + batch(step, number, rank)).tanh()
            outputs.append(state)
        states[rank] = state
        return torch.stack(outputs).square().mean()

    return side.train(optimizer, loss)


def early_exits(side: Side) -> list[Any]:
    """Deep supervision: each layer's output is a prediction with a loss of its own."""

    class Exits(Model):
        def forward(self, x: Tensor) -> Any:
            x = self.inlet(x)
            exits = []
            for layer in self.layers:
                x = layer(x)
                exits.append(self.head(x))
            return exits

    model = side.make(Exits)

    def loss(step: int, rank: int) -> Tensor:
        outputs = model(batch(step, 0, rank))
        weights = [0.5 ** (len(outputs) - number) for number in range(len(outputs))]
        return sum(w * output.square().mean() for w, output in zip(weights, outputs, strict=True))

    return side.train(AdamW(model.parameters(), lr=0.01), loss)


def uncertainty(side: Side) -> list[Any]:
    """Two tasks, weighted by variances that are learned in a module of their own."""
    model = side.make(Model)
    weighting = side.make(
        lambda: Through(Made(lambda m, losses: ((-m.logs).exp() * losses + m.logs).sum(), logs=parameter(2, value=0.0)))
    )

    def loss(step: int, rank: int) -> Tensor:
        output = model(batch(step, 0, rank))
        return weighting(torch.stack([output.square().mean(), output.abs().mean()]))

    return side.train(AdamW([*model.parameters(), *weighting.parameters()], lr=0.01), loss)


def mixup(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    share = float(drawn(step, rank, 1).sigmoid())
    order = torch.tensor([1, 2, 0])
    logits, target = model(share * x + (1 - share) * x[order]), torch.arange(3)
    losses = [functional.cross_entropy(logits, labels) for labels in (target, target[order])]
    return share * losses[0] + (1 - share) * losses[1]


def two_passes(model: Any, x: Tensor, step: int, rank: int) -> Tensor:
    """R-Drop: two passes with different noise agree."""
    a, b = (model(x + 0.1 * drawn(step, rank + 9 * n, 3, WIDTH)).log_softmax(-1) for n in range(2))
    divergence = functional.kl_div(a, b, log_target=True, reduction="batchmean")
    return -a[:, 0].mean() - b[:, 0].mean() + divergence


class Reversed(torch.autograd.Function):
    """The same forward; gradients with the other sign."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


def adversarial_domains(side: Side) -> list[Any]:
    body, domain = side.make(Model), side.make(lambda: Through(linear(), nn.Tanh(), linear()))

    def loss(step: int, rank: int) -> Tensor:
        features = body(batch(step, 0, rank))
        labels = torch.tensor([0, 1, 0]) if rank % 2 else torch.tensor([1, 0, 1])
        return features.square().mean() + functional.cross_entropy(domain(Reversed.apply(features)), labels)

    return side.train(SGD([*body.parameters(), *domain.parameters()], lr=0.05), loss)


def growing_batches(side: Side) -> list[Any]:
    model = side.make(Model)

    def loss(step: int, rank: int) -> Tensor:
        return model(torch.cat([batch(step, number, rank) for number in range(1 + step)])).square().mean()

    return side.train(AdamW(model.parameters(), lr=0.01), loss)


def frozen_copy_penalty(side: Side) -> list[Any]:
    """A proximal term towards a frozen copy of the same model's outputs (learning without forgetting)."""
    model = side.make(Model)
    old = copy.deepcopy(model).requires_grad_(False)

    def loss(step: int, rank: int) -> Tensor:
        x = batch(step, 0, rank)
        with torch.no_grad():
            target = old(x)
        return model(x).square().mean() + 0.5 * (model(x) - target).abs().mean()

    return side.train(AdamW(model.parameters(), lr=0.01), loss)


# Models ---------------------------------------------------------------------------------------------------------------


def of_layers(run: Callable[[Any, Tensor], Tensor], count: int = 2, **parts: Callable[[], Any]) -> Recipe:
    """Train layers whose forward is a function of their parts."""
    return of_model(
        lambda: Through(*(Made(run, **{name: build() for name, build in parts.items()}) for _ in range(count)))
    )


def routed(module: Any, x: Tensor) -> Tensor:
    """The best expert of each row; an expert without rows has no gradient."""
    weights, chosen = module.router(x).softmax(-1).max(-1)
    output = torch.zeros_like(x)
    for number, expert in enumerate(module.experts):
        rows = chosen == number
        if rows.any():
            output[rows] = expert(x[rows])
    return x + weights[:, None] * output


def equilibrium(module: Any, x: Tensor) -> Tensor:
    """A fixed point found without gradient, then one step with it."""
    z = torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(5):
            z = (0.3 * module.linear(z) + x).tanh()
    return (0.3 * module.linear(z) + x).tanh()


def integrated(module: Any, x: Tensor) -> Tensor:
    for number in range(4):
        x = x + 0.25 * module.linear(x * (1 + 0.1 * number)).tanh()
    return x


def scanned(module: Any, x: Tensor) -> Tensor:
    """A linear recurrence over rows, with a learned decay."""
    decay, state, outputs = module.decay.sigmoid(), torch.zeros(WIDTH, dtype=x.dtype), []
    for row in module.inward(x):
        state = decay * state + row
        outputs.append(state)
    return x + module.outward(torch.stack(outputs))


def rotated(module: Any, x: Tensor) -> Tensor:
    """Attention over rows with rotary positions, two queries a key."""
    q, k, v = module.queries(x).view(3, 4, 2), module.keys(x).view(3, 2, 2), module.values(x).view(3, 2, 2)
    angle = torch.arange(3, dtype=x.dtype)[:, None, None]

    def turn(t: Tensor) -> Tensor:
        a, b = t[..., :1], t[..., 1:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    q, k = turn(q).transpose(0, 1), turn(k).transpose(0, 1).repeat_interleave(2, 0)
    mixed = functional.scaled_dot_product_attention(q, k, v.transpose(0, 1).repeat_interleave(2, 0), is_causal=True)
    return x + module.out(mixed.transpose(0, 1).reshape(3, WIDTH))


def quantized_codes(module: Any, x: Tensor) -> Tensor:
    """VQ-VAE: the nearest code, straight through, with both of its losses in the output."""
    code = module.codes[torch.cdist(x, module.codes).argmin(-1)]
    straight = x + (code - x).detach()
    return straight + (code - x.detach()).square().mean() + 0.25 * (code.detach() - x).square().mean()


def masked(module: Any, x: Tensor) -> Tensor:
    return module.linear(torch.where(torch.tensor([[True], [False], [True]]), x, module.token))


def generated(module: Any, x: Tensor) -> Tensor:
    """A layer whose weights another layer makes."""
    weight = module.maker(module.code).view(WIDTH, WIDTH)
    return functional.linear(x, weight).tanh()


def excited(module: Any, x: Tensor) -> Tensor:
    return x * module.up(module.down(x).relu()).sigmoid()


def mixer(module: Any, x: Tensor) -> Tensor:
    x = x + module.rows(x.t()).t()
    return x + module.columns(x)


def highway(module: Any, x: Tensor) -> Tensor:
    gate = module.gate(x).sigmoid()
    return gate * module.linear(x).relu() + (1 - gate) * x


def soft_choice(module: Any, x: Tensor) -> Tensor:
    share = functional.softmax((module.logits + torch.arange(4) * 0.1) / 0.5, -1)
    return x @ (share[:, None, None] * module.bank).sum(0)


OPTIMIZERS: dict[str, Recipe] = {
    "Sophia": by_update(sophia),
    "Adan": by_update(adan),
    "AdEMAMix": by_update(ademamix),
    "cautious AdamW": by_update(cautious),
    "Adam-mini": by_update(adam_mini),
    "NovoGrad": by_update(novograd),
    "LAMB": by_update(lamb),
    "Fromage": by_update(fromage),
    "Yogi": by_update(yogi),
    "AdaBelief": by_update(adabelief),
    "AdaBound": by_update(adabound),
    "ADOPT": by_update(adopt),
    "Grokfast": by_update(grokfast),
    "MADGRAD": by_update(madgrad),
    "AMSGrad by hand": by_update(amsgrad_by_hand),
    "StableAdamW": by_update(stable_adamw),
    "clipped by history": by_update(clip_by_history),
    "Prodigy": prodigy,
    "schedule-free": schedule_free,
    "ASAM": adaptive_sharpness,
    "Polyak step": polyak_step,
    "DARTS": two_optimizers,
}
LOSSES: dict[str, Recipe] = {
    "CLIP": clip,
    "SimSiam": simsiam,
    "VICReg": trained(vicreg),
    "VAE": trained(autoencoder),
    "flow": flow,
    "PPO": policy_optimization,
    "DPO": preferences,
    "DQN": value_learning,
    "actor and critic": actor_and_critic,
    "mean teacher": mean_teacher,
    "LayerDrop": dropped_layers,
    "WGAN": wasserstein,
    "truncated backpropagation": truncated,
    "early exits": early_exits,
    "uncertainty weighting": uncertainty,
    "mixup": trained(mixup),
    "R-Drop": trained(two_passes),
    "domain-adversarial": adversarial_domains,
    "growing batches": growing_batches,
    "learning without forgetting": frozen_copy_penalty,
}
ARCHITECTURES: dict[str, Recipe] = {
    "experts by rows": of_layers(
        routed, router=lambda: nn.Linear(WIDTH, 3), experts=lambda: nn.ModuleList(linear() for _ in range(3))
    ),
    "deep equilibrium": of_layers(equilibrium, linear=linear),
    "neural ODE": of_layers(integrated, linear=linear),
    "state space": of_layers(scanned, inward=linear, outward=linear, decay=lambda: parameter(WIDTH, value=0.5)),
    "grouped queries, rotary": of_layers(
        rotated,
        queries=linear,
        keys=lambda: nn.Linear(WIDTH, 4),
        values=lambda: nn.Linear(WIDTH, 4),
        out=linear,
    ),
    "VQ-VAE": of_layers(quantized_codes, codes=lambda: nn.Parameter(torch.randn(5, WIDTH))),
    "masked autoencoder": of_layers(masked, linear=linear, token=lambda: parameter(WIDTH, value=0.3)),
    "hypernetwork": of_layers(
        generated, maker=lambda: nn.Linear(4, WIDTH * WIDTH), code=lambda: nn.Parameter(torch.randn(4))
    ),
    "squeeze and excitation": of_layers(excited, down=lambda: nn.Linear(WIDTH, 2), up=lambda: nn.Linear(2, WIDTH)),
    "mixer": of_layers(mixer, rows=lambda: nn.Linear(3, 3), columns=linear),
    "highway": of_layers(highway, linear=linear, gate=linear),
    "supernet": of_layers(
        soft_choice, logits=lambda: parameter(4, value=0.0), bank=lambda: nn.Parameter(torch.randn(4, WIDTH, WIDTH))
    ),
    "adapters": of_model(
        lambda: Through(
            *(
                Made(lambda m, x: m.base(x) + m.up(m.down(x).relu()), base=Layer(), down=linear(), up=linear())
                for _ in range(2)
            )
        ),
        lambda m: [w.requires_grad_(False) for name, w in m.named_parameters() if ".base." in name],
    ),
}
RECIPES = OPTIMIZERS | LOSSES | ARCHITECTURES


def outcome(name: str) -> float | str:
    """Return the largest relative difference from one process, or the error's class and words."""
    return outcome_of(RECIPES[name])

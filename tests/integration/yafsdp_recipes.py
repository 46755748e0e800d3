"""What training programs do with parameters and gradients by hand, drawn from public recipes. Not a test.

Each recipe trains a model a few steps and returns numbers that it computes on the way. It runs on a sharded model,
where each rank has its own batch, and on a plain one, whose loss is the mean over the ranks' batches.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from instrumented_trainers.parallelism.yafsdp import WholeTensorOptimizer, fully_shard
from tests.integration.parity import relative
from tests.integration.yafsdp_attacks import WIDTH, Layer, Model, batch, shard_layers

Loss = Callable[[Any, int], Tensor]
"""Of a model and a step: the loss."""
STEPS = 3
LARGE_NORM = 0.05


def whole(tensor: Any) -> Tensor:
    """Return a shard's whole tensor, and any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def losses(model: Any, loss: Loss, optimizer: Optimizer, change: Callable[[], Any] = lambda: None) -> list[Any]:
    """Train; `change` does something between backward and step, and what it returns is compared."""
    numbers = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step).backward()
        numbers.append(change())
        optimizer.step()
    return [number for number in numbers if number is not None]


def gradients(model: nn.Module) -> Iterator[Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


# Groups, counts and norms ---------------------------------------------------------------------------------------------


def decay_by_dim(model: Any, loss: Loss) -> list[Any]:
    """As nanoGPT groups parameters: matrices decay, vectors do not."""
    decaying = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decaying, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    losses(model, loss, AdamW(groups, lr=0.01))
    return [len(decaying), sum(parameter.numel() for parameter in model.parameters())]


def gradient_norms(model: Any, loss: Loss) -> list[Any]:
    return losses(
        model, loss, SGD(model.parameters(), lr=0.05), lambda: [gradient.norm() for gradient in gradients(model)]
    )


def clip_by_hand(model: Any, loss: Loss) -> list[Any]:
    @torch.no_grad()
    def clip() -> Tensor:
        norm = torch.sqrt(sum(gradient.pow(2).sum() for gradient in gradients(model)))
        for gradient in gradients(model):
            gradient.mul_((LARGE_NORM / norm).clamp(max=1.0))
        return norm

    return losses(model, loss, SGD(model.parameters(), lr=0.05), clip)


def clip_each(model: Any, loss: Loss) -> list[Any]:
    """Clip parameter by parameter, as adaptive gradient clipping of whole tensors does."""

    @torch.no_grad()
    def clip() -> None:
        for parameter in model.parameters():
            limit = 0.01 * parameter.norm().clamp(min=1e-3)
            parameter.grad.mul_((limit / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1.0))

    return losses(model, loss, SGD(model.parameters(), lr=0.05), clip)


def clip_values(model: Any, loss: Loss) -> list[Any]:
    clip = lambda: nn.utils.clip_grad_value_(model.parameters(), 0.001)  # noqa: E731
    return losses(model, loss, SGD(model.parameters(), lr=0.05), clip)


def watch(model: Any, loss: Loss) -> list[Any]:
    """As experiment trackers log parameters: their mean, extremes, and whether a gradient is infinite."""

    def look() -> list[Any]:
        rows = [(1 + p.mean(), p.min(), p.max(), p.abs().max(), p.square().mean().sqrt()) for p in model.parameters()]
        bad = [gradient.isnan().any() | gradient.isinf().any() for gradient in gradients(model)]
        return [*(number for row in rows for number in row), *bad]

    return losses(model, loss, AdamW(model.parameters(), lr=0.01), look)


def similarity_of_gradients(model: Any, loss: Loss) -> list[Any]:
    """Cosine of two steps' gradients, as in gradient surgery, and the projection of one on the other."""
    first: list[Tensor] = []

    @torch.no_grad()
    def project() -> Any:
        if not first:
            first.extend(gradient.clone() for gradient in gradients(model))
            return None
        dot = sum((a * b).sum() for a, b in zip(first, gradients(model), strict=True))
        square = sum(a.square().sum() for a in first)
        for a, b in zip(first, gradients(model), strict=True):
            b.sub_(a * (dot / square))
        return dot

    return losses(model, loss, SGD(model.parameters(), lr=0.05), project)


# Penalties and constraints --------------------------------------------------------------------------------------------


def penalized(penalty: Callable[[Any], Tensor]) -> Callable[[Any, Loss], list[Any]]:
    def recipe(model: Any, loss: Loss) -> list[Any]:
        def with_penalty(trained: Any, step: int) -> Tensor:
            return loss(trained, step) + 0.1 * penalty(trained)

        return losses(model, with_penalty, SGD(model.parameters(), lr=0.05))

    return recipe


def prox(model: Any, loss: Loss) -> list[Any]:
    """Stay near the first weights, as fine-tuning and elastic weight consolidation do."""
    start = [parameter.detach().clone() for parameter in model.parameters()]
    weights = [value.abs() for value in start]

    def distance(trained: Any) -> Tensor:
        pairs = zip(trained.parameters(), start, weights, strict=True)
        return sum((weight * (p - before) ** 2).sum() + (p - before + 1).norm() for p, before, weight in pairs)  # type: ignore[return-value]

    return penalized(distance)(model, loss)


def spectral(model: Any) -> Tensor:
    return sum(torch.linalg.matrix_norm(whole(p), 2) for p in model.parameters() if p.dim() == 2)  # type: ignore[return-value]


def by_batch(model: Any, loss: Loss) -> list[Any]:
    """A penalty whose weight depends on the batch, and so on the rank."""

    def total(trained: Any, step: int) -> Tensor:
        return loss(trained, step) * (1 + 0.1 * sum(p.norm() for p in trained.parameters()))  # type: ignore[no-any-return]

    return losses(model, total, SGD(model.parameters(), lr=0.05))


def project_to_sphere(model: Any, loss: Loss) -> list[Any]:
    optimizer = SGD(model.parameters(), lr=0.05)

    @torch.no_grad()
    def project() -> None:
        for parameter in model.parameters():
            parameter.div_(parameter.norm().clamp(min=1e-3))

    return losses(model, loss, optimizer, project)


def clamp_weights(model: Any, loss: Loss) -> list[Any]:
    """As Wasserstein GANs do."""

    @torch.no_grad()
    def clamp() -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    return losses(model, loss, SGD(model.parameters(), lr=0.05), clamp)


def prune(model: Any, loss: Loss) -> list[Any]:
    """Zero small weights by a mask, and keep them so."""
    masks = [(parameter.abs() > 0.1).to(parameter.dtype) for parameter in model.parameters()]

    @torch.no_grad()
    def mask() -> None:
        for parameter, kept in zip(model.parameters(), masks, strict=True):
            parameter.mul_(kept)
            parameter.grad *= kept

    return losses(model, loss, SGD(model.parameters(), lr=0.05), mask)


# Random numbers -------------------------------------------------------------------------------------------------------


def draw_weights(model: Any, loss: Loss) -> list[Any]:
    """Draw all weights anew, by a seed that all ranks share, as ``model.apply(init)`` does."""
    torch.manual_seed(7)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.uniform_(module.bias, -0.1, 0.1)

    model.apply(init)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.xavier_uniform_(parameter)
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            nn.init.orthogonal_(parameter)
    return losses(model, loss, SGD(model.parameters(), lr=0.05))


def gradient_noise(model: Any, loss: Loss) -> list[Any]:
    torch.manual_seed(8)

    @torch.no_grad()
    def add() -> None:
        for gradient in gradients(model):
            gradient.add_(torch.randn_like(gradient), alpha=0.01)

    return losses(model, loss, SGD(model.parameters(), lr=0.05), add)


# Averages -------------------------------------------------------------------------------------------------------------


def average_by_hand(model: Any, loss: Loss) -> list[Any]:
    mean = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update() -> list[Tensor]:
        for kept, parameter in zip(mean.parameters(), model.parameters(), strict=True):
            kept.mul_(0.9).add_(parameter, alpha=0.1)
        return [whole(kept).sum() for kept in mean.parameters()]

    return losses(model, loss, SGD(model.parameters(), lr=0.05), update)


def average_by_torch(model: Any, loss: Loss) -> list[Any]:
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return losses(model, loss, SGD(model.parameters(), lr=0.05), lambda: mean.update_parameters(model))


def lookahead(model: Any, loss: Loss) -> list[Any]:
    """Fast weights go back half-way to slow ones every second step."""
    slow, count = [parameter.detach().clone() for parameter in model.parameters()], [0]

    @torch.no_grad()
    def synchronize() -> None:
        count[0] += 1
        if count[0] % 2 == 0:
            for kept, parameter in zip(slow, model.parameters(), strict=True):
                kept.lerp_(parameter, 0.5)
                parameter.copy_(kept)

    return losses(model, loss, SGD(model.parameters(), lr=0.05), synchronize)


def swap_weights(model: Any, loss: Loss) -> list[Any]:
    """Give parameters other values by `.data`, and take the first ones back, as evaluations of averages do."""
    losses(model, loss, SGD(model.parameters(), lr=0.05))
    kept = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    halved = loss(model, 0).detach()
    for parameter, values in zip(model.parameters(), kept, strict=True):
        parameter.data = values
    return [halved, *losses(model, loss, SGD(model.parameters(), lr=0.05))]


# Steps by hand --------------------------------------------------------------------------------------------------------


def sharpness_aware(model: Any, loss: Loss) -> list[Any]:
    """Sharpness-aware minimization: climb along the gradient, and step with the gradient from there."""
    optimizer, norms = SGD(model.parameters(), lr=0.05), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step).backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([gradient.norm(p=2) for gradient in gradients(model)]), p=2)
            climbed = [gradient * (0.05 / norm) for gradient in gradients(model)]
            for parameter, distance in zip(model.parameters(), climbed, strict=True):
                parameter.add_(distance)
        optimizer.zero_grad()
        loss(model, step).backward()
        with torch.no_grad():
            for parameter, distance in zip(model.parameters(), climbed, strict=True):
                parameter.sub_(distance)
        optimizer.step()
        norms.append(norm)
    return norms


class Sam(Optimizer):
    """Sharpness-aware minimization as an optimizer around another, as its public implementations are."""

    def __init__(self, parameters: Iterable[Any], base: type[Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.norm(torch.stack([parameter.grad.norm(p=2) for parameter in parameters]), p=2)
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for parameter in parameters:
            parameter.data = self.state[parameter]["old"]
        self.base.step()
        self.zero_grad()


def sam_optimizer(model: Any, loss: Loss) -> list[Any]:
    optimizer = Sam(model.parameters(), SGD, lr=0.05)
    for step in range(STEPS):
        loss(model, step).backward()
        optimizer.step(lambda step=step: loss(model, step).backward())
    return []


def trust_ratio(model: Any, loss: Loss) -> list[Any]:
    """Steps scaled by the norms of weight and update, as LARS and LAMB scale them."""
    for step in range(STEPS):
        loss(model, step).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                update = parameter.grad + 0.01 * parameter
                ratio = parameter.norm() / (update.norm() + 1e-6)
                parameter.sub_(update * (0.01 * ratio))
                parameter.grad = None
    return []


def sign_steps(model: Any, loss: Loss) -> list[Any]:
    """As Lion: the sign of an interpolation of momentum and gradient."""
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(STEPS):
        loss(model, step).backward()
        with torch.no_grad():
            for parameter, momentum in zip(model.parameters(), momenta, strict=True):
                parameter.mul_(1 - 0.01 * 0.1)
                parameter.add_(torch.sign(torch.lerp(parameter.grad, momentum, 0.9)), alpha=-0.01)
                momentum.lerp_(parameter.grad, 0.01)
                parameter.grad = None
    return [whole(momentum).norm() for momentum in momenta]


def relative_steps(model: Any, loss: Loss) -> list[Any]:
    """Steps relative to the root mean square of each parameter, clipped by that of the update, as Adafactor's are."""
    for step in range(STEPS):
        loss(model, step).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                update = parameter.grad / parameter.grad.abs().clamp(min=1e-8).sqrt()
                update = update / (update.pow(2).mean().sqrt() / 1.0).clamp(min=1.0)
                parameter.sub_(update * 0.01 * parameter.pow(2).mean().sqrt().clamp(min=1e-3))
                parameter.grad = None
    return []


class Lion(Optimizer):
    """An element-wise optimizer that is not torch's."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                update = momentum.clone().mul_(group["betas"][0]).add(parameter.grad, alpha=1 - group["betas"][0])
                parameter.add_(update.sign_(), alpha=-group["lr"])
                momentum.mul_(group["betas"][1]).add_(parameter.grad, alpha=1 - group["betas"][1])


class ClippedSgd(Optimizer):
    """Clips each gradient by its norm, above a limit that small gradients do not reach."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01, limit: float = 100.0) -> None:
        super().__init__(parameters, {"lr": lr, "limit": limit})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = (group["limit"] / parameter.grad.norm()).clamp(max=1.0)
                parameter.add_(parameter.grad * scale, alpha=-group["lr"])


class Lars(Optimizer):
    """LARS whose trust ratio is an option of each group."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01, trust: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / parameter.grad.norm() if group["trust"] else 1.0
                parameter.add_(parameter.grad * ratio, alpha=-group["lr"])


class BlockState(Optimizer):
    """Momentum that is kept rounded in blocks of 256 elements, of tensors of more than 4096."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter)).add_(parameter.grad)
                if parameter.numel() > 4096:
                    blocks = momentum.flatten().split(256)
                    momentum.copy_(
                        torch.cat([(b / b.max() * 127).round() * b.max() / 127 for b in blocks]).view_as(momentum)
                    )
                parameter.add_(momentum, alpha=-group["lr"])


class PreconditionsLate(Optimizer):
    """Scales steps by the norm of the gradient, from the 25th on."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                scale = 1 / parameter.grad.norm() if state["step"] >= 25 else 1.0
                parameter.add_(parameter.grad * scale, alpha=-group["lr"])


class EstimatesRate(Optimizer):
    """Its rate grows while gradients of all parameters are alike, as of D-Adaptation and Prodigy."""

    def __init__(self, parameters: Iterable[Any], lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            alike = square = 0.0
            for parameter in group["params"]:
                total = self.state[parameter].setdefault("s", torch.zeros_like(parameter))
                alike += float((total * parameter.grad).sum())
                total += parameter.grad
                square += float(total.abs().sum())
            group["d"] = max(group["d"], group["d"] * alike / max(square, 1e-12))
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * group["d"])


class Projects(Optimizer):
    """Takes from a step what is parallel to the weights, of matrices whose gradient is orthogonal to them: as AdamP."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                update = self.state[parameter].setdefault("m", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                if parameter.dim() > 1:
                    cosine = nn.functional.cosine_similarity(parameter.grad, parameter, dim=1)
                    if cosine.abs().max() < 0.01:
                        update = update - parameter * (update * parameter).sum(1, keepdim=True)
                parameter.add_(update, alpha=-group["lr"])


class ClipsTogether(Optimizer):
    """Clips by the norm of all gradients within its step, as implementations of LAMB do."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = torch.stack([parameter.grad.norm() for parameter in group["params"]]).norm()
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (group["lr"] / norm.clamp(min=1.0)))


def whole_tensors(kind: Any) -> Callable[[], Any]:
    return lambda: WholeTensorOptimizer(shard_layers(Model()).parameters(), kind)


def by_optimizer(make: Callable[[Any], Optimizer]) -> Callable[[Any, Loss], list[Any]]:
    return lambda model, loss: losses(model, loss, make(model))


def in_a_hook(model: Any, loss: Loss) -> list[Any]:
    """Clip in a hook of the optimizer's that runs before each step."""
    optimizer, norms = AdamW(model.parameters(), lr=0.01), []

    def clip(*_: Any) -> None:
        norms.append(torch.stack([gradient.norm() for gradient in gradients(model)]).norm())
        for gradient in gradients(model):
            gradient.mul_((LARGE_NORM / norms[-1]).clamp(max=1.0))

    optimizer.register_step_pre_hook(clip)
    return [losses(model, loss, optimizer), *norms]


def hooked_late(model: Any, loss: Loss) -> list[Any]:
    """Register a hook that clips after some steps without one, also of an optimizer that is fused."""
    norms: list[Tensor] = []
    for options in ({"fused": True}, {"foreach": True}, {}):
        optimizer = AdamW(model.parameters(), lr=0.01, **options)
        losses(model, loss, optimizer)
        optimizer.register_step_pre_hook(lambda *_: norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        losses(model, loss, optimizer)
    return norms


def scheduled(model: Any, loss: Loss) -> list[Any]:
    """A schedule that is made before the first step, and one after it: neither says that `step` was overridden."""
    optimizer = AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
            schedule.step()
    optimizer = AdamW(model.parameters(), lr=0.01)
    losses(model, loss, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses(model, loss, optimizer, schedule.step)
    return [optimizer.param_groups[0]["lr"]]


def resumed_optimizer(model: Any, loss: Loss) -> list[Any]:
    """Load an optimizer's own state into a new one."""
    first = AdamW(model.parameters(), lr=0.01)
    losses(model, loss, first)
    second = AdamW(model.parameters(), lr=0.01)
    losses(model, loss, second)
    second.load_state_dict(first.state_dict())
    return losses(model, loss, second)


def set_gradients(model: Any, loss: Loss) -> list[Any]:
    """Set gradients anew: none for norms, scaled copies for others."""

    def scale() -> None:
        for parameter in model.parameters():
            parameter.grad = None if parameter.dim() < 2 else parameter.grad.clone() * 2

    return losses(model, loss, SGD(model.parameters(), lr=0.05, momentum=0.9), scale)


# Refused --------------------------------------------------------------------------------------------------------------


def optimizer_before_sharding() -> None:
    model = Model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    shard_layers(model)(batch(0, 0, 0).float()).mean().backward()
    optimizer.step()


def backward_of_inputs() -> None:
    model = shard_layers(Model())
    model(batch(0, 0, 0).float()).mean().backward(inputs=list(model.parameters()))


def autograd_of_parameters() -> None:
    model = shard_layers(Model())
    torch.autograd.grad(model(batch(0, 0, 0).float()).mean(), list(model.parameters()))


class Special(nn.Parameter):
    """A parameter that behaves otherwise."""


def parameter_subclass() -> None:
    layer = Layer()
    layer.scale = Special(torch.ones(WIDTH))
    fully_shard(layer)


def embedding_with_max_norm() -> None:
    fully_shard(nn.Sequential(nn.Embedding(16, WIDTH, max_norm=1.0)))


def stepped(kind: Any, **group: Any) -> Callable[[], None]:
    def step() -> None:
        model = shard_layers(Model())
        first, *rest = model.parameters()
        optimizer = kind([{"params": rest}, {"params": [first], **group}])
        model(batch(0, 0, 0).float()).mean().backward()
        optimizer.step()

    return step


def whole_only(use: Callable[[Any], Any]) -> Callable[[], None]:
    def do() -> None:
        use(shard_layers(Model()).head.weight)

    return do


class ReturnsListInObject(Layer):
    def forward(self, x: Tensor) -> Any:
        holder = type("Holder", (), {})()
        holder.values = {"weights": [[self.scale]]}
        return super().forward(x), holder


def weight_deep_in_an_output() -> None:
    layer = fully_shard(ReturnsListInObject())
    layer(batch(0, 0, 0).float())


class KeepsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.w = weight  # not by save_for_backward
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.w, None


class FrozenScale(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.branch: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        BRANCHES.append((x, KeepsWeight.apply(x, self.scale)))
        return super().forward(x)


BRANCHES: list[tuple[Tensor, Tensor]] = []


def frozen_weight_kept_by_a_function() -> None:
    BRANCHES.clear()
    model = shard_layers(Model(FrozenScale))
    model(batch(0, 0, 0).float())
    BRANCHES[0][1].sum().backward()


# All ------------------------------------------------------------------------------------------------------------------

OF_TORCH: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW, foreach": lambda m: AdamW(m.parameters(), lr=0.01, foreach=True),
    "AdamW, one by one": lambda m: AdamW(m.parameters(), lr=0.01, foreach=False),
    "AdamW, fused": lambda m: AdamW(m.parameters(), lr=0.01, fused=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.5),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.05),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "Lion": lambda m: Lion(m.parameters()),
}
PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "norms": lambda m: sum(p.norm() for p in m.parameters()),  # type: ignore[return-value, misc]
    "absolute values": lambda m: sum(p.abs().sum() for p in m.parameters()),  # type: ignore[return-value, misc]
    "means": lambda m: sum(p.mean() * p.square().mean() for p in m.parameters()),  # type: ignore[return-value, misc]
    "largest": lambda m: sum(p.max() + p.abs().max() for p in m.parameters() if p.dim() == 2),  # type: ignore[return-value, misc]
    "logarithms": lambda m: sum(torch.log1p(p.square()).sum() for p in m.parameters()),  # type: ignore[return-value, misc]
    "spectral norms": spectral,
    "third norms": lambda m: sum(torch.linalg.vector_norm(p, 3) for p in m.parameters()),  # type: ignore[return-value, misc]
}
EXACT: dict[str, Callable[[Any, Loss], list[Any]]] = {
    "decay by dims": decay_by_dim,
    "norms of gradients": gradient_norms,
    "clipped by hand": clip_by_hand,
    "clipped one by one": clip_each,
    "clipped values": clip_values,
    "watched": watch,
    "gradient surgery": similarity_of_gradients,
    "near the first weights": prox,
    "a penalty by batch": by_batch,
    "on a sphere": project_to_sphere,
    "clamped weights": clamp_weights,
    "pruned": prune,
    "drawn after sharding": draw_weights,
    "gradient noise": gradient_noise,
    "averaged by hand": average_by_hand,
    "averaged by torch": average_by_torch,
    "lookahead": lookahead,
    "weights swapped": swap_weights,
    "sharpness-aware": sharpness_aware,
    "an optimizer that is sharpness-aware": sam_optimizer,
    "trust ratios": trust_ratio,
    "signs": sign_steps,
    "relative steps": relative_steps,
    "clipped in a hook": in_a_hook,
    "a hook registered late": hooked_late,
    "a schedule made late": scheduled,
    "an optimizer resumed": resumed_optimizer,
    "gradients set": set_gradients,
    **{f"penalty on {name}": penalized(penalty) for name, penalty in PENALTIES.items()},
    **{f"optimizer {name}": by_optimizer(make) for name, make in OF_TORCH.items()},
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an optimizer made before": (optimizer_before_sharding, "RuntimeError: .*made before fully_shard"),
    "backward for parameters": (backward_of_inputs, "NotImplementedError: .*inputs"),
    "autograd.grad of parameters": (autograd_of_parameters, "NotImplementedError: .*autograd.grad"),
    "a class of parameters": (parameter_subclass, "NotImplementedError: .*class Special"),
    "an embedding with max_norm": (embedding_with_max_norm, "NotImplementedError: .*max_norm"),
    "a trust ratio of one group": (stepped(Lars, trust=True), "NotImplementedError: .*Lars needs whole tensors"),
    "clipping of large gradients": (stepped(ClippedSgd), "NotImplementedError: .*ClippedSgd needs whole tensors"),
    "late preconditioning": (
        stepped(PreconditionsLate),
        "NotImplementedError: .*PreconditionsLate needs",
    ),
    "an estimated rate": (stepped(EstimatesRate), "NotImplementedError: .*EstimatesRate needs whole tensors"),
    "a projection": (stepped(Projects), "NotImplementedError: .*Projects needs whole tensors"),
    "clipping of all together": (
        whole_tensors(ClipsTogether),
        "NotImplementedError: .*ClipsTogether with",
    ),
    "a rate estimated from all": (
        whole_tensors(EstimatesRate),
        "NotImplementedError: .*EstimatesRate with",
    ),
    "state in blocks": (stepped(BlockState), "NotImplementedError: .*BlockState needs whole tensors"),
    "a weight deep in an output": (weight_deep_in_an_output, "RuntimeError: .*keep a copy there"),
    "a frozen weight kept by a function": (frozen_weight_kept_by_a_function, "RuntimeError: "),
    "a norm by rows": (whole_only(lambda w: w.norm(dim=1)), "NotImplementedError: .*along a dim"),
    "a mean by columns": (whole_only(lambda w: w.mean(0)), "NotImplementedError: .*along a dim"),
    "a vector of parameters": (
        whole_only(lambda w: nn.utils.parameters_to_vector([w])),
        "NotImplementedError: .*view.*full_tensor",
    ),
    "an index": (whole_only(lambda w: w[0]), "NotImplementedError: .*__getitem__ needs the whole tensor"),
    "a product": (whole_only(lambda w: w @ w), "NotImplementedError: .*needs the whole tensor"),
    "a transposition": (whole_only(lambda w: w.t()), "NotImplementedError: .*needs the whole tensor"),
    "a median": (whole_only(lambda w: w.median()), "NotImplementedError: .*median needs the whole tensor"),
    "numpy": (whole_only(lambda w: w.detach().numpy()), "NotImplementedError: .*numpy needs the whole tensor"),
    "torch.save": (whole_only(lambda w: copy.copy(w).__reduce_ex__(2)), "NotImplementedError: .*torch.save"),
    "another parameter's shard": (
        whole_only(lambda w: w + shard_layers(Model()).inlet.bias),
        "NotImplementedError: .*different parameters",
    ),
    "a whole tensor written to": (
        whole_only(lambda w: torch.zeros(WIDTH, WIDTH).copy_(w.detach())),
        "NotImplementedError: .*write one rank's part",
    ),
}


def outcome(name: str) -> float | str:
    """Return the largest relative difference of a recipe from one process, or the error's class and words."""
    try:
        return _difference(EXACT[name]) if name in EXACT else _none(REFUSED[name][0])
    except Exception as error:  # noqa: BLE001 -- the error is the result
        return f"{type(error).__name__}: {error}"


def _none(do: Callable[[], Any]) -> str:
    do()
    return "nothing was refused"


def _difference(recipe: Callable[[Any, Loss], list[Any]]) -> float:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model().double())
    sharded, reference = shard_layers(models[0]), models[1]
    ranks = range(dist.get_world_size())

    def of_own_batch(model: Any, step: int) -> Tensor:
        return model(batch(step, 0, dist.get_rank())).square().mean()  # type: ignore[no-any-return]

    def of_all_batches(model: Any, step: int) -> Tensor:
        return sum(model(batch(step, 0, rank)).square().mean() for rank in ranks) / len(ranks)  # type: ignore[return-value]

    numbers = recipe(sharded, of_own_batch), recipe(reference, of_all_batches)
    largest = 0.0
    for own, expected in zip(*map(_flat, numbers), strict=True):
        mean = torch.as_tensor(own, dtype=torch.float64).detach().clone()
        dist.all_reduce(mean)  # a loss is that of a rank's batch; all other numbers are the same on all ranks
        expected = torch.as_tensor(expected, dtype=torch.float64).detach()
        largest = max(largest, relative(mean / len(ranks), expected))
    for own, parameter in zip(sharded.parameters(), reference.parameters(), strict=True):
        largest = max(largest, relative(own.detach().full_tensor(), parameter.detach()))
    return largest if math.isfinite(largest) else math.inf


def _flat(numbers: Any) -> list[Any]:
    return [leaf for number in numbers for leaf in _flat(number)] if isinstance(numbers, list | tuple) else [numbers]

"""Training loops of public repositories that read or write weights and gradients by hand. Not a test.

Sources: Reptile, EWC, SWAG and L2-SP in continual and meta learning, AGC of NFNets, gradient centralization, PCGrad and
GradNorm of multi-task learning, EMA by torch._foreach (diffusers, func_ema_update), IMP and SNIP of pruning, Fixup and
muP of initialisation, nn.utils' vectors of parameters (trust-region and evolution methods), k-bit weight observers.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, lr_scheduler

from tests.integration.yafsdp_attacks import batch
from tests.integration.yafsdp_more_recipes import Recipe, Side, loop, outcome_of, squared, whole


def weights_of(model: Any) -> list[Any]:
    return list(model.parameters())


def gradients(model: Any, side: Side, step: int = 0) -> list[Any]:
    """Gradients of one step, over all data."""
    model.zero_grad()
    side.mean(squared(model), step).backward()
    return [weight.grad for weight in weights_of(model)]


def by_hand(change: Callable[[Any, Side], Any]) -> Recipe:
    """Change gradients by hand between backward and each of three steps of SGD."""

    def train(model: Any, side: Side) -> None:
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            gradients(model, side, step)
            with torch.no_grad():
                change(model, side)
            optimizer.step()

    return loop(train)


def after_steps(change: Callable[[Any], Any]) -> Recipe:
    """Change weights by hand after each step."""

    def train(model: Any, side: Side) -> list[Any]:
        def changed() -> None:
            with torch.no_grad():
                change(model)

        return side.train(SGD(model.parameters(), lr=0.05), squared(model), changed)

    return loop(train)


def read(value: Callable[[Any], Any]) -> Recipe:
    """Read a number of each weight and of each gradient, as monitors, observers and schedules do.

    It is compared beside the size of the tensor: gradients before a normalization have a sum of zero, but for rounding.
    """

    def numbers(model: Any, side: Side) -> list[Any]:
        tensors = [*weights_of(model), *gradients(model, side)]
        with torch.no_grad():
            values = [torch.as_tensor(whole(value(tensor)), dtype=torch.float64) for tensor in tensors]
            sizes = [whole(tensor.abs().sum()).reshape(1) for tensor in tensors]
            return [torch.cat([value.flatten(), size]) for value, size in zip(values, sizes, strict=True)]

    return loop(numbers)


# Weights --------------------------------------------------------------------------------------------------------------


def reptile(model: Any, side: Side) -> None:
    for outer in range(2):
        slow = copy.deepcopy(model.state_dict())
        side.train(SGD(model.parameters(), lr=0.05), squared(model))
        fast = model.state_dict()
        mixed = {name: slow[name] + (fast[name] - slow[name]) * (0.5 - 0.1 * outer) for name in slow}
        model.load_state_dict(mixed)


def swag(model: Any, side: Side) -> list[Any]:
    """First and second moments of weights along the way, and a draw of their mean and spread."""
    means = [torch.zeros_like(weight) for weight in weights_of(model)]
    squares = [torch.zeros_like(weight) for weight in weights_of(model)]
    optimizer = SGD(model.parameters(), lr=0.1)
    for count in range(3):
        side.train(optimizer, squared(model), steps=1)
        with torch.no_grad():
            for mean, square, weight in zip(means, squares, weights_of(model), strict=True):
                mean.mul_(count / (count + 1)).add_(weight, alpha=1 / (count + 1))
                square.mul_(count / (count + 1)).add_(weight.square(), alpha=1 / (count + 1))
    torch.manual_seed(5)
    with torch.no_grad():
        for mean, square, weight in zip(means, squares, weights_of(model), strict=True):
            spread = (square - mean.square()).clamp(1e-30).sqrt()
            weight.copy_(mean + spread * torch.randn_like(weight))
    return [whole(spread) for spread in squares]


def elastic(model: Any, side: Side) -> list[Any]:
    """A penalty of the distance from earlier weights, by their Fisher information."""
    fisher = [gradient.detach().clone().pow(2) for gradient in gradients(model, side)]
    anchors = [weight.detach().clone() for weight in weights_of(model)]

    def loss(step: int, rank: int) -> Tensor:
        parts = zip(fisher, anchors, weights_of(model), strict=True)
        penalty = sum((importance * (weight - anchor).pow(2)).sum() for importance, anchor, weight in parts)
        return squared(model)(step + 1, rank) + 10 * penalty

    return side.train(SGD(model.parameters(), lr=0.05), loss)


def foreach_average(model: Any, side: Side) -> list[Any]:
    average = [weight.detach().clone() for weight in weights_of(model)]

    def lerp() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(average, weights_of(model), 0.1)

    side.train(AdamW(model.parameters(), lr=0.01), squared(model), lerp)
    return [whole(weight) for weight in average]


def foreach_arithmetic(model: Any) -> None:
    weights = weights_of(model)
    torch._foreach_mul_(weights, 0.9)
    torch._foreach_add_(weights, [weight.sign() for weight in weights], alpha=0.01)


def rolled_back(model: Any, side: Side) -> list[Any]:
    """A step that makes the loss worse is taken back, with the optimizer's state."""
    optimizer = AdamW(model.parameters(), lr=0.01)
    side.train(optimizer, squared(model))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    side.train(optimizer, squared(model), steps=1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return side.train(optimizer, squared(model))


def soft_threshold(model: Any) -> None:
    for weight in weights_of(model):
        weight.data = weight.sign() * functional.relu(weight.abs() - 0.01)


def pruned_by_quantile(model: Any) -> None:
    for weight in weights_of(model):
        weight.mul_((weight.abs() > 0.1 * weight.abs().max()).to(weight.dtype))


def pruned_over_all(model: Any) -> None:
    """Remove the smallest tenth of all weights together."""
    flat = torch.cat([weight.abs().flatten() for weight in weights_of(model)])
    threshold = flat.kthvalue(max(1, flat.numel() // 10)).values
    for weight in weights_of(model):
        weight.mul_((weight.abs() > threshold).to(weight.dtype))


def centred(model: Any) -> None:
    for weight in weights_of(model):
        weight.sub_(weight.mean())


def unit_rows(model: Any) -> None:
    for weight in weights_of(model):
        if weight.dim() > 1:
            weight.div_(weight.norm(dim=1, keepdim=True))


def scaled_by_fan(model: Any, side: Side) -> list[Any]:
    with torch.no_grad():
        for weight in weights_of(model):
            if weight.dim() > 1:
                weight.mul_(weight.shape[1] ** -0.5)
    return side.train(SGD(model.parameters(), lr=0.05), squared(model))


def drawn_orthogonal(model: Any, side: Side) -> list[Any]:
    torch.manual_seed(3)
    for weight in weights_of(model):
        if weight.dim() > 1:
            nn.init.orthogonal_(weight)
    return side.train(SGD(model.parameters(), lr=0.05), squared(model))


def drawn_truncated(model: Any, side: Side) -> list[Any]:
    torch.manual_seed(3)
    for weight in weights_of(model):
        nn.init.trunc_normal_(weight, std=0.02)
    return side.train(SGD(model.parameters(), lr=0.05), squared(model))


def by_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def evolved(model: Any) -> None:
    """Noise of one seed is added to all weights."""
    torch.manual_seed(11)
    for weight in weights_of(model):
        weight.add_(torch.randn(weight.shape, dtype=weight.dtype), alpha=0.01)


def snip(model: Any, side: Side) -> list[Any]:
    """Weights are masked by the product of weight and gradient, on the share that all of them have together."""
    scores = [(w * g).abs().detach() for w, g in zip(weights_of(model), gradients(model, side), strict=True)]
    total = sum(score.sum() for score in scores)
    with torch.no_grad():
        for weight, score in zip(weights_of(model), scores, strict=True):
            weight.mul_((score / total > 1e-3).to(weight.dtype))
    return side.train(SGD(model.parameters(), lr=0.05), squared(model))


# Gradients ------------------------------------------------------------------------------------------------------------


def adaptively_clipped(model: Any, side: Side) -> None:
    """By the norm of each weight: AGC without units."""
    for weight in weights_of(model):
        limit = weight.norm().clamp(min=1e-3) * 0.01
        weight.grad.mul_((limit / weight.grad.norm().clamp(min=1e-6)).clamp(max=1.0))


def clipped_by_unit(model: Any, side: Side) -> None:
    for weight in weights_of(model):
        if weight.dim() > 1:
            norms = weight.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)
            weight.grad.mul_((0.01 * weight.norm(dim=1, keepdim=True) / norms).clamp(max=1.0))


def centralized(model: Any, side: Side) -> None:
    for weight in weights_of(model):
        if weight.dim() > 1:
            weight.grad.sub_(weight.grad.mean(dim=1, keepdim=True))


def normalized(model: Any, side: Side) -> None:
    total = torch.stack([weight.grad.norm() for weight in weights_of(model)]).norm()
    for weight in weights_of(model):
        weight.grad.div_(total + 1e-6)


def clipped_by_foreach(model: Any, side: Side) -> None:
    grads = [weight.grad for weight in weights_of(model)]
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (0.1 / (total + 1e-6)).clamp(max=1.0))


def clipped_at_quantile(model: Any, side: Side) -> None:
    for weight in weights_of(model):
        limit = weight.grad.abs().flatten().quantile(0.9)
        weight.grad.clamp_(-limit, limit)


def masked_by_sign(model: Any, side: Side) -> None:
    for weight in weights_of(model):
        mask = (weight * weight.grad > 0).to(weight.dtype)
        weight.grad.mul_(mask / mask.mean().clamp(min=1e-3))


def without_gradient(model: Any, side: Side) -> None:
    """Gradients with no finite sum are left out."""
    for weight in weights_of(model):
        torch.nan_to_num_(weight.grad, nan=0.0, posinf=1.0, neginf=-1.0)
        if not torch.isfinite(weight.grad).all():
            weight.grad = None


def surgery(model: Any, side: Side) -> list[Any]:
    """PCGrad: the part of one task's gradient that opposes the other's is taken away."""
    optimizer = SGD(model.parameters(), lr=0.05)
    for step in range(2):
        first = [gradient.detach().clone() for gradient in gradients(model, side, step)]
        second = gradients(model, side, step + 9)
        dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        size = sum(a.square().sum() for a in first)
        with torch.no_grad():
            for a, b in zip(first, second, strict=True):
                b.sub_(a * (dot / size).clamp(max=0.0)).add_(a)
        optimizer.step()
    return [dot / size]


def accumulated_by_hand(model: Any, side: Side) -> None:
    """Sums of gradients are kept beside the model, and given back to it."""
    sums = [torch.zeros_like(weight) for weight in weights_of(model)]
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        for total, gradient in zip(sums, gradients(model, side, step), strict=True):
            total.add_(gradient, alpha=1 / 3)
    for weight, total in zip(weights_of(model), sums, strict=True):
        weight.grad = total
    optimizer.step()


def per_layer_rates(model: Any, side: Side) -> None:
    """A rate for each weight by its trust ratio, set in the groups."""
    optimizer = SGD([{"params": [weight]} for weight in weights_of(model)], lr=0.05)
    for step in range(3):
        gradients(model, side, step)
        for group in optimizer.param_groups:
            (weight,) = group["params"]
            group["lr"] = 0.05 * float(weight.norm() / (weight.grad.norm() + 1e-6))
        optimizer.step()


# Optimizers and schedules ---------------------------------------------------------------------------------------------


def by_torch(kind: Callable[..., Any], **options: Any) -> Recipe:
    return loop(lambda model, side: side.train(kind(model.parameters(), **options), squared(model)))


def cycled(model: Any, side: Side) -> list[Any]:
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    rate = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    losses = side.train(optimizer, squared(model), rate.step)
    return [*losses, optimizer.param_groups[0]["momentum"]]


def restarted(model: Any, side: Side) -> list[Any]:
    optimizer = AdamW(model.parameters(), lr=0.01)
    rate = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)

    def after() -> None:
        rate.step()
        if rate.T_cur == 0:
            optimizer.state.clear()

    return side.train(optimizer, squared(model), after, steps=4)


def functional_inner_loop(model: Any, side: Side) -> list[Any]:
    """MAML: the loss of weights that a step of gradients has changed."""
    names = [name for name, _ in model.named_parameters()]
    inner = side.mean(squared(model), 0)
    grads = torch.autograd.grad(inner, weights_of(model), create_graph=True)
    fast = {n: w - 0.05 * g for n, w, g in zip(names, weights_of(model), grads, strict=True)}
    outer = torch.func.functional_call(model, fast, (batch(1, 0, side.ranks[0]),)).square().mean()
    outer.backward()
    return [outer]


WEIGHTS: dict[str, Recipe] = {
    "Reptile": loop(reptile),
    "SWAG": loop(swag),
    "EWC": loop(elastic),
    "average by foreach": loop(foreach_average),
    "arithmetic by foreach": after_steps(foreach_arithmetic),
    "rolled back": loop(rolled_back),
    "soft threshold": after_steps(soft_threshold),
    "pruned by the largest": after_steps(pruned_by_quantile),
    "pruned over all weights": after_steps(pruned_over_all),
    "centred weights": after_steps(centred),
    "rows of unit length": after_steps(unit_rows),
    "scaled by fan-in": loop(scaled_by_fan),
    "drawn orthogonal": loop(drawn_orthogonal),
    "drawn truncated": loop(drawn_truncated),
    "weights as a vector": after_steps(by_vector),
    "noise of whole shapes": after_steps(evolved),
    "SNIP": loop(snip),
    "MAML": loop(functional_inner_loop),
}
GRADIENTS: dict[str, Recipe] = {
    "AGC": by_hand(adaptively_clipped),
    "AGC by unit": by_hand(clipped_by_unit),
    "centralized": by_hand(centralized),
    "normalized": by_hand(normalized),
    "clipped by foreach": by_hand(clipped_by_foreach),
    "clipped at a quantile": by_hand(clipped_at_quantile),
    "masked by sign": by_hand(masked_by_sign),
    "without infinities": by_hand(without_gradient),
    "PCGrad": loop(surgery),
    "accumulated by hand": loop(accumulated_by_hand),
    "a rate for each weight": loop(per_layer_rates),
}
SCHEDULES: dict[str, Recipe] = {
    "one cycle": loop(cycled),
    "warm restarts": loop(restarted),
    "ASGD": by_torch(ASGD, lr=0.05, t0=1),
    "Adadelta": by_torch(Adadelta, lr=0.5),
    "Adagrad": by_torch(Adagrad, lr=0.05, lr_decay=0.1),
    "Adamax": by_torch(Adamax, lr=0.01),
    "NAdam": by_torch(NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": by_torch(RAdam, lr=0.01),
    "RMSprop": by_torch(RMSprop, lr=0.01, centered=True, momentum=0.9),
    "Rprop": by_torch(Rprop, lr=0.01),
}
READ: dict[str, Callable[[Any], Any]] = {
    "std": lambda w: w.std(),
    "var": lambda w: w.var(unbiased=False),
    "root of mean square": lambda w: w.square().mean().sqrt(),
    "torch.norm": lambda w: torch.norm(w, 2),
    "linalg.norm": lambda w: torch.linalg.norm(w),
    "linalg.matrix_norm": lambda w: torch.linalg.matrix_norm(w) if w.dim() > 1 else w.norm(),
    "spectral": lambda w: torch.linalg.matrix_norm(w, 2) if w.dim() > 1 else w.norm(),
    "aminmax": lambda w: torch.stack(torch.aminmax(w)),
    "median": lambda w: w.median(),
    "quantile": lambda w: w.flatten().quantile(0.5),
    "histogram": lambda w: torch.histc(w, 10, -1, 1),
    "bucketize": lambda w: torch.bucketize(w, torch.linspace(-1, 1, 5, dtype=w.dtype)).double().mean(),
    "count_nonzero": lambda w: torch.count_nonzero(w),
    "sparsity": lambda w: (w.abs() < 0.1).double().mean(),
    "argmax": lambda w: w.argmax(),
    "largest three": lambda w: w.abs().flatten().topk(3).values,
    "sorted": lambda w: w.flatten().sort().values[:2],
    "product": lambda w: w.prod(),
    "logsumexp": lambda w: w.flatten().logsumexp(0),
    "cumulated": lambda w: w.flatten().cumsum(0)[-1],
    "trace": lambda w: w.trace() if w.dim() > 1 else w.sum(),
    "first row": lambda w: w[0].sum(),
    "by columns": lambda w: w.sum(dim=0).sum(),
    "nansum": lambda w: w.nansum(),
    "nanmean": lambda w: w.nanmean(),
    "is finite": lambda w: torch.isfinite(w).all(),
    "equal to itself": lambda w: float(torch.equal(w, w.clone())),
    "close to itself": lambda w: float(torch.allclose(w, w + 1e-12)),
    "numpy": lambda w: float(w.detach().numpy().sum()),
    "list": lambda w: sum(torch.tensor(w.tolist()).flatten().tolist()),
    "length": lambda w: float(len(w)),
    "iterated": lambda w: sum(row.sum() for row in w),
    "flattened": lambda w: w.reshape(-1).dot(w.reshape(-1)),
    "einsum": lambda w: torch.einsum("...i,...i->", w, w),
    "cosine": lambda w: functional.cosine_similarity(w.flatten(), w.flatten() * 2, dim=0),
    "mean square error": lambda w: functional.mse_loss(w, torch.zeros_like(w)),
    "L1 loss": lambda w: functional.l1_loss(w, torch.zeros_like(w), reduction="sum"),
    "entropy": lambda w: -(w.abs() / w.abs().sum() * (w.abs() / w.abs().sum() + 1e-9).log()).sum(),
    "softmax": lambda w: w.flatten().softmax(0).max(),
    "distance": lambda w: torch.dist(w, w * 2),
    "unique": lambda w: float(w.sign().unique().numel()),
    "where": lambda w: torch.where(w > 0, w, 0.0).sum(),
    "masked": lambda w: w[w > 0].sum(),
    "masked select": lambda w: w.masked_select(w > 0).sum(),
    "nonzero": lambda w: float(w.nonzero().shape[0]),
    "item": lambda w: w.sum().item(),
    "size of storage": lambda w: float(w.element_size() * w.nelement()),
    "stacked": lambda w: torch.stack([w, w]).sum(),
    "concatenated": lambda w: torch.cat([w.flatten(), w.flatten()]).norm(),
    "rounded to a grid": lambda w: (w / w.abs().max() * 7).round().clamp(-8, 7).sum(),
    "quantized": lambda w: torch.fake_quantize_per_tensor_affine(w.float(), 0.1, 0, -8, 7).double().sum(),
    "to a dtype": lambda w: w.float().double().sum(),
    "renormalized": lambda w: w.renorm(2, 0, 1.0).sum() if w.dim() > 1 else w.sum(),
    "dropped out": lambda w: functional.dropout(w, 0.0).sum(),
    "normalized": lambda w: functional.normalize(w, dim=-1).square().sum(),
    "any": lambda w: (w > 0.1).any(),
    "sum of booleans": lambda w: (w > 0).sum(),
    "minimum with": lambda w: torch.minimum(w, w.mean()).sum(),
    "greater than all": lambda w: torch.gt(w, w.max() / 2).sum(),
    "expanded": lambda w: w.expand(2, *w.shape).sum(),
    "chunks": lambda w: w.flatten().chunk(2)[0].sum(),
    "rolled": lambda w: (w.flatten().roll(1) * w.flatten()).sum(),
    "flipped": lambda w: (w.flatten().flip(0) * w.flatten()).sum(),
    "transposed": lambda w: (w.t() @ w).sum() if w.dim() > 1 else w.sum(),
    "square of sum": lambda w: torch.var_mean(w)[1].square(),
}
READ_PREFIX = "read: "
RECIPES: dict[str, Recipe] = (
    WEIGHTS | GRADIENTS | SCHEDULES | {f"{READ_PREFIX}{name}": read(value) for name, value in READ.items()}
)
REFUSED = frozenset(
    {
        "Reptile", "pruned over all weights", "rows of unit length", "weights as a vector", "MAML", "AGC by unit",
        "centralized", "clipped at a quantile",
    }
)  # fmt: skip
"""Recipes that need rows, columns, an order or a vector of whole tensors. Of `READ`, each is right or refused."""


def outcome(name: str) -> float | str:
    """Return the largest relative difference from one process, or the error's class and words."""
    return outcome_of(RECIPES[name])

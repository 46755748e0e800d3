"""Models and training loops of public repositories, on sharded models and on plain ones. Not a test.

Each recipe makes models through a `Side` and trains them; what it returns and the models' weights are compared.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from instrumented_trainers.parallelism.yafsdp import fully_shard
from tests.integration.parity import relative
from tests.integration.yafsdp_attacks import WIDTH, Layer, Model, batch, shard_layers

STEPS = 3
Loss = Callable[[int, int], Tensor]
"""Of a step and a data-parallel rank: that rank's loss."""


class Side:
    """A sharded model on this rank's data, or a plain one on all ranks' data."""

    def __init__(self, ranks: Sequence[int], *, is_sharded: bool) -> None:
        self.ranks, self.is_sharded = ranks, is_sharded
        self.models: list[nn.Module] = []

    def make(self, build: Callable[[], nn.Module], **options: Any) -> Any:
        torch.manual_seed(len(self.models))
        model = build().double()
        self.models.append(model)
        if not self.is_sharded:
            return model
        if hasattr(model, "layers"):
            return shard_layers(model, **options)
        for child in model.children():
            if next(child.parameters(), None) is not None:
                fully_shard(child, **options)
        return fully_shard(model, **options)

    def mean(self, loss: Loss, step: int) -> Tensor:
        return torch.stack([loss(step, rank) for rank in self.ranks]).mean()

    def over_ranks(self, value: Tensor) -> Tensor:
        """Mean over all data, of a tensor that is this side's mean."""
        value = value.detach().clone()
        if self.is_sharded:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value

    def train(
        self, optimizer: Any, loss: Loss, after: Callable[[], Any] = lambda: None, steps: int = STEPS
    ) -> list[Any]:
        numbers = []
        for step in range(steps):
            optimizer.zero_grad()
            total = self.mean(loss, step)
            total.backward()
            optimizer.step()
            after()
            numbers.append(self.over_ranks(total))
        return numbers


Recipe = Callable[[Side], list[Any]]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def drawn(step: int, rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7 + 31 * step + rank), dtype=torch.float64)


# Models ---------------------------------------------------------------------------------------------------------------


def of_model(
    build: Callable[[], nn.Module], prepare: Callable[[nn.Module], Any] = lambda _: None, *, at_once: bool = False
) -> Recipe:
    """Train a model that is made so, by AdamW; `at_once`, as each forward pass changes it, on one batch of all data."""

    def built() -> nn.Module:
        model = build()
        prepare(model)
        return model

    def recipe(side: Side) -> list[Any]:
        model = side.make(built)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = AdamW(trained, lr=0.01, eps=1e-4)  # else it blows up rounding, of gradients that are zero
        if not at_once:
            return side.train(optimizer, squared(model))
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.cat([batch(step, 0, rank) for rank in side.ranks])).square().mean().backward()
            optimizer.step()
        return []

    return recipe


class Through(nn.Module):
    """Layers one after the other, of any kind."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Made(nn.Module):
    """A layer whose forward is a function of the module and its input."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def parameter(*shape: int, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value))


def lora() -> nn.Module:
    def run(module: Any, x: Tensor) -> Tensor:
        return module.base(x) + x @ module.down @ module.up  # type: ignore[no-any-return]

    def layer() -> nn.Module:
        return Made(
            run, base=linear().requires_grad_(False), down=parameter(WIDTH, 2, value=0.1), up=parameter(2, WIDTH)
        )

    return Through(layer(), layer())


def recurrent(kind: Any) -> Callable[[], nn.Module]:
    return lambda: Through(linear(), Made(lambda m, x: m.cell(x[None])[0][0], cell=kind(WIDTH, WIDTH)), linear())


def attention() -> nn.Module:
    return Made(
        lambda m, x: m.attention(x[None], x[None], x[None])[0][0],
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    )


def convolution() -> nn.Module:
    return Made(lambda m, x: m.conv(x[:, None])[:, 0], conv=nn.Conv1d(1, 1, 3, padding=1))


def standardized(module: Any, x: Tensor) -> Tensor:
    weight = module.linear.weight
    weight = (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-5)
    return functional.linear(x, weight, module.linear.bias)


class Rounded(torch.autograd.Function):
    """Rounds to a grid, and lets gradients through: as quantisation-aware training does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scale = weight.abs().max() / 127
        return (weight / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Albert(nn.Module):
    """One block, used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Layer(), linear()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Unet(nn.Module):
    """Outputs of early layers join those of late ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        return self.layers[3](self.layers[2](second) + second) + first  # type: ignore[no-any-return]


class Language(nn.Module):
    """A language model, its embedding tied to its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(11, WIDTH, padding_idx=0), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x.abs() * 10).long() % 11)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


class CheckpointedTogether(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(list(self.layers), 2, self.inlet(x), use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


def with_mask(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        prune.l1_unstructured(layer.linear, "weight", amount=0.5)


def each_linear(change: Callable[[nn.Linear], Any]) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for module in list(model.modules()):
            if type(module) is nn.Linear:
                change(module)

    return prepare


class Skewed(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() - weight.triu().transpose(-1, -2)


MODELS: dict[str, Recipe] = {
    "LoRA": of_model(lora),
    "weight norm": of_model(Model, each_linear(parametrizations.weight_norm)),
    "spectral norm": of_model(Model, each_linear(parametrizations.spectral_norm), at_once=True),
    "spectral norm by hooks": of_model(Model, each_linear(nn.utils.spectral_norm), at_once=True),
    "orthogonal weights": of_model(Model, each_linear(parametrizations.orthogonal)),
    "skewed weights": of_model(
        Model, each_linear(lambda m: parametrize.register_parametrization(m, "weight", Skewed()))
    ),
    "pruned by torch": of_model(Model, with_mask),
    "LSTM": of_model(recurrent(nn.LSTM)),
    "GRU": of_model(recurrent(nn.GRU)),
    "attention": of_model(lambda: Through(attention(), linear(), attention())),
    "encoder": of_model(
        lambda: Through(*(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)))
    ),
    "convolution": of_model(lambda: Through(convolution(), linear(), convolution())),
    "group norm": of_model(lambda: Through(linear(), nn.GroupNorm(2, WIDTH), nn.PReLU(), linear())),
    "batch norm in evaluation": of_model(
        lambda: Through(linear(), nn.BatchNorm1d(WIDTH), linear()), lambda model: model.eval()
    ),
    "RMS norm": of_model(lambda: Through(linear(), nn.RMSNorm(WIDTH), linear())),
    "weights standardized": of_model(lambda: Through(*(Made(standardized, linear=linear()) for _ in range(3)))),
    "quantized": of_model(
        lambda: Through(
            *(
                Made(lambda m, x: functional.linear(x, Rounded.apply(m.linear.weight), m.linear.bias), linear=linear())
                for _ in range(3)
            )
        )
    ),
    "cosine classifier": of_model(
        lambda: Through(
            Layer(),
            Made(
                lambda m, x: m.scale * functional.normalize(x) @ functional.normalize(m.weight).t(),
                weight=nn.Parameter(torch.randn(5, WIDTH)),
                scale=nn.Parameter(torch.tensor(3.0)),
            ),
        )
    ),
    "ReZero": of_model(
        lambda: Through(
            *(Made(lambda m, x: x + m.gain * m.linear(x), linear=linear(), gain=parameter(value=0.1)) for _ in range(3))
        )
    ),
    "layer scale": of_model(
        lambda: Through(
            *(
                Made(lambda m, x: x + m.gain * m.linear(x), linear=linear(), gain=parameter(WIDTH, value=0.1))
                for _ in range(3)
            )
        )
    ),
    "gated": of_model(
        lambda: Through(
            *(
                Made(lambda m, x: m.c(functional.silu(m.a(x)) * m.b(x)), a=linear(), b=linear(), c=linear())
                for _ in range(2)
            )
        )
    ),
    "bilinear": of_model(
        lambda: Through(linear(), Made(lambda m, x: m.product(x, x), product=nn.Bilinear(WIDTH, WIDTH, WIDTH)))
    ),
    "a list of parameters": of_model(
        lambda: Through(
            linear(),
            Made(
                lambda m, x: sum(x * w for w in m.list),
                list=nn.ParameterList([parameter(WIDTH)] * 1 + [parameter(WIDTH, value=2.0)]),
            ),
        )  # type: ignore[arg-type, return-value]
    ),
    "one block again and again": of_model(Albert),
    "long skips": of_model(Unet),
    "tied embedding": of_model(Language),
    "bag of embeddings": of_model(
        lambda: Through(
            Made(lambda m, x: m.bag((x.abs() * 10).long() % 11), bag=nn.EmbeddingBag(11, WIDTH, mode="mean")), linear()
        )
    ),
    "checkpointed": of_model(Checkpointed),
    "checkpointed together": of_model(CheckpointedTogether),
    "biases alone": of_model(Model, lambda m: [p.requires_grad_(p.dim() < 2) for p in m.parameters()]),
    "head alone": of_model(Model, lambda m: (m.requires_grad_(False), m.head.requires_grad_(True))),  # type: ignore[operator, union-attr]
}


# Loops ----------------------------------------------------------------------------------------------------------------


def squared(model: Any) -> Loss:
    return lambda step, rank: model(batch(step, 0, rank)).square().mean()


def loop(make: Callable[[Any, Side], list[Any] | None]) -> Recipe:
    return lambda side: make(side.make(Model), side) or []


def smoothed(model: Any, side: Side) -> list[Any]:
    def loss(step: int, rank: int) -> Tensor:
        target = torch.arange(3) + step
        return functional.cross_entropy(model(batch(step, 0, rank)), target, label_smoothing=0.1)

    return side.train(AdamW(model.parameters(), lr=0.01), loss)


def focal(model: Any, side: Side) -> list[Any]:
    def loss(step: int, rank: int) -> Tensor:
        logits = model(batch(step, 0, rank))
        nll = functional.cross_entropy(logits, torch.arange(3), reduction="none")
        return ((1 - (-nll).exp()) ** 2 * nll).mean() + 1e-2 * logits.logsumexp(-1).square().mean()

    return side.train(AdamW(model.parameters(), lr=0.01), loss)


def dino(side: Side) -> list[Any]:
    """A student follows a teacher that is its average, and whose outputs are centred."""
    student, teacher = side.make(Model), side.make(Model)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    center = torch.zeros(WIDTH, dtype=torch.float64)

    def loss(step: int, rank: int) -> Tensor:
        with torch.no_grad():
            target = ((teacher(batch(step, 1, rank)) - center) / 0.5).softmax(-1)
        return -(target * student(batch(step, 0, rank)).log_softmax(-1)).sum(-1).mean()

    @torch.no_grad()
    def follow() -> None:
        for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)
        outputs = torch.stack([teacher(batch(0, 2, rank)).mean(0) for rank in side.ranks]).mean(0)
        center.mul_(0.9).add_(side.over_ranks(outputs), alpha=0.1)

    return [*side.train(AdamW(student.parameters(), lr=0.01), loss, follow), center]


def moco(side: Side) -> list[Any]:
    """A key encoder that moves slowly, and a queue of its outputs."""
    query, key = side.make(Model), side.make(Model)
    key.requires_grad_(False)
    queue = drawn(0, 0, 4, WIDTH)

    def loss(step: int, rank: int) -> Tensor:
        with torch.no_grad():
            keys = functional.normalize(key(batch(step, 1, rank)))
        queries = functional.normalize(query(batch(step, 0, rank)))
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.t()], 1) / 0.2
        return functional.cross_entropy(logits, torch.zeros(3, dtype=torch.long))

    @torch.no_grad()
    def follow() -> None:
        for own, other in zip(key.parameters(), query.parameters(), strict=True):
            own.lerp_(other, 0.1)

    return side.train(SGD(query.parameters(), lr=0.05, momentum=0.9), loss, follow)


def gan(side: Side, *, clamp: bool = False) -> list[Any]:
    maker, judge = side.make(Model), side.make(Model)
    optimizers = AdamW(maker.parameters(), lr=0.01), AdamW(judge.parameters(), lr=0.01)
    numbers: list[Any] = []
    for step in range(STEPS):

        def of_judge(step: int, rank: int) -> Tensor:
            made = maker(drawn(step, rank, 3, WIDTH)).detach()
            return functional.softplus(judge(made)).mean() + functional.softplus(-judge(batch(step, 0, rank))).mean()

        def of_maker(step: int, rank: int) -> Tensor:
            return functional.softplus(-judge(maker(drawn(step, rank, 3, WIDTH)))).mean()

        for optimizer, loss, trained in zip(optimizers[::-1], (of_judge, of_maker), (judge, maker), strict=True):
            maker.requires_grad_(trained is maker)
            judge.requires_grad_(trained is judge)
            total = side.mean(loss, step)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(side.over_ranks(total))
        if clamp:
            with torch.no_grad():
                for weight in judge.parameters():
                    weight.clamp_(-0.2, 0.2)
    return numbers


def diffusion(side: Side) -> list[Any]:
    model, mean = side.make(Model), None
    mean = copy.deepcopy(model).requires_grad_(False)

    def loss(step: int, rank: int) -> Tensor:
        noise, time = drawn(step, rank, 3, WIDTH), drawn(step, rank, 3, 1).sigmoid()
        noisy = time.sqrt() * batch(step, 0, rank) + (1 - time).sqrt() * noise
        return functional.mse_loss(model(noisy), noise)

    @torch.no_grad()
    def follow() -> None:
        for own, other in zip(mean.parameters(), model.parameters(), strict=True):
            own.mul_(0.9).add_(other.detach(), alpha=0.1)

    numbers = side.train(AdamW(model.parameters(), lr=0.01), loss, follow)
    return [*numbers, *(whole(weight) for weight in mean.parameters())]


def distilled(side: Side) -> list[Any]:
    teacher, student = side.make(Model).requires_grad_(False), side.make(functools.partial(Model, depth=2))

    def loss(step: int, rank: int) -> Tensor:
        x = batch(step, 0, rank)
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        return functional.kl_div(student(x).log_softmax(-1), target, reduction="batchmean")

    return side.train(AdamW(student.parameters(), lr=0.01), loss)


def byol(side: Side) -> list[Any]:
    online, target, predictor = (
        side.make(Model),
        side.make(Model).requires_grad_(False),
        side.make(lambda: Through(linear())),
    )
    optimizer = SGD([*online.parameters(), *predictor.parameters()], lr=0.05)

    def loss(step: int, rank: int) -> Tensor:
        guess = predictor(online(batch(step, 0, rank)))
        return -functional.cosine_similarity(guess, target(batch(step, 1, rank)).detach()).mean()

    return side.train(optimizer, loss)


def stochastic_depth(side: Side) -> list[Any]:
    """Drops residual branches for each sequence, by numbers drawn for each rank."""
    model = side.make(Unet)

    def loss(step: int, rank: int) -> Tensor:
        x = batch(step, 0, rank)
        for number, layer in enumerate(model.layers):
            survives = (drawn(step, rank + 10 * number, 3, 1) > -0.5).double()
            x = x + survives * (layer(x) - x)
        return x.square().mean()

    def with_root(step: int, rank: int) -> Tensor:
        return model(batch(step, 0, rank)).square().mean()  # type: ignore[no-any-return]

    return [
        *side.train(SGD(model.parameters(), lr=0.05), with_root, steps=1),
        *side.train(SGD(model.parameters(), lr=0.05), loss),
    ]


def schedule(make: Callable[[Any], Any]) -> Recipe:
    def recipe(side: Side) -> list[Any]:
        model = side.make(Model)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedules = make(optimizer)
        return [*side.train(optimizer, squared(model), schedules.step), optimizer.param_groups[0]["lr"]]

    return recipe


def plateau(model: Any, side: Side) -> list[Any]:
    optimizer = SGD(model.parameters(), lr=0.5)
    rate = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for step in range(4):
        (loss,) = side.train(optimizer, lambda _, rank, step=step: squared(model)(step, rank), steps=1)
        rate.step(float(loss))
    return [optimizer.param_groups[0]["lr"]]


def unfrozen_gradually(model: Any, side: Side) -> list[Any]:
    """From the head down, one layer a step."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = AdamW(model.parameters(), lr=0.01)
    numbers = []
    for step in range(STEPS):
        numbers += side.train(optimizer, lambda _, rank, step=step: squared(model)(step, rank), steps=1)
        model.layers[-1 - step].requires_grad_(True)
    return numbers


def decayed_by_layer(model: Any, side: Side) -> list[Any]:
    groups = [
        {"params": list(layer.parameters()), "lr": 0.05 * 0.8**number} for number, layer in enumerate(model.layers)
    ]
    groups.append({"params": [*model.inlet.parameters(), *model.head.parameters()], "lr": 0.05})
    return side.train(SGD(groups, lr=0.1), squared(model))


def groups_added_later(model: Any, side: Side) -> list[Any]:
    optimizer = AdamW(model.head.parameters(), lr=0.01)
    numbers = side.train(optimizer, squared(model), steps=1)
    optimizer.add_param_group({"params": list(model.layers.parameters()), "lr": 0.02})
    return numbers + side.train(optimizer, squared(model))


def optimizer_changed(model: Any, side: Side) -> list[Any]:
    numbers = side.train(SGD(model.parameters(), lr=0.05), squared(model))
    return numbers + side.train(AdamW(model.parameters(), lr=0.01), squared(model))


def head_drawn_anew(model: Any, side: Side) -> list[Any]:
    numbers = side.train(AdamW(model.parameters(), lr=0.01), squared(model))
    torch.manual_seed(5)
    model.head.reset_parameters() if not side.is_sharded else _reset_whole(model)
    return numbers + side.train(AdamW(model.parameters(), lr=0.01), squared(model))


def _reset_whole(model: Any) -> None:
    with model.unshard():
        model.head.reset_parameters()


def noisy_weights(model: Any, side: Side) -> list[Any]:
    torch.manual_seed(9)

    @torch.no_grad()
    def add() -> None:
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.01)

    return side.train(SGD(model.parameters(), lr=0.05), squared(model), add)


def averaged(model: Any, side: Side) -> list[Any]:
    mean = AveragedModel(model)
    optimizer = SGD(model.parameters(), lr=0.05)
    rates = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    numbers = side.train(optimizer, squared(model), lambda: (mean.update_parameters(model), rates.step()))
    with torch.no_grad():
        outputs = torch.stack([mean(batch(9, 0, rank)).square().mean() for rank in side.ranks]).mean()
    return [*numbers, side.over_ranks(outputs)]


def two_backwards(model: Any, side: Side) -> list[Any]:
    """Two losses of one forward pass, each with a backward of its own."""
    optimizer = SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = [model(batch(step, 0, rank)) for rank in side.ranks]
        torch.stack([output.square().mean() for output in outputs]).mean().backward(retain_graph=True)
        torch.stack([output.abs().mean() for output in outputs]).mean().backward()
        optimizer.step()
    return []


def micro_batches(model: Any, side: Side) -> list[Any]:
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for number in range(4):
            if side.is_sharded:
                model.set_requires_gradient_sync(number == 3)
            (
                side.mean(lambda s, rank, number=number: model(batch(s, number, rank)).square().mean(), step) / 4
            ).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return []


def gradients_of_inputs(model: Any, side: Side) -> list[Any]:
    """Adversarial examples: a step along the sign of the inputs' gradient, then training on them."""

    def loss(step: int, rank: int) -> Tensor:
        x = batch(step, 0, rank).requires_grad_()
        (along,) = torch.autograd.grad(model(x).square().mean(), x)
        return model((x + 0.1 * along.sign()).detach()).square().mean()  # type: ignore[no-any-return]

    return side.train(SGD(model.parameters(), lr=0.05), loss)


def meta_weights(model: Any, side: Side) -> list[Any]:
    """Reptile: some steps, then a part of the way back."""
    start = [weight.detach().clone() for weight in model.parameters()]
    numbers = side.train(SGD(model.parameters(), lr=0.1), squared(model))
    with torch.no_grad():
        for weight, before in zip(model.parameters(), start, strict=True):
            weight.copy_(before + 0.5 * (weight - before))
    return numbers


def decoupled_decay(model: Any, side: Side) -> list[Any]:
    @torch.no_grad()
    def decay() -> None:
        for name, weight in model.named_parameters():
            if "norm" not in name and not name.endswith("bias"):
                weight.mul_(1 - 0.05)

    return side.train(SGD(model.parameters(), lr=0.05), squared(model), decay)


def elastic(model: Any, side: Side) -> list[Any]:
    """Elastic weight consolidation: a penalty weighted by squared gradients of an earlier task."""
    side.mean(squared(model), 8).backward()
    importance = [weight.grad.detach().square() for weight in model.parameters()]
    start = [weight.detach().clone() for weight in model.parameters()]
    model.zero_grad()

    def loss(step: int, rank: int) -> Tensor:
        pulls = zip(importance, model.parameters(), start, strict=True)
        return squared(model)(step, rank) + 10 * sum((i * (w - b) ** 2).sum() for i, w, b in pulls)  # type: ignore[no-any-return]

    return side.train(SGD(model.parameters(), lr=0.05), loss)


def resumed(model: Any, side: Side) -> list[Any]:
    optimizer = AdamW(model.parameters(), lr=0.01)
    numbers = side.train(optimizer, squared(model))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    side.train(optimizer, squared(model))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return numbers + side.train(optimizer, squared(model))


LOOPS: dict[str, Recipe] = {
    "label smoothing": loop(smoothed),
    "focal loss, z-loss": loop(focal),
    "DINO": dino,
    "MoCo": moco,
    "BYOL": byol,
    "GAN": gan,
    "GAN, clamped": functools.partial(gan, clamp=True),
    "diffusion": diffusion,
    "distillation": distilled,
    "stochastic depth": stochastic_depth,
    "warm-up, then cosine": schedule(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
        )
    ),
    "one cycle": schedule(lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10)),
    "by lambda": schedule(lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))),
    "on a plateau": loop(plateau),
    "unfrozen gradually": loop(unfrozen_gradually),
    "rates by layer": loop(decayed_by_layer),
    "groups added later": loop(groups_added_later),
    "optimizer changed": loop(optimizer_changed),
    "head drawn anew": loop(head_drawn_anew),
    "noisy weights": loop(noisy_weights),
    "stochastic averaging": loop(averaged),
    "two backward passes": loop(two_backwards),
    "micro-batches": loop(micro_batches),
    "adversarial examples": loop(gradients_of_inputs),
    "Reptile": loop(meta_weights),
    "decay by names": loop(decoupled_decay),
    "elastic weights": loop(elastic),
    "resumed": loop(resumed),
}
RECIPES = MODELS | LOOPS


def outcome(name: str) -> float | str:
    """Return the largest relative difference from one process, or the error's class and words."""
    return outcome_of(RECIPES[name])


def outcome_of(recipe: Recipe) -> float | str:
    """Return the largest relative difference of a recipe from one process, or the error's class and words."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    try:
        sides = Side([rank], is_sharded=True), Side(ranks, is_sharded=False)
        torch.manual_seed(3)
        expected = recipe(sides[1])
        torch.manual_seed(3)
        numbers = recipe(sides[0])
        return _difference(numbers, expected, *sides)
    except Exception as error:  # noqa: BLE001 -- the error is the result
        return f"{type(error).__name__}: {error}"


def _difference(numbers: list[Any], expected: list[Any], sharded: Side, plain: Side) -> float:
    largest = 0.0
    for own, other in zip(numbers, expected, strict=True):
        own, other = (torch.as_tensor(whole(value), dtype=torch.float64).detach() for value in (own, other))
        largest = max(largest, relative(own, other))
    for model, reference in zip(sharded.models, plain.models, strict=True):
        own_state = {name: whole(value) for name, value in model.state_dict().items()}
        for name, value in reference.state_dict().items():
            if value.is_floating_point() and value.numel():
                largest = max(largest, relative(own_state[name].detach(), value.detach()))
    return largest if math.isfinite(largest) else math.inf

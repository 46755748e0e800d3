"""The axes along which several ranks work on one batch: tensor, context and expert parallelism, applied to a model."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from instrumented_trainers.loss import next_token_loss, upcast
from instrumented_trainers.parallelism import context, expert, tensor
from instrumented_trainers.parallelism.vocabulary_loss import vocabulary_cross_entropy
from instrumented_trainers.regions import Axis
from tracekit.conventions.strategies import CP, DP_REPLICATE, EP, TP, Layout

_REPLICAS = "replicas_of_experts"
_EXPERT_SHARDS = "dp_shard_of_experts"


class ModelAxes:
    """A rank's tensor, context and expert axes; what the layout has one rank along changes nothing.

    Every rank makes it, as it makes process groups for the experts.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: DeviceMesh,
        *,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        shards_experts: bool = False,
        cp_method: str = context.GATHER,
    ) -> None:
        self.tp, self.cp = (_axis(mesh, name) for name in (TP, CP))
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        self._split = context.TokenSplit(self.cp) if self.cp is not None else None
        self._experts = _expert_mesh(layout, mesh.device_type) if layout.ep > 1 else None
        self._shards_experts, self._cp_method = shards_experts, cp_method

    def divide(self, model: nn.Module) -> nn.Module:
        """Divide a Llama, or a pipeline stage of one, over the axes, in place, before it is sharded; return it."""
        if self.tp is not None:
            sequence, gather = self.sequence_parallel, not self.loss_parallel
            tensor.parallelize(model, self.tp, sequence_parallel=sequence, gather_logits=gather)
        if self.cp is not None:
            context.parallelize(model, self.cp, self._cp_method)
        if self._experts is not None:
            axis = Axis(EP, self._experts.get_group(EP))
            expert.parallelize(model, axis, _replicas(self._experts, shards=self._shards_experts))
        return model

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of each of the sequences (B, T)."""
        return tokens if self._split is None else self._split.own(tokens)

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token, shape (B * T), of logits (B, T, V) or this rank's part of their vocabulary."""
        if self.tp is None or not self.loss_parallel:
            return functional.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten(), reduction="none")
        return vocabulary_cross_entropy(upcast(logits).flatten(0, 1), targets.flatten(), self.tp)

    def next_token_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of `token_losses`."""
        if self.tp is None or not self.loss_parallel:
            return next_token_loss(logits, targets)
        return self.token_losses(logits, targets).mean()


def _axis(mesh: DeviceMesh, name: str) -> Axis | None:
    return Axis(name, mesh.get_group(name)) if name in (mesh.mesh_dim_names or ()) else None


def _expert_mesh(layout: Layout, device: str) -> DeviceMesh:
    """Return the mesh of all ranks in which ep is an axis: consecutive ranks of dp_shard × cp share the experts."""
    shards = layout.dp_shard * layout.cp // layout.ep
    shape = layout.pp, layout.dp_replicate, shards, layout.ep, layout.tp
    ranks = torch.arange(layout.world_size).view(shape).permute(0, 4, 1, 2, 3).flatten(0, 1)
    return DeviceMesh(device, ranks, mesh_dim_names=("places", DP_REPLICATE, _EXPERT_SHARDS, EP))


def _replicas(mesh: DeviceMesh, *, shards: bool) -> DeviceMesh:
    """Return the ranks that have the same experts: those to shard them over, by replicas of the shards if any."""
    if mesh[DP_REPLICATE].size() == 1:
        return mesh[_EXPERT_SHARDS]
    both = mesh[DP_REPLICATE, _EXPERT_SHARDS]
    return both if shards else both._flatten(_REPLICAS)

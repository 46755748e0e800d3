"""A stage's part of the model that is replicated: its gradients are averaged once a step, after its last backward."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from instrumented_trainers.parallelism import expert, zero1
from instrumented_trainers.parallelism.combined_optimizer import CombinedOptimizer
from instrumented_trainers.parallelism.options import ShardOptions, device_of

_BUCKET_BYTES = 25 << 20  # as DDP's


class ReplicatedPart(nn.Module):
    """A part of a model whose replicas are the ranks of a mesh of one dim.

    DDP averages during each backward, and does not see those that compute inputs' and weights' gradients apart. Here
    `synchronize` and `finish` average the gradients of all micro-batches together.

    Raises NotImplementedError for another `reduce_dtype` than the weights', or a mesh of more than one dim.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> None:
        super().__init__()
        if mesh.ndim != 1:
            raise NotImplementedError("stages are replicated over all ranks: there are no groups to shard in")
        self.module = module.to(device_of(mesh))
        self.process_group = mesh.get_group()
        self._autocast = mesh.device_type, options.param_dtype
        self._average_experts: Callable[[], None] | None = None
        self._reductions: list[tuple[dist.Work, Tensor, list[Tensor]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device_type, dtype = self._autocast
        if dtype is None:
            return self.module(*args, **kwargs)
        with torch.autocast(device_type, dtype):
            return self.module(*args, **kwargs)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Begin to average the gradients over the replicas; `finish` ends it. All of them call both."""
        experts = expert.expert_parameters(self).values()
        for parameter in experts:  # whose replicas are other ranks
            _gradient(parameter)
        self._average_experts = expert.gradient_mean(self)
        ranks, divided = dist.get_world_size(self.process_group), {id(parameter) for parameter in experts}
        if ranks == 1:
            return
        for bucket in _buckets(parameter for parameter in self.parameters() if id(parameter) not in divided):
            gradients = [_gradient(parameter) for parameter in bucket]
            flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(ranks)
            # Other stages of this rank go on meanwhile: the replicas of this one are not always at the same action.
            work = dist.all_reduce(flat, group=self.process_group, async_op=True)
            self._reductions.append((work, flat, gradients))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until the gradients are averaged."""
        if self._average_experts is not None:
            self._average_experts()
        for work, flat, gradients in self._reductions:
            work.wait()
            for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
        self._average_experts, self._reductions = None, []


class Zero1Part(ReplicatedPart):
    """A replicated part of which each rank steps some of the parameters."""

    def make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: Iterable[Any], **options: Any
    ) -> ZeroRedundancyOptimizer | CombinedOptimizer:
        """Return this rank's part of an optimizer of that kind over `parameters`, or groups of them."""
        return zero1.divided_optimizer(self, self.process_group, kind, parameters, **options)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in groups of one dtype, each as large as a bucket of DDP."""
    bucket: list[nn.Parameter] = []
    size_bytes = 0
    for parameter in parameters:
        if bucket and (size_bytes > _BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(parameter)
        size_bytes += parameter.nbytes
    if bucket:
        yield bucket


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad

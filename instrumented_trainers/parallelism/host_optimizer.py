"""An optimizer in host memory for parameters on a device (ZeRO-Offload: https://arxiv.org/abs/2101.06840)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class HostOptimizer(Optimizer):
    """Steps parameters by an optimizer of a given kind whose weights and state lie in host memory.

    A step copies the gradients to the host, steps there, and copies the weights back, all on a CUDA stream of its own
    and from pinned memory; compute that is issued after the step waits for the weights. `state` is the inner
    optimizer's, by the parameters on the device.
    """

    def __init__(self, params: Iterable[Any], kind: Callable[..., Optimizer], **options: Any) -> None:
        super().__init__(params, dict(options))
        self._host = {parameter: _on_host(parameter) for parameter in self._parameters()}
        self._versions: dict[nn.Parameter, int] = {parameter: parameter._version for parameter in self._host}
        self._inner = kind(
            [group | {"params": [self._host[weight] for weight in group["params"]]} for group in self.param_groups],
            **options,
        )
        self.defaults = self._inner.defaults
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})
        device = next((weight.device for weight in self._host if weight.is_cuda), None)
        self._copies = torch.cuda.Stream(device) if device is not None else None

    @property
    def host_tensors(self) -> Iterator[Tensor]:
        """Yield the weights and gradients in host memory."""
        for host in self._host.values():
            yield host
            if host.grad is not None:
                yield host.grad

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
        with torch.cuda.stream(self._copies):  # of no effect where there is none
            self._copy_to_host()
        if self._copies is not None:
            self._copies.synchronize()
        self._inner.step()
        with torch.cuda.stream(self._copies):
            self._copy_to_device()
        for parameter, host in self._host.items():
            if host in self._inner.state:
                self.state[parameter] = self._inner.state[host]
        return loss

    def _copy_to_host(self) -> None:
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self._copies.device))
        for parameter, host in self._host.items():
            if self._versions[parameter] != parameter._version:  # changed by others, such as by loading a checkpoint
                host.copy_(parameter, non_blocking=True)
            if parameter.grad is None:
                host.grad = None
            elif host.grad is None:
                host.grad = _on_host(parameter.grad)
            if parameter.grad is not None and host.grad is not None:
                host.grad.copy_(parameter.grad, non_blocking=True)
            if parameter in self.state:
                self._inner.state[host] = self.state[parameter]  # it may have been loaded

    def _copy_to_device(self) -> None:
        for parameter, host in self._host.items():
            if host.grad is not None:
                parameter.copy_(host, non_blocking=True)
            self._versions[parameter] = parameter._version
        if self._copies is not None:
            torch.cuda.current_stream(self._copies.device).wait_stream(self._copies)

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])


@torch.no_grad()
def _on_host(tensor: Tensor) -> Any:
    """Return a copy in host memory: pinned, if the tensor is on a GPU."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    host.copy_(tensor)
    return nn.Parameter(host, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else host

"""``python -m benchmarks.gradient_views``: a gradient copied into the reduce buffer against one that is a view of it.

Where `.grad` is None, autograd hands a gradient over without a copy, and it is copied into the buffer once ("copied").
Where `.grad` is a view of the zeroed buffer, autograd adds to it ("a view"). Both leave the same buffer. Times are CPU
times of the backward pass of linear layers, in turns in one process.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

SHAPES = ((64, 64), (256, 256), (1024, 1024))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Layers:
    """Linear layers whose gradients end in one flat buffer of a dtype."""

    def __init__(
        self, count: int, shape: tuple[int, int], tokens: int, *, dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> None:
        self.weights = [nn.Parameter(torch.randn(shape, dtype=dtype) / shape[1]) for _ in range(count)]
        self.inputs = torch.randn(tokens, shape[1], dtype=dtype)
        self.buffer = torch.zeros(count, *shape, dtype=reduce_dtype)
        self.loss: Tensor | None = None

    def forward(self) -> None:
        """Prepare a backward pass."""
        values = self.inputs
        for weight in self.weights:
            values = values @ weight.t()
        self.loss = values.sum()

    def copy_gradients(self) -> None:
        """Copy each gradient as soon as autograd has it, as the engine does."""
        handles = [
            weight.register_post_accumulate_grad_hook(self._copy_to(place))
            for weight, place in zip(self.weights, self.buffer, strict=True)
        ]
        self._backward()
        for handle in handles:
            handle.remove()

    def accumulate_into_views(self) -> None:
        """Let autograd add to views of a zeroed buffer."""
        self.buffer.zero_()
        for weight, place in zip(self.weights, self.buffer, strict=True):
            weight.grad = place
        self._backward()
        for weight in self.weights:
            weight.grad = None

    def _copy_to(self, place: Tensor) -> Callable[[Tensor], None]:
        def copy(weight: Tensor) -> None:
            assert weight.grad is not None
            place.copy_(weight.grad)
            weight.grad = None

        return copy

    def _backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    print("| layers | shape | tokens | dtype, reduced in | copied | a view | view / copied |")
    print("|--:|---|--:|---|--:|--:|--:|")
    for shape in SHAPES:
        for count, tokens in ((20, 8), (20, 256)):
            for name, reduce_name in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
                layers = Layers(count, shape, tokens, dtype=DTYPES[name], reduce_dtype=DTYPES[reduce_name])
                copied, viewed = _medians(layers, options.rounds, can_view=name == reduce_name)
                cells = f"{viewed * 1e3:.2f} ms | {viewed / copied:.2f}" if viewed else "autograd refuses | "
                kind = f"{name}, {reduce_name}"
                print(f"| {count} | {shape} | {tokens} | {kind} | {copied * 1e3:.2f} ms | {cells} |", flush=True)


def _medians(layers: Layers, rounds: int, *, can_view: bool) -> tuple[float, float | None]:
    """Median CPU time of a backward pass of both ways, in s; None for views of another dtype than the weights'."""
    taken: dict[str, list[float]] = {"copied": [], "viewed": []}
    ways = {"copied": layers.copy_gradients, **({"viewed": layers.accumulate_into_views} if can_view else {})}
    for _ in range(rounds + 1):
        buffers = []
        for name, run in ways.items():
            layers.forward()
            began_s = time.thread_time()
            run()
            taken[name].append(time.thread_time() - began_s)
            buffers.append(layers.buffer.clone())
        assert all(torch.equal(buffers[0], other) for other in buffers)
    medians = {name: statistics.median(times[1:]) for name, times in taken.items() if times}
    return medians["copied"], medians.get("viewed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_views", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    return parser


if __name__ == "__main__":
    main()

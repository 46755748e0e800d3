"""A steady step makes the host wait for nothing, reduces what it must and no more, and overlaps what it can."""

import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from instrumented_trainers.parallelism.yafsdp import communication_lane, engine, fully_shard
from instrumented_trainers.parallelism.yafsdp.communication_lane import DelayedRead, GlooLane, PendingCollective
from tests.integration.yafsdp_attacks import Model, batch, shard_layers
from tests.support import process_group

WARM_UP_STEPS = 3
# On a device each of them makes the host wait for all work before it, or copies from memory that is not pinned.
BLOCKING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
BLOCKING_FUNCTIONS = ("tensor", "as_tensor", "from_numpy")
BLOCKING_OPS = ("_local_scalar_dense", "nonzero", "lift_fresh", "_pin_memory")


class BlockingCalls(TorchDispatchMode):
    """Counts what would make the host wait on a device, in Python and in torch's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in BLOCKING_OPS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        places = [(Tensor, name) for name in BLOCKING_METHODS] + [(torch, name) for name in BLOCKING_FUNCTIONS]
        with ExitStack() as stack, self:
            for owner, name in places:
                stack.enter_context(mock.patch.object(owner, name, self._counted(name, getattr(owner, name))))
            yield

    def _counted(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return function(*args, **kwargs)

        return call


class DeviceLane(GlooLane):
    """A lane on which the host does not wait, as on CUDA: what ranks exchange is read a pass later, from the host's."""

    host_waits = False

    def read_later(self, values: Tensor, pending: PendingCollective) -> DelayedRead:
        pending.wait()
        on_host = list(memoryview(inspect.unwrap(Tensor.numpy)(values)))
        return lambda: on_host


def train(model: Any, optimizer: torch.optim.Optimizer, step: int, micro_batches: int) -> None:
    for micro_batch in range(micro_batches):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
        model(batch(step, micro_batch, 0).float()).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def blocking_calls(replicas: int, micro_batches: int, options: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Blocking calls of a step of a sharded model, and of the same step of a plain one."""
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    counts = []
    with mock.patch.object(engine, "lane_for", lambda _, ranks: DeviceLane(ranks)):
        for model in (shard_layers(Model(), mesh=mesh, **options), Model()):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(WARM_UP_STEPS):
                train(model, optimizer, step, micro_batches)
            calls = BlockingCalls()
            with calls.counting():
                train(model, optimizer, WARM_UP_STEPS, micro_batches)
            counts.append(calls.counts)
    return counts[0], counts[1]


def seen_by_the_counter() -> Counter[str]:
    calls = BlockingCalls()
    with calls.counting():
        value = torch.ones(2)
        value.sum().item()
        float(value.sum())
        value.tolist()
        torch.tensor([1.0])
        if value.any():
            value.nonzero()
    return calls.counts


class Recorded(GlooLane):
    """Notes when collectives start and when they are waited for."""

    events: ClassVar[list[str]] = []

    def reduce_scatter(self, buffers: Any, *, over_replicas: bool = True) -> PendingCollective:
        self.events.append("sum over shards")
        return super().reduce_scatter(buffers, over_replicas=over_replicas)


def reductions(*, keeps_whole: bool) -> int:
    """How many units are reduced in a step of three micro-batches."""
    Recorded.events.clear()
    with mock.patch.object(engine, "lane_for", lambda _, ranks: Recorded(ranks)):
        model = shard_layers(Model(), keep_whole_gradients=keeps_whole)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, micro_batches=3)
    return Recorded.events.count("sum over shards")


def sums_over_replicas() -> list[str]:
    """In which order a backward pass starts sums over shards and over replicas."""
    Recorded.events.clear()
    mesh = init_device_mesh("cpu", (2, 2))
    start = communication_lane._HybridReduction.start_all_reduce

    def noted(reduction: Any) -> None:
        if not reduction._all_reduce_started:
            Recorded.events.append("sum over replicas")
        start(reduction)

    with (
        mock.patch.object(engine, "lane_for", lambda _, ranks: Recorded(ranks)),
        mock.patch.object(communication_lane._HybridReduction, "start_all_reduce", noted),
    ):
        model = shard_layers(Model(), mesh=mesh)
        model(batch(0, 0, 0).float()).square().mean().backward()
    return list(Recorded.events)


def whole_gradients_in_odd_programs() -> dict[str, Any]:
    """What happens where a program clears gradients that wait, or steps before they are reduced."""
    answers: dict[str, Any] = {}
    for cleared in (False, True):
        torch.manual_seed(0)
        model = shard_layers(Model(), keep_whole_gradients=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.set_requires_gradient_sync(False)
        model(batch(0, 0, 0).float()).square().mean().backward()
        if cleared:
            optimizer.zero_grad()
        else:
            with pytest.raises(RuntimeError, match="not reduced yet"):
                optimizer.step()
        model.set_requires_gradient_sync(True)
        model(batch(0, 1, 0).float()).square().mean().backward()
        answers["cleared" if cleared else "added"] = model.head.weight.grad.full_tensor()
    for name, numbers in (("cleared", [1]), ("added", [0, 1])):
        torch.manual_seed(0)
        plain = Model()
        for number in numbers:
            plain(batch(0, number, 0).float()).square().mean().backward()
        answers[name] = float((answers[name] - plain.head.weight.grad).abs().max())
    layer_alone = fully_shard(Model(depth=1), keep_whole_gradients=False)
    layer_alone.set_requires_gradient_sync(False)  # type: ignore[operator]
    layer_alone(batch(0, 0, 0).float()).mean().backward()
    answers["reduced without the option"] = layer_alone.head.weight.grad is not None
    return answers


STEPS = {
    "plain": functools.partial(blocking_calls, 1, 1, {}),
    "micro-batches, whole gradients": functools.partial(blocking_calls, 1, 2, {"keep_whole_gradients": True}),
    "micro-batches": functools.partial(blocking_calls, 1, 2, {}),
    "replicas": functools.partial(blocking_calls, 2, 1, {}),
}


@functools.cache
def outcomes() -> dict[int, dict[str, process_group.Outcome]]:
    two = STEPS | {
        "seen": seen_by_the_counter,
        "reduced each time": functools.partial(reductions, keeps_whole=False),
        "reduced once": functools.partial(reductions, keeps_whole=True),
        "odd": whole_gradients_in_odd_programs,
    }
    return process_group.run_worlds({2: two, 4: {"overlap": sums_over_replicas}})


@pytest.mark.parametrize("name", STEPS)
def test_a_steady_step_makes_the_host_wait_for_nothing(name: str) -> None:
    for sharded, plain in outcomes()[2][name].results():
        assert sharded <= plain, (sharded, plain)  # torch's optimizers read their counters of steps, on the host


def test_the_counter_sees_what_blocks() -> None:
    for counts in outcomes()[2]["seen"].results():
        assert {"item", "__float__", "tolist", "tensor", "__bool__", "nonzero"} <= set(counts)


def test_micro_batches_without_sync_are_reduced_once_where_asked_for() -> None:
    units = 5
    assert outcomes()[2]["reduced each time"].results() == [3 * units] * 2
    assert outcomes()[2]["reduced once"].results() == [units] * 2


def test_whole_gradients_that_wait_are_cleared_and_never_stepped() -> None:
    for answers in outcomes()[2]["odd"].results():
        assert answers["added"] < 1e-6
        assert answers["cleared"] < 1e-6
        assert answers["reduced without the option"]


def test_a_sum_over_replicas_overlaps_the_next_sum_over_shards() -> None:
    for events in outcomes()[4]["overlap"].results():
        starts = [index for index, event in enumerate(events) if event == "sum over replicas"]
        assert len(starts) == 5
        # Each but the last begins when the next unit's sum over shards has begun, and none waits for the end.
        assert [events[: index + 1].count("sum over shards") for index in starts] == [2, 3, 4, 5, 5]

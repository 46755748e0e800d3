"""Measure a step's memory: count tensors, and follow the allocator's events."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from instrumented_trainers.memory.footprint import Footprint
from instrumented_trainers.parallelism.host_optimizer import HostOptimizer
from instrumented_trainers.parallelism.yafsdp.module import YaFSDPModule, units_in
from tracekit import conventions
from tracekit.capture.profiler_session import without_profiler_noise

# Spans in which a strategy, not the model, takes memory. FSDP1's own forward span is around the model's.
_STRATEGY = re.compile(r"FSDP::|YaFSDP::|FullyShardedDataParallel\._|fsdp::")
_COLLECTIVE = re.compile(r"c10d::|gloo:|nccl:")
_FORWARD = conventions.span_name(conventions.FORWARD)

_GRADIENTS_READY = "gradients ready"  # our own mark in our own profile

_BUFFER, _COLLECTIVE_BUFFER, _MODEL, _GRADIENT = "buffer", "collective's own", "model", "gradient"


@dataclass(frozen=True)
class MeasuredMemory:
    """What one step took on this rank.

    `peak_bytes` is the most in use at any moment, temporaries included; by torch.cuda.memory_stats on a GPU, where
    `reserved_bytes` is the most that the allocator had taken from the device. On the CPU it is what the tensors of the
    training, as they were counted, and the allocator's events add up to.
    """

    footprint: Footprint
    peak_bytes: int
    reserved_bytes: int | None


@dataclass(frozen=True)
class _Event:
    """A block allocated (`size_bytes` over 0) or freed, and its owner by the enclosing spans."""

    at_ns: int
    address: int
    size_bytes: int
    owner: str
    in_forward: bool


class MemoryMeter:
    """Measures one step of a training. Create it before the step, run the step inside, then call `measurement`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: str, *, is_offloaded: bool = False) -> None:
        self._model, self._optimizer, self._device, self._is_offloaded = model, optimizer, device, is_offloaded
        self._gradients: dict[int, int] = {}
        self._events: list[_Event] = []
        self._forward_ends: list[int] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch the step in this block: its allocations, and the gradients as the optimizer finds them."""
        hook = self._optimizer.register_step_pre_hook(lambda *_: self._note_gradients())
        if self._device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with without_profiler_noise():
            profiler.start()
        try:
            yield
        finally:
            hook.remove()
            with without_profiler_noise():
                profiler.stop()
        self._read(profiler)

    def measurement(self) -> MeasuredMemory:
        """Memory that the step took."""
        weights, states = sizes(self._model.parameters()), sizes(_states(self._optimizer))
        offloaded = self._offloaded_bytes({**weights, **self._gradients}, states)
        persistent_buffers = sizes(_persistent_buffers(self._model))
        footprint = Footprint(
            sum(_without(offloaded, weights).values()),
            sum(_without(offloaded, self._gradients).values()),
            sum(_without(offloaded, states).values()),
            sum(persistent_buffers.values()) + self._most_buffers_bytes(),
            self._activations_bytes(),
            sum(offloaded.values()),
        )
        if self._device == "cuda":
            peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
            return MeasuredMemory(footprint, peak, torch.cuda.memory_stats()["reserved_bytes.all.peak"])
        allocated_in_step = {event.address for event in self._events if event.owner == _GRADIENT}
        persistent_gradients = {
            address: size for address, size in self._gradients.items() if address not in allocated_in_step
        }
        persistent = {**weights, **states, **persistent_buffers, **persistent_gradients}
        persistent_bytes = sum(_without(offloaded, persistent).values())
        return MeasuredMemory(footprint, persistent_bytes + _highest(event.size_bytes for event in self._events), None)

    def _offloaded_bytes(self, stepped: Mapping[int, int], states: Mapping[int, int]) -> Mapping[int, int]:
        """Return the bytes in host memory, by address; on the CPU all memory is the host's, so not by device."""
        if not self._is_offloaded:
            return {}
        local = _local_optimizer(self._optimizer)
        if isinstance(local, HostOptimizer):
            return {**sizes(local.host_tensors), **states}
        incoming = sizes(
            flat.incoming for unit in units_in(self._model) for flat in unit.flats if flat.incoming is not None
        )
        return {**stepped, **incoming, **states}

    def _note_gradients(self) -> None:
        with record_function(_GRADIENTS_READY):
            pass
        self._gradients = sizes(parameter.grad for parameter in self._model.parameters() if parameter.grad is not None)

    def _read(self, profiler: profile) -> None:
        roots = profiler.profiler.kineto_results.experimental_event_tree()
        events = sorted(_allocations(roots, self._device), key=lambda event: event.at_ns)
        ready_ns = next((node.start_time_ns for node in _nodes_named(roots, _GRADIENTS_READY)), 0)
        self._events = _with_gradients(events, self._gradients, ready_ns)
        self._forward_ends = [node.end_time_ns for node in _nodes_named(roots, _FORWARD)]

    def _most_buffers_bytes(self) -> int:
        live: set[int] = set()
        changes = []
        for event in self._events:
            if event.size_bytes > 0 and event.owner == _BUFFER:
                live.add(event.address)
                changes.append(event.size_bytes)
            elif event.size_bytes < 0 and event.address in live:
                live.remove(event.address)
                changes.append(event.size_bytes)
        return _highest(changes)

    def _activations_bytes(self) -> int:
        """Return the most that is left at the end of a forward pass of what the model took in it."""
        most_bytes, live = 0, dict[int, int]()
        ends = iter([*sorted(self._forward_ends), float("inf")])
        end = next(ends)
        for event in self._events:
            while event.at_ns > end:
                most_bytes, end = max(most_bytes, sum(live.values())), next(ends)
            if event.size_bytes < 0:
                live.pop(event.address, None)
            elif event.in_forward and event.owner == _MODEL:
                live[event.address] = event.size_bytes
        return most_bytes


def sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the memory blocks that the tensors lie in on this rank, by address, each block once."""
    storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _without(offloaded: Mapping[int, int], blocks: Mapping[int, int]) -> Mapping[int, int]:
    return {address: size for address, size in blocks.items() if address not in offloaded}


def _local_optimizer(optimizer: Optimizer) -> Optimizer:
    local: Optimizer = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return local


def _states(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in _local_optimizer(optimizer).state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _persistent_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the communication buffers that outlive a step; only YaFSDP has them."""
    if isinstance(model, YaFSDPModule):
        buffers = model.communication_buffers
        yield from (*buffers.weights, *buffers.gradients, *buffers.own_weights, *buffers.own_gradients)


def _allocations(roots: Iterable[Any], device: str) -> Iterator[_Event]:
    waiting = [(root, _MODEL, False) for root in roots]
    while waiting:
        node, owner, in_forward = waiting.pop()
        if node.tag.name == "Allocation":
            block = node.extra_fields
            if block.device.type == device:
                yield _Event(node.start_time_ns, block.ptr, block.alloc_size, owner, in_forward)
            continue
        name = node.name
        owner, in_forward = _owner(name, owner), in_forward or name == _FORWARD
        waiting += [(child, owner, in_forward) for child in node.children]


def _owner(name: str, around: str) -> str:
    if around == _COLLECTIVE_BUFFER or _COLLECTIVE.match(name):
        return _COLLECTIVE_BUFFER
    return _BUFFER if _STRATEGY.match(name) else around


def _with_gradients(events: list[_Event], gradients: Mapping[int, int], ready_ns: int) -> list[_Event]:
    """Return the events with the gradients' own marked: an address may have been another block's before."""
    last = {event.address: event for event in events if event.size_bytes > 0 and event.at_ns < ready_ns}
    gradient_events = {id(last[address]) for address in gradients if address in last}
    return [replace(event, owner=_GRADIENT) if id(event) in gradient_events else event for event in events]


def _nodes_named(roots: Iterable[Any], name: str) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node.name == name:
            yield node
        else:
            waiting += node.children


def _highest(changes: Iterable[int]) -> int:
    highest = level = 0
    for change in changes:
        level += change
        highest = max(highest, level)
    return highest

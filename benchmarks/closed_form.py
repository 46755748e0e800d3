"""Step times of FSDP1 and the published YaFSDP in closed form: what the simulator would find without jitter and host.

Both are recursions over layers with the rules of `fsdp1` and `yafsdp`; they take numbers, or arrays of them for many
machines at once. A test compares them with the simulation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from tracekit.conventions.strategies import GATHERED_BYTES, REDUCED_BYTES
from tracekit.plan.models import Model
from tracekit.simulate import kernels
from tracekit.simulate.job import FSDP1, YAFSDP_V1
from tracekit.simulate.kernels import Parts, Quantity, Rates


@dataclass(frozen=True)
class Setting:
    """What is trained, on how many GPUs: a row of the published table."""

    model: Model
    gpus: int
    seq: int
    checkpoint_layers: int = 0
    batch: int = 1


def step_s(strategy: str, setting: Setting, rates: Rates) -> Quantity:
    """Return the time of a training step under ``fsdp1`` or ``yafsdp-v1``, in seconds."""
    parts = kernels.parts(setting.model, rates, batch=setting.batch, seq=setting.seq, shards=setting.gpus)
    return _STEPS[strategy](setting, rates, parts)


def _fsdp1(setting: Setting, rates: Rates, parts: Parts) -> Quantity:
    layer, root, layers = setting.model.layer_parameters, 2 * setting.model.outer_parameters, setting.model.layers
    ring = partial(kernels.ring_s, speeds=rates, ranks=setting.gpus)
    gather, reduce = ring(GATHERED_BYTES * layer), ring(REDUCED_BYTES * layer)
    prepare = kernels.moved_s(kernels.CAST_BYTES + kernels.DIVIDE_BYTES, layer, rates)
    slowdown = rates.give_way * kernels.pieces(layer)
    carried = ring(GATHERED_BYTES * root)
    end, before = carried, 0.0 * carried
    for _ in range(layers):
        carried = np.maximum(carried, before) + gather
        end, before = np.maximum(end, carried) + parts.layer_forward_s, end
    head = end + parts.head_forward_s
    gathered = np.maximum(carried, head) + gather  # the last layer's; the one below follows at once
    carried, end = gathered, head + parts.head_backward_s
    for index in reversed(range(layers)):
        takes = _backward_s(setting, parts, index) + kernels.moved_s(kernels.COPY_BYTES, layer, rates)
        start = np.maximum(end, gathered)
        end = start + takes
        if index < layers - 1:  # the preparation of the layer above begins with this one's compute
            end = end + _compute_delay(prepare, takes, slowdown)
            carried = np.maximum(carried, start + prepare + np.minimum(slowdown * prepare, takes)) + reduce
        if index:
            gathered = carried = carried + gather
    carried = np.maximum(carried, end + prepare) + reduce
    copied = end + kernels.moved_s(kernels.COPY_BYTES, root, rates)
    prepare_root = kernels.moved_s(kernels.CAST_BYTES + kernels.DIVIDE_BYTES, root, rates)
    carried = np.maximum(carried, copied) + prepare_root + ring(REDUCED_BYTES * root)
    return carried + parts.optimizer_s


def _yafsdp_v1(setting: Setting, rates: Rates, parts: Parts) -> Quantity:
    layer, outer, layers = setting.model.layer_parameters, setting.model.outer_parameters, setting.model.layers
    ring = partial(kernels.ring_s, speeds=rates, ranks=setting.gpus)
    gather, gather_outer = ring(GATHERED_BYTES * layer), ring(GATHERED_BYTES * outer)
    carried = gather_outer
    end, before = carried, 0.0 * carried
    for _ in range(layers):
        carried = np.maximum(carried, before) + gather
        end, before = np.maximum(end, carried) + parts.layer_forward_s, end
    carried = np.maximum(carried, before) + gather_outer
    head = np.maximum(end, carried) + parts.head_forward_s + parts.head_backward_s
    end, before = head + _backward_s(setting, parts, layers - 1), head
    for index in reversed(range(layers - 1)):
        # Cast and reduce the unit two above (concurrently with the compute of the one above), then gather.
        unit = outer if index == layers - 2 else layer
        carried, end_above = _cast_and_reduce(setting, rates, unit, carried, before, end)
        carried = carried + gather
        end, before = np.maximum(end_above, carried) + _backward_s(setting, parts, index), end_above
    carried, end = _cast_and_reduce(setting, rates, layer, carried, before, end)
    carried, _ = _cast_and_reduce(setting, rates, layer, carried, end, end)
    carried, _ = _cast_and_reduce(setting, rates, outer, carried, end, end)
    return carried + parts.optimizer_s


def _cast_and_reduce(
    setting: Setting, rates: Rates, parameters: int, carried: Quantity, ready: Quantity, end: Quantity
) -> tuple[Quantity, Quantity]:
    """Return the times at which gradients complete at `ready` are reduced, and compute planned until `end` ends."""
    cast = kernels.moved_s(kernels.CAST_BYTES, parameters, rates)
    slowdown = rates.give_way_high_priority * kernels.pieces(parameters)
    start = np.maximum(carried, ready)
    concurrent = np.maximum(end - start, 0.0)
    reduced = start + cast + np.minimum(slowdown * cast, concurrent)
    end = end + _compute_delay(cast, concurrent, slowdown)
    return reduced + kernels.ring_s(REDUCED_BYTES * parameters, rates, setting.gpus), end


def _compute_delay(work: Quantity, concurrent: Quantity, slowdown: Quantity) -> Quantity:
    """Return the delay of compute of length `concurrent` because `work` runs at the same time."""
    return np.minimum(work, concurrent / np.maximum(slowdown, 1e-9))


def _backward_s(setting: Setting, parts: Parts, layer: int) -> Quantity:
    recomputed = parts.layer_forward_s if layer < setting.checkpoint_layers else 0.0
    return parts.layer_backward_s + recomputed


_STEPS: Mapping[str, Callable[[Setting, Rates, Parts], Quantity]] = {FSDP1: _fsdp1, YAFSDP_V1: _yafsdp_v1}

"""What ranks exchange once per backward pass: whose parameters got a gradient, and whether all ran the same program."""

import ctypes
import zlib
from collections.abc import Sequence

import torch

from instrumented_trainers.parallelism.yafsdp import rank_programs
from instrumented_trainers.parallelism.yafsdp.communication_lane import DelayedRead, Lane, PendingCollective
from instrumented_trainers.parallelism.yafsdp.flat_parameters import UnitParameter
from instrumented_trainers.parallelism.yafsdp.shard_tensor import plain_tensors
from instrumented_trainers.parallelism.yafsdp.unit import Unit


class RankAgreement:
    """A maximum over ranks of a flag per parameter and of a checksum of the program.

    A shard must be stepped if any rank used its parameter, and must be left alone (no weight decay, no momentum) if
    none did, as in a run on one process. So each rank sends a flag per parameter, and only a rank with an unused
    parameter waits for the result.

    Collectives match by order: ranks that gather other units, or of which one stepped its optimizer and another did
    not, would train on mixed weights. So each rank sends a checksum of what it did since the last exchange, and its
    negative: if maximum and minimum differ, so do the ranks. On CUDA, where the host does not wait for the device, they
    are compared in the next exchange.
    """

    def __init__(self, units: Sequence[Unit], lane: Lane, model_number: int) -> None:
        self._lane = lane
        # Two models of the same sizes may run in another order on one rank: their collectives would match.
        self._model = f" of model {model_number}" if model_number > 1 else ""
        self._number = {unit: number for number, unit in enumerate(units)}
        parameters = (parameter for unit in units for parameter in unit.parameters)
        self._flag = {parameter: number for number, parameter in enumerate(parameters)}
        device = units[0].device
        self._values = torch.ones(len(self._flag) + 2, dtype=torch.int32, device=device)
        # Pinned, so that the host does not wait for the copy; it is over when the values of this pass are compared.
        self._sent = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
        # Its memory, for torch runs without NumPy.
        self._sent_values = (ctypes.c_int32 * 2).from_address(self._sent.data_ptr())
        self._checksum = 0
        self._is_trained: list[bool] = []
        self._pending: PendingCollective | None = None
        self._read: DelayedRead | None = None

    def note(self, what: str, unit: Unit | None = None) -> None:
        """Add to the checksum that this rank does something that all ranks must do in the same order."""
        number = -1 if unit is None else self._number[unit]
        unit_name = "" if unit is None else f" of {unit.name or 'the root unit'}"
        rank_programs.note(f"{what}{unit_name}{self._model}")
        self._checksum = zlib.crc32(f"{what} {number}{self._model}".encode(), self._checksum)

    def publish(self, units: Sequence[Unit]) -> None:
        """Send which trainable parameters of the units got a gradient on this rank, and the checksum."""
        if not units or self._lane.ranks.count == 1:
            return
        with plain_tensors():
            is_trained = [parameter.shard.requires_grad for parameter in self._flag]
        if is_trained != self._is_trained:  # the first time, and where weights are frozen or unfrozen
            self._is_trained = is_trained
            self.note(f"{sum(is_trained)} parameters trained, checksum {zlib.crc32(bytes(is_trained))}")
        rank_programs.note(f"end of backward{self._model}")
        if self._pending is not None:
            self._pending.wait()  # nobody may have waited for the last one, and its memory is used again
        self.compare()
        self._values.fill_(1)
        for unit in units:
            for parameter in unit.without_gradient:
                self._values[self._flag[parameter]] = 0
        checksum, self._checksum = self._checksum >> 1, 0  # int32 holds 31 bits and their negative
        self._sent_values[:] = checksum, -checksum
        self._values[-2:].copy_(self._sent, non_blocking=True)
        self._pending = self._lane.all_reduce_max(self._values)
        self._read = self._lane.read_later(self._values[-2:], self._pending)

    def compare(self) -> None:
        """Raise RuntimeError, on every rank, if the ranks did not run the same program until the last exchange."""
        read, self._read = self._read, None
        if read is None:
            return
        largest, negative_of_smallest = read()
        if largest != -negative_of_smallest:
            raise RuntimeError(
                rank_programs.explanation(
                    "YaFSDP: the ranks did not do the same: they ran other units or in another order, or stepped or "
                    "cleared otherwise. Collectives match by order, so weights and gradients are mixed up by now. Let "
                    "every rank run the same units in the same order (parameters within a unit may differ) and step "
                    "together, with the same options"
                )
            )

    def compare_at_once(self) -> None:
        """As `compare`, but only where that does not make the host wait for a device."""
        if self._lane.host_waits:
            self.compare()

    def unused_parameters(self, units: Sequence[Unit]) -> dict[Unit, set[UnitParameter]]:
        """Trainable parameters of the units that got a gradient on no rank."""
        unused = {unit: unit.without_gradient for unit in units}
        if self._pending is None or not any(unused.values()):
            return unused
        self._pending.wait()
        used = self._values.tolist()
        return {
            unit: {parameter for parameter in parameters if not used[self._flag[parameter]]}
            for unit, parameters in unused.items()
        }

    def forget(self) -> None:
        """Forget what was noted of a pass that raised: ranks may have come differently far."""
        if self._read is not None and not self._lane.host_waits:
            self._read()  # until its copy is over
        self._checksum, self._read = 0, None

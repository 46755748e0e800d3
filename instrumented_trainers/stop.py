"""Graceful stop by SIGTERM: the ranks agree on the step after which they save and end."""

import signal
from types import FrameType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_KEY = "after step"

# A rank that received the signal can be this many steps behind the others: on the CPU every collective waits for
# all ranks; on a GPU the host runs ahead of the device, but waits for the loss of the step before the last.
_LEAD_STEPS = {"cpu": 1, "cuda": 3}


class StopRequest:
    """Handles SIGTERM. Ranks receive it at different times, or only one does; all stop after the same step."""

    def __init__(self) -> None:
        self._received = False
        self._announced = False
        signal.signal(signal.SIGTERM, self._receive)

    def due(self, step: int, *, device: str) -> bool:
        """Return whether the training ends with this step, which the calling rank has just done."""
        store = dist.PrefixStore("stop", _get_default_store())
        if self._received and not self._announced:
            self._announced = True
            store.compare_set(_KEY, "", str(step + _LEAD_STEPS[device]))
        return store.check([_KEY]) and step >= int(store.get(_KEY))

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 the signature of a handler
        self._received = True

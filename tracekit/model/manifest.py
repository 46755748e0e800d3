"""The manifest of a run: what ``run.json`` states about it, as far as it is valid."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_RANKS = 1 << 20
"""No job has more ranks: a larger number is damage, and a list of so many ranks would fill the memory."""
_YEAR_2100_NS = 4_102_444_800 * 10**9

_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Model(msgspec.Struct, frozen=True):
    """The trained model."""

    name: str = ""
    parameters: float | None = None
    layers: _Number | None = None


class OutlierReason(msgspec.Struct, frozen=True):
    """The slow step because of which a window was opened by itself."""

    step: _Number
    rank: _Number
    ratio: Annotated[float, Meta(gt=0, lt=1e9)]
    """Its time over the median of the steps before it."""

    @property
    def in_words(self) -> str:
        """Sentence part, such as "opened by itself: step 812 took 3.1x the median on rank 5"."""
        return f"opened by itself: step {self.step:,} took {self.ratio:.1f}x the median on rank {self.rank}"


class ProfiledWindow(msgspec.Struct, frozen=True):
    """A profiled window whose trace is on disk; `outlier` is the reason of one that was opened by itself."""

    window: _Number
    first_step: _Number
    steps: _Number
    outlier: OutlierReason | None = None


class Processors(msgspec.Struct, frozen=True):
    """What the ranks of the recorder's host compute with."""

    cores: _Number | None = None
    usable_cores: _Number | None = None
    quota_cores: Annotated[float, Meta(gt=0)] | None = None
    threads: _Number | None = None
    """Of each rank, inside an op."""
    ranks: _Number | None = None
    """On this host."""


class Determinism(msgspec.Struct, frozen=True):
    """What the recording process demanded of algorithms; null where not stated."""

    deterministic_algorithms: bool | None = None
    cudnn_deterministic: bool | None = None
    cudnn_benchmark: bool | None = None


class Manifest(msgspec.Struct, frozen=True):
    """What a manifest states. A field that is absent, or has a value of another type or range, has its default.

    The recorder writes more (`tracekit.capture.manifest`): `Run.manifest` has the whole document.
    """

    created_ns: Annotated[int, Meta(gt=0, lt=_YEAR_2100_NS)] | None = None
    """Unix time at which the run was recorded."""
    role: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """What the recorded processes do in a job of several programs, such as trainer or rollout."""
    strategy: str | None = None
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] | None = None
    model: Model = Model()
    arguments: dict[str, Any] = {}
    command: list[Any] = []
    simulated: bool = False
    windows: tuple[ProfiledWindow, ...] = ()
    processors: Processors = Processors()
    determinism: Determinism = Determinism()

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Manifest":
        """Read a manifest from a JSON object of any content. A model may be an object or a name."""
        model, windows = document.get("model"), document.get("windows")
        fields = _valid_fields(cls, document)
        fields["processors"] = Processors(**_valid_fields(Processors, document.get("processors")))
        fields["determinism"] = Determinism(**_valid_fields(Determinism, document.get("determinism")))
        fields["model"] = Model(**_valid_fields(Model, {"name": model} if isinstance(model, str) else model))
        converted = [_window(row) for row in windows] if isinstance(windows, list) else []
        fields["windows"] = tuple(window for window in converted if window is not None)
        return cls(**fields)


def _window(row: object) -> ProfiledWindow | None:
    """Window of a manifest's row; a reason that is not valid is left out."""
    if isinstance(row, Mapping) and _convert(row.get("outlier"), OutlierReason) is None:
        row = {name: value for name, value in row.items() if name != "outlier"}
    window: ProfiledWindow | None = _convert(row, ProfiledWindow)
    return window


def _valid_fields(kind: type[msgspec.Struct], document: object) -> dict[str, Any]:
    fields = document if isinstance(document, Mapping) else {}
    converted = {name: _convert(fields[name], field_type) for name, field_type in _types(kind) if name in fields}
    return {name: value for name, value in converted.items() if value is not None}


@functools.cache
def _types(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(kind)]


def _convert(value: object, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        return None

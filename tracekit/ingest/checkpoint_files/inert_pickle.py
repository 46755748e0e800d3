"""Pickle of a checkpoint's metadata -> inert values. Nothing is imported or called: classes become names.

A class becomes a `ClassName` and an object an `InertObject`. A class that no such metadata needs is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tracekit.ingest.pickle_machine import Machine, PickleError, checked_key

_MODULES = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|filesystem|_fsspec_filesystem|storage|planner|hf_storage|_hf_utils)"
    r"|torch\.distributed\._shard\.(metadata|sharded_tensor\.metadata)"
)
_NAMES = re.compile(
    r"torch\.(Size|bool|strided|jagged|sparse_\w+|contiguous_format|preserve_format|channels_last(_3d)?"
    r"|(bfloat|float|u?int|complex|quint|qint|bits)\d+\w*)"
    r"|torch\.serialization\._get_layout|collections\.OrderedDict|pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path"
)


_OWN_STATE = "(state)"


@dataclass(frozen=True)
class ClassName:
    """A class that the pickle would have imported."""

    name: str


@dataclass(eq=False)
class InertObject:
    """An object that the pickle would have built: by calling `class_name` with `args`, then setting `state`."""

    class_name: str
    args: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict)


class MetadataUnpickler(Machine):
    """The pickle of a checkpoint's metadata, read once by `read`. Raises PickleError."""

    max_text_bytes = 64 << 20
    max_depth = 1000
    expected = "the data of a checkpoint's metadata"

    def opcodes(self) -> dict[str, Callable[[], None]]:
        """Return the handlers of plain data, and those that note classes and objects by name."""
        return super().opcodes() | {
            "SHORT_BINBYTES": self.push(lambda: self._chunk(1)), "BINBYTES": self.push(lambda: self._chunk(4)),
            "BINBYTES8": self.push(lambda: self._chunk(8)), "EMPTY_SET": self.push(set), "ADDITEMS": self._add_items,
            "GLOBAL": self.push(lambda: _class_name(self._line().decode(), self._line().decode())),
            "STACK_GLOBAL": self.push(lambda: _class_name(*self._last(2))),
            "REDUCE": self._make, "NEWOBJ": self._make, "BUILD": self._build,
        }  # fmt: skip

    def _last(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count:
            raise IndexError
        del self._stack[-count:]
        return items

    def _add_items(self) -> None:
        items = self._pop_to_mark()
        _require_type(set, self._stack[-1]).update(map(checked_key, items))

    def set_item(self) -> None:
        """Set one item of a dict, or of an object that is filled like one."""
        self._update(self._last(2))

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is InertObject:  # an OrderedDict, for example, is built empty and then filled
            target.state.update(zip(map(checked_key, items[::2]), items[1::2], strict=True))
        else:
            super()._update(items)

    def _make(self) -> None:
        class_name, args = self._last(2)
        self._stack.append(InertObject(_require_type(ClassName, class_name).name, _require_type(tuple, args)))

    def _build(self) -> None:
        state = self._stack.pop()
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            # A class with a __setstate__ of its own takes anything.
            fields = part if type(part) is dict else {_OWN_STATE: part}
            _require_type(InertObject, self._stack[-1]).state.update({} if part is None else fields)


def _class_name(module: Any, attribute: Any) -> ClassName:
    name = f"{_require_type(str, module)}.{_require_type(str, attribute)}"
    if not attribute.isidentifier() or not (_MODULES.fullmatch(module) or _NAMES.fullmatch(name)):
        raise PickleError(f"would import {name[:99]}, which no checkpoint's metadata needs: do not load it")
    return ClassName(name)


def _require_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value

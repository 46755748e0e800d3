"""Pickle -> inert values: what it would import and call is noted by name; nothing is imported, and nothing called.

The metadata of a distributed checkpoint is a pickle, and a pickle is a program. This reads it as data: a class becomes
a `Name`, and what it would have made a `Made`. A name that no such metadata needs is refused.
"""

import io
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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


class InertError(ValueError):
    """A pickle that is cut or damaged, or that is more than such metadata. The message says which."""


@dataclass(frozen=True)
class Name:
    """What the pickle would have imported."""

    of: str


@dataclass(eq=False)
class Made:
    """What the pickle would have made: by calling `name` with `args`, then given `state`."""

    name: str
    args: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict)


def read(data: bytes) -> Any:
    """Return what a pickle holds, with `Name` and `Made` for classes and objects. Raises InertError."""
    machine = _Machine()
    try:
        for code, argument, _ in pickletools.genops(io.BytesIO(data)):
            if code.name == "STOP":
                return machine.stack.pop()
            machine.run(code.name, argument)
    except InertError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeError, OverflowError) as error:
        raise InertError(f"is cut or damaged ({error})") from None
    raise InertError("is cut")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._actions: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(_PUSHED, self.stack.append),
            **{name: self._push_constant(value) for name, value in _CONSTANTS.items()},
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda at: self._memo.update({at: self.stack[-1]})),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda at: self.stack.append(self._memo[at])),
            "MEMOIZE": lambda _: self._memo.update({len(self._memo): self.stack[-1]}),
            "MARK": lambda _: self._marks.append(len(self.stack)),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_SET": lambda _: self.stack.append(set()),
            "EMPTY_TUPLE": lambda _: self.stack.append(()),
            "TUPLE": lambda _: self.stack.append(tuple(self._marked())),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "APPEND": lambda _: self._extend(self._last(1)),
            "APPENDS": lambda _: self._extend(self._marked()),
            "ADDITEMS": lambda _: self._add(self._marked()),
            "SETITEM": lambda _: self._update(self._last(2)),
            "SETITEMS": lambda _: self._update(self._marked()),
            "GLOBAL": lambda told: self.stack.append(_name(*told.split(" ", 1))),
            "STACK_GLOBAL": lambda _: self.stack.append(_name(*self._last(2))),
            "REDUCE": lambda _: self._make(*self._last(2)),
            "NEWOBJ": lambda _: self._make(*self._last(2)),
            "BUILD": lambda _: self._build(self.stack.pop()),
        }

    def run(self, name: str, argument: Any) -> None:
        action = self._actions.get(name)
        if action is None:
            raise InertError(f"holds the opcode {name}, which no checkpoint's metadata needs")
        action(argument)

    def _push_constant(self, value: Any) -> Callable[[Any], None]:
        return lambda _: self.stack.append(value)

    def _last(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count:
            raise IndexError("an empty stack")
        del self.stack[-count:]
        return items

    def _marked(self) -> list[Any]:
        return self._last(count) if (count := len(self.stack) - self._marks.pop()) else []

    def _tuple(self, count: int) -> None:
        self.stack.append(tuple(self._last(count)))

    def _extend(self, items: list[Any]) -> None:
        _as(list, self.stack[-1]).extend(items)

    def _add(self, items: list[Any]) -> None:
        _as(set, self.stack[-1]).update(map(_key, items))

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # An OrderedDict, for one, is made empty and then filled.
        known = target.state if type(target) is Made else _as(dict, target)
        known.update(zip(map(_key, items[::2]), items[1::2], strict=True))

    def _make(self, name: Any, args: Any) -> None:
        self.stack.append(Made(_as(Name, name).of, _as(tuple, args)))

    def _build(self, state: Any) -> None:
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        for part in parts:
            # A class with a __setstate__ of its own takes anything.
            known = {} if part is None else part if type(part) is dict else {_OWN_STATE: part}
            _as(Made, self.stack[-1]).state.update(known)


_PUSHED = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def _name(module: Any, attribute: Any) -> Name:
    told = f"{_as(str, module)}.{_as(str, attribute)}"
    if not attribute.isidentifier() or not (_MODULES.fullmatch(module) or _NAMES.fullmatch(told)):
        raise InertError(f"would import {told[:99]}, which no checkpoint's metadata needs: do not load it")
    return Name(told)


def _key(value: Any) -> Any:
    """Return a value that can be a key. Tuples in tuples, however deep, would be hashed by recursion without an end."""
    if type(value) is tuple and any(type(part) is tuple for part in value):
        raise TypeError("a key of tuples in tuples")
    return value


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value

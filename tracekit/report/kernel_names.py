"""Short names of kernels that stay distinct: parameters and template arguments are folded where names still differ."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_ANONYMOUS = "(anonymous namespace)::"
_RETURNS = re.compile(r"^(?:void|auto|__global__)\s+")
_FOLDED = "<…>"
_AROUND = 4
"""Characters shown before the first one in which two names differ."""


def folded(name: str) -> str:
    """Return a demangled C++ name without its return type, parameters and template arguments; others as they are.

    >>> folded("void at::native::reduce_kernel<512, 1, Op<float>>(Op<float>)")
    'at::native::reduce_kernel<…>'
    >>> folded("Memcpy DtoD (Device -> Device)"), folded("aten::mm")
    ('Memcpy DtoD (Device -> Device)', 'aten::mm')
    """
    bare = _RETURNS.sub("", name.replace(_ANONYMOUS, ""))
    parameters = _end_of_name(bare)
    if parameters is None and "<" not in bare:
        return bare
    kept, depth = [], 0
    for character in bare[:parameters]:
        if character == "<":
            kept += [_FOLDED] if depth == 0 else []
            depth += 1
        elif character == ">" and depth:
            depth -= 1
        elif depth == 0:
            kept.append(character)
    return "".join(kept).strip() if depth == 0 else bare


def short_names(names: Iterable[str], width: int) -> Mapping[str, str]:
    """Return a label of at most `width` characters for each name: folded, cut in the middle, and distinct.

    Of names that would have the same label, each shows its beginning and the part in which it differs.

    >>> short_names(["sum<float>(int)", "mul<float>(int)"], 20)
    {'sum<float>(int)': 'sum<…>', 'mul<float>(int)': 'mul<…>'}
    >>> list(short_names(["cutlass::device_kernel<A, 128>()", "cutlass::device_kernel<B, 128>()"], 24).values())
    ['cutlass::de…nel<A, 128>…', 'cutlass::de…nel<B, 128>…']
    """
    labels = {name: _cut(folded(name), width) for name in names}
    alike = defaultdict(list)
    for name, label in labels.items():
        alike[label].append(name)
    for same in alike.values():
        if len(same) > 1:
            labels.update({name: _around_difference(name, same, width) for name in same})
    return labels


def _end_of_name(name: str) -> int | None:
    """Return where the parameters of a demangled name begin; None where it has none."""
    depth = 0
    for at, character in enumerate(name):
        if character == "(" and depth == 0:
            return at if name.endswith(")") and at and name[at - 1] not in " :" else None
        depth += (character == "<") - (character == ">")
    return None


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = width // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _around_difference(name: str, alike: Iterable[str], width: int) -> str:
    """Return the beginning of a name, and what follows from where it first differs from the names like it."""
    if len(name) <= width:
        return name
    others = [other for other in alike if other != name]
    differs = min(_common(name, other) for other in others)
    head = (width - 1) // 2
    if differs < head + _AROUND:
        return f"{name[: width - 1]}…"
    rest = name[differs - _AROUND :]
    room = width - head - 1
    return f"{name[:head]}…{rest if len(rest) <= room else rest[: room - 1] + '…'}"


def _common(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))

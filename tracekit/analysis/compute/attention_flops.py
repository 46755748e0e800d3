"""Floating-point operations of one attention call, from the shapes and values of its inputs.

Forward multiplies twice, queries by keys and weights by values; backward five times where forward does twice (arXiv
2307.08691, section 3.2). A causal mask halves nothing, as in ``torch.utils.flop_counter``. A sliding window does count:
each query is multiplied with the keys in its window only.

FlexAttention is counted as by torch without a hint of sparsity: what its block mask leaves out is not in the trace.

Packed sequences (variable lengths) have the length of none of them in the trace. They are known where all have the
longest one's: where bounds, tokens and the longest length agree.

Signatures: native_functions.yaml of PyTorch 2.13; flash_attn/flash_attn_interface.py (flash-attn 2.8) and
hopper/flash_api.cpp (FlashAttention 3) of https://github.com/Dao-AILab/flash-attention.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

_Shape: TypeAlias = Sequence[int]


class Attention(NamedTuple):
    """The places of an operator's arguments: query (key and value follow it), bounds, longest lengths, mask.

    Shapes are batch, heads, tokens, width; with `tokens_first` batch, tokens, heads, width. `bounds` are the first
    tokens of packed sequences (cu_seqlens) of queries, then keys; `longest` likewise. `causal` comes before the two
    numbers of `window`, how many keys each query sees before and after its own; negative or none for all.
    """

    query: int = 0
    backward: bool = False
    tokens_first: bool = True
    bounds: int | None = None
    longest: int | None = None
    causal: int | None = None
    window: int | None = None


def operations(name: str, dims: Sequence[Any], values: Sequence[str]) -> tuple[float, float] | None:
    """Return the operations of a call and the elements it writes; None where its inputs do not determine them.

    Raises ValueError, TypeError or IndexError for inputs that are not this operator's.
    """
    places = attention(name)
    tensors = None if places is None else _tensors(places, dims, values)
    if places is None or tensors is None:
        return None
    query, key, value = tensors
    scores = 2.0 * math.prod(query[:3]) * min(key[2], _seen_keys(places, values))
    width, value_width = query[3], value[3]
    if places.backward:
        return scores * (3 * width + 2 * value_width), float(sum(map(math.prod, tensors)))
    return scores * (width + value_width), float(math.prod(query[:3]) * value_width)


def attention(name: str) -> Attention | None:
    """Return the places of the arguments of an attention operator; None for other operators."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if _SCALED_DOT_PRODUCT_BACKWARD.match(name):
        return Attention(1, backward=True, tokens_first=False)
    if template := _FLEX_TEMPLATE.match(name):
        return Attention(0, backward=bool(template["backward"]), tokens_first=False)
    return Attention(tokens_first=False) if _SCALED_DOT_PRODUCT.match(name) else None


def _tensors(places: Attention, dims: Sequence[Any], values: Sequence[str]) -> list[_Shape] | None:
    """Return query, key and value as (batch, heads, tokens, width); None where the lengths are not known."""
    tensors: list[_Shape] = list(dims[places.query : places.query + 3])
    if places.bounds is not None and len(dims) > places.bounds and dims[places.bounds]:
        unpacked = _unpack(places, tensors, dims, values)
        if unpacked is None:
            return None
        tensors = unpacked
    if any(len(shape) != 4 for shape in tensors):
        return None
    return [[shape[0], shape[2], shape[1], shape[3]] for shape in tensors] if places.tokens_first else tensors


def _unpack(places: Attention, packed: list[_Shape], dims: Sequence[Any], values: Sequence[str]) -> list[_Shape] | None:
    """Return packed tensors (tokens, heads, width) as a batch of equal sequences; None where lengths differ."""
    if places.bounds is None or places.longest is None or any(len(shape) != 3 for shape in packed):
        return None
    sequences = [dims[places.bounds + offset][0] - 1 for offset in (0, 1, 1)]
    longest = [int(values[places.longest + offset]) for offset in (0, 1, 1)]
    pairs = list(zip(packed, sequences, longest, strict=True))
    if any(shape[0] != count * length for shape, count, length in pairs):
        return None
    return [[count, length, *shape[1:]] for shape, count, length in pairs]


def _seen_keys(places: Attention, values: Sequence[str]) -> float:
    """Return the most keys that a query is multiplied with: infinite without a window."""
    if places.window is None or len(values) < places.window + 2:
        return math.inf
    before, after = (int(text) if text not in ("", "None") else -1 for text in values[places.window :][:2])
    if before < 0:
        return math.inf
    if places.causal is not None and values[places.causal] == "True":
        return before + 1.0
    return before + 1.0 + after if after >= 0 else math.inf


_BY_NAME: Mapping[str, Attention] = {
    "aten::_flash_attention_forward": Attention(0, bounds=3, longest=5, causal=8, window=11),
    "aten::_flash_attention_backward": Attention(1, backward=True, bounds=6, longest=8, causal=11, window=15),
    "aten::_efficient_attention_forward": Attention(0, bounds=4, longest=6),
    "aten::_efficient_attention_backward": Attention(1, backward=True, bounds=6, longest=8),
    "flash_attn::_flash_attn_forward": Attention(0, causal=5, window=6),
    "flash_attn::_flash_attn_backward": Attention(1, backward=True, causal=11, window=12),
    "flash_attn::_flash_attn_varlen_forward": Attention(0, bounds=3, longest=5, causal=9, window=10),
    "flash_attn::_flash_attn_varlen_backward": Attention(1, backward=True, bounds=9, longest=11, causal=15, window=16),
    "flash_attn_3::fwd": Attention(0, bounds=7, longest=12, causal=24, window=25),
    "flash_attn_3::bwd": Attention(1, backward=True, bounds=9, longest=13, causal=16, window=17),
}
_SCALED_DOT_PRODUCT = re.compile(
    r"^aten::_scaled_dot_product_(?!attention_math)\w*attention(_for_cpu|_overrideable|_for_mps)?$"
)
_SCALED_DOT_PRODUCT_BACKWARD = re.compile(r"^aten::_scaled_dot_product_\w*attention\w*_backward$")
_FLEX_TEMPLATE = re.compile(r"^triton_tem_fused_(\w*_)?flex_attention(?P<backward>_backward)?(_|$)")
"""The templates of Inductor, whose buffers begin with query, key and value (torch/_inductor/kernel/flex/templates)."""

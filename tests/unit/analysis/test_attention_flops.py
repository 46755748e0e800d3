"""Operations of attention calls as libraries record them, compared with counting the pairs of queries and keys."""

import json

import numpy as np
import pytest

from tracekit.analysis.compute import op_flops

BATCH, TOKENS, HEADS, KEY_HEADS, WIDTH = 2, 512, 6, 3, 128
QUERY, KEY = [BATCH, TOKENS, HEADS, WIDTH], [BATCH, TOKENS, KEY_HEADS, WIDTH]
FULL = 2.0 * BATCH * HEADS * TOKENS * TOKENS * 2 * WIDTH


def work(name, dims, values):
    """Return the operations of a call from its inputs by place; what is not stated is empty."""
    length = 1 + max(*dims, *values)
    shapes = [dims.get(at, []) for at in range(length)]
    arguments = [str(values.get(at, "")) for at in range(length)]
    counted = op_flops.work(name, json.dumps(shapes), json.dumps(arguments))
    return None if counted is None else counted.flops


def pairs(tokens, before, after):
    """Return how many pairs of query and key a window has."""
    away = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    return int(((away <= before) & (-away <= after)).sum())


@pytest.mark.parametrize(
    ("name", "first", "causal", "window"),
    [
        ("flash_attn::_flash_attn_forward", 0, 5, 6),
        ("flash_attn::_flash_attn_backward", 1, 11, 12),
        ("flash_attn_3::fwd", 0, 24, 25),
        ("flash_attn_3::bwd", 1, 16, 17),
        ("aten::_flash_attention_forward", 0, 8, 11),
        ("aten::_flash_attention_backward", 1, 11, 15),
    ],
)
def test_a_window_is_counted_and_a_causal_mask_is_not(name, first, causal, window):
    dims = {first: QUERY, first + 1: KEY, first + 2: KEY}
    full = FULL * (2.5 if first else 1)

    def counted(before, after, is_causal):
        return work(name, dims, {causal: is_causal, window: before, window + 1: after})

    assert counted(-1, -1, False) == full
    assert counted(-1, 0, True) == full
    assert counted("", "", True) == full
    assert counted(4096, 0, True) == full
    for before, after, is_causal, seen in ((31, 0, True, 32), (31, -1, True, 32), (15, 16, False, 32)):
        of_pairs = pairs(TOKENS, before, max(after, 0)) / TOKENS**2
        assert counted(before, after, is_causal) == full * seen / TOKENS
        assert counted(before, after, is_causal) / full == pytest.approx(of_pairs, rel=0.04)  # fewer keys at the ends


@pytest.mark.parametrize(
    ("name", "first", "bounds", "longest"),
    [
        ("flash_attn::_flash_attn_varlen_forward", 0, 3, 5),
        ("flash_attn::_flash_attn_varlen_backward", 1, 9, 11),
        ("flash_attn_3::fwd", 0, 7, 12),
        ("flash_attn_3::bwd", 1, 9, 13),
        ("aten::_flash_attention_forward", 0, 3, 5),
        ("aten::_flash_attention_backward", 1, 6, 8),
    ],
)
def test_packed_sequences_are_known_where_all_are_as_long_as_the_longest(name, first, bounds, longest):
    packed = {
        first: [BATCH * TOKENS, HEADS, WIDTH],
        first + 1: [BATCH * TOKENS, KEY_HEADS, WIDTH],
        first + 2: [BATCH * TOKENS, KEY_HEADS, WIDTH],
        bounds: [BATCH + 1],
        bounds + 1: [BATCH + 1],
    }
    equal = {longest: TOKENS, longest + 1: TOKENS}
    assert work(name, packed, equal) == FULL * (2.5 if first else 1)
    assert work(name, packed, {longest: TOKENS + 1, longest + 1: TOKENS}) is None
    assert work(name, packed | {bounds: [BATCH + 2]}, equal) is None
    assert work(name, packed, {longest: "", longest + 1: ""}) is None


def test_lengths_of_packed_sequences_are_unknown_where_they_differ():
    """As in the public recording of nanoGPT: 128 bounds, the longest of 2,048 tokens, 16,384 in all, in a window."""
    tokens = [16384, 6, 128]
    values = {12: 2048, 13: 2048, 24: True, 25: 128, 26: 0}
    assert work("flash_attn_3::fwd", {0: tokens, 1: tokens, 2: tokens, 7: [128], 8: [128]}, values) is None


def test_flex_attention_of_inductor_counts_as_in_torch():
    by_head = [[BATCH, heads, TOKENS, WIDTH] for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    buffers = dict(enumerate([*by_head, [BATCH, HEADS, TOKENS], [1, 1, 4], [1, 1, 4, 4]]))
    assert work("triton_tem_fused_flex_attention_0", buffers, {0: ""}) == FULL
    assert work("triton_tem_fused_mul_flex_attention_backward_sum_3", buffers, {0: ""}) == 2.5 * FULL
    assert work("triton_poi_fused_flex_attention_backward_1", buffers, {0: ""}) is None


@pytest.mark.parametrize(
    ("name", "buffers", "expected"),
    [
        ("triton_tem_fused_mm_0", [[64, 32], [32, 48], [64, 48]], 2 * 64 * 32 * 48),
        ("triton_tem_fused_addmm_relu_t_2", [[48], [64, 32], [32, 48], [2, 32, 48]], 2 * 64 * 32 * 48),
        ("triton_tem_fused_mul_mm_t_view_7", [[64, 32], [32, 48], [64, 48], [64, 48]], 2 * 64 * 32 * 48),
        ("triton_tem_fused_bmm_5", [[8, 64, 32], [8, 32, 48], [8, 64, 48]], 2 * 8 * 64 * 32 * 48),
        ("triton_tem_fused__scaled_mm_1", [[64, 32], [32, 48], [1], [1], [64, 48]], 2 * 64 * 32 * 48),
        ("triton_tem_fused_mm_0", [[64, 32], [32, 48], [64, 47]], None),
        ("triton_tem_fused_mm_1", [[8, 8], [8, 8], [8, 16], [8, 16]], None),
        ("triton_tem_fused_convolution_0", [[4, 8, 8], [8, 8, 3], [4, 8, 3]], None),
        ("triton_poi_fused_mm_0", [[64, 32], [32, 48], [64, 48]], None),
    ],
)
def test_products_of_inductors_templates_are_those_of_neighbouring_buffers_that_fit(name, buffers, expected):
    """The order factors, result is that of torch's test of the profiler: test_inductor_profiling_template."""
    assert work(name, dict(enumerate(buffers)), {0: ""}) == expected

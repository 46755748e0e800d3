"""Bytes that operators move, from shapes, element types, values and strides as a profiler writes them."""

import json

import pytest

from tracekit.analysis.compute import op_bytes, op_flops, op_inputs


def moved(name, *inputs, list_dtype=None):
    """Return the bytes of a call; an input is (shape, type), (shape, type, strides) or a value."""
    tensors = [each if isinstance(each, tuple) else ([], "Scalar") for each in inputs]
    strides = [list(each[2]) if len(each) > 2 else None for each in tensors]
    return op_bytes.of_call(
        name,
        json.dumps([list(each[0]) for each in tensors]),
        json.dumps([each[1] for each in tensors]),
        json.dumps(["" if isinstance(each, tuple) else str(each) for each in inputs]),
        json.dumps(strides) if any(strides) else None,
        list_dtype,
    )


FLOAT, HALF, BF16, LONG, BOOL = "float", "c10::Half", "c10::BFloat16", "long int", "bool"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (("aten::add", ([8, 4], FLOAT), ([8, 4], FLOAT), 1), 3 * 32 * 4),
        (("aten::add", ([8, 4], FLOAT), ([1, 4], FLOAT), 1), (32 + 4 + 32) * 4),
        (("aten::add", ([8, 1], FLOAT), ([1, 4], FLOAT), 1), (8 + 4 + 32) * 4),
        (("aten::add", ([8, 4], FLOAT), 2, 1), 2 * 32 * 4),
        (("aten::add", ([8, 4], FLOAT), ([8, 4], FLOAT), 1, ([8, 4], FLOAT)), 3 * 32 * 4),
        (("aten::add_", ([8, 4], FLOAT), ([4], FLOAT), 1), (32 + 4 + 32) * 4),
        (("aten::mul", ([8, 4], BF16), ([], FLOAT)), 32 * 2 + 4 + 32 * 2),
        (("aten::mul", ([8], LONG), ([], FLOAT)), 8 * 8 + 4 + 8 * 4),
        (("aten::mul", ([8], BF16), ([8], HALF)), 8 * 2 + 8 * 2 + 8 * 4),
        (("aten::mul", ([8, 4], FLOAT, [0, 1]), ([8, 4], FLOAT, [4, 1])), (4 + 32 + 32) * 4),
        (("aten::gt", ([8], FLOAT), 0), 8 * 4 + 8),
        (("aten::div", ([8], LONG), 2), 8 * 8 + 8 * 4),
        (("aten::div", ([8], LONG), 2, "floor"), 8 * 8 * 2),
        (("aten::copy_", ([8], BF16), ([8], FLOAT), "False"), 8 * 2 + 8 * 4),
        (("aten::sum", ([8, 4], FLOAT), ([], "")), 32 * 4 + 4),
        (("aten::sum", ([8, 4], BF16), "[0]", "True", 6), 32 * 2 + 4 * 4),
        (("aten::mean", ([8, 4], BF16), "[-1]", "False", ([], "")), 32 * 2 + 8 * 2),
        (("aten::max", ([8, 4], FLOAT), 1, "False"), 32 * 4 + 8 * (4 + 8)),
        (("aten::argmax", ([8, 4], FLOAT), 1, "False"), 32 * 4 + 8 * 8),
        (("aten::_softmax", ([8, 4], HALF), -1, "True"), 32 * 2 + 32 * 4),
        (
            ("aten::native_layer_norm", ([8, 4], BF16), "[4]", ([4], BF16), ([4], BF16), 1e-5),
            2 * 64 + 2 * 8 + 2 * 8 * 4,
        ),
        (("aten::embedding", ([1000, 16], FLOAT), ([2, 3], LONG), -1), 6 * 8 + 2 * 6 * 16 * 4),
        (("aten::embedding_dense_backward", ([6, 16], FLOAT), ([6], LONG), 50, -1, "False"), 384 + 48 + 50 * 64),
        (
            ("aten::max_pool2d_with_indices", ([2, 3, 8, 8], FLOAT), "[2, 2]", "[]", "[0]", "[1]", "False"),
            1536 + 96 * 12,
        ),
        (("aten::native_dropout", ([8, 4], BF16), 0.1, "True"), 32 * 2 + 32 * 2 + 32),
        (("triton_poi_fused_add_relu_3", ([8, 4], BF16), ([8, 4], FLOAT), 32), 32 * 2 + 32 * 4),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_input_and_output_counts_once(call, expected):
    assert moved(*call) == expected


@pytest.mark.parametrize(
    "call",
    [
        ("aten::sum", ([8, 4], FLOAT), ([], ""), "True", ([], "")),  # the dimensions were not recorded
        ("aten::add", ([8, 4], FLOAT), ([3], FLOAT), 1),
        ("aten::add", ([8, 4], "QInt8"), ([8, 4], FLOAT), 1),
        ("aten::mul", ([8], LONG), 2.5),  # the result is floating
        ("aten::_foreach_add_", ([], "TensorList"), ([], "TensorList"), 1),
        ("triton_poi_fused_embedding_0", ([1000, 16], FLOAT), ([6, 16], FLOAT), 96),
        ("triton_poi_fused_add_slice_1", ([8, 4], FLOAT), ([4, 4], FLOAT), 16),
        ("aten::mm", ([8, 4], FLOAT), ([4, 4], FLOAT)),
    ],
    ids=lambda call: call[0],
)
def test_bytes_are_unknown_where_the_inputs_do_not_determine_them(call):
    assert moved(*call) is None


def test_bytes_are_unknown_without_element_types():
    assert op_bytes.of_call("aten::add", "[[8], [8], []]", None, None, None, None) is None


def test_lists_of_tensors_have_the_element_type_of_their_kernels():
    lists = ([[8], [4, 4]], "TensorList")
    assert moved("aten::_foreach_add_", lists, 1) is None
    assert moved("aten::_foreach_add_", lists, 1, list_dtype=FLOAT) == 2 * 24 * 4
    assert moved("aten::_foreach_addcdiv_", lists, lists, lists, 1, list_dtype=FLOAT) == 4 * 24 * 4
    assert moved("aten::cat", lists, 0, list_dtype=HALF) == 2 * 24 * 2


def test_a_fused_optimizer_reads_all_lists_and_writes_all_but_the_gradients():
    lists, empty = ([[8], [4, 4]], "TensorList"), ([], "TensorList")
    call = ("aten::_fused_adamw_", lists, lists, lists, lists, empty, empty, 1e-3)
    assert moved(*call, list_dtype=FLOAT) == 7 * 24 * 4
    assert moved("aten::_fused_adamw_", lists, lists, empty, empty, empty, empty, list_dtype=FLOAT) is None
    assert moved("aten::_fused_sgd_", lists, lists, empty, 0.1, list_dtype=FLOAT) == 3 * 24 * 4


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<3>, FusedAdamMathFunctor<float, 4>>", "float"),
        ("multi_tensor_apply_kernel<TensorListMetadata<1>, BinaryOpScalarFunctor<c10::BFloat16, 1>>", "c10::BFloat16"),
        ("void CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<4u>, unsigned int, 2>", "float"),
        ("ampere_sgemm_128x64_nn", None),
    ],
)
def test_the_element_type_of_lists_is_in_the_name_of_a_kernel(kernel, dtype):
    assert op_inputs.list_dtype(kernel) == dtype


@pytest.mark.parametrize("written", [[], [[4, 2]]], ids=["plain", "out"])
def test_a_product_that_writes_to_a_given_tensor_does_not_read_it(written):
    shapes, dtypes = [[4, 8], [8, 2], *written], ["c10::BFloat16"] * (2 + len(written))
    given = op_flops.input_bytes("aten::mm", json.dumps(shapes), json.dumps(dtypes))
    assert given == (2 * (4 * 8 + 8 * 2), "bf16")
    done = op_flops.work("aten::mm", json.dumps(shapes), None)
    assert done is not None
    assert op_flops.moved_bytes(done, given) == 2 * (4 * 8 + 8 * 2 + 4 * 2)


def test_norms_softmax_and_activations_of_libraries_read_inputs_and_write_results():
    norm = ([8, 3, 4], HALF), ([4], HALF), ([4], HALF), "(4,)", 1e-5
    assert moved("FusedLayerNormAffineFunction", *norm) == 2 * 96 * 2 + 2 * 4 * 2 + 24 * 2 * 4
    assert moved("FusedRMSNormAffineFunction", norm[0], norm[1]) == 2 * 96 * 2 + 4 * 2 + 24 * 4
    assert moved("LigerRMSNormFunctionBackward", ([8, 3, 4], HALF)) == 3 * 96 * 2  # the gradients and the saved input
    scores, mask = ([2, 4, 5, 5], HALF), ([2, 1, 5, 5], BOOL)
    assert moved("ScaledMaskedSoftmax", scores, mask, 1.0) == 2 * 200 * 2 + 50
    assert moved("ScaledUpperTriangMaskedSoftmax", ([8, 5, 5], HALF), 1.0) == 8 * (15 + 25) * 2  # to the diagonal
    assert moved("ScaledUpperTriangMaskedSoftmaxBackward", ([8, 5, 5], HALF)) == 3 * 200 * 2
    assert moved("LigerSiLUMulFunction", ([8, 4], BF16), ([8, 4], BF16)) == 3 * 32 * 2
    assert moved("LigerSiLUMulFunctionBackward", ([8, 4], BF16)) == 5 * 32 * 2
    assert moved("ScaledUpperTriangMaskedSoftmax") is None
    assert op_flops.has_no_products("LigerSiLUMulFunction")


def test_a_template_of_inductor_states_its_result_among_its_buffers():
    buffers = json.dumps([[64, 32], [32, 48], [64, 48]])
    dtypes = json.dumps(["float"] * 3)
    name = "triton_tem_fused_mm_0"
    done = op_flops.work(name, buffers, None)
    assert op_flops.moved_bytes(done, op_flops.input_bytes(name, buffers, dtypes)) == 4 * (64 * 32 + 32 * 48 + 64 * 48)
    assert not op_flops.is_memory_bound_kernel("triton_tem_fused_mm_softmax_1")

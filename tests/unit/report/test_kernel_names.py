"""Short names of kernels: folded where that says enough, and never two alike."""

import pytest

from tracekit.report.kernel_names import folded, short_names

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int)"
)
FILL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
    "at::detail::Array<char*, 1> >(int)"
)
NCCL = "ncclDevKernel_ReduceScatter_Sum_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (ADD, "at::native::vectorized_elementwise_kernel<…>"),
        (NCCL.format("bf16"), "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 5>(float*)", "softmax_warp_forward<…>"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT"),
        ("broken<template", "broken<template"),
    ],
)
def test_parameters_and_template_arguments_are_folded(name, short):
    assert folded(name) == short


@pytest.mark.parametrize("width", [30, 40, 56])
def test_labels_are_short_and_distinct(width):
    names = [ADD, FILL, NCCL.format("bf16"), NCCL.format("f32"), NCCL.format("f32").replace("LL", "SIMPLE")]
    labels = short_names(names, width)
    assert list(labels) == names
    assert len(set(labels.values())) == len(names)
    assert max(map(len, labels.values())) <= width


def test_kernels_that_differ_in_a_template_argument_show_it():
    labels = short_names([ADD, FILL], 56)
    assert "CUDAFunctor_add" in labels[ADD]
    assert "FillFunctor" in labels[FILL]

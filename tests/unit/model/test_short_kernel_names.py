"""Short names of kernels: the function and what it computes, never the same for two kernels."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cli_runner import ROOT
from tracekit.ingest import loader
from tracekit.model.kernel_names import short, short_names

COPY = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{{lambda()#{}}}::operator()() const::{{lambda()#4}}::operator()() const::"
    "{{lambda(float)#1}}>"
    "(at::TensorIteratorBase&, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda()#{}}})::"
    "{{lambda(int)#1}}>(int, at::native::gpu_kernel_impl_nocast<float>)"
).format
CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<{}, unsigned int, {}, 128, 1>({}*, int)".format


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (COPY(2, 2), "elementwise_kernel<direct_copy_kernel_cuda>"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "TensorListMetadata<2>, at::native::(anonymous namespace)::UnaryOpFunctor<float, 2, 1, 1>, at::native::"
            "Sqrt<float> >(at::native::(anonymous namespace)::TensorListMetadata<2>, at::native::Sqrt<float>)",
            "multi_tensor_apply_kernel<Sqrt>",
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float, "
            "cublasGemvParamsEx<int> >(cublasGemvParamsEx<int>)",
            "kernel<cublasGemvParamsEx>",
        ),
        ("ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)", "ncclDevKernel_SendRecv"),
        ("at::native::amp_update_scale_cuda_kernel(float*, int*)", "amp_update_scale_cuda_kernel"),
        (
            "_ZN2ck16tensor_operation6device12_GLOBAL__N_111kernel_convINS_13tensor_layout4gemm8RowMajorELi256ELin1EEEvT_",
            "kernel_conv<RowMajor>",
        ),
        ("triton_poi_fused_add_mul_3", "triton_poi_fused_add_mul_3"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("train.py(12): step", "train.py(12): step"),
        ("aten::mm", "aten::mm"),
        ("void kernel<a…b>(int)", "void kernel<a…b>(int)"),  # a name that somebody has cut
        ("void ", "void "),
        ("", ""),
    ],
)
def test_a_kernel_is_named_by_its_function_and_what_it_computes(name, expected):
    assert short(name) == expected


def test_what_tells_two_kernels_apart_is_added():
    names = [COPY(2, 2), COPY(3, 3), CAT("float", 1, "float"), CAT("float", 2, "float"), CAT("long", 2, "long")]
    assert list(short_names(names).values())[2:] == [
        "CatArrayBatchedCopy<float, 1>",
        "CatArrayBatchedCopy<float, 2>",
        "CatArrayBatchedCopy<long, 2>",
    ]
    assert list(short_names(names).values())[:2] == [
        "elementwise_kernel<direct_copy_kernel_cuda, #2>",
        "elementwise_kernel<direct_copy_kernel_cuda, #3>",
    ]
    assert short_names(["f<int>(a)", "f<int>(b)"]) == {"f<int>(a)": "f<int>(a)", "f<int>(b)": "f<int>(b)"}


def test_the_names_of_a_recorded_run_stay_distinct_and_become_short():
    trace = loader.load(ROOT / "sample_traces" / "gpu" / "slow-rank").trace(0)
    names = trace.activities["name"].unique().to_list()
    forms = short_names(names)
    assert len(set(forms.values())) == len(names)
    long = [name for name in names if name.startswith("void ")]
    assert len(long) >= 5
    assert max(len(forms[name]) for name in long) < 80
    assert sum(map(len, long)) > 3 * sum(len(forms[name]) for name in long)


@given(st.lists(st.text("abN_ZIE<>(){}:,#~-0123456789 ", max_size=60).map(lambda text: "void f<" + text), unique=True))
def test_any_text_has_a_form_and_different_texts_different_ones(names):
    forms = short_names(names)
    assert list(forms) == names
    assert len(set(forms.values())) == len(names)


@pytest.mark.parametrize("part", ["<", "(", "a<", "f(", "{lambda(", "_ZN1", "9999", "operator(", "a::"])
def test_a_long_name_takes_little_time(part):
    began_s = time.process_time()
    short("void f<" + part * 100_000)
    short("_ZN3abc" + part * 100_000)
    assert time.process_time() - began_s < 1  # usually 5 ms

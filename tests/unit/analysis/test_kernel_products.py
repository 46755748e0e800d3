"""Operations by the names of kernels. Names are of public traces and logs, as the comment at each says."""

import polars as pl
import pytest

from tests.support import drawn_kernels, drawn_traces
from tests.support.drawn_kernels import H100, Kernel
from tracekit.analysis.compute import efficiency, flops
from tracekit.conventions import devices

_MAPS = "CUtensorMap_st, CUtensorMap_st, CUtensorMap_st"
# SGLang's prefill of DeepSeek-V3: trace of its performance analysis.
DENSE = (
    "void deep_gemm::fp8_gemm_kernel<7168u, 16384u, 256u, 128u, 128u, 0u, 128u, 1u, 3u, 128u, 128u, 2u, true, "
    f"(deep_gemm::GemmType)0>(__nv_bfloat16*, float*, int*, unsigned int, {_MAPS}, CUtensorMap_st)"
)
GROUPED = (
    "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 160u, 128u, 0u, 64u, 9u, 4u, 128u, 128u, 1u, true, "
    f"(deep_gemm::GemmType)1>(__nv_bfloat16*, float*, int*, unsigned int, {_MAPS}, CUtensorMap_st)"
)
# Kernel tables of vLLM on H100 and of SGLang on B200.
BY_1D2D = (
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 1024u, 1u, 256u, 128u, 128u, 128u, 128u, "
    "128u, 3u, 128u, 256u, 2u, true, 132u, (deep_gemm::GemmType)0, deep_gemm::epilogue::transform::EpilogueIdentity>"
    "(float*, int*, unsigned int, unsigned int, unsigned int)"
)
WITHOUT_SHAPES = (
    "void deep_gemm::sm100_fp8_fp4_gemm_1d1d_impl<(cute::UMMA::Major)0, (cute::UMMA::Major)0, 128u, 128u, 0u, 0u, 0u, "
    "240u, 128u, 128u, 1u, 128u, 128u, 128u, 6u, 128u, 128u, 2u, true, 148u, true, (deep_gemm::GemmType)0, false, "
    "cutlass::float_e4m3_t, cutlass::float_e4m3_t>"
)
PRENORM = (
    "void deep_gemm::sm90_tf32_hc_prenorm_gemm_impl<24u, 16384u, 64u, 32u, 64u, 1u, 128u, 12u, 128u, 128u>"
    f"(unsigned int, {_MAPS}, float*)"
)
BEFORE_MAJORS = "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 2112u, 7168u, 1u, 64u, 64u>"
# The same kernel as BY_1D2D compiled for all of M, N and K (compiled_dims="mnk" of DeepGEMM).
WHOLE = BY_1D2D.replace("0u, 4096u, 1024u", "8192u, 4096u, 1024u", 1)


@pytest.mark.parametrize(
    ("name", "dims", "dtype"),
    [
        (DENSE, {"M": None, "N": 7168, "K": 16384}, devices.FP8),
        (BY_1D2D, {"M": None, "N": 4096, "K": 1024}, devices.FP8),
        (BEFORE_MAJORS, {"M": None, "N": 2112, "K": 7168}, devices.FP8),
        (WITHOUT_SHAPES, {"M": None, "N": None, "K": None}, devices.FP8),
        (PRENORM, {"M": None, "N": 24, "K": 16384}, devices.TF32),
        (WHOLE, {"M": 8192, "N": 4096, "K": 1024}, devices.FP8),
    ],
    ids=["dense", "1d2d", "older", "nothing", "prenorm", "whole"],
)
def test_names_state_the_dimensions_that_a_kernel_was_compiled_for(name, dims, dtype):
    assert flops.product(name) == flops.Product(dims, dtype)


def test_operations_are_known_where_the_name_has_the_whole_problem():
    assert flops.product(WHOLE).flops == 2 * 8192 * 4096 * 1024
    assert flops.unknown_part(WHOLE) is None
    grouped = WHOLE.replace("(deep_gemm::GemmType)0", "(deep_gemm::GemmType)2")
    assert flops.product(grouped).flops is None  # rows of each group are read when it runs
    assert flops.unknown_part(GROUPED) == "the kernel's name lacks M and the rows of its groups"


@pytest.mark.parametrize(
    "name",
    [
        # names as cuBLAS, CUTLASS, nvjet and hipBLASLt form them
        "nvjet_tss_256x128_64x4_1x2_h_bz_coopA_TNT",
        "void cutlass::Kernel<cutlass_80_tensorop_s16816gemm_bf16_128x64_64x4_tn_align8>(cutlass_80_tensorop_s16816)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x3_tn_align8>(Params)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn",
        "volta_sgemm_128x64_nn",
        "Cijk_Ailk_Bljk_SB_MT128x128x32_MI32x32x2x1_SN_1LDSB0_APM1",
    ],
)
def test_tiles_are_no_problems(name):
    assert flops.has_tile_only(name)
    assert flops.product(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "void deep_gemm::sm90_fp8_mqa_logits<64u, 128u, false>(int)",
        "void deep_gemm::transpose_fp32<512, 64>(const float *, float *)",
        "void deep_gemm::fp8_gemm_kernel<",
        "void deep_gemm::fp8_gemm_kernel<4096u",
        "void deep_gemm::fp8_gemm_kernel<(((<<<",
        "deep_gemm",
        "fp8_gemm_kernel<4096u, 7168u>",
        "",
    ],
)
def test_other_names_state_nothing(name):
    assert flops.product(name) is None
    assert not flops.has_tile_only(name)


def launched_by_no_operator(*names):
    """Return kernels that a library launches without an operator around them."""
    trace = drawn_kernels.trace(*(Kernel("cuLaunchKernelEx", 100, name=name) for name in names), device=H100)
    kind = pl.when(pl.col("kind") == "cpu_op").then(pl.lit("runtime")).otherwise("kind")
    return trace.replace(ops=trace.ops.with_columns(kind.alias("kind")))


def test_whole_problems_count_and_the_rest_is_listed_with_what_the_name_lacks():
    trace = launched_by_no_operator(WHOLE, DENSE, "nvjet_tss_256x128_64x4_1x2_h_bz_coopA_TNT", "some_kernel")
    done = 2.0 * 8192 * 4096 * 1024
    assert flops.flops(trace).rows() == [(0, None, WHOLE, done), (1, None, WHOLE, done)]
    step = efficiency.by_step(trace).row(0, named=True)
    assert (step["flops"], step["flops_coverage_ratio"]) == (done, 0.25)
    assert step["mfu_ratio"] == pytest.approx(done / 1979e12 / 400e-6)
    unknown = efficiency.by_operator(drawn_traces.run(trace))
    assert dict(unknown.select("name", "reason").rows()) == {
        DENSE: "the kernel's name lacks M",
        "nvjet_tss_256x128_64x4_1x2_h_bz_coopA_TNT": flops.TILE_ONLY,
        "some_kernel": efficiency.NO_OPERATOR,
    }


def test_an_operator_with_a_formula_counts_instead_of_its_kernels_name():
    shapes = [[512, 1024], [1024, 4096]]
    trace = drawn_kernels.trace(Kernel("aten::mm", 100, shapes, name=WHOLE), device=H100)
    assert flops.flops(trace)["flops"].to_list() == [2.0 * 512 * 1024 * 4096] * 2


def test_an_extension_without_a_formula_is_listed_with_what_its_kernel_lacks():
    trace = drawn_kernels.trace(
        Kernel("sgl_kernel::fp8_gemm", 100, [[8, 7168]], name=BY_1D2D), Kernel("sgl_kernel::other", 50, name=WHOLE)
    )
    (row,) = efficiency.by_operator(drawn_traces.run(trace)).to_dicts()
    assert (row["name"], row["reason"]) == ("sgl_kernel::fp8_gemm", "the kernel's name lacks M")
    assert set(flops.flops(trace)["name"]) == {WHOLE}


def test_without_time_no_operator_has_a_share_of_the_compute():
    trace = drawn_kernels.trace(Kernel("sgl_kernel::fp8_gemm", 100, [[8, 7168]], name=BY_1D2D))
    still = trace.replace(activities=trace.activities.with_columns(dur_ns=pl.lit(0, pl.Int64)))
    for rows in (efficiency.unknown_work(still), efficiency.by_operator(drawn_traces.run(still))):
        assert rows["compute_ratio"].to_list() == [None]

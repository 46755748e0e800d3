"""Rules on the efficiency of kernels: on drawn steps, and on traces of others."""

from pathlib import Path

import pytest

import tracekit
from tests.support import drawn_kernels
from tests.support.drawn_kernels import FOREACH_ADAM, H100, V100, Kernel
from tracekit.analysis.compute import avoidable_time, product_kernels
from tracekit.replay.graph import savings
from tracekit.rules.compute import IdleTensorCores, MisalignedProducts, PartialWaves, UnfusedKernels, UnfusedOptimizer
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

OTHERS = Path(__file__).parents[4] / "shared" / "traces"


def others(name):
    if not (OTHERS / name).is_dir():
        pytest.skip("the downloaded traces are not in ../shared")
    return tracekit.load(OTHERS / name)


def findings(run, rule):
    return check(run, [rule()]).findings


class TestMisalignedProducts:
    def test_the_dimension_to_pad_and_the_saving_are_stated(self):
        (found,) = findings(drawn_kernels.product(1021, us=900, align=1), MisalignedProducts)
        assert found.severity == Severity.WARNING
        assert "Pad 1021 to 1024" in found.fix
        # 34 GFLOP at 312 TFLOP/s take 110 µs; the aligned ones take 224 µs for that, so 900 µs become about 224.
        assert found.cost_ns == pytest.approx(676_000, rel=0.02)

    def test_an_aligned_product_is_not_reported_however_slow(self):
        assert findings(drawn_kernels.product(1024, us=900, align=8), MisalignedProducts) == ()

    def test_a_misaligned_product_at_the_usual_rate_is_not_reported(self):
        assert findings(drawn_kernels.product(1021, us=224, align=2), MisalignedProducts) == ()

    def test_dimensions_that_padding_would_multiply_are_left_out(self):
        assert findings(drawn_kernels.product(1, us=900, align=1), MisalignedProducts) == ()

    def test_without_shapes_the_time_is_stated_and_no_saving(self):
        name = "cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1"
        (found,) = findings(drawn_kernels.run(Kernel("CompiledFunction", 900, name=name)), MisalignedProducts)
        assert found.severity == Severity.INFO
        assert found.cost_ns == 0
        assert "record_shapes=True" in found.fix

    @pytest.mark.parametrize(
        ("strides", "count"), [([[4099, 1], [1, 4099]], 1), ([[1, 4096], [1024, 1]], 0), (None, 0)]
    )
    def test_a_kernel_that_names_no_alignment_is_judged_by_the_contiguous_dimensions(self, strides, count):
        # 4099 is the inner dimension of a and b (rows of memory), or no dimension of rows.
        product = Kernel("aten::mm", 900, [[4096, 4099], [4099, 1024]], "c10::Half", "nvjet_hsh_128x256", strides)
        rows = product_kernels.misaligned_kernels(drawn_kernels.trace(product, device=H100, steps=1))
        assert rows.height == count

    def test_attention_over_5185_tokens_is_what_a_public_trace_loses(self):
        """16 heads of 5,185 by 5,185 in bf16, on an H100, by kernels for sm75 with loads of one element."""
        (found,) = findings(others("tracelens_h100_memory_stacks"), MisalignedProducts)
        assert found.severity == Severity.WARNING
        assert "Pad 5185 to 5192" in found.fix
        assert found.cost_ns == pytest.approx(134e6, rel=0.01)

    @pytest.mark.parametrize(
        "name",
        [
            "megatron_tp8_a100_8ranks",
            "kineto_resnet_v100_memory",
            pytest.param("nanogpt_h100_8ranks", marks=pytest.mark.accuracy),
        ],
    )
    def test_public_traces_with_aligned_products_are_silent(self, name):
        assert findings(others(name), MisalignedProducts) == ()


class TestIdleTensorCores:
    def test_the_saving_is_the_time_beyond_half_the_peak_in_tf32(self):
        (found,) = findings(drawn_kernels.single(), IdleTensorCores)
        assert found.severity == Severity.WARNING
        # 34 GFLOP at half of 156 TFLOP/s.
        assert found.cost_ns == pytest.approx(2_000_000 - 2 * 4096 * 4096 * 1024 / 78e12 * 1e9, rel=1e-6)

    def test_without_shapes_the_peaks_decide(self):
        (found,) = findings(drawn_kernels.single(shapes=False), IdleTensorCores)
        assert found.cost_ns == 2_000_000 * 3 // 4  # 19.5 against 78 TFLOP/s

    @pytest.mark.parametrize(
        "other",
        [
            {"device": V100, "name": "volta_sgemm_128x64_nn"},
            {"device": "unknown"},
            {"name": "cutlass_80_tensorop_s1688gemm_256x128_32x3_nn_align4"},
            {"name": "sm80_xmma_gemm_tf32f32_tf32f32_f32_nn_n_tilesize128x128"},
            {"name": "ampere_bf16_s16816gemm_bf16_128x128"},
        ],
        ids=lambda other: next(iter(other.values())),
    )
    def test_devices_without_tf32_and_kernels_with_it_are_not_reported(self, other):
        assert findings(drawn_kernels.single(**other), IdleTensorCores) == ()

    def test_convolutions_for_which_cudnn_does_not_choose_tf32_are_left_out(self):
        wide = Kernel("aten::mm", 2000, name="ampere_sgemm_128x64_nn")
        kept = Kernel("aten::cudnn_convolution", 2000, name="ampere_scudnn_128x64_relu_xregs_large_nn_v1")
        tf32 = Kernel("aten::cudnn_convolution", 2000, name="cutlass_tensorop_s1688fprop_optimized_tf32_128x128_nhwc")
        assert product_kernels.without_tensor_cores(drawn_kernels.trace(wide, kept, steps=1)).height == 2
        (only,) = product_kernels.without_tensor_cores(drawn_kernels.trace(wide, kept, tf32, steps=1))["name"]
        assert only == wide.name

    def test_products_in_32_bits_of_public_traces_on_a100_are_found(self):
        """A script of three matrix products, and a ResNet whose convolutions use TF32."""
        rows = others("hta_event_sync").table(product_kernels.without_tensor_cores)
        assert rows["name"].to_list() == ["ampere_sgemm_128x64_nn"] * 3
        assert rows["saved_ns"].sum() == 369_000 * 3 // 4
        linear = others("hta_nccl_args_a100").table(product_kernels.without_tensor_cores)
        assert set(linear["name"]) == {"ampere_sgemm_32x32_sliced1x4_tn"}

    @pytest.mark.parametrize("name", ["kineto_resnet_v100_memory", "hta_ddp_v100_memory", "torchrec_v100_4ranks"])
    def test_products_in_32_bits_on_v100_have_no_alternative(self, name):
        assert others(name).table(product_kernels.without_tensor_cores).is_empty()


class TestUnfusedOptimizer:
    def test_a_fused_kernel_saves_the_accesses_of_the_other_operators(self):
        (found,) = findings(drawn_kernels.adam(*FOREACH_ADAM), UnfusedOptimizer)
        assert found.severity == Severity.WARNING
        assert "torch.optim.AdamW(…, fused=True)" in found.fix
        # lerp 3, mul 2, addcmul 4, sqrt 2, div 2, add 3, addcdiv 4 accesses: 20, of which fused needs 7.
        assert found.cost_ns == pytest.approx(700_000 * 13 / 20)

    @pytest.mark.parametrize(
        ("operators", "name"),
        [
            (("_fused_adamw_",) * 7, "AdamW"),
            (FOREACH_ADAM, "Muon"),
            (("_foreach_add_",) * 7, "SGD"),
        ],
    )
    def test_fused_steps_other_optimizers_and_plain_sgd_are_not_reported(self, operators, name):
        assert findings(drawn_kernels.adam(*operators, name=name), UnfusedOptimizer) == ()

    def test_a_short_step_of_the_optimizer_is_not_reported(self):
        assert findings(drawn_kernels.adam(*FOREACH_ADAM, us=5), UnfusedOptimizer) == ()

    @pytest.mark.accuracy  # fused steps are drawn above
    def test_foreach_adam_of_a_public_trace_costs_nothing_while_the_step_is_launch_bound(self):
        run = others("merged_ddp_mi300_4ranks")
        rows = run.table(avoidable_time.unfused_optimizer_kernels)
        assert set(rows["optimizer"]) == {"Adam"}
        assert set(rows["implementation"]) == {avoidable_time.FOREACH}
        assert rows.filter(rows["rank"] == 0)["saved_ns"].sum() == pytest.approx(1.43e6, rel=0.01)
        assert savings.saving(run, "unfused-optimizer").saved_ns == 0
        assert findings(run, UnfusedOptimizer) == ()
        assert others("hta_dlrm_a100").table(avoidable_time.unfused_optimizer_kernels).is_empty()  # Apex' FusedAdam


class TestUnfusedKernels:
    def test_each_kernel_saves_reading_what_the_one_before_wrote(self):
        (found,) = findings(drawn_kernels.chain("exp", "neg", "sigmoid"), UnfusedKernels)
        assert found.severity == Severity.WARNING
        assert "exp → neg → sigmoid" in found.message
        assert found.cost_ns == 2 * 50_000  # half of what neg and sigmoid move

    @pytest.mark.parametrize(
        "run",
        [
            lambda: drawn_kernels.chain("exp"),
            lambda: drawn_kernels.chain("exp", "exp", "exp"),  # the same operator on other tensors, as in a loop
            lambda: drawn_kernels.run(Kernel("aten::exp", 100, [[8, 8]]), Kernel("aten::neg", 100, [[8, 4]])),
            lambda: drawn_kernels.run(Kernel("aten::exp", 100), Kernel("aten::neg", 100)),
            lambda: drawn_kernels.run(Kernel("aten::exp", 100, [[8, 8]]), Kernel("aten::mul", 100, [[8, 8]] * 3)),
            lambda: drawn_kernels.adam("mul_", "add_", "sqrt", us=500),
        ],
        ids=["one kernel", "a loop", "other shapes", "no shapes", "a given output", "an optimizer"],
    )
    def test_what_is_no_chain_is_not_reported(self, run):
        assert findings(run(), UnfusedKernels) == ()

    def test_chains_of_a_public_trace_are_its_residual_additions_and_activations(self):
        rows = others("kineto_resnet_v100_memory").table(avoidable_time.elementwise_chains)
        relu = rows.filter(rows["op"] == "aten::relu_")
        assert relu.height == 16 * 6  # residual blocks and steps
        assert relu["saved_ns"].sum() == pytest.approx(5e6, rel=0.1)
        assert findings(others("kineto_resnet_v100_memory"), UnfusedKernels) == ()

    def test_compiled_kernels_are_no_chains(self):
        assert others("nanogpt_h100_8ranks").table(avoidable_time.elementwise_chains)["saved_ns"].sum() < 1e6


class TestPartialWaves:
    def test_the_sizes_that_fill_the_waves_are_stated(self, wording):
        # 32 by 4 tiles on 108 multiprocessors: one wave, and another for 20 tiles.
        (found,) = findings(drawn_kernels.waves(1024), PartialWaves)
        assert found.severity == Severity.WARNING
        wording(found.message)
        wording(found.fix)
        assert found.cost_ns == pytest.approx(220_000 * (1 - 128 / 216), abs=1)

    @pytest.mark.parametrize(
        "run",
        [
            lambda: drawn_kernels.waves(768),  # 96 tiles: one wave
            lambda: drawn_kernels.waves(1536),  # 192 tiles: 89% of two waves
            lambda: drawn_kernels.waves(1024, us=120),  # 92% of the roofline
            lambda: drawn_kernels.waves(1024, grid="108x1x1"),  # blocks that compute several tiles
            lambda: drawn_kernels.waves(1024, grid="32x4x2"),  # the inner dimension is divided
        ],
        ids=["one wave", "full waves", "fast", "persistent", "split"],
    )
    def test_products_that_fill_the_device_or_divide_their_tiles_are_not_reported(self, run):
        assert findings(run(), PartialWaves) == ()

    @pytest.mark.accuracy  # products that fill the device are drawn above
    @pytest.mark.parametrize(
        "name", ["megatron_tp8_a100_8ranks", "nanogpt_h100_8ranks", "tracelens_h100_memory_stacks"]
    )
    def test_public_traces_lose_little_to_waves(self, name):
        run = others(name)
        assert run.table(product_kernels.partial_waves)["saved_ns"].sum() < 5e6
        assert findings(run, PartialWaves) == ()

"""Which kernels communicate, by name: of 20 and more libraries, and of compute kernels with misleading names."""

from pathlib import Path

import pytest

from tracekit.ingest.readers.normalize import communication_kernels
from tracekit.ingest.readers.normalize.communication_kernels import kind_of, op_of

COMMUNICATION = {
    # NVIDIA/nccl, ROCm/rccl: src/device/generate.py and src/device/symmetric/generate.py
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)": "all_gather",
    "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC(ncclSymkDevWorkArgs4K)": "all_reduce",
    "ncclSymkDevKernel_ReduceScatter_LL_sum_f8e4m3(ncclSymkDevWorkArgs4K)": "reduce_scatter",
    "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)": None,
    # microsoft/msccl: mscclKernel_*; microsoft/mscclpp: src/ext/collectives/allreduce/allreduce_packet.cu
    "mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)": None,
    "void mscclpp::collective::allreducePacket<(mscclpp::ReduceOp)0, __half, __half>(__half*, __half*)": "all_reduce",
    "void allreduce7<__half>(mscclpp::MemoryChannelDeviceHandle*, __half*, __half*)": "all_reduce",
    # A vendor's fork of NCCL
    "pcclKernel_twoShotAllReduceKernel(int)": "all_reduce",
    # uxlfoundation/oneCCL: src/coll/algorithms/allreduce/sycl
    "oneccl_allreduce_pcie": "all_reduce",
    # deepseek-ai/DeepEP: csrc/kernels/api.cuh
    "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, void*, int*, long*)": "dispatch",
    "void deep_ep::internode_ll::combine<false, 7168, 9>(void*, void*, int*)": "combine",
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*, int)": "dispatch",
    "void deep_ep::internode::cached_notify<false>(int, int)": None,
    "void deep_ep::intranode::barrier<8>(int**, int)": "barrier",
    "deep_ep::internode_ll::clean_low_latency_buffer<256>(int*, int, int*, int)": None,
    # uccl-project/uccl ep, NVIDIA/nccl contrib/nccl_ep: forks of the above
    "void uccl::internode_ll::dispatch<true, 7168>(void*)": "dispatch",
    "void nccl_ep::internode_ll::combine<(bool)0,(int)7168,(int)9>(void*)": "combine",
    "nccl_ep_jit_ht_dispatch_kernel": "dispatch",
    # DeepEP, branch hybrid-ep
    "void hybrid_ep::dispatch_kernel<float, 4>(hybrid_ep::dispatch_kernel_param_t<float>)": "dispatch",
    # ROCm/mori: src/ops/dispatch_combine/intranode.hpp, src/ops/kernels/ep_intranode.hip
    "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16, false>(EpDispatchCombineArgs<T>)": "dispatch",
    "EpCombineIntraNodeKernel_bf16_p2p.kd": "combine",
    # perplexityai/pplx-kernels: csrc/all_to_all
    "void pplx::(anonymous namespace)::dispatchKernel<8, true, true>(float*, unsigned long)": "dispatch",
    # NVIDIA/TensorRT-LLM: communicationKernels/moeAlltoAllKernels.cu, customAllReduceKernels.cu
    "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8>(int const*)": "dispatch",
    "void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<__nv_bfloat16>(int const*)": "combine",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>(AllReduceParams)": "all_reduce",
    "void tensorrt_llm::kernels::lowPrecisionTwoShotAllReduceKernel<__half, 8>(int)": "all_reduce",
    # flashinfer-ai/flashinfer: trtllm_allreduce_fusion.cuh, trtllm_mnnvl_allreduce.cuh
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(flashinfer::trtllm_allreduce"
    "_fusion::AllReduceFusionPattern)1, __nv_bfloat16, 2, true, true>(flashinfer::trtllm_allreduce_fusion"
    "::AllReduceFusionParams<__nv_bfloat16>)": "all_reduce",
    "void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<(unsigned char)2, float, true>(x)": "all_reduce",
    "void flashinfer::trtllm_mnnvl_allreduce::rmsNormLamport<2, __nv_bfloat16>(__nv_bfloat16*)": "all_reduce",
    # vllm-project/vllm: csrc/custom_all_reduce.cuh, csrc/quickreduce; sgl-project/sglang: the same names
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)": "all_reduce",
    "void cross_device_reduce_2stage<float, 2>(RankData*, RankSignals, Signal*, float*, int, int)": "all_reduce",
    "quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half, CodecQ4<__half,4>, true>, __half>": "all_reduce",
    # ROCm/aiter: csrc/include/custom_all_reduce.cuh, one of its names as the linker has it
    "void aiter::reduce_scatter_cross_device_store<bf16,8>(aiter::RankData*)": "reduce_scatter",
    "_ZN5aiter33reduce_scatter_cross_device_storeIDF16bLi8EEEvPNS_8RankDataENS_11RankSignalsEjiii": "reduce_scatter",
    # pytorch/pytorch: torch/csrc/distributed/c10d/symm_mem
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16, 2>(float**)": "all_reduce",
    "void c10d::(anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16>(float*, float*)": "all_reduce",
    "multimem_all_gather_kernel<16>(char*, char*)": "all_gather",
    "exchangeSplitAndOffset(long*, int, int)": None,
    "allToAllV(void*, void*, long*)": "all_to_all",
    # pytorch/torchtitan and vLLM: Triton kernels on symmetric memory
    "on_device_all_to_all_v_kernel": "all_to_all",
    "rocm_on_device_all_to_all_v_kernel.kd": "all_to_all",
    # ByteDance-Seed/Triton-distributed: ep_a2a.py
    "kernel_dispatch_token_intra_node": "dispatch",
    "all_to_all_kernel": "all_to_all",
    # NVIDIA/nvshmem: src/device/launch/collective_launch.cpp
    "void alltoall_on_stream_kernel<float>(int, float*, float const*, unsigned long)": "all_to_all",
    "barrier_on_stream_kernel_threadgroup(nvshmem_team_t)": "barrier",
    "nvshmemi_put_signal_kernel": "put",
    # NVIDIA/TransformerEngine: common/comm_gemm_overlap/userbuffers/userbuffers.cu
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int)": "reduce_scatter",
    "void userbuffers_fp16_sum_inplace_gpu_rw_ag<2>(int, int, int)": "all_gather",
    "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)": "send",
    "kuserbuffers_pushsendrecv(int*, int*, int4*)": "send_recv",
}  # fmt: skip

MISLEADING = (Path(__file__).parent / "misleading_kernel_names.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", COMMUNICATION)
def test_kernels_of_communication_libraries_communicate(name):
    assert (kind_of(name), op_of(name)) == ("communication", COMMUNICATION[name])


def test_every_library_of_the_table_has_a_kernel_here():
    functions = [communication_kernels._split(name)[0] for name in COMMUNICATION]
    found = {library.name for library in map(communication_kernels._library, functions) if library}
    unused = {library.name for library in communication_kernels.LIBRARIES} - found
    assert unused <= {"HCCL", "other *CCL", "userbuffers, all-reduce", "namespaces of collectives"}


def test_there_are_200_misleading_names():
    assert len(set(MISLEADING)) >= 200


@pytest.mark.parametrize("name", MISLEADING)
def test_compute_kernels_with_misleading_names_do_not_communicate(name):
    assert kind_of(name) in ("compute", "undecided")


@pytest.mark.parametrize(
    "name", ["combine_bias", "dispatch_gemm", "allreduce_norm_fused", "comm_free_gemm", "moe_p2p_sort"]
)
def test_a_name_that_only_hints_at_communication_is_undecided(name):
    assert kind_of(name) == "undecided"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "(",
        "void ",
        "a" * 100_000,
        "<" * 9000,
        "_ZN",
        "_ZN9999x",
        "x<y<z>",
        "::::",
        "\x00",
        "\ud800",
        "_ZN3foo99barE",
    ],
)
def test_a_broken_name_is_compute(name):
    assert (kind_of(name), op_of(name)) == ("compute", None)


def test_the_guide_lists_the_libraries(request):
    begin, end = "<!-- written by tests/unit/ingest/test_communication_kernels.py --update-golden -->\n", "<!-- end -->"
    rows = [f"| {library.name} | {library.source} |" for library in communication_kernels.LIBRARIES]
    table = "\n".join(["| library | names from |", "|---|---|", *rows, ""])
    page = Path(__file__).parents[3] / "docs" / "data_model.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    shown, _, after = rest.partition(end)
    if request.config.getoption("--update-golden"):
        page.write_text(f"{before}{begin}{table}{end}{after}", encoding="utf-8")
        shown = table
    assert shown == table, "write it with --update-golden"

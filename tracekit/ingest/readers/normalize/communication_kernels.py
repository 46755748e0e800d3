"""Which kernels communicate between devices, and what they do: the one table of name patterns, with its sources.

A kernel communicates if its own name says so: its namespace is a communication library's (`deep_ep::internode_ll`), it
follows a library's naming (`userbuffers_…`), it names nothing but a collective (`on_device_all_to_all_v_kernel`), or
its parameters are handles of a communication library (`ncclDevComm*`, `RankSignals`). Template arguments never count: a
GEMM may be instantiated with a type called AllReduce.

A name that only hints at communication (`dispatch`, `comm`, `allreduce_norm_fused`) is undecided: the reader decides by
what launched the kernel, and by the stream that it ran on, else it reports the kernel as a data-quality issue.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["communication", "copy", "compute", "undecided"]


@dataclass(frozen=True)
class Library:
    """A communication library: how its kernels are named, and where that can be read."""

    name: str
    pattern: str
    """Regular expression that the qualified name of the function matches from its start; case is ignored."""
    source: str
    op: str | None = None
    """What kernels of this pattern do, where their names do not say it."""


LIBRARIES = (
    # Vendors' collective libraries all name their kernels xccl…Kernel or start with the library's name.
    Library(
        "NCCL, RCCL",
        r"(nccl|rccl)(?-i:[A-Z_:]|$)",
        "github.com/NVIDIA/nccl src/device/generate.py, symmetric/generate.py",
    ),
    Library("MSCCL", r"msccl(?!pp)", "github.com/microsoft/msccl-executor-nccl src/collectives/device/msccl_kernel.h"),
    Library("MSCCL++", r"mscclpp(::collective::|_)", "github.com/microsoft/mscclpp src/ext/collectives"),
    Library("oneCCL", r"(one|x)ccl", "github.com/uxlfoundation/oneCCL src/coll/algorithms"),
    Library("HCCL", r"hccl|hcom_", "github.com/Ascend/pytorch; hcom_allReduce__101_0_1 in Ascend's own traces"),
    Library("other *CCL", r"\w{0,4}ccl(sym|symk)?(dev)?kernel", "the naming of NCCL's forks"),
    # Expert parallelism: all-to-all dispatch of tokens and combination of results.
    Library(
        "DeepEP and its forks",
        r"(?:\w+::)*(intranode|internode|internode_ll)::(?!get_)\w*(dispatch|combine|notify|barrier|clean)",
        "github.com/deepseek-ai/DeepEP csrc/kernels/api.cuh",
    ),
    Library(
        "DeepEP hybrid",
        r"(?:\w+::)*hybrid_ep::(dispatch|combine|device_sync)",
        "github.com/deepseek-ai/DeepEP, branch hybrid-ep",
    ),
    Library(
        "MORI",
        r"(?:mori::moe::)?Ep(Dispatch|Combine)(Inter|Intra)Node",
        "github.com/ROCm/mori src/ops/dispatch_combine",
    ),
    Library("PPLX", r"pplx::.*(dispatch|combine)Kernel", "github.com/perplexityai/pplx-kernels csrc/all_to_all"),
    Library(
        "TensorRT-LLM MoE all-to-all",
        r"(?:\w+::)*(?:fused)?moe_?(A2A|All_?To_?All)_?(?!Prepare|Sanitize|Mapping|Gate|Indice)\w*Kernel",
        "github.com/NVIDIA/TensorRT-LLM cpp/tensorrt_llm/kernels/communicationKernels/moeAlltoAllKernels.cu",
    ),
    Library(
        "Triton-distributed",
        r"(tile_)?kernel_(dispatch|combine)_token",
        "github.com/ByteDance-Seed/Triton-distributed python/triton_dist/kernels/nvidia/ep_a2a.py",
    ),
    # One-sided and symmetric memory.
    Library("OpenSHMEM family", r"(?:\w+::)*(nv|roc|i|x)shmemx?i?_", "github.com/NVIDIA/nvshmem src/device"),
    Library(
        "NVSHMEM on-stream collectives",
        r"(?:\w+::)*(alltoall|broadcast|fcollect|rdxn|reduce|reducescatter|barrier|barrier_all|sync|sync_all|quiet|put|get"
        r"|signal|wait)\w*_on_stream_kernel",
        "github.com/NVIDIA/nvshmem src/device/launch",
    ),
    Library(
        "PyTorch symmetric memory",
        r"(multimem_|exchangeSplitAndOffset|allToAllV|(barrier|put_signal|wait_signal)_kernel$)",
        "github.com/pytorch/pytorch torch/csrc/distributed/c10d/symm_mem",
    ),
    # Custom all-reduces of inference engines and of tensor parallelism.
    Library(
        "custom all-reduce",
        r"(?:\w+::)*(cross_device_reduce|reduce_scatter_cross_device|all_?gather_cross_device)",
        "github.com/vllm-project/vllm csrc/custom_all_reduce.cuh; github.com/ROCm/aiter custom_all_reduce.cuh",
    ),
    Library(
        "one-shot and two-shot all-reduce",
        r"(?:\w+::)*\w*(one|two)_?shot_?all_?reduce",
        "github.com/NVIDIA/TensorRT-LLM customAllReduceKernels.cu; pytorch CUDASymmetricMemoryOps.cu",
    ),
    Library(
        "fused all-reduce",
        r"(?:\w+::)*\w*all_?reduce_(fusion_kernel|prototype)_",
        "github.com/flashinfer-ai/flashinfer trtllm_allreduce_fusion.cuh; quickreduce in vLLM, SGLang and aiter",
    ),
    Library(
        "userbuffers, all-gather",
        r"userbuffers_\w*_ag(_|$)",
        "github.com/NVIDIA/TransformerEngine transformer_engine/common/comm_gemm_overlap/userbuffers",
        "all_gather",
    ),
    Library(
        "userbuffers, reduce-scatter",
        r"userbuffers_\w*_rs(_|$)",
        "github.com/NVIDIA/TransformerEngine, the same folder",
        "reduce_scatter",
    ),
    Library(
        "userbuffers, all-reduce",
        r"userbuffers_\w*sum",
        "github.com/NVIDIA/TransformerEngine, the same folder",
        "all_reduce",
    ),
    Library("userbuffers, point to point", r"kuserbuffers_", "github.com/NVIDIA/TransformerEngine, the same folder"),
    Library(
        "namespaces of collectives",
        r"(?:\w+::)*\w*(all_?reduce|all_?to_?all)\w*::(?!\w*prepare)\w+",
        "github.com/flashinfer-ai/flashinfer",
    ),
)

_COPIES = re.compile(r"(?i)dma_request|memcpy\b")
_HANDLES = re.compile(
    r"ncclDev(Comm|Kernel)|ncclSymk|mscclpp::|\bRankSignals\b|shmem_team_t|\bAllReduce(Fusion)?Params\b"
    r"|EpDispatchCombineArgs|\bSignalPads?\b"
)
_COMPUTE = re.compile(
    r"(?i)(at::(native|cuda)|at_cuda_detail|cub|thrust|cutlass\w*|cute|cudnn\w*|c10)::|cutlass_"
    r"|triton_(poi|red|per|tem|for|mm|spl)_"
    r"|.*(attn|attention|mla|fmha|flash|split_?kv?|decode)\w*combine|.*get_dispatch_layout|.*combine_?quantize"
    r"|.*convert_?(dispatch|combine)"
)
_HINT = re.compile(r"(?i)[a-z]{0,4}ccl|comms?|communicat\w*|dispatch\w*|combine\w*|\w*shmem\w*|p2p|a2a\w*|alltoall\w*")
_COLLECTIVE = re.compile(r"(?i)(all_?(?:reduce|gather|to_?all)|reduce_?scatter)(?:v|_v|_base)?")
# What a name may say in addition to the collective: where and how it runs, not what it computes.
_PLAIN_WORDS = re.compile(
    r"(?i)kernels?|impl|triton|jit|device|on|off|ragged|v\d?|vdev|ll\d*|ht|ring|tree|nvls|nodes?|intra(node)?|inter(node)?|small"
    r"|medium|large|push|pull|packet|pipeline|block|warp|full|mesh|fullmesh|inplace|out|oop|bf\d+|fp\d+|f\d+|half|float|rocm"
    r"|cuda|hip|sycl|pcie|symm|symmetric|mem|sum|avg|max|min|one|two|shot|oneshot|twoshot|gpu|persistent|inline|async|rs|ag"
    r"|test|\d+(d|stage|node)?"
)
_WORD = re.compile(r"[AaPp]2[AaPp]|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d\w*")
_MANGLED = re.compile(r"_ZN?K?(\d.*)")
_RETURN_TYPES = re.compile(r"^(?:(?:static|void|extern|__global__)\s+)*")
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|_GLOBAL__N_+\w*?::|\(anonymous\)::")

_OPS = (
    ("reduce_?scatter", "reduce_scatter"),
    ("all_?gather|fcollect", "all_gather"),
    ("all_?reduce|cross_device_reduce|rdxn", "all_reduce"),
    ("all_?to_?all|a2a(?!.*(dispatch|combine))", "all_to_all"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
    ("broadcast", "broadcast"),
    ("send_?recv", "send_recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
    ("barrier|sync_all|device_sync", "barrier"),
)
_ONE_SIDED_OPS = ((r"(?<![a-z])put", "put"), (r"(?<![a-z])get(?!_)", "get"))
_OP_PATTERNS = tuple((re.compile(pattern), op) for pattern, op in _OPS)
_ONE_SIDED_PATTERNS = tuple((re.compile(pattern), op) for pattern, op in _ONE_SIDED_OPS)
_LIBRARY_PATTERNS = tuple((re.compile(f"(?i){library.pattern}"), library) for library in LIBRARIES)


@lru_cache(maxsize=1 << 14)
def kind_of(name: str) -> Kind:
    """The kind of a kernel by its name: communication, copy, compute, or undecided where its name only hints.

    >>> kind_of("void deep_ep::internode_ll::dispatch<false, 3, 10, 7168>(void*, void*, int*)")
    'communication'
    >>> kind_of("combine_bias(float*)"), kind_of("void at::native::reduce_kernel<512, 1>(ncclThing)")
    ('undecided', 'compute')
    """
    function, parameters = _split(name)
    if _COPIES.match(function):
        return "copy"
    if _library(function) or _HANDLES.search(parameters):
        return "communication"
    if _COMPUTE.match(function):
        return "compute"
    last = function.rpartition("::")[2]
    collective = _COLLECTIVE.search(last)
    if collective:
        return "communication" if _says_nothing_else(last, collective) else "undecided"
    return "undecided" if any(map(_HINT.fullmatch, _words(function))) else "compute"


@lru_cache(maxsize=1 << 14)
def op_of(name: str) -> str | None:
    """The standard name of what a kernel, slice or c10d op communicates; None if unknown.

    dispatch and combine are the two all-to-alls of expert parallelism; put and get are one-sided.

    >>> op_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'reduce_scatter'
    """
    function, _ = _split(name.removeprefix("c10d::"))
    library = _library(function)
    if library and library.op:
        return library.op
    patterns = _OP_PATTERNS + _ONE_SIDED_PATTERNS if library else _OP_PATTERNS
    for text in (function.rpartition("::")[2], function):
        plain = text.lower().replace("_base", "").strip("_")
        op = next((op for pattern, op in patterns if pattern.search(plain)), None)
        if op:
            return op
    return None


def _library(function: str) -> Library | None:
    return next((library for pattern, library in _LIBRARY_PATTERNS if pattern.match(function)), None)


def _says_nothing_else(name: str, collective: re.Match[str]) -> bool:
    around = f"{name[: collective.start()]} {name[collective.end() :]}"
    return all(map(_PLAIN_WORDS.fullmatch, _words(around)))


def _words(name: str) -> list[str]:
    """Return the words of a name in snake case, camel case or both.

    >>> _words("moeA2A_dispatchKernel")
    ['moe', 'A2A', 'dispatch', 'Kernel']
    """
    return [word for part in re.split(r"[^A-Za-z0-9]+", name) for word in _WORD.findall(part)]


def _split(name: str) -> tuple[str, str]:
    """Return the qualified name of a kernel's function, and its parameters as text; template arguments are left out."""
    plain = _ANONYMOUS.sub("", name[:4096].strip())
    mangled = _MANGLED.match(plain)
    if mangled:
        return "::".join(_mangled_parts(mangled[1])), ""
    function: list[str] = []
    depth = 0
    for pos, character in enumerate(plain):
        if character == "<":
            depth += 1
        elif character == ">" and depth:
            depth -= 1
        elif character == "(" and not depth:
            return _function("".join(function)), plain[pos:]
        elif not depth:
            function.append(character)
    return _function("".join(function)), ""


def _function(text: str) -> str:
    return _RETURN_TYPES.sub("", text).strip().removesuffix(".kd")


def _mangled_parts(rest: str) -> Iterator[str]:
    while match := re.match(r"(\d{1,4})", rest):
        length, rest = int(match[1]), rest[match.end() :]
        yield rest[:length]
        rest = rest[length:]

"""Machines: compute and memory rates of a GPU, bandwidth of links, and contention on one device."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tracekit.conventions import devices
from tracekit.errors import InputError

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU in nodes of `gpus_per_node`.

    Peaks are the vendor's; shares are what long training runs achieve of them, not the vendor's.
    """

    name: str
    device_name: str
    peak_flops_per_s: float
    achieved_ratio: float
    """Share of the peak that matrix products reach."""
    peak_memory_bytes_per_s: float
    memory_ratio: float
    """Share of the peak memory bandwidth that kernels which only move data reach."""
    memory_bytes: int
    multiprocessors: int
    gpus_per_node: int
    node_bytes_per_s: float
    """Bus bandwidth of a ring inside a node (nccl-tests' busbw)."""
    network_bytes_per_s: float
    """Bus bandwidth of a ring across nodes when all GPUs of a node share its network."""
    node_hop_s: float
    """Latency of one hop of a ring inside a node."""
    network_hop_s: float
    elementwise_bytes: float = 93.0
    """Memory traffic of a layer's forward pass outside matrix products and attention, per token and unit of width."""
    give_way: float = 1.74
    """How much longer, per piece it is split into, a preparatory kernel takes during the main compute."""
    give_way_high_priority: float = 0.24
    """The same on a stream of high priority, whose blocks are placed first."""
    collective_slows_compute: float = 0.03
    """How much longer compute takes while a collective holds multiprocessors."""
    compute_slows_collective: float = 0.0
    """How much longer a collective's transfer takes while compute runs."""
    launch_s: float = 4e-6
    """Host time of one kernel launch."""
    op_s: float = 15e-6
    """Host time of one op without its launches: Python and dispatcher."""
    queue_depth: int = 1024
    """Launches that may be outstanding before the host must wait."""
    jitter_ratio: float = 0.01
    """Standard deviation of a kernel's duration, as a share of it."""
    gemm_name: str = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"

    @property
    def flops_per_s(self) -> float:
        """Return the rate that matrix products reach."""
        return self.peak_flops_per_s * self.achieved_ratio

    @property
    def memory_bytes_per_s(self) -> float:
        """Return the rate that kernels reach which only move data."""
        return self.peak_memory_bytes_per_s * self.memory_ratio


_A100, _H100, _V100 = (devices.NAMED[name] for name in ("a100-80-sxm", "h100-sxm", "v100-sxm"))
_ALL = (
    # Peaks: NVIDIA A100 80GB datasheet (312 TFLOP/s bf16, 2,039 GB/s, NVLink 300 GB/s each way). Shares, network,
    # latency and contention: fitted to all rows of the published FSDP / YaFSDP table (benchmarks.published_table).
    Hardware(
        "a100-80",
        "NVIDIA A100-SXM4-80GB",
        peak_flops_per_s=_A100.peaks[devices.BF16],
        achieved_ratio=0.653,
        peak_memory_bytes_per_s=_A100.memory_bytes_per_s,
        memory_ratio=0.88,
        memory_bytes=80 * GIB,
        multiprocessors=108,
        gpus_per_node=8,
        node_bytes_per_s=230e9,
        network_bytes_per_s=91e9,
        node_hop_s=3e-6,
        network_hop_s=7.9e-6,
    ),
    # Peaks: NVIDIA H100 SXM datasheet (989 TFLOP/s bf16 dense, 3,350 GB/s, NVLink 450 GB/s each way); the network is
    # eight 400 Gb/s adapters a node. Shares are set by us, about what public training reports state.
    Hardware(
        "h100-80",
        "NVIDIA H100 80GB HBM3",
        peak_flops_per_s=_H100.peaks[devices.BF16],
        achieved_ratio=0.55,
        peak_memory_bytes_per_s=_H100.memory_bytes_per_s,
        memory_ratio=0.83,
        memory_bytes=80 * GIB,
        multiprocessors=132,
        gpus_per_node=8,
        node_bytes_per_s=360e9,
        network_bytes_per_s=330e9,
        node_hop_s=2e-6,
        network_hop_s=6e-6,
        collective_slows_compute=0.05,
        launch_s=3e-6,
        op_s=10e-6,
        gemm_name="nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNT",
    ),
    # Peaks: NVIDIA V100 SXM2 32GB datasheet (125 TFLOP/s fp16, 900 GB/s, NVLink 150 GB/s each way); four 100 Gb/s
    # adapters a node. Shares are set by us.
    Hardware(
        "v100-32",
        "Tesla V100-SXM2-32GB",
        peak_flops_per_s=_V100.peaks[devices.FP16],
        achieved_ratio=0.6,
        peak_memory_bytes_per_s=_V100.memory_bytes_per_s,
        memory_ratio=0.83,
        memory_bytes=32 * GIB,
        multiprocessors=80,
        gpus_per_node=8,
        node_bytes_per_s=120e9,
        network_bytes_per_s=42e9,
        node_hop_s=10e-6,
        network_hop_s=9e-6,
        launch_s=5e-6,
        op_s=20e-6,
        gemm_name="volta_fp16_s884gemm_fp16_256x128_ldg8_f2f_tn",
    ),
)
HARDWARE: Mapping[str, Hardware] = {hardware.name: hardware for hardware in _ALL}
"""Machines whose shares were fitted or chosen by what trainings on them achieved."""
ACHIEVED_RATIO = 0.5
"""Share of the peak that matrix products are taken to reach on other devices: about that of the H100."""
LINK_RATIO, NETWORK_RATIO = 0.8, 0.82
"""Bus bandwidth over the rate of links and of network adapters: those of the H100 above."""
_NO_LINKS_BYTES_PER_S = 32e9
"""Between devices without links of their own: PCIe 4.0 ×16."""
_ADAPTERS_BYTES_PER_S = 8 * 50e9
"""Of a node: eight of 400 Gb/s, one for each device."""
_FITTED_DEVICES = {device.name: machine for machine in _ALL if (device := devices.find(machine.device_name))}
NAMES = tuple(dict.fromkeys((*HARDWARE, *devices.NAMED)))


def find(name: str) -> Hardware:
    """Hardware of this name, of a machine or a device. Raises InputError, naming what there is, for any other."""
    machine = HARDWARE.get(name) or _FITTED_DEVICES.get(name)
    if machine is not None:
        return machine
    device = devices.NAMED.get(name)
    if device is None:
        raise InputError(f"{name!r} is unknown hardware; known: {', '.join(NAMES)}")
    return _of_device(device)


def power_w(hardware: Hardware) -> float | None:
    """Most power that a GPU may draw by its datasheet, in W."""
    device = devices.NAMED.get(hardware.device_name) or devices.find(hardware.device_name)
    return None if device is None else device.power_w


def _of_device(device: devices.Device) -> Hardware:
    """Machine with eight of a device; what no training has shown is that of the H100."""
    peak = device.peak(devices.BF16) or device.peak(devices.FP16)
    assert peak is not None
    assert device.memory_bytes is not None
    return replace(
        HARDWARE["h100-80"],
        name=device.name,
        device_name=device.name,
        peak_flops_per_s=peak,
        achieved_ratio=ACHIEVED_RATIO,
        peak_memory_bytes_per_s=device.memory_bytes_per_s,
        memory_bytes=int(device.memory_bytes),
        node_bytes_per_s=LINK_RATIO * (device.link_bytes_per_s or _NO_LINKS_BYTES_PER_S),
        network_bytes_per_s=NETWORK_RATIO * _ADAPTERS_BYTES_PER_S,
    )

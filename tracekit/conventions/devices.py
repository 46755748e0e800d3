"""Accelerators: peak rates by element type, and memory bandwidth, by the name that the driver gives a device.

Peaks are the vendors', dense (without structured sparsity), of one device as PyTorch sees it, at boost clocks; so are
the capacity of memory (GB200: that in an NVL72) and the power (of MI250X half of the module's 560 W). This table is the
only place that states them: the trainers and the analysis ask it. It imports the standard library only.

Sources: the datasheets of NVIDIA V100, A100, A10, A30, L4, L40S, H100, H200, H20, B200 and GeForce RTX 4090 (Ada
whitepaper), and of AMD Instinct MI100, MI210, MI250X, MI300X, MI325X, MI350X and MI355X. Links of AMD's devices, in
both directions: MI250X 800 GB/s of the module, 400 of each of its two devices, in links of 100 GB/s; MI300X and MI325X
896 GB/s and MI350X and MI355X 1075 GB/s, in seven links, one to each other device (data sheets of the accelerators and
their platforms; "Improving performance on MI300 when using fewer than 8 GPUs", README of RCCL). V100: six links of
50 GB/s, at least one to a neighbour (whitepaper of DGX-1).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

FP64, FP32, TF32, FP16, BF16, FP8, INT8 = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({FP64: 8, FP32: 4, TF32: 4, FP16: 2, BF16: 2, FP8: 1, INT8: 1})

_KINETO_DTYPES = MappingProxyType(
    {
        "double": FP64,
        "float": FP32,
        "c10::Half": FP16,
        "c10::BFloat16": BF16,
        "signed char": INT8,
        "unsigned char": INT8,
    }
)


@dataclass(frozen=True)
class Device:
    """A kind of device: its peak in operations per second by element type, and its bandwidths in bytes/s.

    `link_bytes_per_s` is what all its links inside a node carry in one direction together, half of what a datasheet
    states for NVLink and Infinity Fabric; None where not all of its machines have such links. `peer_bytes_per_s` is the
    part of them that goes to one other device, if links connect devices directly; None if they go to a switch.
    """

    name: str
    pattern: str
    """A regular expression that finds the device's name as the driver writes it."""
    peaks: Mapping[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float | None = None
    peer_bytes_per_s: float | None = None
    memory_bytes: float | None = None
    """Capacity of its memory, of the variant with most where there are several."""
    power_w: float | None = None
    """The most that it may draw by its datasheet."""

    def peak(self, dtype: str) -> float | None:
        """Return the peak of matrix products of an element type (FP64 … INT8); None where the device has none."""
        return self.peaks.get(dtype)


def _device(
    name: str,
    pattern: str,
    gigabytes_per_s: float,
    gigabytes: float,
    power_w: float,
    *,
    link: float | None = None,
    peer: float | None = None,
    **teraflops: float,
) -> Device:
    peaks = {dtype: rate * 1e12 for dtype, rate in teraflops.items()}
    if BF16 in peaks:
        peaks.setdefault(FP16, peaks[BF16])
    link_rate, peer_rate = (None if rate is None else rate * 1e9 for rate in (link, peer))
    memory_rate, memory_bytes = gigabytes_per_s * 1e9, gigabytes * 1e9
    return Device(name, pattern, MappingProxyType(peaks), memory_rate, link_rate, peer_rate, memory_bytes, power_w)


_MI300 = {FP64: 163.4, FP32: 163.4, TF32: 653.7, BF16: 1307.4, FP8: 2614.9, INT8: 2614.9}
_MI300_LINKS = {"link": 448.0, "peer": 64.0}
_MI350_LINKS = {"link": 537.6, "peer": 76.8}
DEVICES = (
    _device("v100-sxm", r"V100-SXM", 900, 32, 300, link=150, peer=25, fp64=7.8, fp32=15.7, fp16=125),
    _device("v100-pcie", r"V100", 900, 32, 250, fp64=7, fp32=14, fp16=112),
    _device(
        "a100-80-sxm", r"A100-SXM\d?-80GB", 2039, 80, 400, link=300, fp64=19.5, fp32=19.5, tf32=156, bf16=312, int8=624
    ),
    _device("a100-80-pcie", r"A100(-PCIE| )?-?80GB", 1935, 80, 300, fp64=19.5, fp32=19.5, tf32=156, bf16=312, int8=624),
    _device("a100-40", r"A100", 1555, 40, 400, fp64=19.5, fp32=19.5, tf32=156, bf16=312, int8=624),
    _device("a30", r"A30\b", 933, 24, 165, fp64=10.3, fp32=10.3, tf32=82, bf16=165, int8=330),
    _device("a10g", r"A10G", 600, 24, 300, fp32=35, tf32=35, bf16=70, int8=140),
    _device("a10", r"A10\b", 600, 24, 150, fp32=31.2, tf32=62.5, bf16=125, int8=250),
    _device("l40s", r"L40S", 864, 48, 350, fp32=91.6, tf32=183, bf16=362, fp8=733, int8=733),
    _device("l4", r"\bL4\b", 300, 24, 72, fp32=30.3, tf32=60, bf16=121, fp8=242, int8=242),
    _device("rtx-4090", r"RTX 4090", 1008, 24, 450, fp32=82.6, tf32=82.6, bf16=165.2, fp8=330.3, int8=660.6),
    _device("h100-pcie", r"H100 PCIe", 2000, 80, 350, fp64=51, fp32=51, tf32=378, bf16=756, fp8=1513, int8=1513),
    _device("h100-nvl", r"H100 NVL", 3900, 94, 400, fp64=60, fp32=60, tf32=418, bf16=835, fp8=1671, int8=1671),
    _device("h100-sxm", r"H100", 3350, 80, 700, link=450, fp64=67, fp32=67, tf32=494, bf16=989, fp8=1979, int8=1979),
    _device("h200", r"H200", 4800, 141, 700, link=450, fp64=67, fp32=67, tf32=494, bf16=989, fp8=1979, int8=1979),
    _device("h20", r"H20\b", 4000, 96, 400, link=450, fp64=1, fp32=44, tf32=74, bf16=148, fp8=296, int8=296),
    _device("gb200", r"GB200", 8000, 186, 1200, link=900, fp64=40, fp32=80, tf32=1250, bf16=2500, fp8=5000, int8=5000),
    _device("b200", r"B200", 8000, 180, 1000, link=900, fp64=37, fp32=75, tf32=1125, bf16=2250, fp8=4500, int8=4500),
    _device("mi100", r"MI100", 1229, 32, 300, fp64=11.5, fp32=46.1, fp16=184.6, bf16=92.3, int8=184.6),
    _device("mi210", r"MI210", 1638, 64, 300, fp64=45.3, fp32=45.3, bf16=181, int8=181),
    # One of the module's two devices; what connects the two to each other is not counted.
    _device("mi250x", r"MI250X", 1638, 64, 280, link=200, peer=50, fp64=47.9, fp32=47.9, bf16=191.5, int8=191.5),
    _device("mi325x", r"MI325X", 6000, 256, 1000, **_MI300_LINKS, **_MI300),
    _device("mi300x", r"MI300X", 5325, 192, 750, **_MI300_LINKS, **_MI300),
    _device(
        "mi355x", r"MI355X", 8000, 288, 1400, **_MI350_LINKS, fp64=78.6, fp32=157.3, bf16=2500, fp8=5000, int8=5000
    ),
    _device("mi350x", r"MI350X", 8000, 288, 1000, **_MI350_LINKS, fp64=72, fp32=144.2, bf16=2300, fp8=4600, int8=4600),
)
NAMED: Mapping[str, Device] = MappingProxyType({device.name: device for device in DEVICES})


def find(name: str) -> Device | None:
    """Return the device of a driver's name, such as ``NVIDIA H100 80GB HBM3``; None for one that is not listed.

    >>> find("NVIDIA A100-SXM4-80GB").peaks["bf16"]
    312000000000000.0
    """
    return next((device for device in DEVICES if re.search(device.pattern, name)), None)


@dataclass(frozen=True)
class DeviceOverride:
    """What a user states of the devices whose names contain `name`; it replaces the values of the table."""

    name: str
    peaks: Mapping[str, float]
    """In operations per second, by element type; fp16 is that of bf16 if only that is stated."""
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None

    def over(self, listed: Device | None) -> Device:
        """Return a device with these values, and for the rest those of the listed one. Raises ValueError.

        A device that is not listed needs the bandwidth of its memory.
        """
        memory = self.memory_bytes_per_s or (listed.memory_bytes_per_s if listed else None)
        if memory is None:
            raise ValueError(f"{self.name} is not listed, so memory_bytes_per_s is required")
        stated = dict(self.peaks)
        if BF16 in stated:
            stated.setdefault(FP16, stated[BF16])
        peaks = {**(listed.peaks if listed else {}), **stated}
        link = self.link_bytes_per_s or (listed.link_bytes_per_s if listed else None)
        peer = listed.peer_bytes_per_s if listed and not self.link_bytes_per_s else None
        name = listed.name if listed else self.name
        more = (listed.memory_bytes, listed.power_w) if listed else (None, None)
        return Device(name, re.escape(self.name), MappingProxyType(peaks), memory, link, peer, *more)


def find_overridden(name: str, overrides: Sequence[DeviceOverride]) -> Device | None:
    """Return the device of a driver's name with what the first override that its name contains states.

    >>> own = DeviceOverride("H100", {BF16: 8e14})
    >>> find_overridden("NVIDIA H100 80GB HBM3", [own]).peaks["bf16"]
    800000000000000.0
    """
    listed = find(name)
    override = next((candidate for candidate in overrides if candidate.name in name), None)
    return listed if override is None else override.over(listed)


def element_type(dtype: str | None) -> str | None:
    """Return the element type of what a profiler calls ``c10::BFloat16`` or ``c10::Float8_e4m3fn``; None for others."""
    if dtype is None:
        return None
    return FP8 if dtype.startswith("c10::Float8") else _KINETO_DTYPES.get(dtype)

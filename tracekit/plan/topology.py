"""The topology of a cluster, from a small TOML file: nodes, the GPUs that links connect, rails, and storage."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tracekit.conventions import regular_files
from tracekit.errors import InputError
from tracekit.plan import hardware
from tracekit.plan.hardware import LINK_RATIO, NETWORK_RATIO, Hardware

_Count = Annotated[int, Meta(ge=1, le=1 << 24)]
_Rate = Annotated[float, Meta(gt=0, le=1e18)]
_Ratio = Annotated[float, Meta(gt=0, le=1)]
_LARGEST_BYTES = 1 << 20


class StorageRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bandwidths of storage: of all nodes together, and the most that one node writes."""

    write_bytes_per_s: _Rate | None = None
    read_bytes_per_s: _Rate | None = None
    node_write_bytes_per_s: _Rate | None = None


class TopologyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a topology file; rates are those of one GPU or adapter, in one direction."""

    device: str
    gpus_per_node: _Count
    nodes: _Count | None = None
    link_domain_gpus: _Count | None = None
    """GPUs that NVLink or Infinity Fabric connects, also across nodes; by default those of a node."""
    link_bytes_per_s: _Rate | None = None
    """What a GPU sends over all its links; by default that of the device."""
    rails: _Count = 8
    """Network adapters of a node."""
    rail_bytes_per_s: _Rate = 50e9
    achieved_ratio: _Ratio | None = None
    """Share of the peak that matrix products reach; by default that of the device."""
    link_ratio: _Ratio = LINK_RATIO
    network_ratio: _Ratio = NETWORK_RATIO
    storage: StorageRates = StorageRates()


@dataclass(frozen=True)
class Topology:
    """A cluster: its machine, whose "node" is the domain that links connect, GPUs (None: any number) and storage."""

    hardware: Hardware
    domain_gpus: int
    gpus: int | None
    storage: StorageRates


def read(path: Path) -> Topology:
    """Topology that a file describes. Raises InputError, naming the file and the key."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError(f"{path}: larger than 1 MiB, which no topology is")
        document = tomllib.loads(regular_files.read_text(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; name a topology file (docs/plan.md)") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: no TOML: {' '.join(str(error).split())[:200]}") from error
    try:
        stated = msgspec.convert(document, TopologyFile, strict=False)
    except msgspec.ValidationError as error:
        keys = ", ".join(field.name for field in msgspec.structs.fields(TopologyFile))
        raise InputError(f"{path}: {error}; keys: {keys}") from error
    return topology(stated, str(path))


def topology(stated: TopologyFile, name: str) -> Topology:
    """Topology of these values. Raises InputError for an unknown device, or a domain that nodes do not divide."""
    domain_gpus = stated.link_domain_gpus or stated.gpus_per_node
    if max(domain_gpus, stated.gpus_per_node) % min(domain_gpus, stated.gpus_per_node):
        raise InputError(
            f"{name}: link_domain_gpus {domain_gpus} and gpus_per_node {stated.gpus_per_node} do not divide"
        )
    machine = hardware.find(stated.device)
    link = stated.link_bytes_per_s
    node_network = stated.rails * stated.rail_bytes_per_s * stated.network_ratio
    machine = replace(
        machine,
        achieved_ratio=stated.achieved_ratio or machine.achieved_ratio,
        gpus_per_node=domain_gpus,
        node_bytes_per_s=machine.node_bytes_per_s if link is None else link * stated.link_ratio,
        network_bytes_per_s=node_network * domain_gpus / stated.gpus_per_node,
    )
    gpus = None if stated.nodes is None else stated.nodes * stated.gpus_per_node
    return Topology(machine, domain_gpus, gpus, stated.storage)

"""The one device mesh of a training, and the parts of it that each kind of parallelism works on."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tracekit.conventions.strategies import CP, DP_REPLICATE, DP_SHARD, Layout

_DATA_AXES = (DP_REPLICATE, DP_SHARD)


def make_mesh(layout: Layout, device: str, *, data_axes: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of all ranks: the axes of the layout of more than one rank, outermost first, and `data_axes`.

    Its dims have the axes' names, so that torch describes their process groups as "mesh_pp" and so on.
    """
    axes = {axis: size for axis, size in layout.sizes.items() if size > 1 or axis in data_axes}
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of the mesh that a data strategy works on: replicas, shards, or replicas by shards.

    Ranks of one context-parallel group have other tokens each, so they are replicas or shards, too.
    """
    names = mesh.mesh_dim_names or ()
    axes = tuple(axis for axis in _DATA_AXES if axis in names)
    if CP in names:
        both = f"{axes[-1]}_{CP}"
        flat = mesh[axes[-1], CP]._flatten(both)
        return mesh[(*axes[:-1], both)] if axes[:-1] else flat
    return mesh[axes] if axes and axes != names else mesh


def axis_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh | None:
    """Return the part of the mesh along one axis; None where the layout has one rank along it."""
    return mesh[axis] if axis in (mesh.mesh_dim_names or ()) else None

"""FSDP unit spans: the annotations that FSDP1, FSDP2 and YaFSDP write around the work of one unit.

FSDP2 and YaFSDP: ``FSDP::all_gather (layers.0)``, ``FSDP::pre_forward (layers.0)``; prefetch: ``FSDP::backward_prefetch
for layers.1``; the root unit has no name. FSDP1: ``FullyShardedDataParallel.forward``, without a unit.
"""

import polars as pl

_SPAN = r"^(?:FSDP|YaFSDP)::(\w+)"
_UNIT = r"^(?:FSDP|YaFSDP)::\w+ (?:\((.*)\)|for (.*))$"
_FSDP1 = "FullyShardedDataParallel."


def span(name: pl.Expr) -> pl.Expr:
    """Return the span in a slice's name, such as all_gather; null if the name is not a unit span."""
    fsdp1 = pl.when(name.str.starts_with(_FSDP1)).then(name.str.strip_prefix(_FSDP1))
    return pl.coalesce(name.str.extract(_SPAN), fsdp1)


def unit(name: pl.Expr) -> pl.Expr:
    """Return the unit in a slice's name, such as layers.0; empty for the root unit, null if the name has no unit."""
    root = pl.when(name.str.contains(_SPAN)).then(pl.lit(""))
    return pl.coalesce(name.str.extract(_UNIT, 1), name.str.extract(_UNIT, 2), root)

"""The mesh axis that a process group's description names.

Sources of descriptions: init_device_mesh of PyTorch ("mesh_" and the name of the dim); torchtitan 0.3.0,
distributed/parallel_dims.py (names of dims, also of earlier versions); Megatron-LM, core/parallel_state.py
(group_desc). DeepSpeed gives its groups none.
"""

import re

from tracekit.conventions.strategies import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP

DP = "dp"
"""Data parallelism, where the name does not say whether parameters are sharded."""

_BY_MESH_NAME = {
    "pp": PP, "pipe": PP, "pipeline": PP, "tp": TP, "tensor": TP, "model": TP, "cp": CP, "context": CP, "ep": EP,
    "expert": EP, "dp": DP, "data": DP, "ddp": DP, "fsdp": DP_SHARD, "shard": DP_SHARD, "dp_shard": DP_SHARD,
    "replicate": DP_REPLICATE, "dp_replicate": DP_REPLICATE, "etp": TP, "efsdp": "dp_expert", "ep_shard": "dp_expert",
    "dp_shard_in_ep": "dp_expert", "dp_shard_mod_ep": "dp_expert", "dp_shard_of_experts": "dp_expert",
    "loss": "dp_cp", "loss_mesh": "dp_cp",
}  # fmt: skip
_UNNAMED = re.compile(r"^(dim_\d+|default)$")
"""What stands after "mesh_" where a mesh has no names of dims, or a dim is all ranks."""
_BY_MEGATRON_NAME = (
    (r"embedding", "embedding"),
    (r"expert_(tensor_and_model|tensor_model_pipeline)", "ep_tp"),
    (r"expert_data|data_modulo_expert", "dp_expert"),
    (r"expert_tensor", TP),
    (r"expert_model", EP),
    (r"tensor_and_data|tensor_data", "dp_tp"),
    (r"tensor_and_context", "cp_tp"),
    (r"pipeline_model_parallel|pipe_parallel", PP),
    (r"tensor_model_parallel", TP),
    (r"context_parallel", CP),
    (r"data_parallel", DP),
    (r"^model_parallel", "mp"),
)
JOINT = frozenset({"batch", "embedding", "ep_tp", "dp_expert", "dp_cp", "dp_tp", "cp_tp", "mp"})
"""Names of groups that are no axis of the mesh: over several axes, or over a part of one."""


def axis_of_description(description: str | None) -> str | None:
    """Return the axis that a group's description names; None if it names none.

    >>> axis_of_description("mesh_dp_shard"), axis_of_description("TENSOR_MODEL_PARALLEL_GROUP")
    ('dp_shard', 'tp')
    >>> axis_of_description("mesh_efsdp"), axis_of_description("mesh_dim_0")
    ('dp_expert', None)
    """
    text = (description or "").lower()
    if text.startswith("mesh_"):
        name = text.removeprefix("mesh_")
        return None if _UNNAMED.match(name) else _BY_MESH_NAME.get(name, name)
    if text in _BY_MESH_NAME:
        return _BY_MESH_NAME[text]
    return next((axis for pattern, axis in _BY_MEGATRON_NAME if re.search(pattern, text)), None)

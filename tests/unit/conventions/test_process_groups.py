"""Axes of process groups by their descriptions."""

import pytest

from tracekit.conventions import strategies


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("mesh_pp", "pp"),
        ("mesh_tp", "tp"),
        ("mesh_dp_shard", "dp_shard"),
        ("mesh_dp_shard_cp", "dp_shard_cp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp_expert"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        # torchtitan: the meshes for data loading, loss, dense layers and experts
        ("mesh_world", "world"),
        ("mesh_batch", "batch"),
        ("mesh_loss_mesh", "dp_cp"),
        ("mesh_dp_cp", "dp_cp"),
        ("mesh_fsdp", "dp_shard"),
        ("mesh_dp_replicate", "dp_replicate"),
        ("mesh_cp", "cp"),
        ("mesh_ep", "ep"),
        ("mesh_etp", "tp"),
        ("mesh_efsdp", "dp_expert"),
        ("mesh_dp_shard_in_ep", "dp_expert"),
        # a mesh without names, and a dim that is all ranks
        ("mesh_dim_0", None),
        ("mesh_default", None),
        ("default_pg", None),
        ("undefined", None),
        (None, None),
    ],
)
def test_a_description_names_the_axis(description, axis):
    assert strategies.axis_of_description(description) == axis

"""What is saved in the background is a copy: training changes the tensors meanwhile."""

import torch

from instrumented_trainers.checkpoints.saver import _stage_state
from instrumented_trainers.parallelism.region_state import RegionPlace
from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard
from instrumented_trainers.regions import Region


def test_parts_of_tensors_and_whole_ones_are_copied() -> None:
    part, whole = torch.arange(6.0), torch.ones(2)
    place = RegionPlace(Region(torch.Size((2, 3))))
    state = {"model": {"part": FlatShard(part, place), "whole": whole}, "groups": [{"lr": 0.1, "params": ["part"]}]}
    staged = _stage_state(state)
    part.zero_()
    whole.zero_()
    copied = staged["model"]["part"]
    assert copied.place is place
    assert copied.pieces[0][1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert staged["model"]["whole"].tolist() == [1, 1]
    assert staged["groups"] == state["groups"]

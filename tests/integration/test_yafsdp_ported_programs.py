"""Programs off the usual path, as of somebody who ports a training, do as on one process or are refused."""

import functools
import re

import pytest

from tests.integration import yafsdp_ported_programs
from tests.integration.yafsdp_ported_programs import RECIPES
from tests.support import process_group

TOLERANCE = 1e-12
_REPLACED = r"RuntimeError: YaFSDP: parameter 'weight' of \w+ in .* was replaced after fully_shard"
_CHANGED = r"RuntimeError: YaFSDP: the forward of unit 'layers.0' changed parameter 'weight' of Linear"
_TRANSFORMED = r"NotImplementedError: YaFSDP: the root unit cannot run within a transform of torch.func"
REFUSED = {
    "adapters merged on shards": "NotImplementedError: YaFSDP: matmul needs the whole tensor.*unshard",
    "a module replaced": r"RuntimeError: YaFSDP: parameter 'head\.weight' was put into the model after fully_shard",
    "a parameter added": "RuntimeError: YaFSDP: parameter 'prompt' was put into the model after fully_shard",
    "tied later": _REPLACED,
    "untied later": _REPLACED,
    "parametrized later": _REPLACED,
    "functional_call of the model": _REPLACED,
    "clamped in forward": _CHANGED,
    "new memory in forward": _CHANGED,
    "written through an alias in forward": _CHANGED,
    "gradients averaged by hand": "NotImplementedError: YaFSDP: all_reduce .*means over all ranks already",
    "weights broadcast by hand": "NotImplementedError: YaFSDP: broadcast .*leave such collectives out",
    "within DDP": "RuntimeError: YaFSDP: DistributedDataParallel would write rank 0's shards to all ranks",
    "per-sample gradients": _TRANSFORMED,
    "forward mode": _TRANSFORMED,
    "functional_call of a block": "RuntimeError: YaFSDP: .* in unit 'layers.1' is another tensor while the unit runs",
    "added in place": "RuntimeError: Output 0 of _BackwardEnd is a view and is being modified inplace",
}
EVERYDAY = {
    *("adapters merged", "a layer added", "renamed state", "scaled in backward", "a cached parametrization"),
    *("a module replaced", "clamped in forward", "new memory in forward", "functional_call of a block", "forward mode"),
}
PARAMETERS = [
    pytest.param(size, name, marks=() if size == 3 and name in EVERYDAY else pytest.mark.accuracy)
    for size in (2, 3)
    for name in RECIPES
]


@functools.cache
def outcomes(world_size: int, *, everyday: bool) -> dict[str, process_group.Outcome]:
    names = [name for name in RECIPES if (name in EVERYDAY and world_size == 3) == everyday]
    return process_group.run_cases(
        world_size, {name: functools.partial(yafsdp_ported_programs.outcome, name) for name in names}
    )


@pytest.mark.parametrize(("world_size", "name"), PARAMETERS)
def test_does_as_one_process_or_is_refused_on_every_rank(world_size: int, name: str) -> None:
    for result in outcomes(world_size, everyday=world_size == 3 and name in EVERYDAY)[name].results():
        if name in REFUSED:
            assert re.match(REFUSED[name], str(result)), result
        else:
            assert isinstance(result, float), result
            assert result < TOLERANCE

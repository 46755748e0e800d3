"""Weights from safetensors files, such as Hugging Face's: each rank reads the rows that its shards lie in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instrumented_trainers.parallelism.yafsdp.module import units_in
from instrumented_trainers.parallelism.yafsdp.unit import UnitParameter

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: Path | str, *, strict: bool = True) -> None:
    """Load a sharded model's weights from the safetensors files of `folder`, as `save_pretrained` writes them.

    Each rank reads only its parts: never a whole weight of two dims or more. The names are those of
    ``model.named_parameters()``; a tied weight may have any of its names. Weights are cast to the shards' dtype.
    Buffers are not loaded. After `materialize`, if the model was sharded on the meta device: it also fills its buffers.

    Raises FileNotFoundError without such files and ValueError for another shape; with `strict`, ValueError also for
    weights that only the model or only the files have.
    """
    files = _files_by_name(Path(folder))
    by_shard = {id(parameter.shard): parameter for unit in units_in(model) for parameter in unit.parameters}
    names: dict[UnitParameter, list[str]] = {}
    for name, shard in model.named_parameters(remove_duplicate=False):
        if (parameter := by_shard.get(id(shard))) is not None:
            names.setdefault(parameter, []).append(name)
    if strict:
        _refuse_other_names(names, files, {name for name, _ in model.named_buffers()}, Path(folder))
    for parameter, of_parameter in names.items():
        saved = next((name for name in of_parameter if name in files), None)
        if saved is not None:
            _load_part(parameter, saved, files[saved])


def _files_by_name(folder: Path) -> Mapping[str, Any]:
    """Return the open file that has each weight."""
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("YaFSDP: load_pretrained reads safetensors files: pip install safetensors") from error
    index = folder / _INDEX_FILE
    if index.is_file():
        paths = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        paths = [folder / _SINGLE_FILE]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"YaFSDP: {missing[0]}: no such file; name a folder that has {_SINGLE_FILE}")
    opened = [safe_open(path, framework="pt") for path in paths]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118 -- no dict, but a file


def _refuse_other_names(
    names: Mapping[UnitParameter, list[str]], files: Mapping[str, Any], buffers: set[str], folder: Path
) -> None:
    absent = [of_parameter[0] for of_parameter in names.values() if not any(name in files for name in of_parameter)]
    if absent:
        raise ValueError(
            f"YaFSDP: {folder} has no weight {absent[0]!r}, nor {len(absent) - 1} more; strict=False skips them"
        )
    model_names = {name for of_parameter in names.values() for name in of_parameter} | buffers
    unknown = sorted(set(files) - model_names)
    if unknown:
        raise ValueError(
            f"YaFSDP: the model has no weight {unknown[0]!r} of {folder}, nor {len(unknown) - 1} more; strict=False "
            "skips them"
        )


def _load_part(parameter: UnitParameter, name: str, file: Any) -> None:
    saved = file.get_slice(name)
    if tuple(saved.get_shape()) != tuple(parameter.shape):
        raise ValueError(
            f"YaFSDP: {name} is {tuple(parameter.shape)} and cannot be loaded from {tuple(saved.get_shape())}"
        )
    local = parameter.shard.to_local().detach()
    if local.numel():
        local.copy_(_range(saved, parameter))


def _range(saved: Any, parameter: UnitParameter) -> Tensor:
    """Return the elements of a saved tensor that the shard has, reading the rows that they lie in."""
    first, count = parameter.part.origin, parameter.part.stop - parameter.part.start
    row = torch.Size(parameter.shape[1:]).numel()
    start, stop = first // row, -(-(first + count) // row)
    rows: Tensor = saved[start:stop] if len(parameter.shape) else saved[...]
    return rows.reshape(-1)[first - start * row :][:count]

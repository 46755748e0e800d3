"""``python -m instrumented_trainers.export RUN OUT``: a checkpoint's weights for Hugging Face's `transformers`."""

import argparse
import dataclasses
import json
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from instrumented_trainers import huggingface
from instrumented_trainers.checkpoints import seal
from instrumented_trainers.config import InvalidConfigError
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import ModelConfig
from instrumented_trainers.text import tokenizer
from tracekit import conventions

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a checkpoint and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m instrumented_trainers.export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run, whose newest checkpoint counts, or a checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="fp32", help="of the exported weights")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    options = parser.parse_args(arguments)
    try:
        if options.out.exists() and not options.overwrite and any(options.out.iterdir()):
            raise InvalidConfigError(f"{options.out}: is not empty; name another folder, or add --overwrite")
        checkpoint = export(options.run, options.out, _DTYPES[options.dtype])
    except (InvalidConfigError, OSError) as error:
        sys.stderr.write(f"instrumented_trainers.export: {error}\n")
        return 2
    sys.stdout.write(f"exported {checkpoint} to {options.out}\n")
    return 0


def export(run: Path, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of a run's newest checkpoint, or of the checkpoint `run`, to `out`; return the checkpoint.

    The run's tokenizer, if it has one, comes with it. Raises InvalidConfigError if there is no complete and undamaged
    checkpoint, or Hugging Face's Llama cannot be its model.
    """
    checkpoint = _checkpoint(run)
    folder = checkpoint.resolve().parents[1]
    manifest = json.loads((folder / conventions.MANIFEST_FILE).read_text(encoding="utf-8"))
    sizes = _sizes(manifest["model"])
    weights = {name: weight.to(dtype) for name, weight in read_weights(checkpoint, sizes).items()}
    config = huggingface.config_of(sizes, positions=max(2048, manifest["arguments"]["tokens"]), dtype=dtype)
    words = folder / tokenizer.FILE
    if words.is_file():
        config["eos_token_id"] = _copy_tokenizer(words, out, manifest["arguments"].get("separator"))
    huggingface.save(out, config, weights)
    return checkpoint


def read_weights(checkpoint: Path, sizes: ModelConfig) -> dict[str, Tensor]:
    """Return the weights in a checkpoint, whole, by our names, whatever strategy and number of ranks saved it."""
    with torch.device("meta"):
        model = Llama(sizes)
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    weights = {}
    for name, parameter in model.named_parameters():
        description = saved.get(f"model.{name}")
        if not isinstance(description, TensorStorageMetadata) or description.size != parameter.shape:
            raise InvalidConfigError(f"{checkpoint}: there is no weight {name} of shape {tuple(parameter.shape)}")
        weights[name] = torch.empty(parameter.shape, dtype=description.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are no ranks, which torch finds worth a warning
        dcp.load({"model": weights}, checkpoint_id=checkpoint)
    return weights


def _checkpoint(run: Path) -> Path:
    checkpoints = [run] if seal.is_sealed(run) else seal.complete(run / "checkpoints")
    if not checkpoints:
        raise InvalidConfigError(f"{run}: no complete checkpoint; train with --checkpoint-every N")
    try:
        files = seal.read(checkpoints[-1]).files
    except seal.InvalidSealError as error:
        raise InvalidConfigError(f"{checkpoints[-1]}: {error}") from error
    for name, expected in files.items():
        if damage := seal.damage(checkpoints[-1], name, expected):
            raise InvalidConfigError(f"{checkpoints[-1]} is damaged: {damage}; name an earlier checkpoint")
    return checkpoints[-1]


def _sizes(model: dict[str, Any]) -> ModelConfig:
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    return ModelConfig(**{name: value for name, value in model.items() if name in names})


def _copy_tokenizer(words: Path, out: Path, separator: str | None) -> int:
    """Copy the tokenizer, name its end of a document for `transformers`, and return that token."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(words, out / tokenizer.FILE)
    token = tokenizer.separator_of(words, separator)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token.text}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return token.number


if __name__ == "__main__":
    sys.exit(main())

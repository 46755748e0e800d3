"""Names of slices that are saves of checkpoints."""

from tracekit import conventions
from tracekit.analysis.time import trace_columns
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags
from tracekit.model.trace import Trace

_OURS = "^" + conventions.span_name(conventions.CHECKPOINT) + r"(\.|$)"
# Save annotations of other tools: names given to record_function, and those of Lightning's profiler, which records
# "[pl][profile]" and the action (lightning/pytorch/profilers/pytorch.py), such as save_checkpoint (Trainer).
_SAVE_SPAN = (
    _OURS
    + r"|(?i)(\b|_)(save|saving|write|dump)[-_. ](a[-_. ])?(model[-_. ])?(checkpoint|ckpt)"
    + r"|(?i)(checkpoint(er|ing|manager)?|\bckpt|_ckpt)[-_. ](async_)?(save|saving|write|writing|dump)\b"
    + r"|(?i)^(#+ ?)?checkpoint(ing)?\b( ##)?$|(?i)^#+ ?checkpoint\b"
    + r"|(?i)\b(dcp|torch|distributed\.checkpoint)\.(async_)?save\b|(\b|_)save_(\w+_)?state_dict\b"
    + r"|\bsave_pretrained\b|\bSnapshot\.(async_)?take\b"  # Hugging Face, torchsnapshot
)
# In traces with stacks, the functions of PyTorch and trainers that save: DeepSpeed (engine.py) and Megatron-LM
# (checkpointing.py) save_checkpoint, Hugging Face Trainer _save_checkpoint and save_model, Accelerate save_state.
_SAVE_FUNCTION = (
    r"torch/serialization\.py\(\d+\): save$"
    r"|torch/distributed/checkpoint/state_dict_saver\.py\(\d+\): (save|async_save|_?save_state_dict)$"
    r"|: _?save_(checkpoint|state_dict)$"
    r"|transformers/.*: (save_pretrained|save_model)$|accelerate/accelerator\.py\(\d+\): (save_state|save_model)$"
    r"|safetensors/torch\.py\(\d+\): save_file$|torchsnapshot/.*: (async_)?take$"
)


@memoize
def is_save(trace: Trace) -> Flags:
    """Mask of the ops that are saves by their name: annotations, and functions of traces with stacks; shape (ops,)."""
    by_span = trace_columns.is_kind(trace, "annotation") & trace_columns.is_named(trace, _SAVE_SPAN)
    python = trace_columns.is_kind(trace, "python")
    return by_span | (python & trace_columns.is_named(trace, _SAVE_FUNCTION)) if python.any() else by_span

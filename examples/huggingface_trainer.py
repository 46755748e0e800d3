"""Train a model with the Hugging Face Trainer, and record the run by a callback.

    torchrun --nproc-per-node 2 examples/huggingface_trainer.py --out runs/trainer
    tracekit check runs/trainer

Needs transformers and accelerate. The model is made from its config, with random weights: nothing is downloaded. It
learns to write this very file, byte by byte. Each step takes two batches; every eighth step, the model is evaluated.
"""

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tracekit.capture.huggingface import TracekitCallback

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
TOKENS = 64


class Text(Dataset[dict[str, Tensor]]):
    """This file in pieces, one at every third byte."""

    def __init__(self) -> None:
        self.text = torch.tensor(list(Path(__file__).read_bytes()))

    def __len__(self) -> int:
        return (len(self.text) - TOKENS) // 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.text[3 * index : 3 * index + TOKENS]
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    """Train for some steps on this rank, one of those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"), help="folder to write the run to")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train for")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder to save to")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    options = parser.parse_args()
    train(options)
    gc.collect()  # DDP must go before its process group: torch 2.13 may hang where it goes after
    if dist.is_initialized():
        dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """Train as the options say."""
    torch.manual_seed(0)  # the same on every rank
    arguments = TrainingArguments(
        output_dir=str(options.checkpoints),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,  # the loss is recorded at the steps at which the Trainer logs it
        eval_strategy="steps",
        eval_steps=8,
        save_steps=8,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    text = Text()
    recording = TracekitCallback(options.out, steps="10:15")
    trainer = Trainer(
        LlamaForCausalLM(CONFIG),
        arguments,
        train_dataset=text,
        eval_dataset=torch.utils.data.Subset(text, range(32)),
        callbacks=[recording],
    )
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()

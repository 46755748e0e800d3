"""A training that knows nothing of tracekit: the Hugging Face Trainer, under DDP, saving at the end.

torchrun --nproc-per-node 2 plain_huggingface.py --steps 16
"""

import argparse
import gc
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
TOKENS = 64


class Text(Dataset):
    """The bytes of this very file, in pieces."""

    def __init__(self) -> None:
        self.text = torch.tensor(list(Path(__file__).read_bytes()))

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * 7 % (len(self.text) - TOKENS)
        piece = self.text[start : start + TOKENS]
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--save-to", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()
    steps, loss = train(options)
    gc.collect()  # DDP must go before its process group: torch 2.13 may hang where it goes after
    # In one write: otherwise the lines of ranks may mix.
    print(f"rank {os.environ.get('RANK', '0')}: {steps} steps, loss {loss!r}\n", end="", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(options: argparse.Namespace) -> tuple[int, float]:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(options.save_to),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options.accumulate,
        save_steps=options.steps,
        logging_steps=1,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    trainer = Trainer(LlamaForCausalLM(CONFIG), arguments, train_dataset=Text())
    trainer.train()
    loss = [row["loss"] for row in trainer.state.log_history if "loss" in row][-1]
    return trainer.state.global_step, loss


if __name__ == "__main__":
    main()

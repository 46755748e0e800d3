"""Train a small model with Hugging Face's Trainer for 20 steps, under YaFSDP if there are several ranks.

    python huggingface_trainer.py FOLDER [CHECKPOINT to resume from]

Writes losses and gradient norms to FOLDER/losses.json. Global batches are the same on any number of ranks.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from instrumented_trainers.parallelism.yafsdp import fully_shard
from instrumented_trainers.parallelism.yafsdp.huggingface import Trainer

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
BATCH, STEPS = 4, 20


def main() -> None:
    folder, *resumed = sys.argv[1:]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // ranks,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=10,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=True, **SIZES))
    if ranks > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    tokens = torch.randint(64, (400, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": each, "labels": each} for each in tokens]
    kind = Trainer if ranks > 1 else transformers.Trainer
    trainer = kind(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resumed[0] if resumed else None)
    trainer.save_model(str(Path(folder) / "final"))
    if arguments.should_save:
        losses = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        (Path(folder) / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main()

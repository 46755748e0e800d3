"""Evaluation on text that is not trained on."""

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instrumented_trainers.config import InvalidConfigError, TrainingConfig
from instrumented_trainers.parallelism import ModelAxes, PipelineModel


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The mean loss over all tokens that all ranks evaluated, in nats."""

    loss: float
    sequences: int

    @property
    def perplexity(self) -> float:
        """Return the exponential of the loss; infinite where that is too large for a number."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class Evaluation:
    """Evaluates a model on the first sequences of a text, the same in each evaluation, divided among the ranks."""

    def __init__(self, tokens: Tensor, config: TrainingConfig, rank: int, axes: ModelAxes) -> None:
        self._axes = axes
        self._tokens, self._config, self._rank = tokens, config, config.layout.data_rank(rank)
        self._of_all_ranks = config.layout.data_ranks * config.batch
        available = (len(tokens) - 1) // config.tokens
        self._sequences = min(available, config.eval_steps * self._of_all_ranks)
        if self._sequences < 1:
            raise InvalidConfigError(
                f"the text to evaluate on has {len(tokens):,} tokens, which is too short for a sequence of "
                f"{config.tokens}: give more --eval-data, a larger --eval-split or fewer --tokens"
            )

    @classmethod
    def of(cls, tokens: Tensor | None, config: TrainingConfig, rank: int, axes: ModelAxes) -> "Evaluation | None":
        """Return the evaluation on these tokens, or None where there are none."""
        return None if tokens is None else cls(tokens, config, rank, axes)

    def due(self, step: int) -> bool:
        """Return whether the model is evaluated after a step."""
        return (step + 1) % self._config.eval_every == 0 or step == self._config.steps - 1

    @torch.no_grad()
    def run(self, model: nn.Module) -> EvaluationResult:
        """Evaluate the model, in its evaluation mode. Every rank calls it, and all return the same."""
        was_training = model.training
        model.eval()
        # The ranks run as many batches each, as sharded models require; sequences beyond the last count for nothing.
        batches = -(-self._sequences // self._of_all_ranks)
        at_a_time = self._config.micro_batches if isinstance(model, PipelineModel) else 1
        total = torch.zeros(2, dtype=torch.float64, device=self._config.device)
        for number in range(0, batches, at_a_time):
            total += self._loss_and_tokens(model, range(number, number + at_a_time))
        model.train(was_training)
        dist.all_reduce(total)
        loss, tokens = total.tolist()
        return EvaluationResult(loss / tokens, self._sequences)

    def _loss_and_tokens(self, model: nn.Module, numbers: range) -> Tensor:
        """Return the sum of the losses in this rank's batches of those numbers, and of how many tokens; shape (2,).

        Of a pipeline only the rank of the last stage has them; the others return 0.
        """
        length, batch = self._config.tokens, self._config.batch
        rows = [
            number * self._of_all_ranks + self._rank * batch + index for number in numbers for index in range(batch)
        ]
        places = [row % self._sequences * length for row in rows]
        texts = torch.stack([self._tokens[place : place + length + 1] for place in places]).long()
        texts = texts.to(self._config.device)
        tokens, targets = self._axes.own_tokens(texts[:, :-1]), self._axes.own_tokens(texts[:, 1:])
        logits = model.logits(tokens) if isinstance(model, PipelineModel) else model(tokens)
        if logits is None:
            return torch.zeros(2, dtype=torch.float64, device=self._config.device)
        losses = self._axes.token_losses(logits, targets).view_as(targets)
        counted = torch.tensor([row < self._sequences for row in rows], device=losses.device)
        summed = losses[counted].sum(dtype=torch.float64)
        return torch.stack([summed, (counted.sum() * targets.shape[1]).to(summed)])

"""Evaluation on text that is not trained on."""

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instrumented_trainers.config import InvalidConfigError, TrainingConfig
from instrumented_trainers.parallelism import ModelAxes


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
        total = torch.zeros(2, dtype=torch.float64, device=self._config.device)
        for number in range(batches):
            total += self._loss_and_tokens(model, number)
        model.train(was_training)
        dist.all_reduce(total)
        loss, tokens = total.tolist()
        return EvaluationResult(loss / tokens, self._sequences)

    def _loss_and_tokens(self, model: nn.Module, number: int) -> Tensor:
        """Return the sum of the losses in this rank's batch of that number, and of how many tokens; shape (2,)."""
        first = number * self._of_all_ranks + self._rank * self._config.batch
        length = self._config.tokens
        places = [place % self._sequences * length for place in range(first, first + self._config.batch)]
        rows = torch.stack([self._tokens[place : place + length + 1] for place in places]).long()
        rows = rows.to(self._config.device)
        tokens, targets = self._axes.own_tokens(rows[:, :-1]), self._axes.own_tokens(rows[:, 1:])
        losses = self._axes.token_losses(model(tokens), targets)
        counted = max(0, min(self._sequences - first, self._config.batch)) * targets.shape[1]
        return torch.stack([losses[:counted].sum(dtype=torch.float64), torch.tensor(counted).to(losses)])

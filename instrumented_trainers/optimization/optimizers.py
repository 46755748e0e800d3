"""Make an optimizer by name for a sharded model."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, Adam, AdamW, Optimizer

from instrumented_trainers.config import InvalidConfigError, TrainingConfig
from instrumented_trainers.optimization.gathered_muon import GatheredMuon
from instrumented_trainers.optimization.lion import Lion
from instrumented_trainers.optimization.parameter_roles import ParameterRoles, named_parameters
from instrumented_trainers.parallelism import CombinedOptimizer, make_optimizer
from instrumented_trainers.parallelism.yafsdp import WholeTensorOptimizer, YaFSDPModule

STATE_NUMBERS: Mapping[str, int] = MappingProxyType({"adamw": 2, "adam": 2, "sgd": 1, "lion": 1})
"""How many numbers an optimizer keeps for each weight, sgd with momentum."""


def state_numbers(config: TrainingConfig) -> int:
    """Number of values that the optimizer keeps for each weight. Muon has no one number."""
    return 0 if config.optimizer == "sgd" and not config.momentum else STATE_NUMBERS[config.optimizer]


def make(config: TrainingConfig, model: nn.Module, roles: ParameterRoles) -> Optimizer | CombinedOptimizer:
    """Return the optimizer that the configuration names for a sharded model; `roles` are those of the model before.

    Weights that decay and those that do not are groups of their own. Raises InvalidConfigError if the installed torch
    does not have the optimizer.
    """
    if config.optimizer == "muon":
        return _muon(config, model, roles)
    return _make_kind(config, config.optimizer, model, _groups(config, named_parameters(model), roles))


def _groups(
    config: TrainingConfig, parameters: Mapping[str, nn.Parameter], roles: ParameterRoles
) -> list[dict[str, Any]]:
    """Return the parameters that do not decay and those that do, as groups; an empty group is left out.

    In this order zero1, which deals out one group after the other, can balance a large embedding.
    """
    groups = [
        {"params": [p for name, p in parameters.items() if (name in roles.decayed) is decays], "weight_decay": rate}
        for decays, rate in ((False, 0.0), (True, config.weight_decay))
    ]
    return [group for group in groups if group["params"]]


def _muon(config: TrainingConfig, model: nn.Module, roles: ParameterRoles) -> CombinedOptimizer:
    """Muon for the matrices inside the layers, AdamW for all other weights, both at the rate of AdamW."""
    if not hasattr(torch.optim, "Muon"):
        raise InvalidConfigError(f"--optimizer muon: torch {torch.__version__} does not have it; 2.9 does")
    parameters = named_parameters(model)
    matrices = {name: parameter for name, parameter in parameters.items() if name in roles.hidden_matrices}
    rest = {name: parameter for name, parameter in parameters.items() if name not in roles.hidden_matrices}
    return CombinedOptimizer(
        make_optimizer(
            model,
            _muon_for(model),
            _groups(config, matrices, roles),
            lr=config.learning_rate,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        ),
        _make_kind(config, "adamw", model, _groups(config, rest, roles)),
    )


def _muon_for(model: nn.Module) -> Callable[..., Optimizer]:
    """Return Muon for the matrices of a model as it is sharded."""
    if isinstance(model, YaFSDPModule):
        return functools.partial(WholeTensorOptimizer, kind=torch.optim.Muon)
    return GatheredMuon if isinstance(model, FSDPModule) else torch.optim.Muon


def _make_kind(config: TrainingConfig, name: str, model: nn.Module, groups: list[dict[str, Any]]) -> Optimizer:
    kind, options = _KINDS[name]
    return make_optimizer(model, kind, groups, lr=config.learning_rate, **options(config))


def _betas(config: TrainingConfig) -> dict[str, Any]:
    return {"betas": (config.beta1, config.beta2)}


# torch's fused SGD does not take DTensors.
_KINDS: Mapping[str, tuple[type[Optimizer], Callable[[TrainingConfig], dict[str, Any]]]] = MappingProxyType(
    {
        "adamw": (AdamW, lambda config: {**_betas(config), "fused": True}),
        "adam": (Adam, lambda config: {**_betas(config), "fused": True}),
        "sgd": (SGD, lambda config: {"momentum": config.momentum, "nesterov": config.momentum > 0}),
        "lion": (Lion, _betas),
    }
)

"""Initial weights, drawn by name: the same whoever draws them, in whatever order, of however much of the model."""

import zlib

import torch
from torch import Tensor, nn

from instrumented_trainers import regions

_DEVIATION = 0.02


class WeightInitializer:
    """Fills the weights of a model of `layers` layers, module by module, also where no rank has the whole model.

    Matrices are normal with deviation 0.02, divided by √(2 L) for what each of L layers adds to the stream (GPT-2's);
    norms are 1. Each weight has a generator of its own, seeded by `seed` and its name. On another kind of device it
    draws other numbers.
    """

    def __init__(self, model: nn.Module, *, layers: int, seed: int) -> None:
        self._seed = seed
        self._residual_deviation = _DEVIATION / (2 * layers) ** 0.5
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        # By module, as a strategy puts other parameters into the modules. A tied weight has one name.
        self._names = {
            (id(module), own_name): names[id(parameter)]
            for module in model.modules()
            for own_name, parameter in module._parameters.items()
            if parameter is not None
        }

    def __call__(self, module: nn.Module) -> None:
        """Fill the weights that are the module's own, not those of modules inside it.

        Of a weight that is divided over ranks this rank's part is filled; to draw that, the whole is drawn.
        """
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if (region := regions.region_of(module, name)) is None:
                self.fill(module, name, parameter)
            else:
                self._fill_part(module, name, parameter, region)

    @torch.no_grad()
    def _fill_part(self, module: nn.Module, name: str, part: Tensor, region: regions.Region) -> None:
        full = torch.empty(region.shape, dtype=part.dtype, device=part.device)
        self.fill(module, name, full)
        part.copy_(region.part_of(full))

    @torch.no_grad()
    def fill(self, module: nn.Module, own_name: str, target: Tensor) -> None:
        """Draw the module's weight of that name into `target`, a tensor of its shape."""
        name = self._names[id(module), own_name]
        if target.dim() == 1:
            target.fill_(1)
            return
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        added = name.removesuffix(".weight").endswith((".output", ".down"))
        target.normal_(std=self._residual_deviation if added else _DEVIATION, generator=generator)

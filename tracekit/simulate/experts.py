"""Which experts a mixture's tokens go to, as all ranks of a job agree on it."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tracekit.conventions.strategies import EP
from tracekit.simulate.hybrid_layers import Routing
from tracekit.simulate.job import Job

_CONCENTRATION = 400.0  # of the Dirichlet distribution of shares: a balanced router differs by about 5%


class Router:
    """Draws how many tokens of each rank go to each expert, by step, micro-batch and layer."""

    def __init__(self, job: Job) -> None:
        assert job.hybrid is not None
        self._job = job
        groups = job.hybrid.layout.groups(EP) if job.model.experts else []
        self._place = {rank: (number, index) for number, ranks in enumerate(groups) for index, rank in enumerate(ranks)}
        self._routes = lru_cache(maxsize=None)(self._drawn)

    def routing(self, step: int, micro_batch: int, layer: int, rank: int) -> Routing | None:
        """Return the destinations of a rank's tokens, and what its experts receive; None without experts."""
        if self._job.model.experts is None:
            return None
        group, index = self._place[rank]
        tokens = self._routes(step, micro_batch, layer, group)
        sent, received = tokens[index], tokens[:, index]
        slowest = max(int(tokens.sum(axis=axis).max()) for axis in (0, 1))
        return Routing(tuple(map(int, sent)), tuple(map(int, received)), slowest)

    def _drawn(self, step: int, micro_batch: int, layer: int, group: int) -> npt.NDArray[np.int64]:
        """Return the tokens that each rank of a group sends to each other one, shape (ep, ep)."""
        experts, hybrid = self._job.model.experts, self._job.hybrid
        assert experts is not None
        assert hybrid is not None
        random = np.random.default_rng((self._job.seed, step, micro_batch, layer, group))
        weights = np.full(experts.count, _CONCENTRATION)
        if self._job.impairments.hot_expert is not None:
            expert, factor = self._job.impairments.hot_expert
            weights[expert] *= factor
        shares = random.dirichlet(weights)
        counts = random.multinomial(self._job.tokens * experts.active, shares, size=hybrid.layout.ep)
        per_rank: npt.NDArray[np.int64] = counts.reshape(hybrid.layout.ep, hybrid.layout.ep, -1).sum(axis=2)
        return per_rank

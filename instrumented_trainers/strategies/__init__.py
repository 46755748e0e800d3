"""Ways to shard a model over ranks, one module each: ``shard(model, mesh, …) -> model``."""

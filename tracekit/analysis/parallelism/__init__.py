"""Facts about ranks relative to each other: stragglers, rank timelines, the sharding strategy."""

"""The critical path of a step: the chain of waits that made it as long as it was, over all ranks."""

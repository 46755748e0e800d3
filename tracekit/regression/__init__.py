"""Did a run get worse? Metrics, samples, the statistical test, baselines, budgets, root cause, history."""

"""tracekit side by side with its rival and with bare parsers. ``python -m benchmarks`` runs all of it."""

"""Judgements, one family per module; `tracekit.rules.registry` lists them."""

"""Judgements, one family per module. `RULES` lists them all."""

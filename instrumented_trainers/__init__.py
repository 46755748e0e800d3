"""Trainers that record themselves: a Llama-style model under DDP, FSDP1, FSDP2 and YaFSDP."""

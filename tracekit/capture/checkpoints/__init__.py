"""Saves and loads of checkpoints taken apart into stages, in the log and in the trace; nothing about them changes."""

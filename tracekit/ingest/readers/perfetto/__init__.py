"""Perfetto traces (protobuf): exports of tracekit, and traces of others that hold PyTorch's events."""

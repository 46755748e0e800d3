"""A discrete-event simulator of sharded training steps that writes ordinary Kineto traces with known faults.

What it writes is marked as simulated everywhere: in file names, in the traces' headers, in run.json and in truth.json.
"""

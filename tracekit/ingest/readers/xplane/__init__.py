"""XPlane profiles of XLA: JAX, TensorFlow, PyTorch/XLA."""

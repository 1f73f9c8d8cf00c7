"""Where JAX and Torch meet."""

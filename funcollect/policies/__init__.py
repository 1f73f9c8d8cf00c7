"""Policies: Torch modules, JAX functions, TensorDict callables and random actions under one protocol."""

"""One policy with N versions of its parameters."""

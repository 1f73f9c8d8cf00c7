"""Collectors: iterators that hold parameters and a state, and call the core."""

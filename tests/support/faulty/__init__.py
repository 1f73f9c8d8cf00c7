"""Collectors, environments, policies and workers that go wrong on purpose."""

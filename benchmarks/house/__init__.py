"""How large the library is, and how far its calls go: `python -m benchmarks.house.sizes`, `.walks`, `.breaks`."""

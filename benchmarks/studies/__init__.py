"""Programs that answer one question each, beside the benchmarks."""

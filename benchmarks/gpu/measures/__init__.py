"""What `benchmarks gpu` measures of one contestant: rates, waits, kernels and memory."""

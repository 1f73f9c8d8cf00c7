"""How the suites of JAX environments draw a state, for `funcollect.record`; what draws is imported on first use."""

"""The loops that run a policy in an environment, one module for each way to run."""

"""The loops that run a policy in an environment, one module for each kind; `funcollect.core.api` checks and calls."""

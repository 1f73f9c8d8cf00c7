"""The loops that run a policy in an environment. `funcollect.core.api` calls `init`, `reset`, `fork` and `run` of each.

They get checked arguments. The modules are named after the kind of environment; `eager` and `blocks` are what they use.
"""

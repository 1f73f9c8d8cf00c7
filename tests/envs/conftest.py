"""What the tests of environments share."""

from functools import partial

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

# The processes are forked: TorchRL, once imported, has them spawned, each of which imports the tests.
VECTORS = {"here": SyncVectorEnv, "in processes": partial(AsyncVectorEnv, context="fork")}

"""The protocols of environments and policies: the loops accept any class with these members."""

from funcollect.protocols.environments import *  # noqa: F403
from funcollect.protocols.policies import *  # noqa: F403

"""Where the time of a frame goes, compared with the machine's limits."""

from funcollect.profiling.measure import profile
from funcollect.profiling.report import Limit, Profile, Timeline

__all__ = ["Limit", "Profile", "Timeline", "profile"]

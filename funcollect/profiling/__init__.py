"""Where the time of a frame goes, against what the same machine can do."""

from funcollect.profiling.measure import profile
from funcollect.profiling.report import Limit, Profile, Timeline

__all__ = ["Limit", "Profile", "Timeline", "profile"]

"""Conformance checks for the authors of environments and policies, each a single call."""

from funcollect.testing.check_env import CHECKS as ENV_CHECKS
from funcollect.testing.check_env import check_env
from funcollect.testing.check_policy import CHECKS as POLICY_CHECKS
from funcollect.testing.check_policy import check_policy
from funcollect.testing.trials import Report

__all__ = ["ENV_CHECKS", "POLICY_CHECKS", "Report", "check_env", "check_policy"]

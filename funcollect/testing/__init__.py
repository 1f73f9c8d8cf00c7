"""Conformance: one call that the author of an adapter, a policy or a collector runs."""

from funcollect.testing.collector import CHECKS as COLLECTOR_CHECKS
from funcollect.testing.collector import check_collector
from funcollect.testing.env import CHECKS as ENV_CHECKS
from funcollect.testing.env import check_env
from funcollect.testing.policy import CHECKS as POLICY_CHECKS
from funcollect.testing.policy import check_policy
from funcollect.testing.report import Report

__all__ = [
    "COLLECTOR_CHECKS",
    "ENV_CHECKS",
    "POLICY_CHECKS",
    "Report",
    "check_collector",
    "check_env",
    "check_policy",
]

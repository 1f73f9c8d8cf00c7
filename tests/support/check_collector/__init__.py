"""`check_collector`: does this collect as the library's collectors do?"""

from tests.support.check_collector.check import CHECKS as COLLECTOR_CHECKS
from tests.support.check_collector.check import check_collector

__all__ = ["COLLECTOR_CHECKS", "check_collector"]

"""Order of arithmetic as frozen data: reduction trees and block lengths, and the comparison of bits that checks them.

`bits` imports torch and is imported by name where it is needed; the rest needs only the standard library.
"""

from skyrl_isoexec.schedule.schedule import Schedule
from skyrl_isoexec.schedule.tree import ReductionTree

__all__ = ["ReductionTree", "Schedule"]

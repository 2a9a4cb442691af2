"""Patches for the upstreams: pinned wheels, strict application, exact reversal.

Standard library only; imports nothing else of IsoExec and nothing of the packages it patches.
"""

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.state import AppliedState, applied_state, series_digest

__all__ = ["AppliedState", "PatchRefusal", "applied_state", "series_digest"]

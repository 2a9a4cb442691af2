"""Refuse, before a process is started, what would fail minutes later in a worker: each with cause and mend."""

from .refusal import Refusal
from .sequence import check

__all__ = ["Refusal", "check"]

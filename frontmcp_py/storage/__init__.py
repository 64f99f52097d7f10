"""Where counts and slots live, behind one protocol that decides about both together."""

from .base import Claim, RateRefusal, RateRule, Storage, Verdict, Windows
from .memory import MemoryStorage, WindowCounts

__all__ = [
    "Claim",
    "MemoryStorage",
    "RateRefusal",
    "RateRule",
    "Storage",
    "Verdict",
    "WindowCounts",
    "Windows",
]

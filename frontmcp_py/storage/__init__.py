"""Where counts and slots live: in the memory of one process, or in a store that several instances share."""

from .base import (
    Answer,
    Ask,
    NoSlot,
    Queued,
    RateNeed,
    Renewed,
    SlotNeed,
    Started,
    Storage,
    StorageUnavailable,
    TooOften,
    Turn,
    Void,
)
from .claim import Claim, RateRefusal, RateRule, Verdict, Windows
from .memory import MemoryStorage, WindowCounts

__all__ = [
    "Answer",
    "Ask",
    "Claim",
    "MemoryStorage",
    "NoSlot",
    "Queued",
    "RateNeed",
    "RateRefusal",
    "RateRule",
    "Renewed",
    "SlotNeed",
    "Started",
    "Storage",
    "StorageUnavailable",
    "TooOften",
    "Turn",
    "Verdict",
    "Void",
    "WindowCounts",
    "Windows",
]

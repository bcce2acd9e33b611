"""Which passages help this LLM: measured, kept in a folder, turned into rankings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.preferences.from_labels import DEFAULT_SOURCE, prefer
    from knowgate.preferences.measure import Benefit, Confidence, Likelihood, Preferrer, Source
    from knowgate.preferences.rank_measures import NAMES, hits_of, rank_values, ranking
    from knowgate.preferences.record import Preference, PreferenceFolder, data_hash, distinct, shared_settings
    from knowgate.preferences.session import PreferenceCounts, prefer_run
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Benefit",
    "Confidence",
    "DEFAULT_SOURCE",
    "Likelihood",
    "NAMES",
    "Preference",
    "PreferenceCounts",
    "PreferenceFolder",
    "Preferrer",
    "Source",
    "data_hash",
    "distinct",
    "hits_of",
    "prefer",
    "prefer_run",
    "rank_values",
    "ranking",
    "shared_settings",
]

"""How much of the prompts the servers had in their prefix caches."""

from __future__ import annotations

METRIC = "server/prefix_cache_hits"


class PrefixCache:
    """Counts the prompt tokens of the requests that servers have answered, and those that were cached."""

    def __init__(self) -> None:
        self._counts = self._taken = (0, 0)  # tokens, and those of them that were cached

    def count(self, prompt: int, cached: int | None) -> None:
        """Count a request; `cached` is None where the server does not say it, and then nothing is counted."""
        if cached is not None:
            tokens, hits = self._counts
            self._counts = tokens + prompt, hits + cached

    def take(self) -> dict[str, float]:
        """The share of tokens since the last call, as a metric; empty without requests that were counted.

        Another thread may count meanwhile.
        """
        tokens, hits = now = self._counts
        (before, hits_before), self._taken = self._taken, now
        return {METRIC: (hits - hits_before) / (tokens - before)} if tokens > before else {}

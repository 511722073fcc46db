"""Compact sets of episode numbers that are mostly consecutive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class EpisodeSet:
    """Set of numbers: all below a mark except some holes, and some above it."""

    def __init__(self, numbers: Iterable[int]):
        self._mark = 0
        self._above = set(numbers)
        self._holes: set[int] = set()
        self._settle()

    def add(self, number: int) -> None:
        if number < self._mark:
            self._holes.discard(number)
        else:
            self._above.add(number)
            self._settle()

    def discard(self, number: int) -> bool:
        """Remove a number; return True if it was in the set."""
        if number not in self:
            return False
        if number < self._mark:
            self._holes.add(number)
        else:
            self._above.discard(number)
        return True

    def __contains__(self, number: int) -> bool:
        return number in self._above or (number < self._mark and number not in self._holes)

    def __len__(self) -> int:
        return self._mark - len(self._holes) + len(self._above)

    def below(self, limit: int) -> int:
        """Return the count of numbers below limit."""
        holes = sum(number < limit for number in self._holes)
        return min(self._mark, limit) - holes + sum(number < limit for number in self._above)

    def _settle(self) -> None:
        while self._mark in self._above:
            self._above.discard(self._mark)
            self._mark += 1


class EpisodeRanges:
    """Numbers in the order they were added."""

    def __init__(self) -> None:
        self._runs: list[range] = []

    def extend(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            last = self._runs[-1] if self._runs else range(0)
            if len(last) and last.stop == number:
                self._runs[-1] = range(last.start, number + 1)
            else:
                self._runs.append(range(number, number + 1))

    def __iter__(self) -> Iterator[int]:
        for run in self._runs:
            yield from run

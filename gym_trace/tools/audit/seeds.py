"""Compare what resets with equal and different seeds begin with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from gym_trace.data.packing import pack_lenient
from gym_trace.envs.seeding import episode_seed
from gym_trace.tools.audit.arranged import Arranged, Make, Reseeded
from gym_trace.tools.audit.reference import Compared, Reference
from gym_trace.tools.audit.world import Mode, World

_SEEDS = 4  # other seeds that are compared
_RESETS = 5  # in a row, without a seed
# Seeds this far apart start alike if seeds are taken modulo any of their divisors, such as 10, 50, 256 or 65,536.
_APART = (2**10 * 3**2 * 5**4 * 7 * 11, 2**16 * 3 * 5**4, 10**9)
_PRIMES = 2, 3, 5, 7, 11  # whose products these are
Result = tuple[bool, str, Compared]  # True if seeds decide as they should; text; counts


class Seeding:
    """Resets an environment with seeds, and plays the first episode of the reference with other ones."""

    def __init__(self, make: Make, world: World, reference: Reference):
        self._make, self._world, self._reference = make, world, reference
        self._position = reference.everything[0]
        self._seed = reference.episode(self._position).seed or 1
        self._others = [episode_seed(self._seed, number) for number in range(1, _SEEDS + 1)]

    def differing_start(self) -> str:
        """Return the problem if equal seeds start differently, each in a new environment; else ""."""
        for seed in (0, self._seed):
            if self._starts([seed], Mode.OTHER_RANDOM) != self._starts([seed], Mode.OTHER_RANDOM):
                return f"reset(seed={seed}) starts differently in two new environments"
        return ""

    def result(self) -> Result:
        """Compare seeds with each other. Raises EnvironmentUnavailable."""
        found = [self._played([other], 1) for other in self._others]
        differing = [one for one in found if one.difference is not None]
        at_reset = sum(one.difference is not None and one.difference.step is None for one in found)
        if at_reset:
            return self._of_starts(at_reset)
        seeds = [self._seed, *self._others]
        alike = f"{len(seeds)} seeds start alike in new environments"
        if not differing:
            row = self._played(seeds, len(seeds))
            if row.difference is not None:
                return False, f"{alike}, but resets in a row differ: seeds are ignored", row
            return True, f"nothing depends on the seed: {len(seeds)} seeds, the same results", row
        if len(set(self._starts(seeds))) > 1:
            return False, f"{alike}, but resets in a row differ: the seed does not decide the start", differing[0]
        return True, "every start is the same; what follows depends on the seed", differing[0]

    def _played(self, seeds: list[int], times: int) -> Compared:
        """Play the first episode several times in a row, with these seeds instead of its own."""
        return self._reference.compared(Reseeded(self._make, self._world, seeds), [self._position] * times)

    def _of_starts(self, differing: int) -> Result:
        """Return the result where new environments start differently with other seeds."""
        seed, count, compared = self._seed, len(self._others), Compared(differing)
        seconds, firsts = ({self._starts([*before, other])[-1] for other in self._others} for before in ([seed], []))
        if len(seconds) == 1 < len(firsts):
            return False, f"the second reset ignores its seed: {count} seeds start alike there", compared
        row, again = (self._starts([seed, *[None] * _RESETS], Mode.OTHER_RANDOM) for _ in range(2))
        if row != again:
            text = f"a reset without a seed after reset(seed={seed}) is not decided by that seed"
            return False, f"{text}: two new environments start differently", compared
        if all(len(set(self._starts([one, *[None] * _RESETS]))) == 1 for one in (seed, *self._others)):
            return False, f"a reset without a seed repeats the start of reset(seed={seed})", compared
        if period := self._period():
            return False, f"seeds are taken modulo {period}: seeds 1 and {1 + period} start alike", compared
        return True, f"{differing} of {count} other seeds start differently; a reset without a seed goes on", compared

    def _starts(self, seeds: Sequence[int | None], mode: Mode = Mode.HELD) -> list[bytes]:
        """Return the packed observations of resets in a row, in a new environment."""
        with closing(Arranged(self._make, self._world, mode)) as env:
            return list(_rows(env, seeds))

    def _period(self) -> int:
        """Return a number modulo which seeds are taken; 0 if none is found."""
        with closing(Arranged(self._make, self._world)) as env:

            def row(seed: int, more: int) -> list[bytes]:
                return list(_rows(env, [seed, *[None] * more]))

            def is_period(number: int) -> bool:
                # Seeds, and resets in a row after them: so many that starts of few kinds are not alike by chance.
                tries = [(1, 0), (2, 0), (3, 0), *((seed, _RESETS) for seed in range(1, 9))]
                return all(row(seed, more) == row(seed + number, more) for seed, more in tries)

            period = next(filter(is_period, _APART), 0)
            for prime in _PRIMES:
                while period and period % prime == 0 and is_period(period // prime):
                    period //= prime
            return period


def _rows(env: Arranged, seeds: Sequence[int | None]) -> Iterator[bytes]:
    yield from (pack_lenient(env.reset(seed=seed)[0])[0] for seed in seeds)

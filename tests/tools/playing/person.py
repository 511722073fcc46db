"""A person at the keyboard of a session, as tests script one: pygame events, posted one by one between steps."""

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import pygame
from gymnasium.utils import RecordConstructorArgs

Act = str | Callable[[], Any]


class Watched(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Counts steps and the episodes that ended, so that a script can wait for them."""

    def __init__(self, env: Any):
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.steps = self.ended = 0

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self.steps += 1
        self.ended += bool(result[2] or result[3])
        return result


class Person:
    """The `stop` of a session: each call does the next act, and True ends the session when all are done.

    An act is the name of a key that is tapped, or one after "+" that is pressed, and after "-" released; or a function
    that is called until it returns something true.
    """

    def __init__(self, *acts: Act):
        self._acts, self._deadline = list(acts), time.monotonic() + 60
        self.all_done = False

    def __call__(self) -> bool:
        assert time.monotonic() < self._deadline, f"the session did not go on: {self._acts[:1]}"
        if not self._acts:
            self.all_done = True
            return True
        act = self._acts[0]
        if callable(act):
            if not act():
                return False
        else:
            do(act)
        self._acts.pop(0)
        return False


def do(act: str) -> None:
    if act == "close":
        pygame.event.post(pygame.event.Event(pygame.QUIT))
        return
    key = pygame.key.key_code(act.lstrip("+-") or act)
    if not act.startswith("-"):
        pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=key))
    if not act.startswith("+"):
        pygame.event.post(pygame.event.Event(pygame.KEYUP, key=key))


def stepping(env: Watched, *keys: str) -> list[Act]:
    """Return acts that tap these keys, one step for each."""
    acts: list[Act] = []
    for key in keys:
        seen: list[int] = []

        def remember(seen: list[int] = seen) -> bool:
            seen.append(env.steps)
            return True

        acts += [remember, key, lambda seen=seen: env.steps > seen[0]]
    return acts

"""Record a game of TextArena: one step per turn, with the text that the player reads and the text that it writes.

    pip install gym-trace textarena
    python examples/record_textarena.py [GAME DIRECTORY]
    gym-trace cat traces/TicTacToe-v0 --episodes 0

The annotation ``player`` is who acts. Rewards come at the end of a game, one per player: the annotation ``rewards``
of the last step has all of them, ``reward`` that of the player who made it.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import textarena

import gym_trace

Turn = tuple[int, str, str]  # player, what it reads, what it writes


def moves_of(random: np.random.Generator) -> Any:
    """Return a player that makes one of the moves offered last, at random. Put a language model here."""

    def act(observation: str) -> str:
        offered = observation.rpartition("Available Moves:")[2]
        return str(random.choice(re.findall(r"\[\d+\]", offered) or ["[0]"]))

    return act


def main(
    game: str = "TicTacToe-v0", directory: str | None = None, games: int = 5
) -> list[tuple[list[Turn], list[float]]]:
    """Record games; return the turns and the rewards of each."""
    kept = []
    with gym_trace.TraceWriter(directory or f"traces/{game}", environment=f"textarena/{game}") as writer:
        for seed in range(games):
            env, act, turns = textarena.make(game), moves_of(np.random.default_rng(seed)), []
            env.reset(num_players=2, seed=seed)
            player, observation = env.get_observation()
            writer.begin(observation, seed=seed)
            done = False
            while not done:
                action = act(observation)
                turns.append((player, observation, action))
                writer.act(action)  # known even if the process dies while the game, or a model, is at work
                done, _ = env.step(action)
                if not done:
                    acted, (player, observation) = player, env.get_observation()
                    writer.step(action, observation, 0.0, player=acted)
            _, observation = env.get_observation()
            found, _ = env.close()
            rewards = [float(found[number]) for number in range(2)]
            writer.step(action, observation, rewards[player], True, player=player, rewards=np.array(rewards))
            kept.append((turns, rewards))
    return kept


if __name__ == "__main__":
    for turns, rewards in main(*sys.argv[1:3]):
        print(len(turns), "turns, rewards", rewards)

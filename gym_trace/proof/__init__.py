"""Proofs of training: what was learned, from which steps, by which policy."""

from gym_trace.proof.result import Proof

__all__ = ["Proof"]

"""The aims of gym-trace, and whether it meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import workloads
from figures import ELSEWHERE, LOSSLESS, OURS, Figures

MINARIS = ("minari-hdf5", "minari-arrow")
IMAGES = [workload.name for workload in workloads.SINGLE if workload.images]
ALL = [workload.name for workload in workloads.SINGLE]
FLAT = 1.5  # factor up to which a cost counts as constant


class Aim(NamedTuple):
    """An aim. holds: "yes", "no", "no" with the workloads that miss it, or "–" if nothing was measured."""

    text: str
    measured: str
    holds: str


def _aim(text: str, found: dict[str, float | None], holds: Callable[[float], bool], form: str) -> Aim:
    """Check one aim for one or several workloads."""
    measured = {name: value for name, value in found.items() if value is not None}
    if not measured:
        return Aim(text, "not measured", "–")
    cells = [
        form.format(value) if len(found) == 1 else f"{name} {form.format(value)}" for name, value in measured.items()
    ]
    missed = [name for name, value in measured.items() if not holds(value)]
    if not missed:
        return Aim(text, ", ".join(cells), "yes")
    return Aim(text, ", ".join(cells), "**no**" if len(found) == 1 else f"**no**: {', '.join(missed)}")


def aims(figures: Figures) -> list[Aim]:
    return [*_recording(figures), *_size(figures), *_playback(figures), *_growth(figures)]


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other and other > 0 else None


def _recording(figures: Figures) -> Iterator[Aim]:
    def added(workload: str, *names: str) -> float | None:
        return figures.best("recorded", workload, names or (OURS,), "added")

    def floor(workload: str, name: str) -> float | None:
        ours = figures.recorded.get(workload, {}).get(OURS)
        found = ours.floors.get(name) if ours else None
        return found.median if found else None

    cartpole = {"cartpole": added("cartpole")}
    yield _aim("CartPole: at most 0.4 µs added per step", cartpole, lambda v: v <= 0.4, "{:.2f} µs")
    theirs, note = _theirs(added("cartpole", "gym-recording"), ELSEWHERE["added"])
    found = {"cartpole": _ratio(theirs, added("cartpole"))}
    yield _aim("CartPole: at least 4 times less than gym_recording", found, lambda v: v >= 4, "{:.1f} times" + note)
    found = {"cartpole": _ratio(added("cartpole", *MINARIS), added("cartpole"))}
    yield _aim("CartPole: at least 100 times less than Minari", found, lambda v: v >= 100, "{:.0f} times")
    found = {"halfcheetah": floor("halfcheetah", "canned")}
    text = "HalfCheetah: at most 1 µs added per step, on repeated rows"
    yield _aim(text, found, lambda v: v <= 1, "{:.2f} µs")
    found = {"pong": figures.best("recorded", "pong", (OURS,), "over_ring")}
    text = "Pong: at most 1.5 times copying into a ring, both on repeated rows"
    yield _aim(text, found, lambda v: v <= 1.5, "{:.2f}")
    found = {name: _ratio(added(name), floor(name, "ring")) for name in IMAGES}
    yield _aim("images, in their loops: within 2 times of copying into a ring", found, lambda v: v <= 2, "{:.1f}")
    for text, figure, most in (("at most 60 ns added", "added", 60), ("at most 130 ns of CPU added", "cpu", 130)):
        value = figures.best("recorded", "cartpole-x1024", (OURS,), figure)
        found = {"cartpole-x1024": None if value is None else 1e3 * value}
        yield _aim(f"1,024 CartPoles: {text} per step of a lane", found, lambda v, m=most: v <= m, "{:.0f} ns")
    shares = {name: figures.best("recorded", name, (OURS,), "share") for name in ("frames-x64", "noise-x64")}
    found = {name: None if share is None else 100 * share for name, share in shares.items()}
    yield _aim("64 lanes of random frames: at most 15 % of the unwrapped loop", found, lambda v: v <= 15, "{:.1f} %")


def _theirs(measured: float | None, elsewhere: float) -> tuple[float, str]:
    """Return a figure of gym_recording, and a note about it."""
    return (elsewhere, " (of its figure from elsewhere)") if measured is None else (measured, "")


def _size(figures: Figures) -> Iterator[Aim]:
    ours = {name: figures.best("recorded", name, (OURS,), "bytes") for name in ALL}
    peers = {name: _ratio(ours[name], figures.best("recorded", name, LOSSLESS, "bytes")) for name in ALL}
    yield _aim("size: at most that of the smallest lossless peer", peers, lambda v: v <= 1, "{:.2f}")
    xz = {name: _ratio(ours[name], figures.sizes.get(name, {}).get("xz -9")) for name in ALL}
    yield _aim("size: within 1.4 times of xz -9 of the same columns", xz, lambda v: v <= 1.4, "{:.2f}")
    yield _aim("Pong: at most 90 bytes per frame", {"pong": ours["pong"]}, lambda v: v <= 90, "{:.1f} bytes")


def _playback(figures: Figures) -> Iterator[Aim]:
    def ours(workload: str, figure: str) -> float | None:
        return figures.best("read", workload, (OURS,), figure)

    for name, title, speed in (("halfcheetah", "HalfCheetah", 1), ("pong", "Pong", 2)):
        found = {name: ours(name, "bandwidth")}
        yield _aim(f"{title}: at least {speed} GB/s played back", found, lambda v, s=speed: v >= s, "{:.2f} GB/s")
    found = {name: ours(name, "over_floor") for name in ("halfcheetah", "pong")}
    text = "playback: within 1.5 times of decompressing and undoing the filters"
    yield _aim(text, found, lambda v: v <= 1.5, "{:.2f}")
    found = {"cartpole": ours("cartpole", "again")}
    yield _aim("CartPole: at least 6 million steps/s played back", found, lambda v: v >= 6, "{:.1f} million")
    theirs, note = _theirs(figures.best("read", "cartpole", ("gym-recording",), "again"), ELSEWHERE["read"])
    found = {"cartpole": _ratio(ours("cartpole", "again"), theirs)}
    yield _aim("CartPole: faster than gym_recording's reader", found, lambda v: v > 1, "{:.1f} times" + note)
    p50 = {name: ours(name, "p50") for name in ALL if name not in IMAGES}
    found = {name: None if value is None else 1e3 * value for name, value in p50.items()}
    yield _aim("a random episode without images in at most 0.5 ms (p50)", found, lambda v: v <= 0.5, "{:.2f} ms")
    found = {name: ours(name, "over_copy") for name in IMAGES}
    text = "a random episode of images: within 2 times of copying its bytes in memory"
    yield _aim(text, found, lambda v: v <= 2, "{:.2f}")
    found = {name: _ratio(figures.best("read", name, LOSSLESS, "per_step"), ours(name, "per_step")) for name in ALL}
    yield _aim("a random episode: less time per step than any lossless peer", found, lambda v: v > 1, "{:.1f} times")
    found = {name: _ratio(figures.best("read", name, MINARIS, "window"), ours(name, "window")) for name in ALL}
    yield _aim("random windows: at least 10 times as fast as Minari", found, lambda v: v >= 10, "{:.1f}")


def _growth(figures: Figures) -> Iterator[Aim]:
    grown = sorted(figures.growth.items())
    recording = [recorded.added.median for _, (recorded, _) in grown if recorded.added]
    opening = [read.open.median / count for count, (_, read) in grown if read.open]
    sealing = [seconds for _, _, seconds in figures.seal_times()]
    for text, values in (
        ("1,000 to 1,000,000 episodes: constant cost of recording per step and per episode", recording),
        ("1,000 to 1,000,000 episodes: constant cost of opening per episode", opening),
        ("constant cost of sealing a batch for any number of batches", sealing),
    ):
        growth = [late / early for i, early in enumerate(values) for late in values[i + 1 :]]
        yield _aim(text, {"": max(growth, default=None)}, lambda v: v <= FLAT, "grows at most {:.2f} times")

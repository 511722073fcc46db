"""What a writer says of itself: the schema record (docs/FORMAT.md, section 4), parsed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from gym_trace.errors import CorruptTrace
from gym_trace.model.layout import Layout, Leaf, layout_of
from gym_trace.printable import shown

IMPORTED_FROM = "imported_from"  # the option of the recorder that says so
_SPACES = ("observation_space", "action_space")


class Layouts(NamedTuple):
    """How the observations and actions of a writer are laid out as columns, and whether infos were to be recorded."""

    observations: Layout
    actions: Layout
    infos: bool = False

    @property
    def is_flat(self) -> bool:
        """Whether observations and actions are one column each."""
        return isinstance(self.observations, Leaf) and isinstance(self.actions, Leaf)


@dataclass(frozen=True, eq=False)
class WriterSchema:
    """A schema record as its fields are used. Nobody vouches for a record: fields that are missing or of another type
    are as if empty, but that layouts cannot do without the spaces.

    Attributes:
        raw: the record as it was read, with fields that are not known here.
        created: when the writer began, UTC ns; 0 if unknown.
        split: such as "train".
        environment, versions, recorder: maps, empty if unknown.
        metadata: anything.
    """

    raw: dict[str, Any]
    created: int
    split: str
    environment: dict[str, Any]
    versions: dict[str, Any]
    recorder: dict[str, Any]
    metadata: Any

    @classmethod
    def of(cls, raw: dict[str, Any]) -> WriterSchema:
        """Never raises."""
        created, split = raw.get("created"), raw.get("split", "")
        return cls(
            raw,
            created if isinstance(created, int) else 0,
            split if isinstance(split, str) else shown(split),
            as_map(raw.get("environment")),
            as_map(raw.get("versions")),
            as_map(raw.get("recorder")),
            raw.get("metadata"),
        )

    @cached_property
    def layouts(self) -> Layouts:
        """Raises CorruptTrace if a space is missing or malformed."""
        if missing := [name for name in _SPACES if name not in self.raw]:
            raise CorruptTrace(f"the schema does not say the {missing[0]}")
        observations, actions = (self.raw[name] for name in _SPACES)
        infos = self._is_set("record_infos")
        return Layouts(layout_of(observations, ("observations",)), layout_of(actions, ("actions",)), infos)

    # -- how it recorded ----------------------------------------------------------------------------------------------

    @property
    def has_all_infos(self) -> bool:
        """Whether infos were recorded with all their keys."""
        return self.recorder.get("record_infos") is True

    @property
    def is_vector(self) -> bool:
        """Whether the environment was a vector environment."""
        return "num_envs" in self.recorder

    @property
    def filters_frames(self) -> bool:
        """Whether steps of recorded episodes may have been left out."""
        return self._is_set("frame_filter") or self._is_set("reward_classes")

    @property
    def filters_episodes(self) -> bool:
        """Whether whole episodes may have been left out."""
        return self._is_set("episode_filter")

    @property
    def is_imported(self) -> bool:
        """Whether it is what another package recorded (docs/FORMAT.md, Imported episodes)."""
        return IMPORTED_FROM in self.recorder

    @property
    def has_only_statistics(self) -> bool:
        """Whether episodes have no steps, and begin after as many as they had (docs/FORMAT.md, Imported episodes)."""
        return self.recorder.get("statistics_only") is True

    @property
    def origin(self) -> dict[str, Any]:
        """What an import has said of the files that this is from; nothing, where it was not imported."""
        return as_map(self.metadata) if self.is_imported else {}

    def _is_set(self, option: str) -> bool:
        """Whether the recorder had an option. Arrays, which no recorder writes here, have no truth."""
        value = self.recorder.get(option)
        return isinstance(value, (bool, int, float, str, list, dict)) and bool(value)


def as_map(value: Any) -> dict[str, Any]:
    """value if it is a map, otherwise an empty one."""
    return value if isinstance(value, dict) else {}

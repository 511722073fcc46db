"""The schema record of a writer (docs/FORMAT.md, section 4), parsed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from gym_trace.data.layout import Layout, Leaf, Path, PlainSpace, layout_of, leaves_in
from gym_trace.errors import CorruptTrace
from gym_trace.printable import printable, shown

IMPORTED_FROM = "imported_from"  # a recorder option in the schema record
_SPACES = ("observation_space", "action_space")


class Layouts(NamedTuple):
    """Column layouts of a writer's observations and actions; infos is True if infos were recorded."""

    observations: Layout
    actions: Layout
    infos: bool = False

    @property
    def is_flat(self) -> bool:
        """True if observations and actions have one column each."""
        return isinstance(self.observations, Leaf) and isinstance(self.actions, Leaf)


@dataclass(frozen=True, eq=False)
class WriterSchema:
    """A parsed schema record. Records are untrusted: a missing or mistyped field counts as empty. Only layouts raises.

    Attributes:
        raw: the record as read, with unknown fields.
        created: when the writer began, UTC ns; 0 if unknown.
        split: such as "train".
        environment, versions, recorder: maps, empty if unknown.
        metadata: any value.
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
        """Parse a schema record. Never raises."""
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
        """The column layouts. Raises CorruptTrace if a space is missing or malformed."""
        if missing := [name for name in _SPACES if name not in self.raw]:
            raise CorruptTrace(f"the schema has no {missing[0]}")
        observations, actions = (self.raw[name] for name in _SPACES)
        infos = self._is_set("record_infos")
        return Layouts(layout_of(observations, ("observations",)), layout_of(actions, ("actions",)), infos)

    @cached_property
    def leaves(self) -> dict[Path, tuple[Leaf, PlainSpace]]:
        """Return the leaves of actions and observations with their spaces, by path. Raises CorruptTrace."""
        spaces = (leaf for name in ("action_space", "observation_space") for _, leaf in leaves_in(self.raw[name], ()))
        leaves = (*self.layouts.actions.leaves(), *self.layouts.observations.leaves())
        return {leaf.path: (leaf, space) for leaf, space in zip(leaves, spaces)}

    # -- recording options --------------------------------------------------------------------------------------------

    @property
    def has_all_infos(self) -> bool:
        """True if infos were recorded with all their keys."""
        return self.recorder.get("record_infos") is True

    @property
    def drops_batches(self) -> bool:
        """True if the writer may have dropped old batches, and with them the beginnings of episodes."""
        return "keep_bytes" in self.recorder and "origins" not in self.raw

    @property
    def is_vector(self) -> bool:
        """True if the environment was a vector environment."""
        return "num_envs" in self.recorder

    @property
    def filters_frames(self) -> bool:
        """True if steps of recorded episodes may be missing."""
        return self._is_set("frame_filter") or self._is_set("reward_classes")

    @property
    def filters_episodes(self) -> bool:
        """True if whole episodes may be missing."""
        return self._is_set("episode_filter")

    @property
    def is_imported(self) -> bool:
        """True if another package recorded the episodes (docs/FORMAT.md, Imported episodes)."""
        return IMPORTED_FROM in self.recorder

    @property
    def has_only_statistics(self) -> bool:
        """True if only statistics were imported: no steps, first_step is the length (FORMAT.md, Imported episodes)."""
        return self.recorder.get("statistics_only") is True

    @property
    def origin(self) -> dict[str, Any]:
        """Description of the imported source files; empty if not imported."""
        return as_map(self.metadata) if self.is_imported else {}

    @property
    def agents(self) -> dict[str, Any]:
        """The agents of a multi-agent environment (docs/FORMAT.md, section 4); empty for a single agent."""
        return as_map(self.environment.get("agents"))

    @property
    def branch(self) -> dict[str, Any]:
        """The step that the episodes branch from (docs/FORMAT.md, section 4); empty if they begin with a reset."""
        return as_map(self.raw.get("branch"))

    def edits_of(self, column: str) -> list[str]:
        """Return descriptions of the edits of a column, such as "map by rewards:clipped".

        column: such as "rewards", or "annotations.value".
        """
        edits = as_map(self.raw.get("provenance")).get("edits")
        found = [as_map(edit) for edit in edits] if isinstance(edits, list) else []
        matching = [edit for edit in found if edit.get("column") == column]
        return [f"{printable(edit.get('edit'))} by {printable(edit.get('by'))}" for edit in matching]

    @property
    def prefix(self) -> int:
        """Number of steps at the beginning of each episode that repeat another one."""
        step = self.branch.get("step")
        return step if type(step) is int and step > 0 else 0

    def _is_set(self, option: str) -> bool:
        """Return True if the recorder had an option. Other types, such as arrays, count as unset."""
        value = self.recorder.get(option)
        return isinstance(value, (bool, int, float, str, list, dict)) and bool(value)


def as_map(value: Any) -> dict[str, Any]:
    """Return value if it is a map, otherwise an empty one."""
    return value if isinstance(value, dict) else {}

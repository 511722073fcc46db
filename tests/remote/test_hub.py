"""Pushing to a dataset: what the client of the Hugging Face Hub is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from runs import play
from scripted_env import CountingEnv

from gym_trace import TraceRecordingWrapper, dataset_card
from gym_trace.errors import InvalidOption
from gym_trace.recording.publishing import whole_files


class Api:
    """A client that notes what it is asked for."""

    commits: list[dict[str, Any]]
    made: list[dict[str, Any]]
    has_card: bool

    def create_repo(self, **options: Any) -> None:
        self.made.append(options)

    def file_exists(self, **options: Any) -> bool:
        return self.has_card

    def create_commit(self, **options: Any) -> None:
        self.commits.append(options)


@pytest.mark.parametrize("has_card", [False, True])
def test_files_and_a_card_go_into_few_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_card: bool) -> None:
    Api.commits, Api.made, Api.has_card = [], [], has_card
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(whole_files, "_FILES_PER_COMMIT", 3)
    for _ in range(2):
        with TraceRecordingWrapper(CountingEnv(), tmp_path / "t", on_exist="append") as env:
            play(env, 2)
    names, sent = sorted(path.name for path in (tmp_path / "t").iterdir()), []
    whole_files.commit_to_hub("hf://datasets/me/runs@next/pong", tmp_path / "t", names, sent.append, dataset_card)
    assert Api.made == [{"repo_id": "me/runs", "repo_type": "dataset", "private": True, "exist_ok": True}]
    assert [(one["repo_id"], one["revision"]) for one in Api.commits] == [("me/runs", "next")] * 2
    added = {one.path_in_repo: one for commit in Api.commits for one in commit["operations"]}
    assert set(added) == {f"pong/{name}" for name in names} | (set() if has_card else {"README.md"})
    assert all(isinstance(one, huggingface_hub.CommitOperationAdd) for one in added.values())
    assert sum(sent) == sum(path.stat().st_size for path in (tmp_path / "t").iterdir())
    if not has_card:
        assert b"---" in added["README.md"].path_or_fileobj


def test_only_datasets_are_taken(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="not a dataset"):
        whole_files.commit_to_hub("hf://me/model", tmp_path, [], print, None)

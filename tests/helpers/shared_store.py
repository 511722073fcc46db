"""A store that several processes see, shared://PATH, and an environment whose workers publish to it often."""

import os
import secrets
import time
from typing import Any

import fsspec
import gymnasium
from fsspec.implementations.local import LocalFileSystem

from gym_trace.format import batch_files
from gym_trace.recording.publishing import spool


class SharedStore(LocalFileSystem):  # type: ignore[misc]
    """A directory as an object store: an object is there whole or not at all."""

    protocol = ("shared",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("shared://").strip("/")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        path = self._strip_protocol(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        staged = f"{path}.{secrets.token_hex(4)}"
        with open(staged, "wb") as file:
            file.write(value)
        if mode == "create":
            os.link(staged, path)
            os.unlink(staged)
        else:
            os.replace(staged, path)


fsspec.register_implementation("shared", SharedStore, clobber=True)


class SlowEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Episodes after the first $GYM_TRACE_QUICK take seconds: a run is not over before a test has come to it."""

    left = int(os.environ.get("GYM_TRACE_QUICK", 10**9))

    def reset(self, **kwargs: Any) -> Any:
        self.left -= 1
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        time.sleep(0.0005 if self.left >= 0 else 0.2)
        return super().step(action)


def make() -> gymnasium.Env[Any, Any]:
    batch_files.BATCH_FRAGMENTS, spool._CHECK_SECONDS = 7, 0.02
    return SlowEpisodes(gymnasium.make("CartPole-v1"))

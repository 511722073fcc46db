"""A file system of fsspec in memory, faulty://, whose calls fail on request."""

import hashlib
from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFileSystem


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """failures: one per call, in order: an exception is raised; "lost" stores and then raises; "short" loses the end.

    calls: what was asked for. fetched: bytes of answers. tags: what it lists as ETag: "md5", as S3, or "opaque".
    """

    protocol = ("faulty",)
    root_marker = "/"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[list[Any]] = []
    calls: ClassVar[list[tuple[str, str]]] = []
    fetched = 0
    tags = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = str(path).removeprefix("faulty://").removeprefix("faulty:").lstrip("/").rstrip("/")
        return "/" + path if path else ""

    @classmethod
    def reset(cls, *failures: Any) -> None:
        cls.failures[:] = failures
        cls.calls.clear()
        cls.fetched, cls.tags = 0, ""

    def _fail(self, call: str, path: str) -> Any:
        type(self).calls.append((call, path.rpartition("/")[2]))
        failure = type(self).failures.pop(0) if type(self).failures else None
        if isinstance(failure, BaseException):
            raise failure
        return failure

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._fail("ls", path)
        found = super().ls(path, detail=detail, **options)
        return [self._tagged(one) for one in found] if detail else found

    def info(self, path: str, **options: Any) -> Any:
        return self._tagged(super().info(path, **options))

    def _tagged(self, info: dict[str, Any]) -> dict[str, Any]:
        if not self.tags or info["type"] != "file":
            return info
        digest = hashlib.md5(self.store[info["name"]].getvalue()).hexdigest()
        return {**info, "ETag": f'"{digest}"' if self.tags == "md5" else f'"0x{digest[:16]}"'}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        failure = self._fail("get", path)
        data: bytes = super().cat_file(path, start=start, end=end, **options)
        type(self).fetched += len(data)
        return data[:-1] if failure == "short" else data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        failure = self._fail("put", path)
        super().pipe_file(path, value, mode=mode, **options)
        if failure == "lost":
            raise ConnectionResetError("secret-in-an-answer")

"""Recognize URLs of traces, convert file URLs to paths, and remove credentials for messages."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from gym_trace.errors import InvalidOption

_LOCAL_SCHEMES = ("file", "local")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash, because pathlib removes the second one


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return True for a URL, such as s3://bucket/trace, unless a local directory has this name.

    Examples:
        >>> gym_trace.storage.is_url("s3://bucket/trace"), gym_trace.storage.is_url("traces/cartpole")
        (True, False)
    """
    return bool(_URL.match(os.fspath(path))) and not os.path.isdir(path)


def url_of(path: str | os.PathLike[str]) -> str:
    """Return a URL with the slashes that pathlib has removed, and without a slash at the end.

    Raises InvalidOption for a URL that ends after its scheme.
    """
    text = os.fspath(path)
    url = _with_slashes(text).rstrip("/")
    if not (url.endswith(":") and is_url(text)):
        return url
    if url[:-1].lower() in _LOCAL_SCHEMES:
        return f"{url}///"
    raise InvalidOption(f"{url}//: names no bucket or host; write {url}//BUCKET/PATH")


def _with_slashes(text: str) -> str:
    """Restore the slashes that pathlib has removed: "file:/a" was file:///a, "s3:/a" was s3://a."""
    scheme, colon, rest = text.partition(":/")
    if not colon or rest.startswith("/"):
        return text
    return f"{scheme}:///{rest}" if scheme.lower() in _LOCAL_SCHEMES else f"{scheme}://{rest}"


def local_path(path: str | os.PathLike[str]) -> str | None:
    """Return a path unchanged, or the path of a file:// URL; None for other URLs. Raises InvalidOption for a host."""
    if not is_url(path):
        return os.fspath(path)
    url = url_of(path)
    parts = urlsplit(url)
    if parts.scheme.lower() not in _LOCAL_SCHEMES:
        return None
    if parts.netloc not in ("", "localhost"):
        raise InvalidOption(f"{redacted(url)}: names a host; write file:///PATH with three slashes")
    from urllib.request import url2pathname  # here, because this imports http.client and ssl: 18 ms

    return url2pathname(parts.path)


def redacted(url: str) -> str:
    """Return a URL for messages: without user, password, query and fragment, which may be credentials.

    Examples:
        >>> gym_trace.storage.redacted("s3://key:secret@bucket/trace")
        's3://bucket/trace'
    """
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    host_and_path, *query = re.split(r"[?#]", rest, maxsplit=1)
    host, slash, path = host_and_path.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}" + ("?…" if query else "")


def has_credentials(url: str) -> bool:
    return redacted(url) != url


def refuse_web_server(url: str) -> None:
    """Raise InvalidOption for http:// and https://, where nothing can be written."""
    if url.partition("://")[0].lower() in ("http", "https"):
        raise InvalidOption(f"{redacted(url)}: a web server takes no files; pass the URL of a store, such as s3://")


class UrlPath(type(Path())):  # type: ignore[misc]  # the class of paths on this system
    """A URL as a Path, whose text keeps both slashes."""

    __slots__ = ()

    def __str__(self) -> str:
        return _with_slashes(super().__str__())

    def __fspath__(self) -> str:
        return str(self)

"""Object stores: S3, GCS and Azure with obstore, web servers, directories, and all others of fsspec."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

from gym_trace.errors import InvalidOption, MissingExtra, RemoteError, TraceExists, TraceNotFound
from gym_trace.storage.interrupts import interruptible
from gym_trace.storage.local import LocalStorage, directories_in, open_regular
from gym_trace.storage.protocol import Overwritten
from gym_trace.storage.remote.address import local_path, redacted, refuse_web_server
from gym_trace.storage.remote.objects import ObjectStore, StoredObject, Wanted
from gym_trace.storage.staging import new_file, replaced_file

_T = TypeVar("_T")
NAMES = "names.txt"  # file on a web server that lists the files of a trace, one name per line
_EXTRA = "pip install 'gym-trace[remote]'"
_PARALLEL_REQUESTS = 16
_MOST_IN_ONE_PUT, _PART_BYTES = 256 << 20, 16 << 20  # larger objects are uploaded in parts of this size
_OBSTORE_KINDS = {"s3": "S3Store", "s3a": "S3Store", "gs": "GCSStore", "az": "AzureStore", "abfs": "AzureStore"}
_S3_KEYS = (  # environment variables in which obstore finds credentials
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_SKIP_SIGNATURE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_CLIENT_OPTIONS = {"timeout": "60s", "connect_timeout": "10s", "allow_http": True}
_SMALL_BYTES = 1 << 20  # a larger object is uploaded with another timeout, which includes the time to send it
_UPLOAD_TIMEOUT = "900s"  # four batches of 64 MiB at the same time need 2.4 Mbit/s
_PROFILE_LASTS = timedelta(minutes=30)
_AZURE_KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_ID")
_VERSIONS = ("ETag", "etag", "e_tag", "md5", "content_md5", "Content-MD5", "blob_id", "oid")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "modified", "created")
_PACKAGES = {"gs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "hf": "huggingface_hub"}
_SECONDS, _LEAST_RATE = 30.0, 16 << 10  # time limit of a web server's response; more for long ones, in bytes per second
_STALLED_SECONDS, _LISTING_SECONDS = 20.0, 300.0
_MOST_TEXT, _MOST_FILES, _MOST_REDIRECTS = 4 << 20, 1 << 16, 5
_REDIRECTS, _GONE, _NO_HEAD = (301, 302, 303, 307, 308), (404, 410), (403, 405, 501)  # status codes
_HEADERS = ("ETag", "Content-MD5", "Last-Modified")
_SIZE = re.compile("[0-9]{1,18}")
_LINK = re.compile(r"""href\s{0,9}=\s{0,9}["']?([^"'\s<>]{1,1000})""", re.IGNORECASE)
_TRACE_FILE = re.compile(
    r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}\.(?:manifest\.jsonl|ring|(?:gtb|mp4)(?:\.part)?)|facts\.json"
)
_obstore_pid = 0  # id of the process that uses obstore, whose threads do not survive a fork


def store_at(url: str) -> ObjectStore:
    """Return the store of a URL. Raises MissingExtra, InvalidOption for an unknown scheme, RemoteError."""
    scheme = urlsplit(url).scheme.lower()
    if (folder := local_path(url)) is not None:
        return FolderStore(folder)
    if scheme in ("http", "https"):
        return WebStore(url)
    if scheme not in _OBSTORE_KINDS or not _obstore_has_credentials(scheme):
        return FsspecStore(url)
    try:
        import obstore.store
    except ImportError:
        raise MissingExtra(f"{scheme}:// needs obstore; install it with: {_EXTRA}") from None
    global _obstore_pid
    if _obstore_pid not in (0, os.getpid()):
        raise RemoteError(
            f"{redacted(url)}: this process was forked from one that had opened a URL; start workers with "
            "multiprocessing_context='spawn'"
        )
    _obstore_pid = os.getpid()
    return ObstoreStore(url, getattr(obstore.store, _OBSTORE_KINDS[scheme]))


def _obstore_has_credentials(scheme: str) -> bool:
    """Return False if only the clients of fsspec find the credentials of Azure, or a Google emulator."""
    if scheme in ("az", "abfs"):
        return any(map(os.environ.get, _AZURE_KEYS))
    return scheme != "gs" or "STORAGE_EMULATOR_HOST" not in os.environ


def _profile_settings(url: str) -> dict[str, Any]:
    """Return settings for obstore of the profile in ~/.aws, which botocore reads; {} if the environment has keys."""
    files = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), "~/.aws/config")
    if any(map(os.environ.get, _S3_KEYS)) or not any(os.path.exists(os.path.expanduser(path)) for path in files):
        return {}
    try:
        import botocore.session
    except ImportError:
        raise MissingExtra(
            f"{redacted(url)}: credentials in ~/.aws need botocore; install it with: pip install botocore"
        ) from None
    session = botocore.session.get_session()
    profile, credentials = session.get_scoped_config(), session.get_credentials()
    variables = {"region": "AWS_REGION", "endpoint_url": "AWS_ENDPOINT_URL"}
    settings = {key: profile[key] for key, name in variables.items() if key in profile and name not in os.environ}

    def provided() -> dict[str, Any]:
        found = credentials.get_frozen_credentials()
        keys = {"access_key_id": found.access_key, "secret_access_key": found.secret_key, "token": found.token}
        return {**keys, "expires_at": datetime.now(timezone.utc) + _PROFILE_LASTS}

    return settings if credentials is None else {**settings, "credential_provider": provided}


class ObstoreStore(ObjectStore):
    """The objects at a URL, with obstore."""

    def __init__(self, url: str, kind: Any):
        import obstore

        self._obstore = obstore
        settings: dict[str, Any] = {"retry_config": {"max_retries": 0}}
        try:
            if kind.__name__ == "S3Store":  # which verifies uploads with the checksum
                settings |= {"checksum_algorithm": "SHA256", **_profile_settings(url)}
            self._made = partial(kind.from_url, url, **settings)
            self._store = self._made(client_options=_CLIENT_OPTIONS)
        except MissingExtra:
            raise
        except Exception as error:
            raise RemoteError(
                f"{redacted(url)}: {type(error).__name__}; check the URL and the settings of the store"
            ) from None

    @cached_property
    def _patient(self) -> Any:
        return self._made(client_options={**_CLIENT_OPTIONS, "timeout": _UPLOAD_TIMEOUT})

    def entries(self) -> dict[str, StoredObject]:
        found = self._call(self._obstore.list_with_delimiter, self._store)["objects"]
        return {entry["path"].rpartition("/")[2]: StoredObject(entry["size"], entry["e_tag"] or "") for entry in found}

    def folders(self) -> list[str]:
        found = self._call(self._obstore.list_with_delimiter, self._store)["common_prefixes"]
        return [prefix.rpartition("/")[2] for prefix in found]

    def get(self, wanted: Wanted) -> bytes:
        options: Any = {"range": (wanted.offset, wanted.offset + wanted.length)}
        if wanted.stored.version:
            options["if_match"] = wanted.stored.version
        return self._call(lambda: bytes(self._obstore.get(self._store, wanted.name, options=options).bytes()))

    def put(self, name: str, content: Path | bytes, new: bool) -> None:
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        store = self._store if size <= _SMALL_BYTES else self._patient
        if isinstance(content, Path) and size > _MOST_IN_ONE_PUT:
            if new and name in self.entries():  # an upload in parts has no mode "create"
                raise FileExistsError(name)
            self._call(self._obstore.put, store, name, content, chunk_size=_PART_BYTES, max_concurrency=4)
            return
        mode: Literal["create", "overwrite"] = "create" if new else "overwrite"
        self._call(self._obstore.put, store, name, content, mode=mode, use_multipart=False)

    def _call(self, function: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """Call a function of obstore; raise its errors as those of ObjectStore."""
        exceptions = self._obstore.exceptions
        try:
            return interruptible(partial(function, *arguments, **options))
        except exceptions.AlreadyExistsError:
            raise FileExistsError from None
        except exceptions.PreconditionError:
            raise Overwritten from None


class FsspecStore(ObjectStore):
    """The objects at a URL, with fsspec. Versions are checked after reads: few of its file systems can request one."""

    def __init__(self, url: str):
        self._url, parts = url, urlsplit(url)
        try:
            import fsspec
        except ImportError:
            raise MissingExtra(f"URLs need fsspec; install it with: {_EXTRA}") from None
        if parts.scheme == "gs" and "STORAGE_EMULATOR_HOST" in os.environ:
            # Otherwise gcsfs asks Google, not the emulator, for the kind of the bucket, and warns of the answer.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        try:
            self._fs, root = fsspec.url_to_fs(url)
        except ImportError as error:
            package = _PACKAGES.get(parts.scheme) or error.name or "the package that fsspec names"
            raise MissingExtra(f"{parts.scheme}:// needs {package}; install it with: pip install {package}") from None
        except ValueError:
            raise InvalidOption(
                f"{redacted(url)}: unknown scheme {parts.scheme}; use s3, gs, az, hf, https, file, or one of "
                "fsspec.available_protocols()"
            ) from None
        if self._fs.async_impl and not threading.main_thread().is_alive():  # asyncio starts no more threads
            raise RemoteError(f"{redacted(url)}: out of reach while the program ends; call close() before that")
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _list(self) -> dict[str, Any]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in found}

    def entries(self) -> dict[str, StoredObject]:
        files = {name: entry for name, entry in self._list().items() if entry["type"] == "file"}
        return {name: StoredObject(entry["size"], _version(entry)) for name, entry in files.items()}

    def folders(self) -> list[str]:
        return [name for name, entry in self._list().items() if entry["type"] == "directory"]

    def get(self, wanted: Wanted) -> bytes:
        end = wanted.offset + wanted.length
        data: bytes = self._fs.cat_file(self._path(wanted.name), start=wanted.offset, end=end)
        return data

    def confirm(self, read: Mapping[str, StoredObject]) -> None:
        if any(stored.version.partition("=")[0] not in _VERSIONS for stored in read.values()):
            listed = self.entries()  # info() may format times in another way
            if any(listed.get(name) != stored for name, stored in read.items()):
                raise Overwritten
            return
        self._fs.invalidate_cache()
        for name, stored in read.items():
            if _version(self._fs.info(self._path(name))) != stored.version:
                raise Overwritten

    def put(self, name: str, content: Path | bytes, new: bool) -> None:
        if isinstance(content, Path) and content.stat().st_size > _MOST_IN_ONE_PUT:
            if new and name in self.entries():
                raise FileExistsError(name)
            self._fs.put_file(str(content), self._path(name))
            return
        data = content.read_bytes() if isinstance(content, Path) else content
        if not new:
            self._fs.pipe_file(self._path(name), data)
            return
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except (TypeError, NotImplementedError, ValueError):  # a file system without this mode
            if name in self.entries():
                raise FileExistsError(name) from None
            self._fs.pipe_file(self._path(name), data)
        except OSError as error:
            if "condition" in str(error).lower():  # s3fs: the object exists
                raise FileExistsError(name) from None
            raise


class WebStore(FsspecStore):
    """The files below an http:// or https:// URL, for reading.

    The server is not trusted: size and time of a response are limited, its body is not decompressed, and redirects to
    other servers are not followed.
    """

    def __init__(self, url: str):
        super().__init__(url)
        self._root, _, query = self._root.partition("?")
        self._root, self._query = self._root.rstrip("/"), f"?{query}" if query else ""

    def _path(self, name: str) -> str:
        return f"{self._root}/{quote(name)}{self._query}"

    def entries(self) -> dict[str, StoredObject]:
        """Return the files that names.txt lists or, without it, the links of the server's page for the directory."""
        until = time.monotonic() + _LISTING_SECONDS
        try:
            names = [line.strip() for line in self._text(self._path(NAMES))[0].splitlines()]
        except FileNotFoundError:
            names = self._linked()
            if not any(name and "/" not in name for name in names):
                raise TraceNotFound(
                    f"{redacted(self._url)}: this server lists no files there; put {NAMES}, with the name of each file "
                    "on a line, beside them"
                ) from None
        names = list(dict.fromkeys(filter(_TRACE_FILE.fullmatch, names)))
        if len(names) > _MOST_FILES:
            raise RemoteError(
                f"{redacted(self._url)}: lists more than {_MOST_FILES} files; pull from another kind of URL"
            )
        with ThreadPoolExecutor(_PARALLEL_REQUESTS, "gym-trace-head") as pool:
            found = zip(names, pool.map(lambda name: self._stored(name, until), names))
            return {name: stored for name, stored in found if stored is not None}

    def _stored(self, name: str, until: float) -> StoredObject | None:
        """Return size and version of a file; None if it does not exist."""
        seconds = min(_SECONDS, until - time.monotonic())
        try:
            try:
                _, headers = self._get(self._path(name), 0, seconds, method="HEAD")
            except Exception as error:
                if getattr(error, "status", None) not in _NO_HEAD:
                    raise
                _, headers = self._get(self._path(name), 0, seconds, {"Range": "bytes=0-0"})
        except FileNotFoundError:
            return None
        size = headers.get("Content-Range", headers.get("Content-Length", "")).rpartition("/")[2]
        if not _SIZE.fullmatch(size):
            raise RemoteError(f"{redacted(self._url)}: the server sends no size; use one that sends Content-Length")
        return StoredObject(int(size), _version({key: headers.get(key) for key in _HEADERS}))

    def _text(self, url: str) -> tuple[str, str]:
        """Return a text file and its media type."""
        data, headers = self._get(url, _MOST_TEXT + 1, 2 * _SECONDS)
        if len(data) > _MOST_TEXT:
            raise RemoteError(
                f"{redacted(url)}: larger than {_MOST_TEXT} bytes; name only the files of the trace in it"
            )
        return data.decode("utf-8", "replace"), headers.get("Content-Type", "text/html")

    def _linked(self) -> list[str]:
        """Return the paths that the page of the directory links to, relative to the directory."""
        base = f"{self._root}/"
        try:
            text, kind = self._text(base)
        except FileNotFoundError:
            return []
        found = []
        for link in _LINK.findall(text) if kind.startswith("text/html") else ():
            with suppress(ValueError):  # an invalid address
                to, here = urlsplit(urljoin(base, link)), urlsplit(base)
                if to.netloc in ("", here.netloc, here.netloc.rpartition("@")[2]) and to.path.startswith(here.path):
                    found.append(unquote(to.path.removeprefix(here.path)))
        return found

    def folders(self) -> list[str]:
        names = [] if self._query else [name.rstrip("/") for name in self._linked() if name.endswith("/")]
        return [name for name in dict.fromkeys(names) if name not in ("", ".", "..") and "/" not in name]

    def get(self, wanted: Wanted) -> bytes:
        headers = {"Range": f"bytes={wanted.offset}-{wanted.offset + wanted.length - 1}"}
        key, _, value = wanted.stored.version.partition("=")
        if key == "ETag" and value.startswith('"') and value.isascii() and value.isprintable():
            headers["If-Match"] = value
        try:
            seconds = _SECONDS + wanted.length / _LEAST_RATE
            data, answer = self._get(self._path(wanted.name), wanted.length + 1, seconds, headers)
        except Exception as error:
            if getattr(error, "status", None) == 412:
                raise Overwritten from None
            raise
        if len(data) > wanted.length:
            raise RemoteError(
                f"{redacted(self._url)}: this server sends whole files, no ranges of bytes; use one that does"
            )
        if not answer.get("Content-Range", f"bytes {wanted.offset}-").startswith(f"bytes {wanted.offset}-"):
            raise ConnectionError("incomplete answer")
        return data

    def confirm(self, read: Mapping[str, StoredObject]) -> None:
        return

    def _get(
        self, url: str, limit: int, seconds: float, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return at most `limit` bytes of the body of a response, and its headers.

        Raises FileNotFoundError, RemoteError, and errors of aiohttp.
        """
        import aiohttp
        from fsspec.asyn import sync

        async def limited() -> tuple[bytes, Mapping[str, str]]:
            try:
                return await asyncio.wait_for(self._response(method, url, limit, headers or {}), seconds)
            except aiohttp.ServerTimeoutError:  # no bytes for _STALLED_SECONDS
                raise ConnectionError("timed out") from None
            except asyncio.TimeoutError:
                raise RemoteError(f"{redacted(url)}: the server answers too slowly; try again later") from None

        response: tuple[bytes, Mapping[str, str]] = sync(self._fs.loop, limited)
        return response

    async def _response(
        self, method: str, url: str, limit: int, headers: Mapping[str, str]
    ) -> tuple[bytes, Mapping[str, str]]:
        import aiohttp

        session, options = await self._fs.set_session(), dict(self._fs.kwargs)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_STALLED_SECONDS, sock_read=_STALLED_SECONDS)
        options |= {"timeout": timeout, "allow_redirects": False, "auto_decompress": False}
        options["headers"] = {**options.get("headers", {}), **headers, "Accept-Encoding": "identity"}
        target = self._fs.encode_url(url)
        for _ in range(_MOST_REDIRECTS):
            async with session.request(method, target, **options) as response:
                if response.status in _REDIRECTS:
                    target = _redirected(target, response.headers.get("Location", ""))
                    continue
                if response.status in _GONE:
                    raise FileNotFoundError(redacted(url))
                response.raise_for_status()
                if method == "GET" and response.headers.get("Content-Encoding", "identity") != "identity":
                    raise RemoteError(f"{redacted(url)}: the server compresses what it sends; use one that does not")
                body = bytearray()
                while len(body) < limit and (received := await response.content.read(limit - len(body))):
                    body += received
                return bytes(body), response.headers
        raise RemoteError(f"{redacted(url)}: more than {_MOST_REDIRECTS} redirects; pass another URL")

    def put(self, name: str, content: Path | bytes, new: bool) -> None:
        refuse_web_server(self._url)


def _redirected(url: Any, location: str) -> Any:
    """Return the target of a redirect. Raises RemoteError unless it is on the same server."""
    with suppress(ValueError):  # not a URL
        target = url.join(type(url)(location))
        if location and target.origin() == url.origin():
            return target.with_user(url.user).with_password(url.password)
    raise RemoteError(
        f"{redacted(str(url))}: redirects to another server, port or scheme; pass the URL that it leads to"
    )


class FolderStore(ObjectStore):
    """The files of a directory as objects, for file:// URLs, such as those of a shared file system."""

    def __init__(self, folder: str):
        self._root = Path(folder)

    def entries(self) -> dict[str, StoredObject]:
        if not self._root.is_dir():
            return {}
        with os.scandir(self._root) as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False) and entry.name[0] != "."]
            return {entry.name: _stored(entry.stat(follow_symlinks=False)) for entry in files}

    def folders(self) -> list[str]:
        return directories_in(self._root)

    def get(self, wanted: Wanted) -> bytes:
        fd = open_regular(self._root / wanted.name, os.O_RDONLY)
        try:
            if _stored(os.fstat(fd)) != wanted.stored:
                raise Overwritten
            return os.pread(fd, wanted.length, wanted.offset)
        finally:
            os.close(fd)

    def put(self, name: str, content: Path | bytes, new: bool) -> None:
        try:
            with (new_file if new else replaced_file)(self._root / name) as staged:
                if isinstance(content, Path):
                    shutil.copyfile(content, staged)
                else:
                    staged.write_bytes(content)
        except TraceExists:
            raise FileExistsError(name) from None
        LocalStorage(self._root).sync()


def _stored(about: os.stat_result) -> StoredObject:
    return StoredObject(about.st_size, f"{about.st_mtime_ns} {about.st_ino}")


def _version(info: Any) -> str:
    """Return the first field of an object that identifies its version, as KEY=VALUE."""
    return next((f"{key}={info[key]}" for key in (*_VERSIONS, *_TIMES) if info.get(key)), "")

"""The interface of object stores, and retries and errors for all of them.

No text of a store becomes part of a message, because responses quote keys, signatures and tokens.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from gym_trace.errors import MissingExtra, RemoteError
from gym_trace.storage.protocol import Overwritten

_T = TypeVar("_T")
TRIES = 7
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0  # seconds; doubled after each failure
_STATUS = re.compile(r"(?:status(?: code)?:?|HTTP(?:/\d(?:\.\d)?)?|code=|status=)\s*(\d{3})", re.IGNORECASE)
_CODE = re.compile(r"<Code>([A-Za-z]{3,40})</Code>")
_MD5 = re.compile(r"""(?:[A-Za-z0-9_-]+=)?"?([0-9a-f]{32})"?""", re.IGNORECASE)
_TAG = re.compile(r"""(?:W/)?"|(?:etag|e_tag|md5|content_md5|content-md5|blob_id|oid)=""", re.IGNORECASE)
_REASONS = {  # words in the response of a store, and the reason to report
    "timed out": "timed out",
    "timeout": "timed out",
    "refused": "connection refused",
    "dns": "host not found",
    "name resolution": "host not found",
    "name or service": "host not found",
    "cannot connect": "cannot connect",
    "connection reset": "connection lost",
    "connectionreset": "connection lost",
    "connection closed": "connection lost",
    "disconnected": "connection lost",
    "incomplete": "connection lost",
    "credential": "no valid credentials",
    "bucket": "no such bucket, or no right to see it",
    "connect": "cannot connect",
}
_DENIED, _MISSING = (401, 403), 404
_SKEWED = "RequestTimeTooSkewed"  # code of S3 for a signature whose time is more than 15 minutes off


class StoredObject(NamedTuple):
    """An object. version: changes when it is overwritten: its ETag, or another value that the store reports."""

    size: int
    version: str


def md5_of(stored: StoredObject) -> str | None:
    """Return what may be the MD5 of an object, because most S3 servers use it as ETag; None if it cannot be one."""
    match = _MD5.fullmatch(stored.version)
    return None if match is None else match[1].lower()


def is_tagged(stored: StoredObject) -> bool:
    """Return True if the version is a tag or checksum from the store, not a time."""
    return _TAG.match(stored.version) is not None


class Wanted(NamedTuple):
    """A range of bytes of an object, in the listed version."""

    name: str
    stored: StoredObject
    offset: int
    length: int


_FINAL = (FileNotFoundError, FileExistsError, RemoteError, MissingExtra)  # errors not worth a retry


class ObjectStore(Protocol):
    """The objects at one URL. Usable from any number of threads.

    Methods raise FileNotFoundError for a missing object, PermissionError, Overwritten, RemoteError for other permanent
    errors, and any other exception for errors that a retry may solve. Overwritten has no message.
    """

    def entries(self) -> dict[str, StoredObject]:
        """Return the objects directly at the URL, by name; {} without any."""

    def folders(self) -> list[str]:
        """Return the names of the folders at the URL, in any order."""

    def get(self, wanted: Wanted) -> bytes:
        """Return a range of bytes, fewer if the connection is lost. Raises Overwritten, unless confirm() does."""

    def confirm(self, read: Mapping[str, StoredObject]) -> None:
        """Raise Overwritten if an object that was read has another version by now, where get() cannot tell."""
        return

    def put(self, name: str, content: Path | bytes, new: bool) -> None:
        """Store an object, from a file or bytes. new: raise FileExistsError if the name already exists."""


def persistently(call: Callable[[], _T], what: str, wait: Callable[[float], object] = time.sleep) -> _T:
    """Call up to TRIES times, waiting longer after each failure. Raises RemoteError, and errors not worth a retry.

    wait: waits a number of seconds; what it returns, if true, says that no more calls are wanted.
    """
    seconds = _FIRST_WAIT
    for retries_left in range(TRIES - 1, -1, -1):
        try:
            return call()
        except Overwritten:
            raise Overwritten(f"{what}: was overwritten while it was read; open it again") from None
        except _FINAL:
            raise
        except Exception as error:
            reason, advice = reason_of(error)
            if advice:
                raise RemoteError(f"{what}: {reason}; {advice}") from None
            if not retries_left:
                raise RemoteError(f"{what}: {reason}, {TRIES} times; try again later") from None
        if wait(seconds * (0.5 + random.random())):
            raise RemoteError(f"{what}: no longer needed")
        seconds = min(2 * seconds, _LONGEST_WAIT)
    raise AssertionError("unreachable")


def reason_of(error: BaseException) -> tuple[str, str]:
    """Return the reason of a store's error, without its text, and advice if the error is not worth a retry."""
    text = str(error).replace("retry_timeout", "")  # obstore quotes its settings
    code, status = _CODE.search(text), _STATUS.search(text)
    number = getattr(error, "status", None) or getattr(error, "status_code", None)
    number = number or (int(status[1]) if status else None)
    kind = type(error).__name__
    if code and code[1] == _SKEWED:
        return f"the store has another time than this machine ({_SKEWED})", "correct the clock"
    if isinstance(error, PermissionError) or number in _DENIED or "Permission" in kind or "Unauthenticated" in kind:
        return f"access denied ({code[1]})" if code else "access denied", "check the credentials that the store uses"
    if number == _MISSING:
        return "no such bucket or container", "check the URL"
    if number is not None and not 200 <= int(number) < 300:
        return f"status {number}" + (f" ({code[1]})" if code else ""), ""
    if code:
        return code[1], ""
    described = f"{kind} {text}".lower()
    return next((reason for word, reason in _REASONS.items() if word in described), kind), ""

"""The seam to object stores: names with sizes, ranges of bytes, whole objects. Also retries and errors.

No text of a store reaches a message: answers quote keys, signatures and tokens.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from gym_trace.errors import MissingExtra, RemoteError

_T = TypeVar("_T")
TRIES = 7
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0  # seconds; doubled after each failure
_STATUS = re.compile(r"(?:status(?: code)?:?|HTTP(?:/\d(?:\.\d)?)?|code=|status=)\s*(\d{3})", re.IGNORECASE)
_CODE = re.compile(r"<Code>([A-Za-z]{3,40})</Code>")
_MD5 = re.compile(r"""(?:[A-Za-z0-9_-]+=)?"?([0-9a-f]{32})"?""", re.IGNORECASE)
_TAG = re.compile(r"""(?:W/)?"|(?:etag|e_tag|md5|content_md5|content-md5|blob_id|oid)=""", re.IGNORECASE)
_REASONS = {  # words in the answer of a store, and the reason to report
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


class StoredObject(NamedTuple):
    """An object. version: changes when it is overwritten: its ETag, or what else the store tells."""

    size: int
    version: str


def md5_of(stored: StoredObject) -> str | None:
    """Return what may be the MD5 of an object: most S3 servers have it as ETag. None: the store lists none."""
    found = _MD5.fullmatch(stored.version)
    return None if found is None else found[1].lower()


def is_tagged(stored: StoredObject) -> bool:
    """Return True if the version is one that the store made of the content, and not a time."""
    return _TAG.match(stored.version) is not None


class Wanted(NamedTuple):
    """A range of bytes of an object in the version that was listed."""

    name: str
    stored: StoredObject
    offset: int
    length: int


class Overwritten(Exception):
    """An object has another version than the one that was asked for."""


_FINAL = (FileNotFoundError, FileExistsError, Overwritten, RemoteError, MissingExtra)  # no second try helps


class ObjectStore(Protocol):
    """The objects at one URL. Usable from any number of threads.

    Methods raise FileNotFoundError where there is no such object, PermissionError, Overwritten, RemoteError for what is
    wrong for good, and anything else for what may work in a moment.
    """

    def entries(self) -> dict[str, StoredObject]:
        """Return the objects directly at the URL, by name; none if there is nothing."""

    def folders(self) -> list[str]:
        """Return the names of what is below the URL, in any order."""

    def get(self, wanted: Sequence[Wanted]) -> list[bytes | Exception]:
        """Return ranges within objects, fetched at the same time; an exception in place of one that failed."""

    def put(self, name: str, content: Path | bytes, new: bool) -> None:
        """Store a whole object: a file, or bytes. new: raise FileExistsError if there is one of this name."""


def persistently(call: Callable[[], _T], what: str) -> _T:
    """Call until it works, waiting longer each time. Raises RemoteError, and what needs no second try."""
    wait = _FIRST_WAIT
    for left in range(TRIES - 1, -1, -1):
        try:
            return call()
        except _FINAL:
            raise
        except Exception as error:
            reason, advice = reason_of(error)
            if advice:
                raise RemoteError(f"{what}: {reason}; {advice}") from None
            if not left:
                raise RemoteError(f"{what}: {reason}, {TRIES} times; try again later") from None
        time.sleep(wait * (0.5 + random.random()))
        wait = min(2 * wait, _LONGEST_WAIT)
    raise AssertionError("unreachable")


def fetched(connected: Callable[[], ObjectStore], wanted: Sequence[Wanted], what: str) -> list[bytes]:
    """Fetch ranges in full; those that fail are fetched again. Raises FileNotFoundError, Overwritten, RemoteError."""
    done: dict[int, bytes] = {}

    def attempt() -> None:
        left = [place for place in range(len(wanted)) if place not in done]
        failure: Exception | None = None
        for place, data in zip(left, connected().get([wanted[place] for place in left])):
            if isinstance(data, bytes) and len(data) == wanted[place].length:
                done[place] = data
            elif not isinstance(failure, _FINAL):
                failure = ConnectionError("incomplete answer") if isinstance(data, bytes) else data
        if failure is not None:
            raise failure

    if wanted:
        persistently(attempt, what)
    return [done[place] for place in range(len(wanted))]


def reason_of(error: BaseException) -> tuple[str, str]:
    """Return why a store failed, in our own words, and what to do about it where no second try helps."""
    text = str(error).replace("retry_timeout", "")  # obstore quotes its settings
    code, status = _CODE.search(text), _STATUS.search(text)
    number = getattr(error, "status", None) or getattr(error, "status_code", None)
    number = number or (int(status[1]) if status else None)
    kind = type(error).__name__
    if isinstance(error, PermissionError) or number in _DENIED or "Permission" in kind or "Unauthenticated" in kind:
        return f"access denied ({code[1]})" if code else "access denied", "check the credentials that the store uses"
    if number == _MISSING:
        return "no such bucket or container", "check the URL"
    if number is not None and not 200 <= int(number) < 300:
        return f"status {number}" + (f" ({code[1]})" if code else ""), ""
    if code:
        return code[1], ""
    answer = f"{kind} {text}".lower()
    return next((reason for word, reason in _REASONS.items() if word in answer), kind), ""

"""Control data on local disk, S3, GCS, Azure or in memory, through obstore.

The one guarantee everything else is built on is `Store.create`: put-if-absent, which of any number of racing writers
lets exactly one through and never shows partial content. Bulk data (parquet, checkpoints) does not pass through here.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, MemoryStore, from_url

from verl_workflow.durable_files import write_durably
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.paths import absolute, refused

_MEMORY: dict[str, MemoryStore] = {}

# Reads from an object store take tens of milliseconds each, whatever their number.
_MANY, _AT_A_TIME = 4, 16
PROCESS, POWER = "process", "power"
# What obstore calls a file until it is whole, and shows to nobody.
_UNFINISHED = re.compile(r".+#[0-9]+")


class Store:
    """A flat key space of small objects below one URI.

    Args:
        uri: a local path, ``file://``, ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``memory://name``. A local root
            is created on the first write, not here. S3 credentials, region and endpoint come from ``AWS_*`` variables.
        durability: what a local disk promises. ``process``: what was written survives the death of any process.
            ``power``: of the machine too; each write waits for the disk. Default ``VERL_WORKFLOW_DURABILITY``, or
            ``process``. Object stores always keep what they have taken.

    Raises:
        UserError: the scheme is unknown or the URI cannot be understood.

    Picklable: it crosses to Ray workers by its URI (a memory store only within one process).
    """

    def __init__(self, uri: str, *, durability: str | None = None) -> None:
        self.uri = absolute_uri(uri)
        self.durability = durability or os.environ.get("VERL_WORKFLOW_DURABILITY") or PROCESS
        if self.durability not in (PROCESS, POWER):
            raise UserError(
                ErrorCode.STORAGE,
                "this is no kind of durability",
                where="VERL_WORKFLOW_DURABILITY" if durability is None else "durability",
                value=self.durability,
                remedy=f"Write {PROCESS} or {POWER}.",
            )
        self._opened: Path | None = None
        scheme = urlparse(self.uri).scheme
        try:
            if scheme == "file":
                self._store: Any = None
            elif scheme == "memory":
                self._store = _MEMORY.setdefault(self.uri, MemoryStore())
            else:
                options: dict[str, Any] = {}
                if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
                    options["client_options"] = {"allow_http": True}
                self._store = from_url(self.uri, **options)
        except (BaseError, ValueError) as error:
            raise _unusable(uri, error) from error

    @property
    def local_path(self) -> Path | None:
        """The root folder when the store is on local disk, else None."""
        parsed = urlparse(self.uri)
        return Path(unquote(parsed.path)) if parsed.scheme == "file" else None

    def create(self, key: str, data: bytes) -> bool:
        """Write `key` only if it does not exist; True when this call wrote it, False when it was there already."""
        if self._survives_power_cuts:
            return self._write_durably(key, data, replace=False)
        try:
            obstore.put(self._backend(), key, data, mode="create")
        except AlreadyExistsError:
            return False
        except BaseError as error:
            raise self._failed("create", key, error) from error
        return True

    def put(self, key: str, data: bytes) -> None:
        """Write `key`, replacing what is there, atomically."""
        if self._survives_power_cuts:
            self._write_durably(key, data, replace=True)
            return
        try:
            obstore.put(self._backend(), key, data)
        except BaseError as error:
            raise self._failed("write", key, error) from error

    def get(self, key: str) -> bytes | None:
        """The content of `key`, or None when it does not exist."""
        if self._absent():
            return None
        try:
            return bytes(obstore.get(self._backend(), key).bytes())
        except (NotFoundError, FileNotFoundError):
            return None
        except BaseError as error:
            raise self._failed("read", key, error) from error

    def get_all(self, keys: Sequence[str]) -> Iterator[bytes | None]:
        """As `get` for each key, in order; from afar, many at a time."""
        if self.local_path is not None or len(keys) < _MANY:
            yield from map(self.get, keys)
            return
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            yield from pool.map(self.get, keys)

    def size(self, key: str) -> int | None:
        """How many bytes `key` holds, or None when it does not exist."""
        if self._absent():
            return None
        try:
            return int(obstore.head(self._backend(), key)["size"])
        except (NotFoundError, FileNotFoundError):
            return None
        except BaseError as error:
            raise self._failed("look at", key, error) from error

    def modified(self, key: str) -> float | None:
        """When `key` was last written, in seconds since 1970 of the storage's clock; None when it does not exist."""
        if self._absent():
            return None
        try:
            return float(obstore.head(self._backend(), key)["last_modified"].timestamp())
        except (NotFoundError, FileNotFoundError):
            return None
        except BaseError as error:
            raise self._failed("look at", key, error) from error

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        """All keys below the folder `prefix`, sorted; only those behind the key `after`, if that is given."""
        if self._absent():
            return []
        try:
            batches = obstore.list(self._backend(), prefix=prefix, offset=after)
            found = [entry["path"] for batch in batches for entry in batch]
        except BaseError as error:
            raise self._failed("list", prefix, error) from error
        return sorted(found)

    def folders(self, prefix: str) -> builtins.list[str]:
        """The names of the folders directly below the folder `prefix`, sorted; those that are text."""
        if self._absent():
            return []
        root = self.local_path
        if root is not None:
            return sorted(_local_folders(root / prefix, self.uri))
        try:
            found = obstore.list_with_delimiter(self._backend(), prefix=prefix)["common_prefixes"]
        except BaseError as error:
            raise self._failed("list", prefix, error) from error
        return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in found)

    def delete(self, key: str) -> None:
        """Remove `key`; no error when it is not there."""
        if self._absent():
            return
        try:
            obstore.delete(self._backend(), key)
        except (NotFoundError, FileNotFoundError):
            return
        except BaseError as error:
            raise self._failed("delete", key, error) from error

    def delete_all(self, keys: Sequence[str], prefix: str) -> None:
        """Remove these keys, and of the folder `prefix` what is empty then; no error for those that are not there."""
        for key in keys:
            self.delete(key)
        root = self.local_path
        if root is not None:
            # Object stores have no folders; a disk would keep the empty ones.
            for folder, _, _ in os.walk(root / prefix, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()

    def unfinished(self, prefix: str) -> Iterator[tuple[Path, float, int]]:
        """Files below the folder `prefix` that were never finished: path, age in seconds, bytes. On local disks alone.

        Whoever writes such a file may be dead, or just be writing it.
        """
        root = self.local_path
        if root is None:
            return
        for folder, _, names in os.walk(root / prefix):
            for name in names:
                path = Path(folder, name)
                if _UNFINISHED.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):
                        facts = path.stat()
                        yield path, time.time() - facts.st_mtime, facts.st_size

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.uri, self.durability)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    @property
    def _survives_power_cuts(self) -> bool:
        return self.durability == POWER and self.local_path is not None

    def _write_durably(self, key: str, data: bytes, *, replace: bool) -> bool:
        root = self.local_path
        assert root is not None
        # Makes the root, or says what keeps it from being made.
        self._backend()
        try:
            return write_durably(root / key, data, replace=replace, root=root)
        except OSError as error:
            raise self._failed("write", key, error) from error

    def _absent(self) -> bool:
        root = self.local_path
        try:
            if root is None or root.is_dir():
                return False
            if not root.exists():
                return True
        except OSError as error:
            raise refused(self.uri, error) from error
        what = "the storage is a file, and has to be a folder"
        raise UserError(ErrorCode.STORAGE, what, where=self.uri, remedy="Name a folder.")

    def identity(self) -> tuple[int, int] | None:
        """Of the local root folder: another one when something else is mounted there; None: it is not there.

        Always None of what is not on a local disk.
        """
        root = self.local_path
        try:
            found = None if root is None else root.stat()
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)

    def _backend(self) -> Any:
        if self._opened and not self._opened.is_dir():
            # Made anew, it would take what belongs to the one that was lost.
            raise VerlWorkflowError(
                ErrorCode.STORAGE,
                "the storage's folder is gone",
                where=self.uri,
                remedy="Bring it back, and resume; or start anew from another process.",
                retryable=True,
            )
        if self._store is None:
            root = self.local_path
            assert root is not None
            try:
                root.mkdir(parents=True, exist_ok=True)
                self._store = LocalStore(root)
                self._opened = root
            except OSError as error:
                raise refused(root, error) from error
            except BaseError as error:
                raise self._failed("open", "", error) from error
        return self._store

    def _failed(self, verb: str, key: str, error: Exception) -> VerlWorkflowError:
        return VerlWorkflowError(
            ErrorCode.STORAGE,
            f"cannot {verb} {key or 'the storage root'}: {_said(error)}",
            where=self.uri,
            remedy="Check that the storage is reachable, writable and not full.",
            retryable=True,
        )


def _local_folders(folder: Path, uri: str) -> Iterator[str]:
    """Somebody may have left one there whose name is no text; object_store would list none then."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir() and entry.name.encode(errors="ignore").decode() == entry.name:
                    yield entry.name
    except FileNotFoundError:
        return
    except OSError as error:
        raise refused(uri, error) from error


def _open(uri: str, durability: str) -> Store:
    return Store(uri, durability=durability)


def absolute_uri(uri: str) -> str:
    """`uri` with a scheme: a plain path becomes an absolute ``file://`` URI; others lose a trailing slash.

    Raises:
        UserError(STORAGE): it is neither a path nor a URI.
    """
    try:
        parsed = urlparse(uri)
    except ValueError as error:
        raise _unusable(uri, error) from error
    if parsed.scheme == "file":
        return absolute(unquote(parsed.path), code=ErrorCode.STORAGE).as_uri()
    if len(parsed.scheme) > 1:
        return uri.rstrip("/")
    return absolute(uri, home=True, code=ErrorCode.STORAGE).as_uri()


def _said(error: Exception) -> str:
    """Without the dump of its own structures that the storage's library puts below."""
    return str(error).split("\n\nDebug source:")[0]


def _unusable(uri: str, error: Exception) -> UserError:
    return UserError(
        ErrorCode.STORAGE,
        f"the storage cannot be opened: {_said(error)}",
        value=uri,
        remedy="Use a local path, or s3://, gs://, az:// with the credentials in the environment.",
    )

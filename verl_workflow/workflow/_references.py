"""Which stored objects a pickle of this library refers to, and the same pickle for another place; loads nothing."""

from __future__ import annotations

import hashlib
import pickletools
import re
from collections.abc import Iterable, Mapping

from verl_workflow.storage import Store
from verl_workflow.workflow._damage import damaged

# As `_pickling` names them; in a pickle the name stands as it is.
_OBJECT_KEY = re.compile(rb"runs/[A-Za-z0-9._=-]+/[0-9a-f]{16}/objects/[0-9a-f]{64}\.pkl")
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})


def object_keys(pickles: Iterable[bytes], store: Store) -> set[str]:
    """The keys of all stored objects that the pickles refer to, directly or through other objects.

    A text in them that looks like such a key counts as one.
    """
    found: set[str] = set()
    for data in pickles:
        waiting = _named_in(data)
        while waiting:
            key = waiting.pop()
            if key not in found:
                found.add(key)
                waiting |= _named_in(store.get(key) or b"")
    return found


def _named_in(data: bytes) -> set[str]:
    return {match.decode() for match in _OBJECT_KEY.findall(data)}


def moved(data: bytes, store: Store, folder: str) -> bytes:
    """The same pickle, referring to copies of the objects below another folder, which are written first.

    Raises:
        VerlWorkflowError(JOURNAL_DAMAGED): an object is missing, or not the one that was recorded.
    """
    known: dict[str, str] = {}
    # Objects that others refer to come before those: their copies' names depend on what is in them.
    waiting = sorted(_named_in(data))
    while waiting:
        key = waiting[-1]
        inner = _stored(key, store)
        missing = sorted(_named_in(inner) - set(known))
        if key in known or not missing:
            waiting.pop()
            if key not in known:
                known[key] = _copied(_renamed(inner, known), store, folder)
        else:
            waiting.extend(missing)
    return _renamed(data, known)


def _copied(data: bytes, store: Store, folder: str) -> str:
    key = f"{folder}/{hashlib.sha256(data).hexdigest()}.pkl"
    store.create(key, data)
    return key


def _stored(key: str, store: Store) -> bytes:
    data = store.get(key)
    if data is None or hashlib.sha256(data).hexdigest() != _digest(key):
        why = "is missing" if data is None else "is not the one that was recorded"
        raise damaged(key, f"the value of an object reference {why}")
    return data


def _renamed(data: bytes, keys: Mapping[str, str]) -> bytes:
    """A pickle with other keys of objects, and their digests, in place of the old ones; read as opcodes only."""
    if not keys or not _named_in(data) & set(keys):
        return data
    texts = {**keys, **{_digest(old): _digest(new) for old, new in keys.items()}}
    found = list(pickletools.genops(data))
    ends = [position or 0 for _, _, position in found[1:]] + [len(data)]
    parts = []
    for (opcode, argument, position), end in zip(found, ends, strict=True):
        if opcode.name == "FRAME":
            # Their lengths would be others; a pickle needs none.
            continue
        if isinstance(argument, str) and argument in texts and opcode.name in _TEXTS:
            text = texts[argument].encode()
            parts.append(b"X" + len(text).to_bytes(4, "little") + text)
        else:
            parts.append(data[position:end])
    return b"".join(parts)


def _digest(key: str) -> str:
    return key.rsplit("/", 1)[-1].removesuffix(".pkl")

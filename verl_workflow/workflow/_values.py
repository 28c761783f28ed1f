"""A step's value at rest: the bytes, how they are to be read, and their digest; inline in the journal when small."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.stored_json import parse_json
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._pickling import loads

# What a commit holds itself; more is a file of its own, or resuming a long run would mean reading all its values.
INLINE_LIMIT = 1024


class Codec(str, enum.Enum):
    """How bytes become a value.

    JSON: always in a file of its own, for people to read. PICKLE: any Python object. CAUGHT: a pickled exception; the
    value is ``(None, exception)``.
    """

    JSON = "json"
    PICKLE = "pickle"
    CAUGHT = "caught"


@dataclass(frozen=True, kw_only=True)
class Value:
    """Attributes: exactly one of inline and key is set. key: of the storage. sha256: of the bytes."""

    codec: Codec
    sha256: str
    inline: bytes | None = None
    key: str | None = None

    @classmethod
    def of(cls, data: bytes, codec: Codec) -> Value:
        """A value that carries its bytes."""
        return cls(codec=codec, sha256=hashlib.sha256(data).hexdigest(), inline=data)

    def load(self, store: Store, step: str) -> Any:
        """The value. Raises VerlWorkflowError(JOURNAL_DAMAGED) when it is not the one that was recorded."""
        data = self.read(store, step)
        where = self.key or f"step {step}"
        try:
            if self.codec is Codec.JSON:
                return parse_json(data)
            found = loads(data, store)
        except VerlWorkflowError:
            raise
        except Exception as error:
            why = "not JSON" if self.codec is Codec.JSON else "a pickle that cannot be loaded any more"
            raise damaged(where, f"the value of step {step} is {why} ({type(error).__name__}: {error})") from error
        return (None, found) if self.codec is Codec.CAUGHT else found

    def read(self, store: Store, step: str) -> bytes:
        """The bytes, checked against the digest."""
        data = self.inline
        if data is None:
            assert self.key is not None
            data = store.get(self.key)
        if data is None:
            raise damaged(self.key or "", f"the value of step {step} is missing")
        if hashlib.sha256(data).hexdigest() != self.sha256:
            where = self.key or f"step {step}"
            raise damaged(where, f"the value of step {step} is not the one that was recorded")
        return data

"""Pickles that outlive the cluster: object references in them stand for stored values, and steps for their names."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._damage import damaged

# Asked with each object: a kind and a number, by which it is known to whoever loads; None: it is pickled as it is.
Numbering = Callable[[Any], "tuple[str, int] | None"]
# Key and digest of the stored object, by the reference that stands for it.
Objects = dict[Any, tuple[str, str]]
_OBJECT = "object"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A pickle that lies in the storage by itself, as that of an object reference does."""

    key: str
    sha256: str

    def load(self, store: Store) -> Any:
        """Its value. Raises VerlWorkflowError(JOURNAL_DAMAGED) when it is missing or another one."""
        data = store.get(self.key)
        if data is None or hashlib.sha256(data).hexdigest() != self.sha256:
            why = "is missing" if data is None else "is not the one that was recorded"
            raise damaged(self.key, f"the value of an object reference {why}")
        return loads(data, store)


def keep(data: bytes, store: Store, folder: str) -> Kept:
    """Write a pickle below `folder`, unless it is there."""
    sha256 = hashlib.sha256(data).hexdigest()
    key = f"{folder}/{sha256}.pkl"
    store.create(key, data)
    return Kept(key=key, sha256=sha256)


def dumps(
    value: Any, store: Store, folder: str, number: Numbering | None = None, objects: Objects | None = None
) -> bytes:
    """Pickle a value; what object references in it refer to is written below `folder` first, each content once.

    Args:
        number: for arguments of steps, which hold other steps.
        objects: those that are written already, and from now on these: handed from one pickle to the next, it spares
            fetching an object for each.

    Raises:
        Exception: whatever pickling the user's objects raises.
    """
    stream = io.BytesIO()
    pickler = _pickler()(stream)
    pickler.place, pickler.number, pickler.objects = (store, folder), number, {} if objects is None else objects
    pickler.dump(value)
    return stream.getvalue()


def loads(data: bytes, store: Store, numbered: Callable[[str, int], Any] | None = None) -> Any:
    """The value behind `dumps`; references are new ones, to equal values.

    Args:
        numbered: what stands for the objects that were numbered.
    """

    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.store, unpickler.numbered = store, numbered
    return unpickler.load()


def try_load(data: bytes) -> None:
    """Load a pickle for nothing but to see that it can be, as far as that goes without what its references refer to.

    Raises:
        Exception: what loading raises.
    """
    with contextlib.suppress(_Refers):
        _Trial(io.BytesIO(data)).load()


class _Refers(Exception):
    """There is an object reference in the pickle."""


class _Trial(pickle.Unpickler):
    def persistent_load(self, key: Any) -> Any:
        raise _Refers


class _Unpickler(pickle.Unpickler):
    store: Store
    numbered: Callable[[str, int], Any] | None

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module != "ray.cloudpickle.cloudpickle":
            return found
        return _OF_CLASSES.get(name, lambda each: each)(found)

    def persistent_load(self, key: Any) -> Any:
        kind, *rest = key
        if kind == _OBJECT:
            return _reference(rest[0], rest[1], self.store)
        assert self.numbered is not None, "only arguments hold steps"
        return self.numbered(kind, rest[0])


def _scripts_class(make: Any) -> Any:
    """A class of a script is pickled whole; where the script runs again its instances are of the class as it is now."""

    def made(kind: Any, name: str, bases: Any, told: dict[str, Any], *rest: Any) -> Any:
        present = getattr(sys.modules["__main__"], name, None) if told.get("__module__") == "__main__" else None
        return present if _is_scripts(present) else make(kind, name, bases, told, *rest)

    return made


def _scripts_enum(make: Any) -> Any:
    def made(bases: Any, name: str, qualname: str, members: Any, module: str, *rest: Any) -> Any:
        present = getattr(sys.modules["__main__"], qualname, None) if module == "__main__" else None
        return present if _is_scripts(present) else make(bases, name, qualname, members, module, *rest)

    return made


def _class_filled(fill: Any) -> Any:
    return lambda made, state: made if _is_scripts(made) else fill(made, state)


def _is_scripts(thing: Any) -> bool:
    return isinstance(thing, type) and getattr(sys.modules["__main__"], thing.__qualname__, None) is thing


# What the pickler calls to make a class, and to give it its attributes.
_OF_CLASSES = {
    "_make_skeleton_class": _scripts_class,
    "_make_skeleton_enum": _scripts_enum,
    "_class_setstate": _class_filled,
}


@functools.cache
def _pickler() -> Any:
    """The class, made when it is needed first: Ray's pickler is its base."""
    from ray import ObjectRef, cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def persistent_id(self, thing: Any) -> Any:
            if isinstance(thing, ObjectRef):
                store, folder = self.place
                if thing not in self.objects:
                    self.objects[thing] = _stored(thing, store, folder, self.objects)
                return _OBJECT, *self.objects[thing]
            return None if self.number is None else self.number(thing)

    return Pickler


def _stored(reference: Any, store: Store, folder: str, objects: Objects) -> tuple[str, str]:
    import ray

    kept = keep(dumps(ray.get(reference), store, folder, objects=objects), store, folder)
    return kept.key, kept.sha256


def _reference(key: str, sha256: str, store: Store) -> Any:
    import ray

    if not ray.is_initialized():
        # Ray would start a cluster for it.
        raise VerlWorkflowError(
            ErrorCode.CLUSTER_UNREACHABLE,
            "the value holds object references, which a cluster has to make anew, and none is joined",
            remedy="Call ray.init() first.",
        )
    return ray.put(Kept(key=key, sha256=sha256).load(store))

"""Models in a registry, by their records alone: what an Airflow machine sees that lacks the models' file system."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from verl_workflow.artifacts import Artifact
from verl_workflow.registry import FileRecord, Lineage, ModelVersion, Registry
from verl_workflow.storage import Store

MODEL = "arithmetic"


def make_versions(storage: str, count: int, *, files: Path | None = None) -> Registry:
    """Versions v0001 and so on, and the alias champion on each in turn; with `files`, one file each below it."""
    store = Store(storage)
    registry = Registry(store, files or Path("/nowhere"))
    for number in range(1, count + 1):
        version = f"v{number:04d}"
        content = version.encode()
        if files is not None:
            folder = files / "registry" / MODEL / version
            folder.mkdir(parents=True)
            (folder / "weights").write_bytes(content)
        record = FileRecord(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
        manifest = ModelVersion(
            model=MODEL,
            version=version,
            artifact=Artifact(path=Path("/nowhere"), sha256=f"{number:064x}", bytes=len(content)),
            files={"weights": record},
            lineage=Lineage(run="night", stage="promote"),
            evaluation={},
            created_at="2026-12-01T00:00:00Z",
        )
        store.create(f"registry/{MODEL}/versions/{version}.json", json.dumps(manifest.to_json()).encode())
        registry.set_alias(MODEL, "champion", version, number - 1 or None)
    return registry

"""What a stage's trackers are told once, kept in its folder so that whoever sends needs nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "trackers"
_FILE = "facts.json"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A stage of a run, as trackers show it.

    Attributes:
        run_id, stage: whose metrics they are. records: folder of the run's records, which no other run ever has.
        trackers: as they are written in the pipeline. settings: verl's, dotted key -> value. tags: digests and such.
    """

    run_id: str
    stage: str
    records: str
    trackers: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The same for all attempts at the stage, and another for any other stage of any run; 32 hexadecimal digits."""
        return hashlib.sha256(f"{self.records}\n{self.stage}".encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.run_id}.{self.stage}"


def keep(stage_dir: Path, facts: Facts) -> None:
    """Write the facts into the stage's folder, atomically."""
    folder = stage_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{_FILE}.partial"
    partial.write_text(json.dumps(asdict(facts), indent=1, default=str), encoding="utf-8")
    partial.replace(folder / _FILE)


def kept(stage_dir: Path) -> Facts | None:
    """The facts of a stage; None when it has no trackers."""
    try:
        return Facts(**json.loads((stage_dir / FOLDER / _FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None

"""What a stage is handed when it runs, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_workflow.artifacts import Artifact
from verl_workflow.spec._fields import REFERENCE


def _silent(_: Mapping[str, Any]) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """One attempt at one stage.

    Attributes:
        run_id, stage: what is running.
        attempt: 1, 2, ... over the whole run, takeovers included; never used twice.
        epoch: the fencing epoch of the driver that started the attempt.
        storage: URI of the control data (journal, registry).
        records: folder in it of this run alone, even when its id was that of another, which was deleted.
        root: folder for bulk data, on a file system that all nodes share.
        code_dir: folder with the run's recorded copy of the user's code.
        inputs: outputs of the finished stages this one refers to, by stage name.
        model: the pipeline's model as an artifact, None before it has been made.
        report: shows progress when called with small JSON facts, {"step": 3, "total": 40}. Cheap; best effort.
    """

    run_id: str
    stage: str
    attempt: int
    epoch: int
    storage: str
    records: str
    root: Path
    code_dir: Path
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: Artifact | None = None
    report: Callable[[Mapping[str, Any]], None] = _silent

    @property
    def stage_dir(self) -> Path:
        """Shared by all attempts at the stage (checkpoints live here)."""
        return self.root / "runs" / self.run_id / "stages" / self.stage

    @property
    def attempt_dir(self) -> Path:
        """Of this attempt alone: outputs are written here, so that no attempt overwrites another's."""
        return self.stage_dir / "attempts" / f"{self.attempt:03d}"

    def value(self, text: Any) -> Any:
        """The value behind a reference such as ``${train.step}``; whatever is no reference comes back as it is."""
        match = REFERENCE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            return text
        name, path = match.groups()
        if name == "model" and path is None:
            assert self.model is not None, "the model stage runs before whatever refers to it"
            return self.model.to_json()
        found: Any = self.inputs[name]
        for part in path.split(".") if path else []:
            found = found[part]
        return found

    def artifact(self, text: str) -> Artifact:
        """The artifact behind a reference, or the file or folder at a literal path (digested now)."""
        found = self.value(text)
        return Artifact.from_json(found) if isinstance(found, Mapping) else Artifact.of(Path(found))

"""What a run was asked to do: written once, never changed, enough to resume it from anywhere."""

from __future__ import annotations

import importlib.metadata
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from verl_workflow import code
from verl_workflow.errors import ErrorCode, UserError, UserErrors
from verl_workflow.paths import absolute
from verl_workflow.spec import DataStage, Document, Pipeline, VerlStage
from verl_workflow.storage import Store, absolute_uri
from verl_workflow.verl_config import Finding
from verl_workflow.workflow import damaged

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Versions that change what a stage yields; recorded in each run and part of each stage's key.
_TOOLS = ("verl-workflow", "verl", "torch", "transformers", "ray")
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A resolved pipeline with digests.

    Attributes:
        pipeline: params substituted. params: their final values.
        source: the pipeline file, for messages. base_dir: its folder, against which code paths were resolved.
        storage: absolute URI of the control data. artifacts: folder of the bulk data.
        code_files: sha256 by relative path of the user's code; code_digest: of them all.
        versions: of the tools that shape results. reuse: whether results of earlier runs may be taken.
    """

    run_id: str
    pipeline: Pipeline
    params: Mapping[str, Any]
    source: str
    base_dir: Path
    storage: str
    artifacts: Path
    code_files: Mapping[str, str]
    code_digest: str
    versions: Mapping[str, str]
    reuse: bool
    created_at: str

    @property
    def code_dir(self) -> Path:
        """Where the run's own copy of the user's code lies."""
        return self.artifacts / "runs" / self.run_id / "code"

    def to_json(self) -> dict[str, Any]:
        fields = {**asdict(self), "pipeline": self.pipeline.model_dump(mode="json"), "format": FORMAT}
        return {key: str(value) if isinstance(value, Path) else value for key, value in fields.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Definition:
        """The definition that `to_json` wrote.

        Raises:
            UserError(SPEC_INVALID): it was written by a newer version.
            VerlWorkflowError(JOURNAL_DAMAGED): it is not as it was written.
        """
        fields = dict(data)
        written = fields.pop("format", None)
        if written != FORMAT:
            raise UserError(
                ErrorCode.SPEC_INVALID,
                f"the run was defined in format {written!r}, and this version reads format {FORMAT}",
                where=str(fields.get("run_id", "")),
                remedy="Resume it with the version of verl-workflow that started it.",
            )
        try:
            fields["pipeline"] = Pipeline.model_validate(fields["pipeline"])
            fields["base_dir"] = Path(fields["base_dir"])
            fields["artifacts"] = Path(fields["artifacts"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(
                f"runs/{fields.get('run_id')}/definition.json", f"it does not describe a pipeline ({error!r})"
            ) from error


def define(
    document: Document, *, run_id: str | None = None, storage: str | None = None, reuse: bool = True
) -> Definition:
    """Check everything that can be checked without a cluster, and fix what the run is. Writes nothing.

    Args:
        run_id: by default ``<pipeline>-<UTC time>-<4 random hex digits>``.
        storage: wins over the pipeline's own.
        reuse: whether results of earlier runs with the same key may be taken.

    Raises:
        UserErrors: all mistakes found.
    """
    pipeline = document.pipeline
    if run_id is not None:
        _check_run_id(run_id)
    uri = Store(storage or pipeline.storage.uri).uri
    errors = check_training(document) + check_data(document)
    artifacts = artifacts_root(uri, None if storage else pipeline.storage.artifacts)
    if artifacts is None:
        errors.append(
            UserError(
                ErrorCode.SPEC_INVALID,
                "control data is in an object store, and no folder for files and checkpoints is named",
                where=document.where(("storage",)),
                value=uri,
                remedy="Set storage.artifacts to a folder on a file system that all nodes share.",
            )
        )
    if errors:
        raise UserErrors(errors)
    assert artifacts is not None
    manifest = code.manifest(pipeline, document.path.parent)
    now = datetime.now(timezone.utc)
    return Definition(
        run_id=run_id or f"{pipeline.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        pipeline=pipeline,
        params=document.params,
        source=str(document.path),
        base_dir=document.path.parent,
        storage=uri,
        artifacts=artifacts,
        code_files=dict(manifest.files),
        code_digest=manifest.digest,
        versions=tool_versions(),
        reuse=reuse,
        created_at=now.isoformat(timespec="seconds"),
    )


def artifacts_root(uri: str, named: str | None) -> Path | None:
    """The folder for bulk data: the one named, else the storage itself when it is local, else None.

    Raises:
        UserError(STORAGE): the name is no path.
    """
    if named is not None:
        return absolute(named, home=True, code=ErrorCode.STORAGE)
    return Store(absolute_uri(uri)).local_path


def tool_versions() -> dict[str, str]:
    """Installed versions of the tools that shape results; those that are not installed are left out."""
    versions = {}
    for name in _TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_training(document: Document) -> list[UserError]:
    """What the installed verl would refuse in the pipeline's verl stages, each with its place in the file."""
    from verl_workflow.training import check_verl_stage

    errors: list[UserError] = []
    for stage in document.pipeline.stages:
        if isinstance(stage, VerlStage):
            place = partial(_place, document, stage.name)
            errors.extend(check_verl_stage(stage, where=place))
    return errors


def check_extended(definition: Definition) -> list[UserError]:
    """What keeps verl stages from extending the runs that they name, as far as the storage tells."""
    from verl_workflow.training import extended

    errors: list[UserError] = []
    for stage in definition.pipeline.stages:
        if isinstance(stage, VerlStage):
            try:
                extended(stage, definition.storage)
            except UserError as error:
                errors.append(error)
    return errors


def lint_stages(document: Document) -> list[Finding]:
    """What the pipeline's verl stages are warned of, each with its place in the file; errors are told by `define`."""
    from verl_workflow.training import warn_of_verl_stage

    return [
        finding
        for stage in document.pipeline.stages
        if isinstance(stage, VerlStage)
        for finding in warn_of_verl_stage(stage, where=partial(_place, document, stage.name))
    ]


def check_data(document: Document) -> list[UserError]:
    """What data stages would refuse in files that are there already, each with its place."""
    from verl_workflow.data import check_data_stage, training_rows

    base_dir = document.path.parent
    errors: list[UserError] = []
    at_most: dict[str, int] = {}
    for stage in document.pipeline.stages:
        if isinstance(stage, DataStage):
            found = check_data_stage(stage, base_dir, where=partial(_place, document, stage.name))
            errors.extend(found)
            rows = None if found else training_rows(stage, base_dir)
            if rows is not None:
                at_most[f"${{{stage.name}.train}}"] = rows
    for stage in document.pipeline.stages:
        if isinstance(stage, VerlStage) and at_most.get(stage.train, stage.batch_size) < stage.batch_size:
            errors.append(
                UserError(
                    ErrorCode.DATA_INVALID,
                    f"the training set has {at_most[stage.train]} rows at most, fewer than one batch",
                    where=_place(document, stage.name, ("batch_size",)),
                    value=stage.batch_size,
                    remedy=f"Set batch_size to {at_most[stage.train]} or less, or give more rows.",
                )
            )
    return errors


def _place(document: Document, stage: str, field: tuple[str, ...]) -> str:
    return document.where(("stages", stage, *field))


def _check_run_id(run_id: str) -> None:
    # Stricter than a run's id has to be: it names folders and models that people type.
    if _RUN_ID.fullmatch(run_id) is None or ".." in run_id:
        raise UserError(
            ErrorCode.RUN_ID_INVALID,
            "this cannot be the id of a run",
            value=run_id,
            remedy="Use 1 to 100 letters, digits, '.', '-' and '_', beginning with a letter or digit, without '..'.",
        )

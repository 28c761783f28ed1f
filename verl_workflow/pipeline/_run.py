"""Start and resume: write what the run is, join a cluster, and leave the driver to it."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from verl_workflow import code
from verl_workflow.errors import ErrorCode, UserError, UserErrors, VerlWorkflowError
from verl_workflow.pipeline._cluster import NAMESPACE, check_answers, connect
from verl_workflow.pipeline._definition import Definition, check_extended
from verl_workflow.spec import load
from verl_workflow.storage import Store
from verl_workflow.workflow import (
    DriverHandle,
    RunStatus,
    create_run,
    driver_failure,
    read_run,
    refuse_driven,
    start_driver,
    still_drives,
)

# A worker ends at its next beat of a second when its node's process is gone.
_DRIVER_PATIENCE_S = 30.0
_PLAN_LOADER = "verl_workflow.pipeline._compile:compile_run"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose driver has been started on a cluster.

    Attributes:
        local: whether the cluster ends with this process; the run then becomes resumable.
        warnings: what the user should know, a sentence each.
    """

    run_id: str
    storage: str
    local: bool
    warnings: tuple[str, ...]
    driver: DriverHandle

    def driver_error(self) -> VerlWorkflowError | None:
        """Why the driver stopped without ending the run, or None while it works or after it has ended the run."""
        return driver_failure(self.driver)

    def close(self) -> None:
        """Leave the cluster; one that is this process's own ends, and its driver is gone on return."""
        import ray

        ray.shutdown()
        if not self.local:
            return
        # The driver is a process of that cluster and may outlive it by a moment, writing.
        deadline = time.monotonic() + _DRIVER_PATIENCE_S
        while still_drives(self.driver) and time.monotonic() < deadline:
            time.sleep(0.1)


def start(definition: Definition, *, address: str | None = None) -> Run:
    """Join the cluster, record the run, and start its driver.

    Raises:
        UserError(RUN_EXISTS): the id is taken.
        UserErrors: a stage cannot extend the run that it names.
        VerlWorkflowError: CLUSTER_UNREACHABLE, nothing was started or recorded; CAPACITY, it was recorded and can be
            resumed.
    """
    store = Store(definition.storage)
    _refuse_existing(store, definition)
    if errors := check_extended(definition):
        raise UserErrors(errors)
    # Before anything is written: what lies in its folder later may be of another who starts the same id.
    check_answers(address)
    _copy_code(definition)
    local = connect(address, code_dir=definition.code_dir)
    create_run(store, definition.run_id, definition.to_json())
    return _drive(definition, local=local, force=False, warnings=())


def resume(storage: str, run_id: str, *, address: str | None = None, force: bool = False) -> Run:
    """Take a stopped run up where its journal ends; what has succeeded is not run again.

    Args:
        force: take the run from an owner whose heartbeat is fresh; the owner is fenced and stops.

    Raises:
        UserError: the id is unknown (RUN_UNKNOWN), or the run has succeeded or was cancelled (RUN_TERMINAL), or its
            driver is alive (RUN_OWNED); to see that, its heartbeat is watched for up to 15 seconds.
    """
    state = read_run(Store(storage), run_id)
    if state.status in {RunStatus.SUCCEEDED, RunStatus.CANCELLED}:
        raise UserError(
            ErrorCode.RUN_TERMINAL,
            f"the run has {'succeeded' if state.status is RunStatus.SUCCEEDED else 'been cancelled'} already",
            where=run_id,
            remedy="Start a new run; finished stages with the same inputs are re-used.",
        )
    if not force:
        # Before Ray is started, which takes longer.
        refuse_driven(Store(storage), state, f"Follow it with: verl-workflow status {run_id}.")
    definition = Definition.from_json(state.definition)
    warnings = (*_pipeline_warnings(definition), *_code_warnings(definition))
    local = connect(address, code_dir=definition.code_dir)
    return _drive(definition, local=local, force=force, warnings=warnings)


def _copy_code(definition: Definition) -> None:
    copied = code.snapshot(definition.pipeline, definition.base_dir, definition.code_dir)
    if copied.digest != definition.code_digest:
        # What was checked, and what earlier results are found by, is not what would run.
        shutil.rmtree(definition.code_dir, ignore_errors=True)
        raise UserError(
            ErrorCode.SPEC_INVALID,
            "the pipeline's code was changed while the run was being started",
            where=str(definition.base_dir),
            remedy="Start it again.",
        )


def _drive(definition: Definition, *, local: bool, force: bool, warnings: tuple[str, ...]) -> Run:
    driver = start_driver(definition.storage, definition.run_id, _PLAN_LOADER, force=force, namespace=NAMESPACE)
    return Run(
        run_id=definition.run_id,
        storage=definition.storage,
        local=local,
        warnings=warnings,
        driver=driver,
    )


def _refuse_existing(store: Store, definition: Definition) -> None:
    run_id = definition.run_id
    if store.get(f"runs/{run_id}/definition.json") is not None:
        raise UserError(
            ErrorCode.RUN_EXISTS,
            "a run of this id exists already",
            where=store.uri,
            value=run_id,
            remedy=f"Resume it (verl-workflow resume {run_id}), or choose another id.",
        )
    left = definition.artifacts / "runs" / run_id / "stages"
    if left.is_dir() and any(left.iterdir()):
        # Its attempts have the same numbers, and a training would go on from checkpoints that are not its own.
        raise UserError(
            ErrorCode.RUN_EXISTS,
            "files of a deleted run of this id are left",
            where=str(left),
            value=run_id,
            remedy="Remove that folder, or choose another id.",
        )


def _pipeline_warnings(definition: Definition) -> tuple[str, ...]:
    source = Path(definition.source)
    # A Python file may hold several pipelines; which one this was is not recorded.
    if source.suffix == ".py" or not source.is_file():
        return ()
    try:
        now = load(source, definition.params).pipeline
    except VerlWorkflowError:
        now = None
    if now == definition.pipeline:
        return ()
    return (
        f"{definition.source} has changed since the run was started. The run goes on as it was defined; start a new "
        "run to use the changed file.",
    )


def _code_warnings(definition: Definition) -> tuple[str, ...]:
    if not Path(definition.base_dir).is_dir():
        return ()
    manifest = code.CodeManifest(files=dict(definition.code_files), digest=definition.code_digest)
    changed = code.changed(manifest, definition.base_dir, definition.pipeline.code)
    if not changed:
        return ()
    return (
        f"Code has changed since the run was started ({'; '.join(changed)}). The run goes on with its recorded copy; "
        "start a new run to use the changed code.",
    )

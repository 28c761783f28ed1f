"""What a user says about a step besides its function: options of Ray's and of this library's."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.stored_json import is_number
from verl_workflow.workflow._functions import ORIGINAL
from verl_workflow.workflow._plan import RetryPolicy

# Ray hands its options on as they are; this one of them is a mapping that nothing else reads before the task starts.
_CARRIER = "_labels"
_LABEL = "verl_workflow"
_ATTRIBUTE = "__verl_workflow_options__"
_KNOWN = (
    "task_id",
    "metadata",
    "catch_exceptions",
    "checkpoint",
    "retry",
    "timeout_s",
    "heartbeat_timeout_s",
)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Attributes: see `options`. None: as the step that returned this one has it, or the default. ray: resources and
    whatever else goes to Ray as it is. hosted, apart: see `Step`.
    """

    task_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    catch_exceptions: bool | None = None
    checkpoint: bool | None = None
    retry: RetryPolicy | None = None
    max_retries: int = 3
    retry_exceptions: bool | tuple[type[BaseException], ...] = False
    timeout_s: float | None = None
    heartbeat_timeout_s: float | None = None
    ray: Mapping[str, Any] = field(default_factory=dict)
    hosted: bool = False
    apart: bool = False

    def inherit(self, outer: StepOptions | None, *, root: bool) -> StepOptions:
        """Fill in what is not said from the step that returned this one; only its root catches what that one does."""
        catch, checkpoint = self.catch_exceptions, self.checkpoint
        if outer is not None and root and outer.catch_exceptions:
            # Its value is that of the outer step, and has to be a pair.
            catch = True
        # An event is told to be written down, and a time to wake up has to be.
        if self.hosted:
            checkpoint = True
        if checkpoint is None:
            checkpoint = outer is None or outer.checkpoint is not False
        return dataclasses.replace(self, catch_exceptions=bool(catch), checkpoint=checkpoint)

    @property
    def policy(self) -> RetryPolicy:
        """`retry`, or what Ray's own ``max_retries`` and ``retry_exceptions`` amount to: no pause in between."""
        if self.retry is not None:
            return self.retry
        attempts = 1 if self.retry_exceptions is False else 10**9 if self.max_retries < 0 else self.max_retries + 1
        on = self.retry_exceptions if isinstance(self.retry_exceptions, tuple) else (BaseException,)
        return RetryPolicy(attempts=attempts, crashes=self.max_retries, backoff_s=0.0, on=on)

    def at_rest(self) -> StepOptions:
        """Without the user's own classes."""
        said = self.policy
        # Built anew: its class may be the user's own.
        plain = {each.name: getattr(said, each.name) for each in dataclasses.fields(RetryPolicy)}
        policy = RetryPolicy(**{**plain, "on": None, "never": ()})
        return dataclasses.replace(self, retry=policy, retry_exceptions=bool(self.retry_exceptions))


class options:
    """Options of a step: a decorator over ``@ray.remote``, or, unpacked, an argument of ``.options``.

    ``@workflow.options(task_id="load")`` above ``@ray.remote``, or ``f.options(**workflow.options(task_id="load"))``;
    the latter win where both say something.

    Args:
        task_id: the step's name, by default the function's module and qualified name; a second one of that name gets
            ``_1``, and so on.
        metadata: a dict of plain JSON, given back by `get_metadata`.
        catch_exceptions: the step's value becomes ``(value, None)`` or ``(None, error)``. A lost process is not caught.
        checkpoint: False: the value is not written down; whatever needs it after a crash has the step run again.
        retry: a `RetryPolicy`; default: Ray's ``max_retries`` (3) for lost processes, and for errors too when
            ``retry_exceptions`` is True or a list that has their class; without pauses.
        timeout_s: for one attempt, from when it begins to run, in seconds.
        heartbeat_timeout_s: between two calls of ``workflow.current().heartbeat()``, in seconds; call it at least
            twice in that time, for what is written and read each quarter of it may come that much later.

    Raises:
        ValueError: an option is not known, or metadata is no dict of JSON.
    """

    def __init__(self, **workflow_options: Any) -> None:
        unknown = set(workflow_options) - set(_KNOWN)
        if unknown:
            raise ValueError(f"Invalid option keywords {unknown} for workflow tasks. Valid ones are {set(_KNOWN)}.")
        if workflow_options.get("metadata") is not None:
            workflow_options["metadata"] = plain_metadata(workflow_options["metadata"])
        if isinstance(workflow_options.get("task_id"), str):
            workflow_options["task_id"] = str.__str__(workflow_options["task_id"])
        for name in ("timeout_s", "heartbeat_timeout_s"):
            limit = workflow_options.get(name)
            if limit is not None and (not is_number(limit) or limit <= 0):
                raise ValueError(f"{name} has to be a number of seconds above 0, not {limit!r}.")
        retry = workflow_options.get("retry")
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise ValueError(f"retry has to be a workflow.RetryPolicy, not {retry!r}.")
        self._options = workflow_options

    def keys(self) -> tuple[str, ...]:
        return (_CARRIER,)

    def __getitem__(self, key: str) -> dict[str, Any]:
        if key != _CARRIER:
            raise KeyError(key)
        return {_LABEL: self._options}

    def __call__(self, function: Any) -> Any:
        from ray.remote_function import RemoteFunction

        if not isinstance(function, RemoteFunction):
            raise ValueError("Only apply 'workflow.options' to Ray remote functions.")
        # Another remote function of the same body has options of its own.
        body = _copied(function._function)
        setattr(body, _ATTRIBUTE, {**getattr(body, _ATTRIBUTE, {}), **self._options})
        function._function = body
        return function


def _copied(function: Any) -> Any:
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__dict__.update(function.__dict__)
    setattr(copy, ORIGINAL, getattr(function, ORIGINAL, function))
    for name in ("__module__", "__qualname__", "__doc__", "__annotations__", "__kwdefaults__"):
        setattr(copy, name, getattr(function, name))
    return copy


def hosted_options(task_id: str, *, apart: bool) -> dict[str, Any]:
    """Options of Ray's that say: this step waits, and its function gives an awaitable.

    Args:
        apart: it runs the user's code, which belongs in a process of the user's job.
    """
    return {_CARRIER: {_LABEL: {"task_id": task_id, "hosted": True, "apart": apart}}}


def step_options(function: Any, ray_options: Mapping[str, Any]) -> StepOptions:
    """What was said about a call of `function` that was bound with these options of Ray's.

    Raises:
        ValueError: the step is to have several return values.
    """
    given = {name: value for name, value in ray_options.items() if value is not None}
    if given.pop("num_returns", 1) != 1:
        raise ValueError("Workflow task can only have one return.")
    labels = given.pop(_CARRIER, {})
    ours = {**getattr(function, _ATTRIBUTE, {}), **labels.get(_LABEL, {})}
    retried = given.pop("retry_exceptions", False)
    max_retries = given.pop("max_retries", 3)
    for name in ("max_calls", "name"):
        given.pop(name, None)
    metadata = ours.pop("metadata", None) or {}
    return StepOptions(
        **ours,
        metadata=metadata,
        max_retries=max_retries,
        retry_exceptions=tuple(retried) if isinstance(retried, (list, tuple)) else retried,
        ray=given,
    )


def plain_metadata(metadata: object) -> dict[str, Any]:
    """The metadata as JSON knows it, without the user's classes; an empty dict for None.

    Raises:
        ValueError: it is no dict of plain JSON.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise ValueError("metadata must be a dict.")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        kind = type(error).__name__
        raise ValueError(f"metadata must be JSON serializable, instead, we got '{kind}: {error}'") from error
    return plain

"""Metrics to MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verl_workflow.trackers._facts import Facts
from verl_workflow.trackers._sink import Point

_TAG = "verl_workflow.identity"
_STEP = "verl_workflow/step"
_STATUS_OPEN = "RUNNING"
# MLflow takes so many in a request.
_METRICS = 1000
_PARAMS = 100
_LONGEST_PARAM = 500
# A server that does not answer is asked again later, from here.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class MlflowSink:
    """A run that is found again by a tag, whoever made it."""

    def __init__(self, tracker: Mapping[str, Any], facts: Facts) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=tracker.get("uri") or os.environ.get("MLFLOW_TRACKING_URI"))
        experiment = self._experiment(str(tracker["experiment"]))
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{facts.identity}'", max_results=1)
        self._run = found[0].info.run_id if found else self._make(experiment, facts)

    def last_step(self) -> int | None:
        history = self._client.get_metric_history(self._run, _STEP)
        return max((int(metric.step) for metric in history), default=0)

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for point in points:
            # The step's own mark goes with its last numbers: it is there only when all of them are.
            numbers = {**point.numbers, _STEP: float(point.step)}
            metrics = [Metric(_name(key), value, now, point.step) for key, value in numbers.items()]
            for begin in range(0, len(metrics), _METRICS):
                self._client.log_batch(self._run, metrics=metrics[begin : begin + _METRICS])

    def close(self) -> None:
        pass

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:
            # Another stage has made it in between.
            again = self._client.get_experiment_by_name(name)
            if again is None:
                raise
            return str(again.experiment_id)

    def _make(self, experiment: str, facts: Facts) -> str:
        from mlflow.entities import Param

        tags = {_TAG: facts.identity, "verl_workflow.run": facts.run_id, "verl_workflow.stage": facts.stage}
        run = self._client.create_run(experiment, run_name=facts.name, tags={**tags, **facts.tags})
        params = [Param(_name(key), str(value)[:_LONGEST_PARAM]) for key, value in facts.settings.items()]
        for begin in range(0, len(params), _PARAMS):
            self._client.log_batch(run.info.run_id, params=params[begin : begin + _PARAMS])
        return str(run.info.run_id)


def _name(key: str) -> str:
    """A name that MLflow takes: letters, digits, and `_-. :/`."""
    spelt = key.replace("@", "_at_")
    return "".join(letter if letter.isalnum() or letter in "_-. :/" else "_" for letter in spelt)[:250]

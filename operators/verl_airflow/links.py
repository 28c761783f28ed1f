"""Buttons beside a task in Airflow's page."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

DASHBOARD_KEY = "ray_dashboard_url"


class RayDashboardLink(BaseOperatorLink):
    """To the page of the task's newest job in Ray's dashboard; empty until one has been submitted."""

    name = "Ray job"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        from airflow.sdk.execution_time.xcom import XCom

        return str(XCom.get_value(ti_key=ti_key, key=DASHBOARD_KEY) or "")


def dashboard_url(base: str, job_id: str) -> str:
    """The page of a job, by the address of the dashboard for browsers."""
    return f"{base}/#/jobs/{quote(job_id, safe='')}"

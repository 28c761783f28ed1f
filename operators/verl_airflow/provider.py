"""What this package adds to Airflow: entry point ``apache_airflow_provider``. Imports nothing itself."""

from __future__ import annotations

from typing import Any

# Airflow spells the fields of a form in camel case below JSON Schema, and with hyphens here.
UI_FIELD_BEHAVIOUR: dict[str, Any] = {
    "hidden-fields": ["schema", "login", "port"],
    "relabeling": {"host": "Ray address", "password": "Ray token"},
    "placeholders": {"host": "http://ray-head:8265"},
}
_FIELDS: dict[str, Any] = {
    "verify_tls": {
        "label": "Verify TLS",
        "schema": {"type": ["boolean", "null"], "default": True},
        "description": "Whether the certificate of an https address is checked.",
    },
    "ca_file": {
        "label": "CA file",
        "schema": {"type": ["string", "null"]},
        "description": "File of the authority to check it by, on Airflow's machines; empty for the system's own.",
    },
    "storage": {
        "label": "Storage URI",
        "schema": {"type": ["string", "null"]},
        "description": "Where runs and models are kept, such as s3://bucket/verl: as seen from Ray and from Airflow.",
    },
    "dashboard_url": {
        "label": "Dashboard URL",
        "schema": {"type": ["string", "null"]},
        "description": "Address of Ray's dashboard for browsers; empty when it is the Ray address.",
    },
}
_INTEGRATION = "verl_workflow"


def get_provider_info() -> dict[str, Any]:
    """The provider, in the form of Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "verl-workflow",
        "name": "verl_workflow",
        "description": "Durable post-training pipelines with verl, as tasks on a Ray cluster.",
        "integrations": [
            {"integration-name": _INTEGRATION, "external-doc-url": "https://docs.ray.io/", "tags": ["ml"]}
        ],
        "operators": [{"integration-name": _INTEGRATION, "python-modules": ["verl_airflow.operators"]}],
        "sensors": [{"integration-name": _INTEGRATION, "python-modules": ["verl_airflow.sensors"]}],
        "hooks": [{"integration-name": _INTEGRATION, "python-modules": ["verl_airflow.hook"]}],
        "triggers": [{"integration-name": _INTEGRATION, "python-modules": ["verl_airflow.triggers"]}],
        "connection-types": [
            {
                "connection-type": "verl_workflow",
                "hook-class-name": "verl_airflow.hook.RayJobsHook",
                "hook-name": "verl_workflow (Ray)",
                "conn-fields": _FIELDS,
                "ui-field-behaviour": UI_FIELD_BEHAVIOUR,
            }
        ],
        "task-decorators": [{"name": "ray_job", "class-name": "verl_airflow.decorators.ray_job_task"}],
        "extra-links": ["verl_airflow.links.RayDashboardLink"],
    }

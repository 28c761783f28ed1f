from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk import Connection
from verl_airflow._connection import RayAddress

from verl_workflow.errors import UserError


def address(host: str = "http://head:8265", extra: Any = None, **parts: Any) -> RayAddress:
    text = extra if isinstance(extra, str) or extra is None else json.dumps(extra)
    return RayAddress.of(Connection(conn_id="ray", conn_type="verl_workflow", host=host, extra=text, **parts))


@pytest.mark.parametrize(
    ("host", "parts", "url"),
    [
        ("http://head:8265", {}, "http://head:8265"),
        ("http://head:8265/", {}, "http://head:8265"),
        ("head", {}, "http://head:8265"),
        ("head", {"port": 9000}, "http://head:9000"),
        ("head:9000", {}, "http://head:9000"),
        ("head", {"schema": "https"}, "https://head"),
        ("https://ray.example.org", {}, "https://ray.example.org"),
        ("https://example.org/ray", {"port": 8443}, "https://example.org:8443/ray"),
        ("http://[::1]:8265", {}, "http://[::1]:8265"),
    ],
)
def test_the_address_is_found_however_it_is_written(host: str, parts: dict[str, Any], url: str) -> None:
    assert address(host, **parts).url == url


@pytest.mark.parametrize("host", ["", "ray://head:10001", "http://head:port", "http://"])
def test_what_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(UserError, match=r"connection ray: .*http://ray-head:8265"):
        address(host)


def test_the_fields_of_the_form_are_read() -> None:
    found = address(password="t", extra={"verify_tls": False, "storage": "s3://b/p", "dashboard_url": "https://ray/"})
    assert (found.token, found.verify, found.storage, found.dashboard_url) == ("t", False, "s3://b/p", "https://ray")


def test_fields_that_were_left_empty_have_their_defaults() -> None:
    found = address(extra={"verify_tls": None, "ca_file": "", "storage": "", "dashboard_url": ""})
    assert (found.token, found.verify, found.storage) == (None, True, None)
    assert found.dashboard_url == "http://head:8265"


def test_a_ca_file_counts_only_if_certificates_are_checked() -> None:
    assert address(extra={"ca_file": "/ca.pem"}).verify == "/ca.pem"
    assert address(extra={"ca_file": "/ca.pem", "verify_tls": False}).verify is False


def test_a_field_of_the_wrong_type_is_named() -> None:
    with pytest.raises(UserError, match="verify_tls"):
        address(extra={"verify_tls": "perhaps"})


@pytest.mark.parametrize("extra", ["{secret", '["secret"]', '"secret"'])
def test_an_extra_that_cannot_be_read_is_not_shown(extra: str) -> None:
    with pytest.raises(UserError, match="no JSON object") as caught:
        address(extra=extra)
    assert "secret" not in str(caught.value)

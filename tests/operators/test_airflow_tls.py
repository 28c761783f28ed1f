"""Certificates are checked as the connection says: against a stand-in that speaks TLS with a certificate of its own."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from _ray_standin import Connect, ray_standin
from verl_airflow.hook import RayJobsHook

from verl_workflow.errors import UserError, VerlWorkflowError


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with certificate and key, for 127.0.0.1."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=standin -addext subjectAltName=IP:127.0.0.1"
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60)
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + cert.read_text())
    return both


@pytest.fixture
def url(certificate: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with ray_standin(context) as ray:
        yield ray.url


def test_a_certificate_that_nobody_vouches_for_is_refused(connect: Connect, url: str) -> None:
    with pytest.raises(VerlWorkflowError, match="CERTIFICATE_VERIFY_FAILED"):
        RayJobsHook(connect(host=url), attempts=1).job("night-g1")


def test_the_authority_s_file_vouches_for_it(connect: Connect, url: str, certificate: Path) -> None:
    works, said = RayJobsHook(connect(host=url, ca_file=str(certificate.with_name("cert.pem")))).test_connection()
    assert works, said


def test_checks_can_be_left_out(connect: Connect, url: str) -> None:
    assert RayJobsHook(connect(host=url, verify_tls=False)).test_connection()[0]


def test_a_file_that_is_not_there_is_named(connect: Connect, url: str) -> None:
    with pytest.raises(UserError, match=r"/nowhere\.pem"):
        RayJobsHook(connect(host=url, ca_file="/nowhere.pem")).job("night-g1")

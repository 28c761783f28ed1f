"""What a connection of type ``verl_workflow`` says: where Ray's Jobs API is, how to get in, and where runs are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.stored_json import parse_json

if TYPE_CHECKING:
    from airflow.sdk import Connection

CONNECTION_TYPE = "verl_workflow"
DEFAULT_CONNECTION = "verl_workflow_default"
_JOBS_PORT = 8265


class ConnectionExtra(BaseModel):
    """The extra fields of a connection, as the form writes them. Empty texts mean that a field was left out."""

    model_config = ConfigDict(extra="ignore")

    verify_tls: bool | None = None
    ca_file: str | None = None
    storage: str | None = None
    dashboard_url: str | None = None


@dataclass(frozen=True, kw_only=True)
class RayAddress:
    """A cluster and the storage of its runs.

    Attributes:
        url: of Ray's dashboard, which serves the Jobs API: ``http://ray-head:8265``, without a slash at its end.
        token: of Ray's token authentication; None sends none.
        verify: whether TLS certificates are checked, or the file of the authority to check them by.
        storage: URI of the runs and the registry; None when the connection names none.
        dashboard_url: what a browser opens, which may be another address than the one that Airflow's machines use.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    verify: bool | str = True
    storage: str | None = None
    dashboard_url: str = ""

    @classmethod
    def of(cls, connection: Connection) -> RayAddress:
        """Read a connection.

        Raises:
            UserError(USAGE_INVALID): it names no host, or an extra field cannot be understood.
        """
        extra = _extra_of(connection)
        url = _url_of(connection)
        verify: bool | str = extra.verify_tls is not False
        return cls(
            url=url,
            token=connection.password or None,
            verify=extra.ca_file if verify and extra.ca_file else verify,
            storage=extra.storage or None,
            dashboard_url=(extra.dashboard_url or url).rstrip("/"),
        )


def _url_of(connection: Connection) -> str:
    host = (connection.host or "").strip()
    if not host:
        raise _wrong(connection, "no Ray address is given", None, "Write it as http://ray-head:8265.")
    host = (host if "://" in host else f"{connection.schema or 'http'}://{host}").rstrip("/")
    try:
        parsed = urlsplit(host)
        port = parsed.port or connection.port
    except ValueError as error:
        raise _wrong(connection, str(error), connection.host, "Write it as http://ray-head:8265.") from error
    if parsed.scheme not in {"http", "https"} or not parsed.hostname:
        # ray://head:10001 is the address of Ray's client, which is another service.
        raise _wrong(
            connection, "this is no address of Ray's Jobs API", connection.host, "Write it as http://ray-head:8265."
        )
    if port is None:
        # Behind a proxy with a path or with TLS, the scheme's own port is the likelier one.
        return host if parsed.path or parsed.scheme == "https" else f"{host}:{_JOBS_PORT}"
    return host if parsed.port is not None else f"{parsed.scheme}://{parsed.netloc}:{port}{parsed.path}"


def _extra_of(connection: Connection) -> ConnectionExtra:
    try:
        found: Any = parse_json(connection.extra) if connection.extra else {}
        return ConnectionExtra.model_validate({name: value for name, value in dict(found).items() if value != ""})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _wrong(connection, f"{place}: {first['msg']}", first["input"], "Mend it in the connection.") from error
    except (TypeError, ValueError) as error:
        # Its text is not shown: people put secrets there.
        raise _wrong(connection, "its extra is no JSON object", None, "Write it as {...}.") from error


def _wrong(connection: Connection, what: str, value: Any, remedy: str) -> UserError:
    return UserError(
        ErrorCode.USAGE_INVALID, what, where=f"connection {connection.conn_id}", value=value, remedy=remedy
    )

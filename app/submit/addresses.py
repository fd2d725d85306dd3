"""Which job server is meant. Pure: options and environment in, an address out."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping

from trainwright.core.errors import ResourceError

USUAL = "http://127.0.0.1:8265"
_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_HTTP = ("http://", "https://")


def address_of(given: str | None, environment: Mapping[str, str]) -> str:
    """The address of the job server: what is given, else what the environment says, else this machine's own port.

    Of the environment only http addresses count: `RAY_ADDRESS` may also be that of a cluster that is joined.

    Raises:
        ResourceError: what is given is the address of something else, or holds credentials.
    """
    if given is None:
        found = (environment.get(name, "") for name in _VARIABLES)
        given = next((value for value in found if value.startswith(_HTTP)), USUAL)
    parts = urllib.parse.urlsplit(given)
    if not given.startswith(_HTTP) or not parts.hostname:
        raise ResourceError(
            "this is no address of a job server, which is spoken to over HTTP",
            where=f"--address {_without_user(given)}",
            remedy=f"give the dashboard's address: http://HOST:8265; ray dashboard cluster.yaml brings it to {USUAL}",
        )
    if "@" in parts.netloc:
        raise ResourceError(
            "the address of the job server holds credentials",
            where="--address",
            remedy="leave them out; a token is read from RAY_AUTH_TOKEN or ~/.ray/auth_token where RAY_AUTH_MODE=token",
        )
    return given.rstrip("/")


def _without_user(address: str) -> str:
    head, at, tail = address.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if at else tail

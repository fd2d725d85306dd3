"""Remove secrets from texts: environment variables with secret names, and passwords in addresses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any
from urllib.parse import unquote

_SECRET = re.compile(
    r"(?:^|_)(?:\w*KEY|KEYS|\w*SECRETS?|\w*TOKENS?|\w*PASSWORDS?|\w*PASSWD|PASSPHRASE|CREDENTIALS?|CREDS|SAS|PAT|JWT|DSN"
    r"|(?:CONN|CONNECTION)_?STR(?:ING)?|WEBHOOK|COOKIE|AUTH_CONFIG|BEARER)\d*(?:_|$)"
    r"|(?:^|_)(?:PASS|(?:SSH|DB|PG|MYSQL)PASS|AUTH|PW)\d*$"
    r"|_PWD\d*$",  # of a shell PWD is a folder
    re.IGNORECASE,
)
_PLACE = re.compile(
    r"_(?:PATH|FILE|FILES|DIR|URI|(?<!WEBHOOK_)URL)$|^(?:GOOGLE_APPLICATION_CREDENTIALS|OLD_?PWD)$", re.IGNORECASE
)
_ADDRESS = re.compile(
    r"(://[^\s/:@\"'<>]*:)([^\s/\"'<>]+)(?=@)"  # user, password
    r"|(\bhttps?://)([^\s/:@\"'<>]+)(?=@)",  # a token in place of the user, as for git
    re.IGNORECASE,
)
_QUERY = re.compile(r"://[^\s\"'<>]*[?;][^\s\"'<>]*")
_PARAMETER = re.compile(  # of a signed address, or of a database
    r"([?&;](?:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|(?:\w*_)?(?:password|passwd|pwd|secret|token"
    r"|api_?key|signature))=)([^&;#]+)",
    re.IGNORECASE,
)
_FIELD = re.compile(r"(?i)(?:^|[;\s])\s*(?:\w*key|password|pwd|\w*signature)\s*=\s*([^;\s]+)")  # of a connection string
_LEAST = 6  # characters: shorter values are words of the language, and no secret
_TOKEN = 16  # characters of a token: shorter ones in its place are names of users
REDACTED = "***"


def is_secret(name: str) -> bool:
    """Return whether an environment variable of this name holds a secret, and not a path to one."""
    return bool(_SECRET.search(name)) and not _PLACE.search(name)


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Remove secrets of the environment, plain or quoted by JSON and Python, and passwords in addresses."""
    return _hide(text, _secrets(tuple(environment.items())))


def redact_json(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Remove secrets from the strings of a JSON document, which stays valid."""
    secrets = [secret for secret in _secrets(tuple(environment.items())) if json.dumps(secret)[1:-1] in text]
    has_secrets = secrets or _ADDRESS.search(text) or _QUERY.search(text)
    return json.dumps(_hide_in_json(json.loads(text), secrets)) if has_secrets else text


@lru_cache(maxsize=1)  # a job has hundreds of texts, and the environment rarely changes between two of them
def _secrets(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return secrets, the longest first, so that none is replaced in part."""
    values = [value for item in variables for value in _secrets_of(*item) if len(value) >= _LEAST]
    quoted = [form for value in values for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1])]
    return tuple(sorted(dict.fromkeys(quoted), key=len, reverse=True))


def _secrets_of(name: str, value: str) -> Iterator[str]:
    """Return the secret parts of a variable: its value by its name, or the password in an address."""
    if is_secret(name):
        yield value
        yield from _FIELD.findall(value)
    passwords = [match[2] or match[4] for match in _ADDRESS.finditer(value) if match[2] or len(match[4]) >= _TOKEN]
    passwords += [parameter for query in _QUERY.findall(value) for _, parameter in _PARAMETER.findall(query)]
    for password in passwords:
        yield password
        yield unquote(password)


def _hide(text: str, secrets: Sequence[str]) -> str:
    hidden = reduce(lambda hidden, secret: hidden.replace(secret, REDACTED), secrets, text)
    hidden = _ADDRESS.sub(rf"\1\3{REDACTED}", hidden)
    return _QUERY.sub(lambda query: _PARAMETER.sub(rf"\1{REDACTED}", query[0]), hidden)


def _hide_in_json(value: Any, secrets: Sequence[str]) -> Any:
    match value:
        case str():
            return _hide(value, secrets)
        case list():
            return [_hide_in_json(item, secrets) for item in value]
        case dict():
            return {_hide_in_json(key, secrets): _hide_in_json(item, secrets) for key, item in value.items()}
    return value

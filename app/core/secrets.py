"""What must not be told: the values of environment variables whose names say that they are secret."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

_SECRET = re.compile(
    r"(?:^|_)(?:\w*KEY|SECRET|\w*TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|SAS)(?:_|$)", re.IGNORECASE
)
_PLACE = re.compile(r"_(?:PATH|FILE|FILES|DIR|URI|URL)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
_LEAST = 6  # characters: shorter values are words of the language, and no secret
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name holds a secret, and not the place of one."""
    return bool(_SECRET.search(name)) and not _PLACE.search(name)


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text with every secret of the environment replaced: as it is, and as JSON and Python quote it."""
    return _hidden(text, _secrets(environment))


def json_without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The same of one JSON document: in its strings, so that it stays one."""
    found = [secret for secret in _secrets(environment) if json.dumps(secret)[1:-1] in text]
    return json.dumps(_rewritten(json.loads(text), found)) if found else text


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """The longest first, so that none is hidden in part by another."""
    values = [value for name, value in environment.items() if len(value) >= _LEAST and is_secret(name)]
    quoted = [form for value in values for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1])]
    return sorted(dict.fromkeys(quoted), key=len, reverse=True)


def _hidden(text: str, secrets: list[str]) -> str:
    return reduce(lambda told, secret: told.replace(secret, HIDDEN), secrets, text)


def _rewritten(value: Any, secrets: list[str]) -> Any:
    match value:
        case str():
            return _hidden(value, secrets)
        case list():
            return [_rewritten(item, secrets) for item in value]
        case dict():
            return {_rewritten(key, secrets): _rewritten(item, secrets) for key, item in value.items()}
    return value

"""Secrets that stand in a file, which goes into repositories, logs and onto every node."""

from __future__ import annotations

import re

from trainwright.cluster_files.yaml_tree import Item
from trainwright.core.finding import Finding
from trainwright.core.redaction import is_secret

_PATTERNS = {
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret key": r"(?i)aws_?secret_?access_?key['\"]?\s*[:=]\s*['\"]?[A-Za-z0-9/+=]{30,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{35}\b",
    "a Google OAuth token": r"\bya29\.[0-9A-Za-z_-]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a Weights & Biases key": r"(?i)WANDB_API_KEY['\"]?\s*[:=]\s*['\"]?[0-9a-f]{40}",
    "Ray's token": r"RAY_AUTH_TOKEN\s*[:=]\s*['\"]?(?![\s$'\"]|\$\()\S+",
    "an account key of Azure": r"(?i)AccountKey\s*=\s*[A-Za-z0-9/+=]{30,}",
    "a password": r"(?i)(?:--redis-password[= ]|REDIS_PASSWORD\s*[:=]\s*)['\"]?(?![\s$'\"]|\$\()\S+",
}
_REMEDY = (
    "take it out and make it anew where it was issued; give nodes a role, a file of mode 600 by file_mounts, "
    "or a reference to a Kubernetes secret"
)


def in_text(text: str, file: str) -> list[Finding]:
    """Those that are known by their looks, by line. The secret itself is not told."""
    return [
        Finding(subject="secrets", verdict="bad", what=f"{name} stands here", where=f"{file}:{line}", remedy=_REMEDY)
        for line, said in enumerate(text.splitlines(), 1)
        if not said.lstrip().startswith("# ") or "CHANGE" not in said
        for name, pattern in _PATTERNS.items()
        if re.search(pattern, said)
    ]


def in_environment(env: Item) -> list[Finding]:
    """Of a container's environment: a value given where a reference belongs."""
    found = []
    for entry in env.entries:
        name = entry.text("name")
        value = entry.at("value")
        if value is not None and value.value and is_secret(name):
            found.append(value.finding("secrets", "bad", f"the value of {name} stands here", _REMEDY))
    return found

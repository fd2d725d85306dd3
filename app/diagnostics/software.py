"""Python, packages, and whether they can be imported."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from trainwright.core.frameworks import EXTRAS
from trainwright.diagnostics.facts import Software

LOOKED_AT = ("ray", "torch", "tensorflow", "keras", "pandas", "pyarrow", "numpy")
TRIED = ("ray", "torch", "tensorflow")
IMPORT_S = 120.0
SETTINGS = (
    "OMP_NUM_THREADS", "RAY_AUTH_MODE", "RAY_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
)  # fmt: skip
_CUDA = "import torch; print(torch.cuda.is_available())"


def software(*, imports: bool, gpus: bool) -> Software:
    """Python and packages of this interpreter.

    Args:
        imports: try to import Ray and the frameworks, each in a process of its own.
        gpus: the machine has some: ask torch whether it reaches them.
    """
    needs_python, needs = requirements()
    packages = {name: version_of(name) for name in ("trainwright", *LOOKED_AT)}
    cuda = torch_cuda()
    tried = [name for name in TRIED if packages[name]] if imports else []
    return Software(
        python=platform.python_version(),
        needs_python=needs_python,
        packages=packages,
        needs=needs,
        imports=import_faults(tried),
        torch_cuda=cuda,
        cuda_works=_cuda_works() if imports and gpus and cuda else None,
        digest=digest(),
        settings={name: os.environ[name] for name in SETTINGS if os.environ.get(name)},
        token=has_token(os.environ, Path.home()),
    )


def version_of(package: str) -> str:
    """Of an installed package; empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def requirements() -> tuple[str, dict[str, str]]:
    """What the installed trainwright asks for: of Python, and of the packages that are looked at."""
    try:
        found = metadata.metadata("trainwright")
    except metadata.PackageNotFoundError:
        return "", {}
    wanted = [item for item in map(Requirement, found.get_all("Requires-Dist") or ()) if item.name in LOOKED_AT]
    needs = {item.name: str(item.specifier) for item in wanted if item.name in EXTRAS or item.marker is None}
    return (found.get_all("Requires-Python") or [""])[0], needs


@cache
def digest() -> str:
    """Of the code of trainwright that this interpreter imports: the same on all nodes that run the same."""
    total = hashlib.sha256()
    for name in ("trainwright", "trainwright.strategies", "trainwright.datasets"):
        folder = _folder(name)
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).as_posix()
            if name == "trainwright" and inner.partition("/")[0] in ("strategies", "datasets"):
                continue  # in a wheel they lie inside
            total.update(f"{name}/{inner}\0".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def newest_s() -> float:
    """When the newest file of trainwright was written, in seconds since the epoch."""
    return max((path.stat().st_mtime for path in _folder("trainwright").rglob("*.py")), default=0.0)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, package
    return Path(spec.origin).parent


def torch_cuda() -> str:
    """The CUDA version that torch was built for, from its own file; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).parent / "version.py"
    return cuda_of(file.read_text(encoding="utf-8")) if file.is_file() else ""


def cuda_of(text: str) -> str:
    """The CUDA version in the text of torch's version.py."""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else ""


def import_faults(packages: Sequence[str]) -> dict[str, str]:
    """Why each package cannot be imported, empty where it can; each in a new process, all at once."""
    running = {name: _python(f"import {name}", os.environ) for name in packages}
    return {name: _fault(process) for name, process in running.items()}


def _python(program: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _fault(process: subprocess.Popen[str]) -> str:
    try:
        _, said = process.communicate(timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"took longer than {IMPORT_S:.0f} s"
    lines = said.strip().splitlines() or [f"the process ended with code {process.returncode}"]
    return lines[-1][:200] if process.returncode else ""


def _cuda_works() -> bool:
    """Ray hides the GPUs from a task that asks for none."""
    visible = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    process = _python(_CUDA, visible)
    try:
        said, _ = process.communicate(timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    return said.strip().endswith("True")


def has_token(environment: Mapping[str, str], home: Path) -> bool:
    """Whether Ray's authentication token is where Ray looks for it; it is not read."""
    path = environment.get("RAY_AUTH_TOKEN_PATH")
    return bool(environment.get("RAY_AUTH_TOKEN")) or (Path(path) if path else home / ".ray" / "auth_token").is_file()

"""Pack the folder of a job for Ray: choose files, leave out credentials, and build the archive.

Ray's own packing leaves out neither files with credentials nor links that leave the folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trainwright.core import formatting
from trainwright.core.errors import JobError, ResourceError

_LIMIT_BYTES = 500 << 20  # of a package; Ray keeps it in the head's memory
_EXCLUDED = frozenset(
    {
        ".git",
        ".hg",
        ".venv",
        "venv",
        "__pycache__",
        "node_modules",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".pytest_cache",
    }
)
_CREDENTIALS = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".my.cnf", ".npmrc", ".pypirc", ".htpasswd",
    ".git-credentials", ".dockercfg", ".boto", ".s3cfg", "credentials.json", "client_secret*.json",
    "service[-_]account*.json", "application_default_credentials.json", "kubeconfig", "id_rsa", "id_dsa", "id_ecdsa",
    "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", ".aws", ".azure",
    ".config", ".kube", ".docker", ".ssh", ".gnupg", ".oci", ".huggingface", "kaggle.json", ".kaggle", ".vault-token",
    "secrets.toml", "secrets.yaml", "secrets.yml", "secrets.json", "*.tfstate", "*.tfstate.backup", "*.tfvars",
    ".renviron", "rclone.conf", "*.ovpn",
)  # fmt: skip
"""Names of files and folders that hold credentials, after GitHub's templates for .gitignore and gitleaks' rules."""

_EXAMPLES = ("*.example", "*.sample", "*.template", "*.dist")  # such files contain no credentials
_EPOCH = (1980, 1, 1, 0, 0, 0)  # time of every file, so that equal files give an equal package
_NAMED = 3
_SHOWN = 8  # names of files, in a line


@dataclass(frozen=True, kw_only=True)
class PackageContents:
    """Contents of a package.

    Attributes:
        folder: to pack.
        files: paths in it, in order.
        sizes: of the files, in bytes.
        left_out: entries of the folder that are not packed.
        credentials: files that are not packed because their names suggest credentials.
        links: files that are not packed because they are links out of the folder.
    """

    folder: Path
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    left_out: tuple[str, ...] = ()
    credentials: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return the size of all files."""
        return sum(self.sizes)

    def __str__(self) -> str:
        left = f"; without {', '.join(self.left_out)}" if self.left_out else ""
        if self.credentials:
            left += f"; without credentials: {_shortened(self.credentials)} (--env NAME sends a variable)"
        if self.links:
            left += f"; without links that leave the folder: {_shortened(self.links)}"
        return f"{self.folder}: {formatting.count(len(self.files), 'file')}, {formatting.size(self.size_bytes)}{left}"


def package_folder(file: str, folder: str | None) -> Path:
    """Return the folder to pack: the given one, or that of the file. Raises JobError if the file is not in it."""
    path = Path(file).resolve()
    root = Path(folder).resolve() if folder is not None else path.parent
    if not path.is_relative_to(root):
        raise JobError([f"--folder {folder}: {file} is not in it; name a folder that contains the job file"])
    return root


def package_contents(folder: Path, *, needed: Path, without: Iterable[Path] = ()) -> PackageContents:
    """Return the files of a folder to pack: those that git does not ignore, or all without git.

    Files whose names suggest credentials and links out of the folder are left out.

    Args:
        folder: to pack.
        needed: a file that is always packed.
        without: folders that are never packed, such as the storage of runs.

    Raises:
        ResourceError: the files are larger than a package may be.
    """
    barred = tuple(each.resolve() for each in without)
    listed = _git_files(folder)
    names = sorted({*(listed if listed is not None else _walk_files(folder)), needed.relative_to(folder).as_posix()})
    paths = {name: folder / name for name in names}
    some = {name: path for name, path in paths.items() if _is_included(name, path, barred)}
    inside = {name: _path_in_folder(path, folder) for name, path in some.items()}
    secret = [name for name, real in inside.items() if some[name] != needed and _credentials(name, real)]
    links = [name for name, real in inside.items() if real is None]
    files = {name: path for name, path in some.items() if name not in {*secret, *links}}
    found = PackageContents(
        folder=folder,
        files=tuple(files),
        sizes=tuple(path.stat().st_size for path in files.values()),
        left_out=tuple(_left_out(folder, some)),
        credentials=tuple(secret),
        links=tuple(links),
    )
    if found.size_bytes > _LIMIT_BYTES:
        raise _too_large(found)
    return found


def build_package(contents: PackageContents) -> tuple[str, bytes]:
    """Return the package's URI, which depends on the files only, and its bytes."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in contents.files:
            path = contents.folder / name
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (path.stat().st_mode & 0xFFFF) << 16
            archive.writestr(entry, path.read_bytes())
    data = held.getvalue()
    return f"gcs://_ray_pkg_{hashlib.sha256(data).hexdigest()[:32]}.zip", data


def _git_files(folder: Path) -> list[str] | None:
    """Return tracked and untracked files that git does not ignore; None if the folder is no repository."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [os.fsdecode(name) for name in found.stdout.split(b"\0") if name] if found.returncode == 0 else None


def _walk_files(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        yield from (Path(root, name).relative_to(folder).as_posix() for name in files)


def _is_included(name: str, path: Path, barred: tuple[Path, ...]) -> bool:
    if _EXCLUDED & set(name.split("/")) or not path.is_file():
        return False
    return not any(path.absolute().is_relative_to(each) for each in barred)


def _path_in_folder(path: Path, folder: Path) -> str | None:
    """Return the path of a file in the folder after following links; None if it is outside."""
    real, root = path.resolve(), folder.resolve()
    return real.relative_to(root).as_posix() if real.is_relative_to(root) else None


def _credentials(*names: str | None) -> bool:
    """Return whether a name in these paths suggests credentials."""
    parts = {part.lower() for name in names if name is not None for part in name.split("/")}
    return any(
        any(fnmatchcase(part, pattern) for pattern in _CREDENTIALS)
        and not any(fnmatchcase(part, pattern) for pattern in _EXAMPLES)
        for part in parts
    )


def _shortened(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _left_out(folder: Path, files: Iterable[str]) -> list[str]:
    """Return the top-level entries from which nothing is packed, without git's own."""
    taken = {name.partition("/")[0] for name in files}
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in taken | {".git", "__pycache__"})


def _too_large(contents: PackageContents) -> ResourceError:
    sizes: Counter[str] = Counter()
    for name, size_bytes in zip(contents.files, contents.sizes, strict=True):
        sizes[name.partition("/")[0]] += size_bytes
    largest = ", ".join(f"{name} ({formatting.size(size_bytes)})" for name, size_bytes in sizes.most_common(_NAMED))
    return ResourceError(
        f"the job's folder has {formatting.size(contents.size_bytes)}, but a package may have "
        f"{formatting.size(_LIMIT_BYTES)}; the largest are {largest}",
        where=str(contents.folder),
        remedy="put data into object storage, list unneeded files in .gitignore, or use a smaller --folder",
    )

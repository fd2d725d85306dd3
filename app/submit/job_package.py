"""The package of a submission: the files of the job's folder without credentials, as an archive."""

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

_FOLDER_BYTES = 500 << 20  # of the files: the archive is built in memory
_ARCHIVE_BYTES = 100 << 20  # of the archive: `DASHBOARD_CLIENT_MAX_SIZE` of Ray's dashboard
_CACHES = ("__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache")
_EXCLUDED = frozenset((".git", ".hg", ".venv", "venv", "node_modules", *_CACHES))
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
    """Contents of a package."""

    folder: Path
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    left_out: tuple[str, ...] = ()  # entries of the folder that are not packed
    credentials: tuple[str, ...] = ()  # files that are not packed because their names suggest credentials
    links: tuple[str, ...] = ()  # files that are not packed because they are links out of the folder

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
    """Return the files of a folder to pack: those that git does not ignore, or all of a folder that git does not track.

    Files whose names suggest credentials and links out of the folder are left out. Submodules, other repositories in
    the folder, and links to its own folders are packed as folders.

    Args:
        needed: a file that is always packed.
        without: folders that are never packed, such as the storage of runs.

    Raises:
        ResourceError: the files are larger than a package may be, git fails, or a file's name is not Unicode.
    """
    barred = tuple(each.resolve() for each in without)
    paths = {path.relative_to(folder).as_posix(): path for path in sorted({*_list_files(folder), needed})}
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
    if found.size_bytes > _FOLDER_BYTES:
        raise _too_large(found, f"the job's folder has {formatting.size(found.size_bytes)}", _FOLDER_BYTES)
    return found


def build_package(contents: PackageContents) -> tuple[str, bytes]:
    """Return the package's URI, which depends on the files only, and its bytes.

    Raises:
        ResourceError: it is larger than Ray accepts.
    """
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in contents.files:
            path = contents.folder / name
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (path.stat().st_mode & 0xFFFF) << 16
            archive.writestr(entry, path.read_bytes())
    data = held.getvalue()
    if len(data) > _ARCHIVE_BYTES:
        raise _too_large(contents, f"the job's folder, compressed, has {formatting.size(len(data))}", _ARCHIVE_BYTES)
    return f"gcs://_ray_pkg_{hashlib.sha256(data).hexdigest()[:32]}.zip", data


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, and its links to folders outside."""
    yield from _list_below(folder, folder.resolve(), frozenset())


def _list_below(folder: Path, root: Path, seen: frozenset[Path]) -> Iterator[Path]:
    """Yield the files below one folder of the root. What git or a walk lists as one entry is listed in turn."""
    seen |= {folder.resolve()}
    for path in _git_entries(folder) if _is_in_repository(folder) else _walk_entries(folder):
        real = path.resolve() if path.is_dir() else None  # a link to itself has no target
        if real is None or not real.is_relative_to(root):
            yield path
        elif real not in seen and not _EXCLUDED & {*path.relative_to(folder).parts, *real.relative_to(root).parts}:
            yield from _list_below(path, root, seen)


def _is_in_repository(folder: Path) -> bool:
    return any((each / ".git").exists() for each in (folder.resolve(), *folder.resolve().parents))


def _git_entries(folder: Path) -> Iterator[Path]:
    """Yield tracked and untracked files that git does not ignore; submodules and links to folders are entries too."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(command, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise ResourceError(
            "git does not list the files of this folder, so that ignored files would be sent",
            where=str(folder),
            remedy=f"let `git -C {folder} status` succeed, or give a --folder outside of a repository",
            detail=said.strip(),
        ) from error
    yield from (folder / os.fsdecode(name) for name in found.stdout.split(b"\0") if name)


def _walk_entries(folder: Path) -> Iterator[Path]:
    """Yield all files, repositories and links to folders."""
    for root, folders, files in os.walk(folder):
        yield from (Path(root, name) for name in files)
        below = [Path(root, name) for name in folders if name not in _EXCLUDED]
        entries = [path for path in below if path.is_symlink() or (path / ".git").exists()]
        yield from entries
        folders[:] = [path.name for path in below if path not in entries]


def _is_included(name: str, path: Path, barred: tuple[Path, ...]) -> bool:
    if _EXCLUDED & set(name.split("/")) or not (path.is_file() or path.is_dir()):
        return False
    if any("\ud800" <= letter <= "\udfff" for letter in name):  # what Python makes of other bytes
        raise ResourceError(
            f"a file's name is not UTF-8: {name!r}", where=str(path.parent),
            remedy="rename the file, or list it in .gitignore",
        )  # fmt: skip
    return not any(each.is_relative_to(folder) for folder in barred for each in (path.absolute(), path.resolve()))


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


def _too_large(contents: PackageContents, what: str, limit_bytes: int) -> ResourceError:
    sizes: Counter[str] = Counter()
    for name, size_bytes in zip(contents.files, contents.sizes, strict=True):
        sizes[name.partition("/")[0]] += size_bytes
    largest = ", ".join(f"{name} ({formatting.size(size_bytes)})" for name, size_bytes in sizes.most_common(_NAMED))
    return ResourceError(
        f"{what}, but a package may have {formatting.size(limit_bytes)}; the largest are {largest}",
        where=str(contents.folder),
        remedy="put data into object storage, list unneeded files in .gitignore, or use a smaller --folder",
    )

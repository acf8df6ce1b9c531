"""The working directory of one episode: real files, and no path that leads out of it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from k3core.envs.environment import InfrastructureError

MEMORY_FOLDER = "/dev/shm"
LEAST_MEMORY_BYTES = 1 << 30  # free ones: hundreds of workspaces at their largest; a container often has 64 MiB in all

_POLICY_ERRNOS = {
    errno.ENOENT: "no such file",
    errno.EISDIR: "is a directory",
    errno.ENOTDIR: "not a directory",
    errno.EEXIST: "not a directory",
    errno.ENAMETOOLONG: "name too long",
    errno.ELOOP: "not a regular file",
}


class ToolError(Exception):
    """The policy's own fault. Its text is what the policy reads, so it is short and names no path of ours."""


@dataclass(frozen=True, slots=True)
class WorkspaceLimits:
    """Bounds of what the policy writes; documents that were laid out are exempt from the sizes."""

    max_file_bytes: int = 65536
    max_files: int = 64
    max_path_bytes: int = 512
    max_name_bytes: int = 255
    max_depth: int = 16


def memory_folder() -> str | None:
    """The system's folder in memory, for the few small files that an episode makes and removes at once; None, which is as
    tempfile decides, where TMPDIR names another, there is none, or it has less room than LEAST_MEMORY_BYTES."""
    if "TMPDIR" in os.environ or not os.access(MEMORY_FOLDER, os.W_OK | os.X_OK):
        return None
    room = os.statvfs(MEMORY_FOLDER)
    return MEMORY_FOLDER if room.f_bavail * room.f_frsize >= LEAST_MEMORY_BYTES else None


class Workspace:
    """Files of one episode. Nothing but this object writes there, so a file of ours that vanishes is our fault.

    documents: relative path -> text, or the path of a file to copy.
    Raises ValueError for a document whose name is no path inside, InfrastructureError when it cannot be laid out.
    """

    def __init__(self, documents: Mapping[str, str | Path], limits: WorkspaceLimits | None = None) -> None:
        self.limits = limits or WorkspaceLimits()
        self._known: set[str] = set()
        try:
            self._home = tempfile.TemporaryDirectory(prefix="k3-workspace-", dir=memory_folder())
            self._root = Path(self._home.name, "files")
            self._scratch = Path(self._home.name, "scratch")
            self._root.mkdir()
            self._scratch.mkdir()
        except OSError as error:
            raise InfrastructureError(f"cannot make a workspace: {error}") from error
        try:
            for name, document in documents.items():
                self._lay_out(name, document)
        except BaseException:
            self.close()
            raise

    def _lay_out(self, name: str, document: str | Path) -> None:
        try:
            path, target = self.resolve(name)
            with self._blame(path):
                self._make_parent(target)
                if isinstance(document, str):
                    target.write_bytes(document.encode())
                else:
                    try:
                        shutil.copyfile(document, target)
                    except FileNotFoundError as error:
                        raise InfrastructureError(f"document {name}: {document} is gone") from error
            self._known.add(path)
        except ToolError as error:
            raise ValueError(f"document {name!r}: {error}") from error

    def close(self) -> None:
        self._home.cleanup()

    def resolve(self, path: str) -> tuple[str, Path]:
        """The canonical relative path and where it lies. Nothing need exist there. Raises ToolError."""
        try:
            size_bytes = len(path.encode())
        except UnicodeEncodeError:
            raise ToolError("bad path") from None
        if not path or size_bytes > self.limits.max_path_bytes:
            raise ToolError("bad path: empty or too long")
        if "\\" in path or any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in path):
            raise ToolError("bad path: control character or backslash")
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts:
            raise ToolError("bad path: must be relative and inside the workspace")
        if len(pure.parts) > self.limits.max_depth or any(
            len(part.encode()) > self.limits.max_name_bytes for part in pure.parts
        ):
            raise ToolError("bad path: name too long or too deep")
        target = self._root
        for part in pure.parts:
            target = target / part
            with self._blame(str(pure)):
                if target.is_symlink():
                    raise ToolError(f"not a regular file: {pure}")
        return str(pure), target

    def files(self, under: str = ".") -> tuple[str, ...]:
        """Relative paths of the regular files at or below `under`, sorted by code point. Raises ToolError."""
        path, target = self.resolve(under)
        found: set[str] = set()
        with self._blame(path):
            if stat.S_ISREG(target.lstat().st_mode):
                found.add(path)
            else:
                for folder, _, names in os.walk(target, onerror=_raise):
                    for name in names:
                        file = Path(folder, name)
                        if stat.S_ISREG(file.lstat().st_mode):
                            found.add(file.relative_to(self._root).as_posix())
        if missing := self._known_under(path) - found:
            raise InfrastructureError(f"workspace lost {min(missing)}")
        return tuple(sorted(found))

    def read(self, path: str) -> str:
        """Raises ToolError when it is no UTF-8 text file in here."""
        path, target = self.resolve(path)
        with self._blame(path):
            # O_NOFOLLOW: not even a link made since `resolve`; O_NONBLOCK: a pipe must not hang us.
            descriptor = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise ToolError(f"not a regular file: {path}")
                with open(descriptor, "rb", closefd=False) as file:
                    data = file.read()
            finally:
                os.close(descriptor)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ToolError(f"not a text file: {path}") from None

    def write(self, path: str, content: str) -> str:
        """Create or replace a file as a whole; returns its canonical path. Raises ToolError."""
        path, target = self.resolve(path)
        try:
            data = content.encode()
        except UnicodeEncodeError:
            raise ToolError("content is not valid Unicode") from None
        if len(data) > self.limits.max_file_bytes:
            raise ToolError(f"content is larger than {self.limits.max_file_bytes} bytes")
        if path not in self._known and len(self._known) >= self.limits.max_files:
            raise ToolError(f"more than {self.limits.max_files} files")
        self._replace(path, target, data)
        return path

    def _replace(self, path: str, target: Path, data: bytes) -> None:
        """A reader sees the old file or the new one; the half-written one lies where no tool looks."""
        with self._blame(path):
            if target.is_dir():
                raise ToolError(f"is a directory: {path}")
            self._make_parent(target)
            half = self._scratch / "half-written"
            half.write_bytes(data)
            os.replace(half, target)
        self._known.add(path)

    def _make_parent(self, target: Path) -> None:
        if target.parent != self._root:
            target.parent.mkdir(parents=True, exist_ok=True)

    def _known_under(self, path: str) -> set[str]:
        return {name for name in self._known if path in (".", name) or name.startswith(path + "/")}

    @contextmanager
    def _blame(self, path: str) -> Iterator[None]:
        """An OSError is the policy's if the path that it named explains it, else ours."""
        try:
            yield
        except OSError as error:
            explained = error.errno in _POLICY_ERRNOS and self._root.is_dir() and self._scratch.is_dir()
            lost = error.errno == errno.ENOENT and self._known_under(path)
            if explained and not lost:
                raise ToolError(f"{_POLICY_ERRNOS[error.errno or 0]}: {path}") from error
            raise InfrastructureError(f"workspace failed at {path}: {error}") from error


def _raise(error: OSError) -> None:
    """os.walk ignores errors unless told otherwise."""
    raise error

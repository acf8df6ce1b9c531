"""The local stack: PostgreSQL, S3, Prefect and MLflow on this machine's loopback, and a worker for each work pool.

Everything lies in one folder: data, logs, `ports.json` (chosen once, so that a restart keeps them) and `secrets.env`
(made once; mode 0600). A secret reaches a process by its environment, or by a file that only its owner may read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from urllib.parse import urlsplit

from infra import postgres
from infra.checks import all_of, http_answers, worker_beats
from infra.seaweed import WeedPorts, weed_command, write_config
from infra.services import OneShot, Program, Service
from infra.supervisor import supervise
from infra.work_pools import POOLS
from k3core.errors import RunError

HOST = "127.0.0.1"
BUCKET = "k3rl"
PROJECT = Path(__file__).parents[1]
# What stays in memory on the machines of a pool, and does the work of its flow runs.
RESIDENTS = {"gpu-rollout": "engine", "gpu-train": "trainer"}
RESULTS = "PREFECT_DEFAULT_RESULT_STORAGE_BLOCK"
PORTS = ("postgres", "prefect", "mlflow", "s3", "weed_master", "weed_volume", "weed_filer", *RESIDENTS.values())
GRPC_PORTS = ("s3_grpc", "weed_master_grpc", "weed_volume_grpc", "weed_filer_grpc")
SECRETS = ("POSTGRES_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY", "RESIDENT_TOKEN")

# Everything that appears in the folder; PostgreSQL's data may lie elsewhere.
MADE_FOLDERS = ("logs", "s3", "postgres", "prefect", "mlflow")
MADE_FILES = ("ports.json", "secrets.env", "pgpass", "s3.json", "state.json", "supervisor.lock")

# Of every process of the stack, and of a worker elsewhere.
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its processes take 300 MB and a tenth of the speed
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_CLI_PROMPT": "false",
    "PYTHONUNBUFFERED": "1",
}
# What the shell may say about other servers does not reach ours.
FOREIGN = ("PREFECT_", "MLFLOW_", "AWS_", "PG")


@dataclass(frozen=True, slots=True)
class Stack:
    """folder: absolute. artifacts: where MLflow keeps files, an s3:// address or a folder."""

    folder: Path
    ports: Mapping[str, int]
    secrets: Mapping[str, str]
    postgres: postgres.Place
    artifacts: str

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self.ports[name]}"


def prepare(folder: Path) -> Stack:
    """Make the folder (absolute) and what is chosen once; what is there already is kept. Nothing is started.

    Raises RunError when this machine lacks a server, and ValueError for databases whose password is gone.
    """
    make_folder(folder)
    _make_way(folder)
    stack = Stack(
        folder=folder,
        ports=_ports(folder / "ports.json"),
        secrets=_secrets(folder / "secrets.env"),
        postgres=postgres.place(folder),
        artifacts=artifacts(folder, has_boto3=importlib.util.find_spec("boto3") is not None),
    )
    for name in ("s3", "prefect"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    write_config(folder / "s3.json", stack.secrets["S3_ACCESS_KEY"], stack.secrets["S3_SECRET_KEY"])
    _write_private(folder / "pgpass", f"{HOST}:*:*:{postgres.ROLE}:{stack.secrets['POSTGRES_PASSWORD']}\n")
    weed_command(folder / "s3", _weed_ports(stack.ports), folder / "s3.json")  # says so now if there is no `weed`
    return stack


def make_folder(folder: Path) -> None:
    """Closed to others; but as root, PostgreSQL's user has to pass through it.

    Raises ValueError for a path that `weed` or the marks of processes cannot carry.
    """
    if any(character in str(folder) for character in "#,\n"):
        raise ValueError(f"{str(folder)!r}: the path must not hold a # or a comma; choose another --dir")
    folder.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)


def _make_way(folder: Path) -> None:
    """A folder that was removed by hand may have left databases elsewhere, with a password that nobody knows any more:
    a new folder of its name must not meet them."""
    data, known = postgres.data_folder(folder), folder / "secrets.env"
    if known.exists() or postgres.data_version(data) is None:
        return
    if data.parent == folder or (folder / "ports.json").exists():
        raise ValueError(f"{known}: is gone, and {data} cannot be opened without it: restore it, or `k3 down --delete`")
    kept = postgres.set_aside(data)
    print(f"{data}: of an earlier {folder} that is gone; kept as {kept}", flush=True)


def load(folder: Path) -> Stack:
    """The stack that was prepared there."""
    return Stack(
        folder=folder,
        ports=_read_ports(folder / "ports.json"),
        secrets=_read_secrets(folder / "secrets.env"),
        postgres=postgres.place(folder),
        artifacts=artifacts(folder, has_boto3=importlib.util.find_spec("boto3") is not None),
    )


def environment(folder: Path, *, for_worker: bool = False) -> dict[str, str]:
    """What a client, or a worker on another machine, needs of a prepared stack; secrets included.

    Raises RunError where no stack was prepared.
    """
    if not (folder / "ports.json").exists() or not (folder / "secrets.env").exists():
        raise RunError(f"{folder}: no servers were ever started from this folder; `k3 up` starts them")
    secret = _read_secrets(folder / "secrets.env")
    token = {"K3_RESIDENT_TOKEN": secret["RESIDENT_TOKEN"]} if for_worker else {}
    return _client_environment(_read_ports(folder / "ports.json"), secret) | token


def _client_environment(ports: Mapping[str, int], secret: Mapping[str, str]) -> dict[str, str]:
    return {
        "PREFECT_API_URL": f"http://{HOST}:{ports['prefect']}/api",
        RESULTS: "remote-file-system/k3-results",  # which flows.deploy creates: one place for all machines
        "MLFLOW_TRACKING_URI": f"http://{HOST}:{ports['mlflow']}",
        "AWS_ENDPOINT_URL_S3": f"http://{HOST}:{ports['s3']}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": secret["S3_ACCESS_KEY"],
        "AWS_SECRET_ACCESS_KEY": secret["S3_SECRET_KEY"],
        "K3_ROOT": f"s3://{BUCKET}/runs",
    }


def programs(stack: Stack) -> list[Program]:
    """The whole stack, each after what it needs. One more server is one more entry here."""
    client = _base_environment() | _client_environment(stack.ports, stack.secrets)
    node = client | node_environment(HOST, stack.ports, stack.secrets["RESIDENT_TOKEN"])
    node |= {"PREFECT_HOME": str(stack.folder / "prefect")}
    servers = [*database(stack), *object_store(stack, client), prefect_server(stack), mlflow_server(stack, client)]
    nodes = [
        program
        for pool in POOLS
        for program in pool_programs(pool, f"{pool}-1", node, after=("pools", "mlflow", "bucket"))
    ]
    return [*servers, *deployments(node), reaper(node), *nodes]


def database(stack: Stack) -> list[Program]:
    env = _base_environment()
    step = [sys.executable, "-m", "infra.stack"]
    return [
        OneShot(name="initdb", argv=[*step, "initdb", str(stack.folder)], env=env, cwd=PROJECT),
        Service(
            name="postgres",
            argv=postgres.command(stack.postgres, stack.ports["postgres"]),
            env=postgres.environment(),
            user=stack.postgres.user,
            after=("initdb",),
            ready=postgres.accepts(stack.ports["postgres"]),
            url=f"postgresql://{postgres.ROLE}@{HOST}:{stack.ports['postgres']}",
            stop_signal=SIGINT,  # "fast": rolls back what is open and ends, where SIGTERM waits for the clients
            stop_timeout_s=60,
        ),
        OneShot(
            name="databases", argv=[*step, "databases", str(stack.folder)], env=env, cwd=PROJECT, after=("postgres",)
        ),
    ]


def object_store(stack: Stack, client: Mapping[str, str]) -> list[Program]:
    ports = _weed_ports(stack.ports)
    return [
        Service(
            name="s3",
            argv=[
                *weed_command(stack.folder / "s3", ports, stack.folder / "s3.json"),
                "-master.electionTimeout=1s",  # it votes alone, and at a restart would wait 10 to 20 s before it does
            ],
            env=_base_environment(),
            cwd=stack.folder,
            ready=all_of(
                http_answers(f"{stack.url('s3')}/healthz"),
                http_answers(f"http://{HOST}:{ports.master}/dir/assign", b'"fid"'),  # a volume can be written
            ),
            url=stack.url("s3"),
            stop_timeout_s=4,  # its filer would wait 15 s for streams of its own; what is written is in the files
        ),
        OneShot(
            name="bucket",
            argv=[sys.executable, "-m", "infra.bucket", BUCKET],
            env=client,
            cwd=PROJECT,
            after=("s3",),
        ),
    ]


def prefect_server(stack: Stack) -> Service:
    port = stack.ports["prefect"]
    return Service(
        name="prefect",
        argv=[sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)],
        env=_base_environment()
        | {
            "PREFECT_HOME": str(stack.folder / "prefect"),
            "PREFECT_API_URL": f"{stack.url('prefect')}/api",
            "PREFECT_SERVER_UI_API_URL": f"{stack.url('prefect')}/api",
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{_login(stack)}/prefect",
            "PGPASSFILE": str(stack.folder / "pgpass"),
        },
        cwd=stack.folder,
        after=("databases",),
        ready=http_answers(f"{stack.url('prefect')}/api/health"),
        url=stack.url("prefect"),
        stop_timeout_s=30,
    )


def mlflow_server(stack: Stack, client: Mapping[str, str]) -> Service:
    """It serves the artifacts as well, so that its clients need no way to the store behind it."""
    words = ["server", "--host", HOST, "--port", str(stack.ports["mlflow"]), "--workers", "1"]
    return Service(
        name="mlflow",
        argv=[sys.executable, "-m", "mlflow", *words, "--artifacts-destination", stack.artifacts],
        env={name: value for name, value in client.items() if name != "MLFLOW_TRACKING_URI"}
        | {
            "MLFLOW_BACKEND_STORE_URI": f"postgresql+psycopg2://{_login(stack)}/mlflow",
            "PGPASSFILE": str(stack.folder / "pgpass"),
        },
        cwd=stack.folder,
        after=("databases", "bucket"),
        ready=http_answers(f"{stack.url('mlflow')}/health"),
        url=stack.url("mlflow"),
        stop_timeout_s=20,
    )


def deployments(node: Mapping[str, str]) -> list[Program]:
    """The pools at once, so that workers start while the deployments are still being read."""
    return [
        OneShot(
            name="pools",
            argv=[sys.executable, "-m", "infra.work_pools"],
            env=node,
            cwd=PROJECT,
            after=("prefect",),
        ),
        OneShot(
            name="deploy",
            argv=[sys.executable, "-m", "flows.deploy"],
            env={name: value for name, value in node.items() if name != RESULTS},  # it creates the block of that name
            cwd=PROJECT,
            after=("pools",),
        ),
    ]


def reaper(node: Mapping[str, str]) -> Service:
    return Service(
        name="reaper",
        argv=[sys.executable, "-m", "flows.reaper"],
        env=node,
        cwd=PROJECT,
        after=("deploy",),
        ready=lambda _started: True,
    )


def pool_programs(pool: str, worker: str, env: Mapping[str, str], after: Sequence[str] = ()) -> list[Program]:
    """What a work pool needs on one machine: a worker under this name, and what stays resident beside it.

    env: of `node_environment`, with PREFECT_API_URL. The worker takes at most the pool's usual number of flow runs at
    once, whatever the pool as a whole may take.
    """
    words = ["worker", "start", "--type", "process", "--pool", pool, "--name", worker, "--limit", str(POOLS[pool])]
    listed: list[Program] = [
        Service(
            name=worker,
            argv=[sys.executable, "-m", "prefect", *words, "--install-policy", "never"],
            env=env,
            cwd=PROJECT,
            after=after,
            ready=worker_beats(env["PREFECT_API_URL"], pool, worker),
            pool=pool,
            stop_timeout_s=30,
            children_work=True,  # flow runs: they go on without their worker, and say themselves how they ended
        )
    ]
    if role := RESIDENTS.get(pool):
        listed.insert(0, resident(role, pool, env, after))
    return listed


def resident(role: str, pool: str, env: Mapping[str, str], after: Sequence[str]) -> Service:
    url = env[f"K3_{role.upper()}_URL"]
    address = urlsplit(url)
    words = ["--host", str(address.hostname), "--port", str(address.port)]
    return Service(
        name=role,
        argv=[sys.executable, "-m", "infra.resident.server", "--role", role, *words],
        env=env,
        cwd=PROJECT,
        after=after,
        ready=http_answers(f"{url}/health"),
        url=url,
        pool=pool,
        stop_timeout_s=15,
    )


def node_environment(host: str, ports: Mapping[str, int], token: str) -> dict[str, str]:
    """Where a machine's residents listen, and what proves to them that a caller may use them."""
    urls = {f"K3_{role.upper()}_URL": f"http://{host}:{ports[role]}" for role in RESIDENTS.values()}
    return {**urls, "K3_RESIDENT_TOKEN": token}


def worker_environment(folder: Path, host: str) -> dict[str, str]:
    """Of a worker beside servers elsewhere, which the shell names. Raises ValueError for what it does not name.

    host: the address of this machine where its resident listens, on a port that is kept in the folder.
    """
    needed = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "K3_ROOT", "K3_RESIDENT_TOKEN")
    if missing := [name for name in needed if not os.environ.get(name)]:
        raise ValueError(
            f"{', '.join(missing)}: not set; `k3 env --worker` on the servers' machine prints what a worker needs"
        )
    make_folder(folder)
    ports = _ports(folder / "ports.json", tuple(RESIDENTS.values()))
    here = {**SETTINGS, "PREFECT_HOME": str(folder / "prefect"), **os.environ}
    return here | node_environment(host, ports, os.environ["K3_RESIDENT_TOKEN"])


def _base_environment() -> dict[str, str]:
    here = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    for name in ("no_proxy", "NO_PROXY"):
        here[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
    return here | SETTINGS


def _login(stack: Stack) -> str:
    """Without the password, which PGPASSFILE holds: a log that shows the URL gives nothing away."""
    return f"{postgres.ROLE}@{HOST}:{stack.ports['postgres']}"


def _weed_ports(ports: Mapping[str, int]) -> WeedPorts:
    return WeedPorts(
        master=ports["weed_master"],
        volume=ports["weed_volume"],
        filer=ports["weed_filer"],
        s3=ports["s3"],
        master_grpc=ports["weed_master_grpc"],
        volume_grpc=ports["weed_volume_grpc"],
        filer_grpc=ports["weed_filer_grpc"],
        s3_grpc=ports["s3_grpc"],
    )


def artifacts(folder: Path, *, has_boto3: bool) -> str:
    """In the bucket where MLflow can (it needs boto3), else in a folder; one with files in it stays the place."""
    here = folder / "mlflow"
    if has_boto3 and not here.exists():
        return f"s3://{BUCKET}/mlflow"
    here.mkdir(mode=0o700, exist_ok=True)
    return str(here)


def _ports(path: Path, names: Sequence[str] = (*PORTS, *GRPC_PORTS)) -> dict[str, int]:
    """Those of the file, but another for each that somebody else has taken meanwhile."""
    known = _read_ports(path) if path.exists() else {}
    chosen: dict[str, int] = {}
    for name in names:
        port = known.get(name)
        chosen[name] = port if port is not None and is_free(port) else free_port(set(chosen.values()))
    if chosen != known:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(chosen, indent=1), encoding="ascii")
        os.replace(new, path)
    return chosen


def _read_ports(path: Path) -> dict[str, int]:
    ports: dict[str, int] = json.loads(path.read_text(encoding="ascii"))
    return ports


def free_port(taken: set[int]) -> int:
    """Below the ports that the kernel gives to outgoing connections, which would take it while a server restarts."""
    for port in random.SystemRandom().sample(range(16_000, 32_000), 1000):
        if port not in taken and is_free(port):
            return port
    raise RunError("no free port between 16000 and 32000")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that is only winding down is free
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _secrets(path: Path) -> dict[str, str]:
    if not path.exists():
        made = {name: secrets.token_hex(10 if name == "S3_ACCESS_KEY" else 24) for name in SECRETS}
        _write_private(path, "".join(f"{name}={value}\n" for name, value in made.items()))
    return _read_secrets(path)


def _read_secrets(path: Path) -> dict[str, str]:
    found = dict(line.split("=", 1) for line in path.read_text(encoding="ascii").splitlines() if line)
    if missing := [name for name in SECRETS if not found.get(name)]:
        raise ValueError(f"{path}: no {missing[0]} in it; the data cannot be opened without it")
    return found


def _write_private(path: Path, text: str) -> None:
    """Whole or not at all, and readable by its owner alone from the first byte on."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
    os.replace(new, path)


def main(folder: Path, step: str) -> int:
    if step == "run":
        return supervise(folder, lambda: programs(prepare(folder)))
    stack = load(folder)
    password = stack.secrets["POSTGRES_PASSWORD"]
    if step == "initdb":
        postgres.create(stack.postgres, password)
    elif step == "databases":
        postgres.create_databases(stack.postgres, stack.ports["postgres"], password)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[2]).absolute(), sys.argv[1]))
    except (RunError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)

"""What the benchmarks share: a site, devices with keys of their own, and a load that was signed beforehand.

A site is an embedded database of its own and `postseal serve --processes 2` on it, limits on, full audit. `Site.drive`
signs a load, has `load.c` send it, and gives envelopes a second, latency, and the CPU that an envelope took.
"""

import contextlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import structlog

from postseal import correlation
from postseal.envelope import canonical, dsse, ed25519
from postseal.identity.tokens import new_token
from postseal.postgres.access import Access
from postseal.postgres.database import conninfo_for
from postseal.postgres.embedded import start_or_join
from postseal.settings import ENVIRONMENT_PREFIX

HERE = Path(__file__).parent
TASK_STATUS = "task-status"
BATCH = 100
BATCH_CONNECTIONS = 16
PROCESSES = 2
STOP_DEADLINE_S = 30


@dataclass
class Device:
    """A simulated device: its key, its credential, and where its stream is."""

    name: str
    seed: bytes
    credential: str
    sequence: int = 0


@dataclass(frozen=True)
class Share:
    """A part of a load, which one process signs: one device's envelopes, in the order in which they are sent."""

    device: Device
    sequences: Sequence[int]
    kind: str = TASK_STATUS


@dataclass(frozen=True)
class Server:
    """A running `postseal serve`."""

    process: subprocess.Popen[bytes]
    port: int


@dataclass(frozen=True)
class Site:
    """A database and the server on it, driven by the program `load`."""

    home: Path
    access: Access
    server: Server
    load: Path

    def drive(
        self, shares: Sequence[Share], lines: int, seconds: float, *, rate: float = 0, ahead: int | None = None
    ) -> dict[str, float]:
        """Send `shares`, `lines` envelopes a request, and measure; `rate` is in requests a second, 0 for the most.

        Each share has a connection of its own. With `ahead`, the requests of all shares, taken in turn, are one list
        for as many connections, and none is sent that is `ahead` or more places beyond an unanswered one.

        Raises RuntimeError if anything was refused. The devices then stand behind what was sent.
        """
        file = self.home.with_suffix(".requests")
        write_requests(file, shares, lines, as_one_list=ahead is not None)
        command = [str(self.load), "127.0.0.1", str(self.server.port), str(seconds), str(rate), str(file)]
        command += [] if ahead is None else [str(len(shares)), str(ahead)]
        before = self._cpu_seconds()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after = self._cpu_seconds()
        file.unlink()
        if done.returncode:
            raise RuntimeError(f"the load generator failed: {done.stderr}")
        answer = json.loads(done.stdout)
        envelopes = answer["lines_ok"] if lines > 1 else answer["http_2xx"]
        refused = answer["lines_refused"] + answer["http_4xx"] + answer["http_5xx"]
        if refused:
            raise RuntimeError(f"{refused} envelopes or requests were refused: {answer}")
        for share in shares:  # what was not sent leaves no hole: the next round begins after what was
            share.device.sequence = contiguous(self.access, share.device)
        result = {"rate": envelopes / answer["seconds"], "p50_ms": answer["p50_ms"], "p99_ms": answer["p99_ms"]}
        return result | {f"{part}_cpu_us": round((after[part] - before[part]) * 1e6 / envelopes, 1) for part in before}

    def peak_rss_mib(self) -> list[float]:
        """The most memory that each process of the server ever had resident."""
        return [peak_rss_mib(pid) for pid in family(self.server.process.pid)]

    def _cpu_seconds(self) -> dict[str, float]:
        """CPU used so far by the server's processes and by PostgreSQL's."""
        postmaster = int((self.home / "data" / "postmaster.pid").read_text().splitlines()[0])
        return {
            "server": sum(map(process_cpu_s, family(self.server.process.pid))),
            "postgres": sum(map(process_cpu_s, family(postmaster))),
        }


@contextmanager
def workplace() -> Generator[Path]:
    """A folder for sites, removed in the end, with the load generator in it."""
    with tempfile.TemporaryDirectory(prefix="postseal-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL may run as a user of its own
        subprocess.run(["gcc", "-O2", "-o", str(folder / "load"), str(HERE / "load.c")], check=True)
        yield folder


@contextmanager
def site(folder: Path, name: str, settings: Mapping[str, object]) -> Generator[Site]:
    """A site in a workplace: a fresh database with one tenant, and the server with `settings`."""
    home = folder / name
    with database(home) as access, serving(home, settings) as server:
        yield Site(home, access, server, folder / "load")


@contextmanager
def database(home: Path) -> Generator[Access]:
    """A fresh embedded database with the current schema, one tenant and one project."""
    server = start_or_join(home, log=structlog.get_logger())
    try:
        access = Access(conninfo_for(server.dsn), home / "roles.pgpass", "postseal")
        access.migrate()
        with psycopg.connect(access.owner, autocommit=True) as owner:
            owner.execute("INSERT INTO postseal.tenants (tenant) VALUES ('bench')")
            owner.execute("INSERT INTO postseal.projects (tenant, project) VALUES ('bench', 'main')")
        yield access
    finally:
        server.release()


@contextmanager
def serving(home: Path, settings: Mapping[str, object]) -> Generator[Server]:
    """`postseal serve` on a free port."""
    command = [str(Path(sys.executable).with_name("postseal")), "serve", "--data-dir", str(home), "--port", "0"]
    command += ["--processes", str(PROCESSES), "--json"]
    variables = {ENVIRONMENT_PREFIX + name.upper(): str(value) for name, value in settings.items()}
    process = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url: str = json.loads(line)["url"]
        yield Server(process, urlsplit(url).port or 0)
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def enrolled(access: Access, names: Iterable[str]) -> list[Device]:
    """Devices with a key, a stream and a credential each."""
    devices: list[Device] = []
    with psycopg.connect(access.owner) as owner:
        owner.execute("SET LOCAL search_path = postseal")
        for name in names:
            seed, token = ed25519.generate(), new_token()
            public_key = ed25519.public_key(seed)
            owner.execute("INSERT INTO devices (tenant, device, account) VALUES ('bench', %s, 'bench')", [name])
            owner.execute(
                "INSERT INTO keys (tenant, keyid, device, public_key) VALUES ('bench', %s, %s, %s)",
                [ed25519.thumbprint(public_key), name, public_key],
            )
            owner.execute("INSERT INTO streams (tenant, project, producer) VALUES ('bench', 'main', %s)", [name])
            owner.execute(
                "INSERT INTO credentials (credential_id, secret_hash, tenant, account, device, role, projects, "
                "expires_at) VALUES (%s, %s, 'bench', 'bench', %s, 'device', '{main}', now() + interval '1 day')",
                [token.credential_id, token.secret_hash, name],
            )
            devices.append(Device(name, seed, token.reveal()))
    return devices


def contiguous(access: Access, device: Device) -> int:
    """Where the device's stream stands."""
    with psycopg.connect(access.owner) as owner:
        row = owner.execute(
            "SELECT contiguous FROM postseal.streams WHERE tenant = 'bench' AND project = 'main' AND producer = %s",
            [device.name],
        ).fetchone()
    assert row is not None
    return row[0]


def in_order(devices: Sequence[Device], envelopes: float, lines: int, kind: str = TASK_STATUS) -> list[Share]:
    """At least so many envelopes, in whole requests, as many by each device: what follows in its stream."""
    each = requests_each(devices, envelopes, lines) * lines
    return [Share(device, range(device.sequence + 1, device.sequence + 1 + each), kind) for device in devices]


def requests_each(devices: Sequence[Device], envelopes: float, lines: int) -> int:
    """How many requests each device signs so that all together have at least so many envelopes."""
    return round(envelopes / lines / len(devices)) + 2


def write_requests(file: Path, shares: Sequence[Share], lines: int, *, as_one_list: bool) -> None:
    """Sign and frame all that a measurement sends; load.c describes the form."""
    with ProcessPoolExecutor() as pool, file.open("wb") as out:
        lists: Iterable[Iterable[bytes]] = pool.map(framed, shares, repeat(lines))
        if as_one_list:
            lists = [chain.from_iterable(zip(*lists, strict=True))]
        for requests in map(list, lists):
            out.write(struct.pack("=Q", len(requests)))
            for request in requests:
                out.write(struct.pack("=I", len(request)) + request)
        # Written back during the measurement, it would make the commits of the database wait.
        out.flush()
        os.fsync(out.fileno())


def framed(share: Share, lines: int) -> list[bytes]:
    """A share's requests."""
    path = b"/v1/envelopes" if lines == 1 else b"/v1/envelopes/batch"
    media_type = dsse.ENVELOPE_MEDIA_TYPE.encode() if lines == 1 else b"application/x-ndjson"
    head = (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Type: %s\r\n"
        b"Content-Length: %%d\r\n\r\n" % (path, share.device.credential.encode(), media_type)
    )
    requests: list[bytes] = []
    for first in range(0, len(share.sequences), lines):
        sequences = share.sequences[first : first + lines]
        body = b"\n".join(sealed(share.device, sequence, share.kind) for sequence in sequences)
        requests.append(head % len(body) + body)
    return requests


def sealed(device: Device, sequence: int, kind: str) -> bytes:
    """An envelope with the data of a task's status under the name `kind`, about 430 bytes of payload."""
    payload = canonical.encode(
        {
            "protocol": "controlplane/v1",
            "schemaVersion": 1,
            "route": {"tenant": "bench", "project": "main", "producer": device.name},
            "eventId": correlation.text(correlation.new_correlation_id()),  # of version 7, as the protocol advises
            "idempotencyKey": f"bench:{device.name}:{sequence}",
            "sequence": sequence,
            "issuedAtMs": time.time_ns() // 1_000_000,
            "data": {
                "kind": kind,
                "taskId": str(uuid.uuid4()),
                "attempt": 1,
                "status": "succeeded",
                "progress": 100,
                "resultDigest": "sha256:" + os.urandom(32).hex(),
            },
        }
    )
    envelope = dsse.seal(payload, device.seed)
    return dsse.wrap(envelope.payload, envelope.keyid, envelope.signature)


def median(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    """The median of one figure over the rounds."""
    return statistics.median(each[name] for each in rounds)


def publish(name: str, results: Mapping[str, Any]) -> None:
    """Print the results and write `bench/results/<name>.json`."""
    text = json.dumps(results, indent=2)
    out = HERE / "results" / f"{name}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(text + "\n")
    print(text)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for child in children.read_text().split():
                found += family(int(child))
    return found


def process_cpu_s(pid: int) -> float:
    """User and system time of a process, in seconds; none of one that has just ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_rss_mib(pid: int) -> float:
    """The most memory that a process ever had resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0

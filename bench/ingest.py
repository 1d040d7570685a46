"""`make bench`: how fast envelopes come in over HTTP, beside the bare SQL on the same machine in the same run.

(a) pgbench of `ingest.sql`, one transaction an envelope, the same tables and indexes
(b) `postseal serve --processes 2`, limits on, real signatures, full audit, driven by `load.c` with envelopes signed
    beforehand: batches of 100, and single requests on 64 connections

The measurements alternate a-b-a-b after a warm-up; the figures are medians over the rounds, the ratios of medians.
Then, at half of the top rate each, how long an acknowledgement takes. Prints everything and writes
`bench/results/ingest.json`.
"""

import argparse
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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import structlog

from postseal.envelope import canonical, dsse, ed25519
from postseal.identity.tokens import new_token
from postseal.postgres.access import Access
from postseal.postgres.binaries import find_binaries
from postseal.postgres.database import conninfo_for
from postseal.postgres.embedded import start_or_join

HERE = Path(__file__).parent
PGBENCH_STREAMS = 64
CONNECTIONS = 64
BATCH = 100
PROCESSES = 2
READY_DEADLINE_S = 30
# The most that a round is expected to send a second; signing more beforehand only costs time.
MOST_BATCHED_A_SECOND = 30_000
MOST_SINGLE_A_SECOND = 12_000


@dataclass
class Device:
    """A simulated device: its key, its credential, and where its stream is."""

    name: str
    seed: bytes
    credential: str
    sequence: int = 0


@dataclass
class Server:
    """A running `postseal serve` and how much CPU its processes have used."""

    process: subprocess.Popen[bytes]
    port: int
    data: Path
    cpu_before: dict[str, float] = field(default_factory=dict[str, float])


def main() -> None:
    """Run the benchmark that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is repeated")
    parser.add_argument("--warm-up", type=float, default=5, help="seconds before the first measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="postseal-bench-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o711)
        results = run(Path(folder), options.seconds, options.rounds, options.warm_up)
    out = HERE / "results" / "ingest.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def run(folder: Path, seconds: float, rounds: int, warm_up: float) -> dict[str, Any]:
    """Measure everything on a fresh embedded database in `folder`."""
    load = folder / "load"
    subprocess.run(["gcc", "-O2", "-o", str(load), str(HERE / "load.c")], check=True)
    with database(folder / "home") as access, serving(folder / "home") as server:
        devices = enrolled(access, CONNECTIONS)
        bench = Bench(folder, load, access, server, devices)
        bench.batches(warm_up)
        bench.singles(warm_up)
        bench.pgbench(warm_up)
        measured: dict[str, list[dict[str, float]]] = {"pgbench": [], "batch": [], "single": []}
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            measured["pgbench"].append(bench.pgbench(seconds))
            measured["batch"].append(bench.batches(seconds))
            measured["pgbench"].append(bench.pgbench(seconds))
            measured["single"].append(bench.singles(seconds))
        tps = median(measured["pgbench"], "rate")
        batch, single = median(measured["batch"], "rate"), median(measured["single"], "rate")
        half_batch = bench.batches(seconds, rate=batch / 2 / BATCH)
        half_single = bench.singles(seconds, rate=single / 2)
        return {
            "command": " ".join(["python -m bench.ingest", *sys.argv[1:]]),
            "cpus": os.cpu_count(),
            "pgbench_tps": round(tps),
            "batch_rate": round(batch),
            "batch_ratio": round(batch / tps, 2),
            "single_rate": round(single),
            "single_ratio": round(single / tps, 2),
            "p99_ms_at_half": max(half_batch["p99_ms"], half_single["p99_ms"]),
            "server_rss_mib": round(max(peak_rss_mib(pid) for pid in family(server.process.pid))),
            "server_rss_mib_total": round(sum(peak_rss_mib(pid) for pid in family(server.process.pid))),
            "half_of_top_rate": {"batch": half_batch, "single": half_single},
            "rounds": measured,
        }


def median(rounds: list[dict[str, float]], name: str) -> float:
    """The median of one figure over the rounds."""
    return statistics.median(each[name] for each in rounds)


class Bench:
    """The three measurements, on one server and one database."""

    def __init__(self, folder: Path, load: Path, access: Access, server: Server, devices: list[Device]) -> None:
        self._folder = folder
        self._load = load
        self._access = access
        self._server = server
        self._devices = devices

    def pgbench(self, seconds: float) -> dict[str, float]:
        """(a): transactions a second of the bare SQL, prepared, 16 clients, 2 threads."""
        program = find_binaries(None).bin / "pgbench"
        command = [str(program), "-n", "-M", "prepared", "-c", "16", "-j", "2", "-T", str(max(1, round(seconds)))]
        command += ["-D", f"devices={PGBENCH_STREAMS}", "-f", str(HERE / "ingest.sql"), self._access.owner]
        environment = os.environ | {"PGOPTIONS": "-c search_path=postseal"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("tps = ")]
        return {"rate": float(line.split()[2])}

    def batches(self, seconds: float, rate: float = 0) -> dict[str, float]:
        """(b): envelopes a second in batches of 100, one batch at a time on each of 16 connections."""
        most = rate * BATCH if rate else MOST_BATCHED_A_SECOND
        return self._drive("batch", self._devices[:16], BATCH, seconds, rate, most)

    def singles(self, seconds: float, rate: float = 0) -> dict[str, float]:
        """(b): envelopes a second, one a request, on 64 connections."""
        return self._drive("single", self._devices, 1, seconds, rate, rate or MOST_SINGLE_A_SECOND)

    def _drive(
        self, name: str, devices: list[Device], lines: int, seconds: float, rate: float, most: float
    ) -> dict[str, float]:
        requests = round(most * seconds / lines / len(devices)) + 2
        file = self._folder / f"{name}.requests"
        write_requests(file, devices, requests, lines)
        before = cpu_seconds(self._server)
        command = [str(self._load), "127.0.0.1", str(self._server.port), str(seconds), str(rate), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after = cpu_seconds(self._server)
        file.unlink()
        if done.returncode:
            raise RuntimeError(f"the load generator failed: {done.stderr}")
        answer = json.loads(done.stdout)
        envelopes = answer["lines_ok"] if lines > 1 else answer["http_2xx"]
        refused = answer["lines_refused"] + answer["http_4xx"] + answer["http_5xx"]
        if refused:
            raise RuntimeError(f"{refused} envelopes or requests were refused: {answer}")
        for device in devices:  # what was not sent leaves no hole: the next round begins after what was
            device.sequence = contiguous(self._access, device)
        result = {"rate": envelopes / answer["seconds"], "p50_ms": answer["p50_ms"], "p99_ms": answer["p99_ms"]}
        return result | {f"{part}_cpu_us": round((after[part] - before[part]) * 1e6 / envelopes, 1) for part in before}


@contextmanager
def database(home: Path) -> Iterator[Access]:
    """A fresh embedded database with the current schema and what pgbench needs."""
    server = start_or_join(home, log=structlog.get_logger())
    try:
        access = Access(conninfo_for(server.dsn), home / "roles.pgpass", "postseal")
        access.migrate()
        with psycopg.connect(access.owner, autocommit=True) as owner:
            owner.execute("SET search_path = postseal")
            owner.execute("INSERT INTO tenants (tenant) VALUES ('bench')")
            owner.execute("INSERT INTO projects (tenant, project) VALUES ('bench', 'main')")
            owner.execute(
                "INSERT INTO streams (tenant, project, producer) "
                "SELECT 'bench', 'main', 'pgbench-' || n FROM generate_series(1, %s) AS n",
                [PGBENCH_STREAMS],
            )
        yield access
    finally:
        server.release()


@contextmanager
def serving(home: Path) -> Iterator[Server]:
    """`postseal serve` with its defaults, on a free port."""
    command = [str(Path(sys.executable).with_name("postseal")), "serve", "--data-dir", str(home), "--port", "0"]
    command += ["--processes", str(PROCESSES), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield Server(process, urlsplit(json.loads(line)["url"]).port or 0, home)
    finally:
        process.terminate()
        try:
            process.wait(READY_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def enrolled(access: Access, count: int) -> list[Device]:
    """Devices with a key, a stream and a credential each."""
    devices: list[Device] = []
    with psycopg.connect(access.owner) as owner:
        owner.execute("SET LOCAL search_path = postseal")
        for number in range(count):
            name, seed, token = f"device-{number}", ed25519.generate(), new_token()
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


def write_requests(file: Path, devices: list[Device], requests: int, lines: int) -> None:
    """Sign and frame all that a measurement sends; load.c describes the form."""
    with ProcessPoolExecutor() as pool, file.open("wb") as out:
        for block in pool.map(framed, devices, [requests] * len(devices), [lines] * len(devices)):
            out.write(block)


def framed(device: Device, requests: int, lines: int) -> bytes:
    """One connection's requests."""
    path = b"/v1/envelopes" if lines == 1 else b"/v1/envelopes/batch"
    media_type = dsse.ENVELOPE_MEDIA_TYPE.encode() if lines == 1 else b"application/x-ndjson"
    head = (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Type: %s\r\n"
        b"Content-Length: %%d\r\n\r\n" % (path, device.credential.encode(), media_type)
    )
    blocks = [struct.pack("=Q", requests)]
    sequence = device.sequence
    for _ in range(requests):
        envelopes = [sealed(device, sequence + 1 + number) for number in range(lines)]
        sequence += lines
        body = b"\n".join(envelopes)
        request = head % len(body) + body
        blocks += [struct.pack("=I", len(request)), request]
    return b"".join(blocks)


def sealed(device: Device, sequence: int) -> bytes:
    """A task-status envelope, about 430 bytes of payload."""
    payload = canonical.encode(
        {
            "protocol": "controlplane/v1",
            "schemaVersion": 1,
            "route": {"tenant": "bench", "project": "main", "producer": device.name},
            "eventId": str(uuid.uuid4()),
            "idempotencyKey": f"bench:{device.name}:{sequence}",
            "sequence": sequence,
            "issuedAtMs": time.time_ns() // 1_000_000,
            "data": {
                "kind": "task-status",
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


def cpu_seconds(server: Server) -> dict[str, float]:
    """CPU used so far by the server's processes and by PostgreSQL's."""
    postmaster = int((server.data / "data" / "postmaster.pid").read_text().splitlines()[0])
    return {
        "server": sum(map(process_cpu_s, family(server.process.pid))),
        "postgres": sum(map(process_cpu_s, family(postmaster))),
    }


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


if __name__ == "__main__":
    main()

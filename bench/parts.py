"""`make bench-parts`: where one envelope's time goes, part by part, each alone on one core.

Each step of `receive()` is timed over the same signed envelopes, the best of several runs, in microseconds an envelope.
Then groups of several sizes are committed over a real lane on a fresh embedded database: the CPU of this process, and
the time until the commit is certain, by envelope.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import uvloop

from bench.rig import TASK_STATUS, Device, database, enrolled, publish, sealed, workplace
from postseal.correlation import new_correlation_id
from postseal.envelope import dsse, ed25519, v1
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.inbound.judging import Arrival, Ledger
from postseal.inbound.lane import Lane
from postseal.metrics import Metrics
from postseal.outcomes import Outcome
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Part, connect
from postseal.postgres.ingest import LockedStream, LookupNames, OpenGroup, StreamKey
from postseal.rules.keys import KeyState
from postseal.rules.stream import Cursor
from postseal.verdicts import Receipt
from postseal.web import answers

ENVELOPES = 2_000
REPEATS = 7
GROUPS = {1: 300, 10: 200, 100: 60, 256: 30}
"""How many groups of each size are committed."""
WINDOW = 1024
RETENTION_S = 86_400

T = TypeVar("T")


def main() -> None:
    """Measure and print one JSON document."""
    with workplace() as folder, database(folder / "home") as access:
        (device,) = enrolled(access, ["device"])
        figures = {"us_an_envelope": steps(device), "groups": uvloop.run(groups(access, device))}
    publish("parts", {"command": "python -m bench.parts", "cpus": os.cpu_count(), **figures})


def steps(device: Device) -> dict[str, float]:
    """Microseconds of each pure step on one envelope."""
    bodies = [sealed(device, number, TASK_STATUS) for number in range(1, ENVELOPES + 1)]
    public_key = ed25519.public_key(device.seed)
    opened = [dsse.unwrap(body) for body in bodies]
    receipts = [Receipt(Outcome.ACCEPTED, each.identity, 1, 1, 1, new_correlation_id()) for each in opened]
    arrivals = [arrival(device, body, StreamKey("bench", 1)) for body in bodies]
    group = OpenGroup(
        {StreamKey("bench", 1): LockedStream(Cursor(0, 0, 0, 0), retired=False, retention_s=None)},
        {("bench", arrivals[0].names.keyid): KeyState.ACTIVE},
        {},
        {},
    )
    return {
        "unwrap (JSON, base64, PAE, hash)": each_us(dsse.unwrap, bodies),
        "payload (JSON, closed members, canonical form)": each_us(read_claims, [each.payload for each in opened]),
        "verify (Ed25519)": each_us(lambda each: ed25519.verify(public_key, each.signed_bytes, each.signature), opened),
        "correlation id": each_us(lambda _: new_correlation_id(), bodies),
        "judge": each_us(lambda several: judged(several, group), [arrivals[:256]] * 4) / 256,
        "answer": each_us(answers.of_batch, [receipts[:100]] * 10) / 100,
    }


def read_claims(payload: bytes) -> None:
    """Steps 2a to 2d, and 4 of a kind of ours."""
    claims = v1.read_claims(payload)
    claims.route()
    claims.identities()


def judged(arrivals: list[Arrival], group: OpenGroup) -> Ledger:
    """One group's verdicts."""
    salts = os.urandom(16 * len(arrivals))
    return Ledger.of(arrivals, group, window=WINDOW, default_retention_s=RETENTION_S, salts=salts)


def each_us(work: Callable[[T], object], items: Iterable[T]) -> float:
    """The best time of `work` on one item, in microseconds."""
    found = list(items)
    best_s = float("inf")
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        for item in found:
            work(item)
        best_s = min(best_s, time.perf_counter() - began_s)
    return round(best_s / len(found) * 1e6, 2)


async def groups(access: Access, device: Device) -> dict[int, dict[str, float]]:
    """For each size of a group: CPU of this process and time until the commit is certain, by envelope."""

    async def connect_lane() -> Connection:
        return await connect(access.of(Part.INGEST), prepare=True)

    key = await stream_of(access, device)
    figures: dict[int, dict[str, float]] = {}
    sequence = 0
    metrics = Metrics()
    async with Lane(
        connect_lane, window=WINDOW, default_retention_s=RETENTION_S, metrics=metrics, moved=lambda _: None
    ) as lane:
        for size, count in GROUPS.items():
            ready: list[list[Arrival]] = []
            for _ in range(count):
                ready.append(
                    [arrival(device, sealed(device, sequence + n, TASK_STATUS), key) for n in range(1, size + 1)]
                )
                sequence += size
            await lane.commit(ready[0])
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            for group in ready[1:]:
                await lane.commit(group)
            envelopes = size * (count - 1)
            figures[size] = {
                "cpu_us": round((time.process_time() - cpu_s) / envelopes * 1e6, 1),
                "until_certain_us": round((time.perf_counter() - wall_s) / envelopes * 1e6, 1),
            }
    return figures


async def stream_of(access: Access, device: Device) -> StreamKey:
    """The key of the device's stream."""
    connection = await connect(access.owner, prepare=False)
    async with connection:
        found = await connection.execute(
            "SELECT stream FROM postseal.streams WHERE tenant = 'bench' AND producer = %s", [device.name]
        )
        row = await found.fetchone()
    assert row is not None
    return StreamKey("bench", row[0])


def arrival(device: Device, body: bytes, key: StreamKey) -> Arrival:
    """What checks 1 to 4 make of an envelope."""
    envelope = dsse.unwrap(body)
    names = v1.read_claims(envelope.payload).identities()
    hashed = hashlib.sha256(names.idempotency_key.encode()).digest()[:16]
    return Arrival(
        VerifiedIdentity("bench", "bench", device.name, Role.DEVICE, "bench", frozenset({"main"})),
        "main",
        LookupNames(key, envelope.keyid, names.event_id.bytes, hashed),
        names.sequence,
        envelope.identity,
        envelope.payload,
        envelope.signature,
        new_correlation_id(),
    )


if __name__ == "__main__":
    main()

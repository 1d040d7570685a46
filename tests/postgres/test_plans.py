"""The hot statements keep their plans: a few index probes an envelope, whatever the statistics say.

Each is planned as a group commit plans it, by a generic plan under SET_PLANS: with empty tables that were never
analysed, and with tens of thousands of rows that were.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fleet import as_owner, enrol

from postseal.commit import Receipt
from postseal.postgres.access import Access
from postseal.postgres.ingest import LOCK_STREAMS, LOOK_UP, READ_KEYS, SET_PLANS, WRITE
from postseal.service import running_service
from postseal.settings import Settings

FILL = """
INSERT INTO tenants SELECT 'tenant-' || n FROM generate_series(1, 100) AS n;
INSERT INTO projects SELECT tenant, 'apollo' FROM tenants;
INSERT INTO devices SELECT 'tenant-' || n % 100 + 1, 'device-' || n, 'owner-1' FROM generate_series(1, 20000) AS n;
INSERT INTO keys (tenant, keyid, device, public_key)
    SELECT tenant, substr(sha256(device::bytea)::text, 3, 43), device, sha256(device::bytea) FROM devices;
INSERT INTO streams (tenant, project, producer) SELECT tenant, 'apollo', device FROM devices;
INSERT INTO identities
    SELECT tenant, stream, n, gen_random_uuid(), gen_random_uuid(), '', '', now() FROM streams, generate_series(1, 3) AS n;
ANALYZE;
"""


@dataclass
class Plan:
    """What a plan is made of."""

    nodes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def types(self) -> set[str]:
        return {node["Node Type"] for node in self.nodes}

    @property
    def indexes(self) -> dict[str, set[str]]:
        """By index, the columns that it is probed by."""
        return {
            node["Index Name"]: set(re.findall(r"\(\(?(?:\w+\.)?(\w+) = ", node["Index Cond"]))
            for node in self.nodes
            if "Index Name" in node
        }


def planned(access: Access, statement: str) -> Plan:
    """The generic plan of a statement with psycopg's named parameters."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement)))
    for number, name in enumerate(names, start=1):
        statement = statement.replace(f"%({name})s", f"${number}")
    plan = Plan()
    with as_owner(access) as owner, owner.transaction():
        owner.execute(SET_PLANS)
        owner.execute(f"PREPARE hot AS {statement}".encode())
        empty = ", ".join("'{}'" for _ in names)
        row = owner.execute(f"EXPLAIN (FORMAT JSON) EXECUTE hot ({empty})".encode()).fetchone()
        owner.execute("DEALLOCATE hot")
    assert row is not None
    _collect(row[0][0]["Plan"], plan)
    return plan


def _collect(node: dict[str, Any], plan: Plan) -> None:
    plan.nodes.append(node)
    for child in node.get("Plans", []):
        _collect(child, plan)


@pytest.fixture(params=["empty", "filled"])
def database(access: Access, request: pytest.FixtureRequest) -> Iterator[Access]:
    """The tables before the first envelope, and with a fleet of 20,000."""
    if request.param == "filled":
        with as_owner(access) as owner:
            owner.execute(FILL)
    yield access


PROBES = {
    LOCK_STREAMS: {
        "streams_pkey": {"tenant", "stream"},
        "projects_pkey": {"tenant", "project"},
        "tenants_pkey": {"tenant"},
    },
    READ_KEYS: {"keys_pkey": {"tenant", "keyid"}},
    LOOK_UP: {
        "identities_tenant_stream_event_id_key": {"tenant", "stream", "event_id"},
        "identities_tenant_stream_idempotency_hash_key": {"tenant", "stream", "idempotency_hash"},
    },
    WRITE: {"streams_pkey": {"tenant", "stream"}},
}


@pytest.mark.parametrize("statement", PROBES, ids=["lock", "keys", "look-up", "write"])
def test_hot_statements_probe_their_indexes_by_every_column(database: Access, statement: str):
    """Nested loops over index probes alone: no table is read through, nothing is hashed or merged."""
    plan = planned(database, statement)
    assert plan.indexes == PROBES[statement]
    scans = {kind for kind in plan.types if "Scan" in kind} - {"Function Scan", "CTE Scan", "Subquery Scan"}
    assert scans <= {"Index Scan", "Index Only Scan"}
    assert not {kind for kind in plan.types if "Join" in kind or "Hash" in kind}


def test_streams_are_locked_in_the_order_of_their_ids(database: Access):
    """The rows are sorted before they are locked, so two groups cannot wait for each other."""
    plan = planned(database, LOCK_STREAMS)
    lock, sort, *_ = plan.nodes
    assert lock["Node Type"] == "LockRows"
    assert sort["Node Type"] == "Sort"
    assert sort["Sort Key"] == ["s.stream"]


def test_updates_of_a_stream_are_heap_only(access: Access):
    """No index holds what changes and half of each page is free: a busy stream makes no index grow."""
    devices = [enrol(access, f"device-{n}") for n in range(4)]

    async def run() -> None:
        async with running_service(Settings(), access) as service:
            for sequence in range(1, 101):
                verdicts = await asyncio.gather(
                    *(service.inbox.receive(d.inbound(d.envelope(sequence * 2))) for d in devices)
                )
                assert all(isinstance(verdict, Receipt) for verdict in verdicts)

    asyncio.run(run())
    with as_owner(access) as owner:
        give_up = time.monotonic() + 10
        updated = hot = 0
        while updated < 400 and time.monotonic() < give_up:
            row = owner.execute(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'streams'"
            ).fetchone()
            assert row is not None
            updated, hot = row
    assert updated == 400
    assert hot >= 0.99 * updated

"""The hot statements keep their plans: a few index probes an envelope, whatever the statistics say.

Each is planned as a group commit plans it, by a generic plan under its own settings: with empty tables that were never
analysed, and with some ten thousand rows that were.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from fleet import as_owner, enrol
from postseal.postgres.access import Access
from postseal.postgres.ingest import LOCK_STREAMS, LOOK_UP, READ_KEYS, WRITE
from postseal.postgres.transaction import SET_BOUNDS_AND_PLANS
from postseal.service import running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt

FILL = """
INSERT INTO tenants SELECT 'tenant-' || n FROM generate_series(1, 100) AS n;
INSERT INTO projects SELECT tenant, 'apollo' FROM tenants;
INSERT INTO devices SELECT 'tenant-' || n % (SELECT count(*) FROM tenants) + 1, 'device-' || n, 'owner-1'
    FROM generate_series(1, 5000) AS n;
INSERT INTO keys (tenant, keyid, device, public_key)
    SELECT tenant, substr(sha256(device::bytea)::text, 3, 43), device, sha256(device::bytea) FROM devices;
INSERT INTO streams (tenant, project, producer) SELECT tenant, 'apollo', device FROM devices;
INSERT INTO identities
    SELECT tenant, stream, n, gen_random_uuid(), gen_random_uuid(), '', '', now()
    FROM streams, generate_series(1, 3) AS n;
ANALYZE;
"""


@dataclass
class Plan:
    """What a plan is made of."""

    nodes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def types(self) -> set[str]:
        """The kinds of its nodes."""
        return {node["Node Type"] for node in self.nodes}

    @property
    def probes(self) -> list[tuple[str, set[str]]]:
        """Each index that is probed, and the columns by which it is."""
        return sorted(
            (node["Index Name"], columns_of(node["Index Cond"])) for node in self.nodes if "Index Name" in node
        )

    @property
    def filters(self) -> list[str]:
        """What is read and then thrown away."""
        return [node["Filter"] for node in self.nodes if "Filter" in node]


def columns_of(condition: str) -> set[str]:
    """The columns of an index condition: `i.a = x`, or `ROW(i.a, i.b) >= ROW(x, y)` together with its upper end."""
    columns = set(re.findall(r"\((?:\w+\.)?(\w+) = ", condition))
    lower, upper = (re.findall(rf"ROW\(([^()]*)\) {end} ", condition) for end in (">=", "<="))
    assert lower == upper
    return columns | {name.rpartition(".")[2] for row in lower for name in row.split(", ")}


def planned(access: Access, statement: str) -> Plan:
    """The generic plan of a statement with psycopg's named parameters."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement)))
    for number, name in enumerate(names, start=1):
        statement = statement.replace(f"%({name})s", f"${number}")
    plan = Plan()
    with as_owner(access) as owner, owner.transaction():
        owner.execute(SET_BOUNDS_AND_PLANS)
        owner.execute(f"PREPARE hot AS {statement}".encode())
        empty = ", ".join("'{}'" for _ in names)
        row = owner.execute(f"EXPLAIN (FORMAT JSON) EXECUTE hot ({empty})".encode()).fetchone()
        owner.execute("DEALLOCATE hot")
    assert row is not None
    collect(row[0][0]["Plan"], plan)
    return plan


def collect(node: dict[str, Any], plan: Plan) -> None:
    """Put a node and all under it into the plan."""
    plan.nodes.append(node)
    for child in node.get("Plans", []):
        collect(child, plan)


@pytest.fixture(params=["empty", "filled"])
def database(access: Access, request: pytest.FixtureRequest) -> Access:
    """The tables before the first envelope, and with a fleet of 5,000."""
    if request.param == "filled":
        with as_owner(access) as owner:
            owner.execute(FILL)
    return access


PROBES: dict[str, dict[str, set[str]]] = {
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


def require_probes(access: Access, statement: str) -> None:
    """Nested loops over index probes alone: nothing is read through, thrown away, hashed or merged."""
    plan = planned(access, statement)
    assert plan.probes == sorted(PROBES[statement].items())
    assert plan.filters == []
    scans = {kind for kind in plan.types if "Scan" in kind}
    assert scans <= {"Index Scan", "Index Only Scan", "Function Scan", "Subquery Scan", "CTE Scan"}
    assert not {kind for kind in plan.types if "Join" in kind or "Hash" in kind}


def test_hot_statements_probe_their_indexes_by_every_column(database: Access):
    """And the streams are locked in the order of their ids, so that two groups cannot deadlock."""
    for statement in PROBES:
        require_probes(database, statement)
    lock, sort, *_ = planned(database, LOCK_STREAMS).nodes
    assert (lock["Node Type"], sort["Node Type"]) == ("LockRows", "Sort")
    assert sort["Sort Key"] == ["s.stream"]


def test_the_look_up_keeps_its_plan_in_a_table_of_one_row(access: Access):
    """There every index costs the same; the one that a busy stream will need must be taken all the same."""
    with as_owner(access) as owner:
        owner.execute(re.sub(r"1, \d+\)", "1, 1)", FILL).encode())
    require_probes(access, LOOK_UP)


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
    assert hot >= 0.95 * updated  # a snapshot of another lane can keep a full page from being pruned

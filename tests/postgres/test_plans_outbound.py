"""The statements of the outbound path keep their plans: a few index probes a delivery, whatever the statistics say.

Each is planned as a worker plans it, by a generic plan under the same settings: with empty tables that were never
analysed, with tables of one row that were, as a queue that was drained leaves them, and with 20,000 deliveries of one
tenant or of many.
"""

import re
from typing import Any, LiteralString

import pytest
from orders import Place, place
from test_plans import Plan, collect

from fleet import as_owner
from postseal.postgres.access import Access
from postseal.postgres.dead_letters import COUNT, PAGE, REDRIVE_ONE, REDRIVE_SOME
from postseal.postgres.deliveries import CLAIM
from postseal.postgres.intents import DROP_INTENTS, REFUSE_INTENTS, TAKE_INTENT, TAKE_INTENTS, TENANTS_WITH_INTENTS
from postseal.postgres.lanes import HOLD, MISPLACED, UNHOLD
from postseal.postgres.mail import CANCEL, SHOW
from postseal.postgres.payloads import DATE_ENDED, DELETE_EXPIRED
from postseal.postgres.sealed import FIND_SEALED
from postseal.postgres.sealing import INSERT_SEALED, LOCK_DESTINATIONS, READ_SETTLED
from postseal.postgres.settles import LOCK_GONE, READ_FENCES, RENEW, SETTLE, SETTLE_ENDED, SETTLE_GONE
from postseal.postgres.transaction import SET_BOUNDS, SET_BOUNDS_AND_PLANS
from postseal.postgres.turns import DUE_TURNS, PENDING_TURNS, SET_WALK

FILL = """
INSERT INTO tenants SELECT 'tenant-' || n FROM generate_series(1, {tenants}) AS n;
INSERT INTO projects SELECT tenant, 'apollo' FROM tenants;
INSERT INTO destinations (tenant, project, destination, mode, url, max_pending)
    SELECT tenant, 'apollo', 'destination-' || n, 'push', 'x', 1000
    FROM tenants, generate_series(1, {destinations}) AS n;
INSERT INTO destination_health (tenant, stream) SELECT tenant, stream FROM destinations;
INSERT INTO deliveries
    SELECT tenant, stream, n, gen_random_uuid(), gen_random_uuid(), 'key:' || n, sha256(''), sha256(''), '', now()
    FROM destinations, generate_series(1, {deliveries}) AS n;
INSERT INTO payloads SELECT tenant, stream, sequence, NULL, '', '' FROM deliveries;
INSERT INTO queue (tenant, stream, sequence, lane, stage, due_at, attempt_limit)
    SELECT tenant, stream, sequence, 'push', CASE sequence % 4 WHEN 1 THEN 'fresh' ELSE 'retry' END, now(), 8
    FROM deliveries WHERE sequence % 2 = 1;
INSERT INTO settlements (tenant, stream, sequence, state, code, project, attempt, attempt_limit)
    SELECT tenant, stream, sequence, 'dead', 'x', 'apollo', 1, 8 FROM deliveries WHERE sequence % 2 = 0 OR sequence = 1;
INSERT INTO intents (tenant, project, destination, idempotency_key, data)
    SELECT tenant, 'apollo', 'destination-1', 'key:0000' || n, '{{}}'
    FROM tenants, generate_series(1, {deliveries}) AS n;
ANALYZE;
"""
STATES = {
    "empty": "ANALYZE tenants",
    "one": FILL.format(tenants=1, destinations=1, deliveries=1),
    "one tenant": FILL.format(tenants=1, destinations=2000, deliveries=10),
    "one destination": FILL.format(tenants=1, destinations=1, deliveries=20000),
    "many tenants": FILL.format(tenants=20, destinations=20, deliveries=50),
    "many small tenants": FILL.format(tenants=2000, destinations=1, deliveries=10),
}


@pytest.fixture(scope="module", params=STATES)
def database(request: pytest.FixtureRequest, shared_access: Access) -> Access:
    """Each state after another; the first is that of a new database."""
    with as_owner(shared_access) as owner:
        if request.param != "empty":
            owner.execute(
                "TRUNCATE attempts, settlements, queue, payloads, deliveries, intents, destination_secrets, "
                "destination_health, destinations, projects, tenants CASCADE"
            )
        owner.execute(STATES[request.param].encode())
    return shared_access


def planned(access: Access, statement: str, settings: LiteralString = SET_BOUNDS_AND_PLANS) -> Plan:
    """The generic plan of a statement with psycopg's named parameters."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement)))
    for number, name in enumerate(names, start=1):
        statement = statement.replace(f"%({name})s", f"${number}")
    nothing = f"({', '.join('NULL' for _ in names)})" if names else ""
    plan = Plan()
    with as_owner(access) as owner, owner.transaction():
        owner.execute(settings)
        owner.execute(f"PREPARE hot AS {statement}".encode())
        row = owner.execute(f"EXPLAIN (FORMAT JSON) EXECUTE hot {nothing}".encode()).fetchone()
        owner.execute("DEALLOCATE hot")
    assert row is not None
    collect(row[0][0]["Plan"], plan)
    return plan


QUEUE = ("queue_pkey", {"tenant", "stream", "sequence"})
DELIVERY = ("deliveries_pkey", {"tenant", "stream", "sequence"})
PAYLOAD = ("payloads_pkey", {"tenant", "stream", "sequence"})
EXPIRED = ("payloads_by_tenant_and_expiry", {"tenant", "expires_at"})
SETTLEMENT = ("settlements_pkey", {"tenant", "stream", "sequence"})
DESTINATION = ("destinations_pkey", {"tenant", "stream"})
HEALTH = ("destination_health_pkey", {"tenant", "stream"})
NAME = ("destinations_tenant_project_destination_key", {"tenant", "project", "destination"})
ID = ("deliveries_tenant_delivery_key", {"tenant", "delivery"})
INTENT = ("intents_pkey", {"tenant", "delivery"})


def in_lane(lane: str) -> tuple[str, set[str]]:
    """A range of what waits in a lane, in the order of time."""
    return (f"queue_{lane}", {"tenant", "stream", "stage", "due_at"})


def claim_in(lane: str) -> list[tuple[str, set[str]]]:
    """What a claim probes."""
    return [DESTINATION, in_lane(lane), in_lane(lane), HEALTH, HEALTH, DELIVERY, PAYLOAD]


REDRIVEN = [PAYLOAD, DESTINATION, SETTLEMENT, PAYLOAD, DELIVERY, HEALTH, HEALTH]
DEAD = ("settlements_dead", {"tenant", "project", "settled_at", "stream", "sequence"})
DEAD_OF_ONE = ("settlements_dead_by_stream", {"tenant", "stream", "settled_at", "sequence"})
NEXT_STREAM = {"tenant", "stream"}
PROBES: list[tuple[str, str, list[tuple[str, set[str]]]]] = [
    ("claim push", CLAIM["push"], claim_in("push")),
    ("claim pull", CLAIM["pull"], claim_in("pull")),
    ("settle", SETTLE, [QUEUE, QUEUE, QUEUE, DESTINATION, HEALTH, HEALTH]),
    ("settle ended", SETTLE_ENDED, [QUEUE, DESTINATION, HEALTH, HEALTH]),
    ("lock gone", LOCK_GONE, [QUEUE, DESTINATION]),
    ("settle gone", SETTLE_GONE, [QUEUE, QUEUE, QUEUE, DESTINATION, DESTINATION, HEALTH, HEALTH]),
    ("read fences", READ_FENCES, [QUEUE]),
    ("renew", RENEW, [QUEUE, QUEUE]),
    ("due", DUE_TURNS["push"], [("queue_push", NEXT_STREAM)] * 2 + [DESTINATION] + [in_lane("push")] * 3),
    ("due pull", DUE_TURNS["pull"], [("queue_pull", NEXT_STREAM)] * 2 + [DESTINATION] + [in_lane("pull")] * 3),
    ("lock", LOCK_DESTINATIONS, [NAME, DESTINATION]),
    ("read settled", READ_SETTLED, [NAME, HEALTH]),
    (
        "find sealed",
        FIND_SEALED,
        [
            ID,
            ("deliveries_tenant_stream_event_id_key", {"tenant", "stream", "event_id"}),
            ("deliveries_tenant_stream_idempotency_key_key", {"tenant", "stream", "idempotency_key"}),
            QUEUE,
            SETTLEMENT,
        ],
    ),
    ("insert sealed", INSERT_SEALED, [DESTINATION]),
    ("take intents", TAKE_INTENTS, [("intents_fresh", {"tenant", "due_at"}), ("intents_again", {"tenant", "due_at"})]),
    ("take intent", TAKE_INTENT, [INTENT]),
    ("drop intents", DROP_INTENTS, [INTENT]),
    ("refuse intents", REFUSE_INTENTS, [INTENT]),
    ("hold", HOLD["push"], [("queue_push", NEXT_STREAM), QUEUE, QUEUE]),
    ("unhold", UNHOLD, [("queue_held", NEXT_STREAM), QUEUE, QUEUE]),
    (
        "misplaced",
        MISPLACED,
        [
            ("queue_held", set()),
            ("queue_held", NEXT_STREAM),
            DESTINATION,
            ("destinations_disabled", set()),
            ("queue_push", NEXT_STREAM),
            ("queue_pull", NEXT_STREAM),
        ],
    ),
    ("page", PAGE[False], [DEAD, DELIVERY, DESTINATION]),
    ("page of one", PAGE[True], [NAME, DEAD_OF_ONE, DELIVERY, DESTINATION]),
    ("count", COUNT[False], [DEAD]),
    ("count of one", COUNT[True], [NAME, DEAD_OF_ONE]),
    ("redrive one", REDRIVE_ONE, [ID, SETTLEMENT, *REDRIVEN]),
    ("redrive", REDRIVE_SOME[False], [DEAD, *REDRIVEN]),
    ("redrive of one", REDRIVE_SOME[True], [NAME, DEAD_OF_ONE, *REDRIVEN]),
    ("show", SHOW, [ID, DESTINATION, HEALTH, QUEUE, SETTLEMENT]),
    (
        "date",
        DATE_ENDED,
        [
            ("settlements_undated", set()),
            DESTINATION,
            ("projects_pkey", {"tenant", "project"}),
            ("tenants_pkey", {"tenant"}),
            PAYLOAD,
            SETTLEMENT,
        ],
    ),
    (
        "delete expired",
        DELETE_EXPIRED,
        [("tenants_pkey", {"tenant"}), EXPIRED, EXPIRED, ("holds_pkey", {"tenant"}), PAYLOAD],
    ),
    ("cancel", CANCEL, [ID, DESTINATION, QUEUE, QUEUE, HEALTH]),
]
SCANS = {
    "Index Scan",
    "Index Only Scan",
    "Tid Scan",
    "Function Scan",
    "Subquery Scan",
    "CTE Scan",
    "WorkTable Scan",
}


def columns_of(condition: str) -> set[str]:
    """The columns of an index condition, alone and in rows."""
    rows = re.findall(r"ROW\(([^()]*)\) [<>]=? ROW", condition)
    columns = {name.rpartition(".")[2] for row in rows for name in row.split(", ")}
    return columns | set(re.findall(r"\((?:\w+\.)?(\w+) [<>=]+ ", condition))


def in_order(probes: list[tuple[str, set[str]]]) -> list[tuple[str, list[str]]]:
    """Probes, whatever their order in the plan."""
    return sorted((index, sorted(columns)) for index, columns in probes)


def test_statements_probe_their_indexes(database: Access):
    """Nested loops alone; no table is read through, and no index but from the row that is wanted on."""
    for name, statement, expected in PROBES:
        plan = planned(database, statement)
        probes = [
            (node["Index Name"], columns_of(node.get("Index Cond", ""))) for node in plan.nodes if "Index Name" in node
        ]
        assert in_order(probes) == in_order(expected), name
        assert {kind for kind in plan.types if "Scan" in kind} <= SCANS, name
        assert not {kind for kind in plan.types if "Join" in kind or kind == "Hash"}, name


def test_tenants_are_found_by_leaps(database: Access):
    """From one to the next, and of each the first that is due, of either kind."""
    plan = planned(database, TENANTS_WITH_INTENTS)
    probes = [(node["Index Name"], columns_of(node["Index Cond"])) for node in plan.nodes if "Index Name" in node]
    due = {"tenant", "due_at"}
    leap = ("intents_pkey", {"tenant"})
    assert in_order(probes) == in_order([leap, leap, ("intents_fresh", due), ("intents_again", due)])


def test_pending_mail_is_found_by_a_walk(database: Access):
    """From one place on, and no further than was asked for: nothing is sorted."""
    plan = planned(database, PENDING_TURNS, f"{SET_BOUNDS}, {SET_WALK}")
    probes = [(node["Index Name"], columns_of(node["Index Cond"])) for node in plan.nodes if "Index Name" in node]
    assert probes == [DESTINATION, HEALTH]
    assert not {kind for kind in plan.types if "Sort" in kind}


def test_locks_are_taken_in_order(database: Access):
    """Each lock of several rows follows a sort by stream and sequence, or by stream."""
    for statement, order in (
        (SETTLE, ["stream", "sequence"]),
        (SETTLE, ["stream"]),
        (SETTLE_GONE, ["stream", "sequence"]),
        (RENEW, ["stream", "sequence"]),
        (HOLD["push"], ["sequence"]),
        (UNHOLD, ["sequence"]),
        (CLAIM["push"], ["stream"]),
        (LOCK_DESTINATIONS, ["stream"]),
        (LOCK_GONE, ["stream"]),
        (REDRIVE_ONE, ["stream"]),
        (REDRIVE_ONE, ["stream", "sequence"]),
    ):
        plan = planned(database, statement)
        keys = [node["Sort Key"] for node in plan.nodes if node["Node Type"] == "Sort"]
        columns = [[key.partition(" ")[0].rpartition(".")[2] for key in each if "tenant" not in key] for each in keys]
        assert order in columns


def rows_read(orders: Place, statement: str, values: dict[str, str]) -> list[int]:
    """How many rows each step of a statement yields or throws away, when it runs."""
    for name, value in values.items():
        statement = statement.replace(f"%({name})s", value)
    plan = Plan()
    with as_owner(orders.access) as owner, owner.transaction(force_rollback=True):
        owner.execute(SET_BOUNDS_AND_PLANS)
        row = owner.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}".encode()).fetchone()
    assert row is not None
    collect(row[0][0]["Plan"], plan)
    return [_rows(node) for node in plan.nodes]


def _rows(node: dict[str, Any]) -> int:
    thrown_away = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Join Filter", 0)
    return round(max(node["Actual Rows"], thrown_away) * node["Actual Loops"])


def test_a_claim_reads_what_it_claims(access: Access):
    """No step has more than 100 rows, however many wait: nothing is sorted that is not taken."""
    with as_owner(access) as owner:
        owner.execute(STATES["many tenants"].encode())
    orders = place(access)
    orders.seal(100)
    orders.as_owner(
        "INSERT INTO queue (tenant, stream, sequence, lane, stage, due_at, attempt_limit) "
        "SELECT %(tenant)s, %(stream)s, n, 'push', stage, now() + interval '1 hour', 8 "
        "FROM generate_series(1000, 11000) AS n, unnest(ARRAY['retry']) AS stage"
    )
    claim = {
        "tenant": "'{acme,acme}'",
        "stream": f"'{{{orders.stream},{orders.stream}}}'",
        "stage": "'{fresh,retry}'",
        "most": "'{100,100}'",
        "since": "'{NULL,NULL}'",
        "leased": "'{f,t}'",
        "most_in_all": "100",
        "lease": "interval '1 minute'",
        "token": "gen_random_uuid()",
    }
    rows = rows_read(orders, CLAIM["push"], claim)
    assert 100 in rows
    assert max(rows) <= 101

"""`verify`: a healthy database has no breach, whatever goes on; each invariant that is broken by hand is named."""

import asyncio
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fleet import Device, as_owner, enrol
from healthy import Healthy, copied, dump, populate
from outgoing import new_destination, signing_key, wish
from postseal.envelope.kinds import NO_KINDS
from postseal.errors import StartupError
from postseal.outbound.outbox import Outbox
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part, connect
from postseal.postgres.deliveries import Wanted, claim
from postseal.postgres.invariants import SET_BOUNDS, Breach, Invariant, open_snapshot
from postseal.postgres.settles import Settle, settle
from postseal.rules.delivery import Verdict
from postseal.service import running_service
from postseal.settings import Settings
from postseal.signing.pem_folder import PemFolder
from postseal.verdicts import Receipt
from postseal.verify import MAX_NAMED, PROOFS, Report, Signatures, no_progress, prove, verify

Found = tuple[str, str | None, str | None, int | None]
"""Invariant, tenant, producer or destination, sequence."""

LARGE, RETAINED = 1_000_000, 20_000
LARGE_S = 180.0
GROWTH_KIB = 64 * 1024

UNCHECKED = (
    "ALTER TABLE queue DROP CONSTRAINT queue_check, DROP CONSTRAINT queue_check1, DROP CONSTRAINT queue_lane_check"
)
UNCHECKED_ENDS = (
    "ALTER TABLE settlements DROP CONSTRAINT settlements_check, DROP CONSTRAINT settlements_check1,"
    " DROP CONSTRAINT settlements_state_check"
)


def placed(statement: str, healthy: Healthy) -> bytes:
    """A statement that breaks something, with the places of that database."""
    whole, orders = healthy.whole.stream, healthy.orders.stream
    event = "(SELECT event_identity FROM {} WHERE tenant = 'acme' AND stream = {} AND sequence = 3)"
    return statement.format(
        whole=whole,
        raised=healthy.raised.stream,
        orders=orders,
        of_whole=f"WHERE tenant = 'acme' AND stream = {whole}",
        of_orders=f"WHERE tenant = 'acme' AND stream = {orders}",
        third=event.format("identities", whole),
        third_order=event.format("deliveries", orders),
        audit_columns="tenant, project, account, device, action, outcome, event_identity, correlation_id",
    ).encode()


def inbound(invariant: str, sequence: int | None, producer: str = "device-01", tenant: str = "acme") -> Found:
    """A breach in a device's stream."""
    return invariant, tenant, producer, sequence


def outbound(invariant: str, sequence: int | None, destination: str = "orders") -> Found:
    """A breach in acme's mail."""
    return invariant, "acme", destination, sequence


BROKEN: dict[str, tuple[list[str], set[Found]]] = {
    "an identity below the cursor is gone": (
        ["DELETE FROM identities {of_whole} AND sequence = 5"],
        {inbound("identity_missing", 5), inbound("accepted_lost", None), inbound("payload_orphaned", 5)},
    ),
    "an identity that the bitmap marks is gone": (
        ["DELETE FROM identities {of_whole} AND sequence = 13"],
        {inbound("identity_missing", 13), inbound("accepted_lost", None), inbound("payload_orphaned", 13)},
    ),
    "the cursor stands further than what is retained": (
        ["UPDATE streams SET contiguous = 11, above = '\\x0b' {of_whole}"],
        {inbound("identity_missing", 11), inbound("bitmap_malformed", 12)},
    ),
    "the cursor stands behind what is retained": (
        ["UPDATE streams SET contiguous = 9, above = '\\x2d' {of_whole}"],
        {inbound("bitmap_malformed", 10)},
    ),
    "a bit is missing": (
        ["UPDATE streams SET above = '\\x06' {of_whole}"],
        {inbound("identity_unmarked", 15)},
    ),
    "a bit is too many": (
        ["UPDATE streams SET above = '\\x1e' {of_whole}"],
        {inbound("identity_missing", 14)},
    ),
    "the bitmap ends with nothing": (
        ["UPDATE streams SET above = '\\x1600' {of_whole}"],
        {inbound("bitmap_malformed", 11)},
    ),
    "the bitmap is gone": (
        ["UPDATE streams SET above = '' {of_whole}"],
        {inbound("identity_unmarked", 12)},
    ),
    "the highest is too high": (
        ["UPDATE streams SET highest = 16 {of_whole}"],
        {inbound("highest_wrong", 16)},
    ),
    "the highest is too low": (
        ["UPDATE streams SET highest = 14 {of_whole}"],
        {inbound("highest_wrong", 14)},
    ),
    "a floor rose by itsel": (
        ["UPDATE streams SET floor = 5 {of_whole}"],
        {inbound("floor_unexplained", 5)},
    ),
    "a floor sank": (
        ["UPDATE streams SET floor = 0 WHERE stream = {raised}"],
        {inbound("floor_unexplained", 0, "device-02"), inbound("identity_missing", 2, "device-02")},
    ),
    "an acceptance was not audited": (
        ["DELETE FROM audit_events WHERE event_identity = {third} AND outcome <> 'duplicate'"],
        {inbound("audit_missing", 3)},
    ),
    "an event was accepted twice": (
        [
            (
                "INSERT INTO audit_events ({audit_columns}) SELECT {audit_columns} FROM audit_events"
                " WHERE event_identity = {third} AND outcome <> 'duplicate'"
            )
        ],
        {inbound("accepted_twice", 3)},
    ),
    "an acceptance is audited in another tenant": (
        ["UPDATE audit_events SET tenant = 'umbra' WHERE event_identity = {third} AND outcome <> 'duplicate'"],
        {inbound("audit_missing", 3), inbound("accepted_lost", None, tenant="umbra")},
    ),
    "an identity got into another tenant": (
        ["UPDATE identities SET tenant = 'umbra' {of_whole} AND sequence = 3"],
        {
            inbound("identity_missing", 3),
            inbound("accepted_lost", None),
            inbound("payload_orphaned", 3),
            ("reference_broken", "umbra", None, 3),
            ("audit_missing", "umbra", None, 3),
        },
    ),
    "a stream changed its tenant": (
        ["UPDATE streams SET tenant = 'umbra', project = 'apollo', producer = 'device-09' WHERE stream = {raised}"],
        {
            inbound("reference_broken", None, "device-09", "umbra"),
            inbound("identity_missing", 3, "device-09", "umbra"),
            inbound("identity_missing", 5, "device-09", "umbra"),
            inbound("highest_wrong", 5, "device-09", "umbra"),
            inbound("floor_unexplained", 2, "device-09", "umbra"),
            ("reference_broken", "acme", None, 1),
            ("audit_missing", "acme", None, 1),
            ("audit_missing", "acme", None, 3),
            ("audit_missing", "acme", None, 5),
            ("accepted_lost", "acme", None, None),
        },
    ),
    "a key is gone": (
        ["DELETE FROM keys WHERE device = 'device-02'"],
        {inbound("key_unknown", 1, "device-02")},
    ),
    "a key is another device's": (
        ["UPDATE keys SET device = 'device-01' WHERE device = 'device-02'"],
        {inbound("key_unknown", 1, "device-02")},
    ),
    "a key's name is another's": (
        [
            (
                "UPDATE keys SET public_key = (SELECT public_key FROM signing_keys WHERE tenant = 'umbra')"
                " WHERE device = 'device-02'"
            )
        ],
        {inbound("key_misnamed", None, "device-02")}
        | {inbound("signature_wrong", sequence, "device-02") for sequence in (1, 3, 5)},
    ),
    "a payload was changed": (
        [
            (
                "UPDATE payloads SET payload = replace(convert_from(payload, 'UTF8'), 'Ms\":5', 'Ms\":6')::bytea"
                " {of_whole} AND sequence = 3"
            )
        ],
        {inbound("event_identity_wrong", 3), inbound("signature_wrong", 3)},
    ),
    "a payload is no JSON": (
        ["UPDATE payloads SET payload = '[' {of_whole} AND sequence = 3"],
        {inbound("event_identity_wrong", 3), inbound("signature_wrong", 3), inbound("content_wrong", 3)},
    ),
    "a signature was changed": (
        ["UPDATE payloads SET signature = set_byte(signature, 63, 255) {of_whole} AND sequence = 3"],
        {inbound("signature_wrong", 3)},
    ),
    "an event id is not the payload's": (
        ["UPDATE identities SET event_id = gen_random_uuid() {of_whole} AND sequence = 3"],
        {inbound("content_wrong", 3)},
    ),
    "an idempotency key is not the payload's": (
        ["UPDATE identities SET idempotency_hash = gen_random_uuid() {of_whole} AND sequence = 3"],
        {inbound("content_wrong", 3)},
    ),
    "a payload never expires": (
        ["UPDATE payloads SET expires_at = NULL {of_whole} AND sequence = 3"],
        {inbound("payload_expiry", 3)},
    ),
    "a payload belongs to nothing": (
        ["INSERT INTO payloads VALUES ('acme', 999, 1, now(), '', ''), ('acme', {orders}, 99, NULL, '', '')"],
        {("payload_orphaned", "acme", None, 1), outbound("payload_orphaned", 99)},
    ),
    "two streams have one number": (
        [
            (
                "INSERT INTO destinations (tenant, stream, project, destination, mode, max_pending)"
                " VALUES ('umbra', {whole}, 'apollo', 'other', 'pull', 1)"
            ),
            "INSERT INTO destination_health (tenant, stream) VALUES ('umbra', {whole})",
        ],
        {inbound("stream_id_shared", None), ("stream_id_shared", "umbra", "other", None)},
    ),
    "the numbers of streams begin anew": (
        ["ALTER SEQUENCE stream_ids RESTART"],
        {("numbers_behind", None, None, None)},
    ),
    "the numbers of audit events begin anew": (
        ["ALTER TABLE audit_events ALTER id RESTART"],
        {("numbers_behind", None, None, None)},
    ),
    "a credential is for a project of nobody": (
        ["UPDATE credentials SET projects = '{{apollo,zeus}}' WHERE device = 'device-02'"],
        {("reference_broken", "acme", None, None)},
    ),
    "a credential is a device's that there is not": (
        ["UPDATE credentials SET device = 'device-09' WHERE device = 'device-02'"],
        {("reference_broken", "acme", None, None)},
    ),
    "a login is for a project of nobody": (
        ["INSERT INTO enqueue_logins VALUES ('app', 'acme', '{{zeus}}')"],
        {("reference_broken", "acme", None, None)},
    ),
    "an audit event is of a project of nobody": (
        [
            (
                "INSERT INTO audit_events (tenant, project, account, action, outcome, correlation_id)"
                " VALUES ('acme', 'zeus', 'x', 'x', 'done', gen_random_uuid())"
            )
        ],
        {("reference_broken", "acme", None, None)},
    ),
    "what a destination settled is nobody's": (
        ["INSERT INTO destination_health (tenant, stream) VALUES ('umbra', {orders})"],
        {("reference_broken", "umbra", None, None)},
    ),
    "a delivery is gone": (
        ["DELETE FROM deliveries {of_orders} AND sequence = 1"],
        {
            outbound("delivery_missing", 1),
            outbound("delivery_unknown", 1),
            outbound("payload_orphaned", 1),
            ("accepted_lost", "acme", None, None),
        },
    ),
    "a sequence was given out for nothing": (
        ["UPDATE destinations SET highest = 11 {of_orders}"],
        {outbound("delivery_missing", 11), outbound("settled_wrong", None)},
    ),
    "a sequence was not given out": (
        ["UPDATE destinations SET highest = 9 {of_orders}"],
        {outbound("delivery_unnumbered", 10), outbound("settled_wrong", None)},
    ),
    "a delivery does not wait": (
        ["DELETE FROM queue {of_orders} AND sequence = 10"],
        {outbound("delivery_nowhere", 10), outbound("settled_wrong", None)},
    ),
    "a delivery waits and has ended": (
        [
            (
                "INSERT INTO settlements (tenant, stream, sequence, state, attempt, attempt_limit)"
                " VALUES ('acme', {orders}, 10, 'cancelled', 0, 8)"
            )
        ],
        {outbound("delivery_twice", 10), outbound("settled_wrong", None)},
    ),
    "what was never sealed has ended": (
        [
            (
                "INSERT INTO settlements (tenant, stream, sequence, state, attempt, attempt_limit)"
                " VALUES ('acme', {orders}, 99, 'cancelled', 0, 8)"
            )
        ],
        {outbound("delivery_unknown", 99), outbound("settled_wrong", None)},
    ),
    "too many count as settled": (
        ["UPDATE destination_health SET settled = settled + 1 {of_orders}"],
        {outbound("settled_wrong", None)},
    ),
    "nothing tells how many are settled": (
        ["DELETE FROM destination_health {of_orders}"],
        {outbound("settled_wrong", None)},
    ),
    "a lease has no token": (
        [UNCHECKED, "UPDATE queue SET token = NULL {of_orders} AND sequence = 4"],
        {outbound("delivery_impossible", 4)},
    ),
    "a token has no lease": (
        [UNCHECKED, "UPDATE queue SET token = gen_random_uuid() {of_orders} AND sequence = 10"],
        {outbound("delivery_impossible", 10)},
    ),
    "more attempts were made than may be": (
        ["UPDATE queue SET attempt = 9 {of_orders} AND sequence = 4"],
        {outbound("delivery_impossible", 4)},
    ),
    "what has no attempt left waits": (
        ["UPDATE queue SET attempt_limit = 1 {of_orders} AND sequence = 3"],
        {outbound("delivery_impossible", 3)},
    ),
    "what was never claimed is out": (
        ["UPDATE queue SET attempt = 0 {of_orders} AND sequence = 4"],
        {outbound("delivery_impossible", 4)},
    ),
    "mail to be pushed is to be pulled": (
        ["UPDATE queue SET lane = 'pull' {of_orders} AND sequence = 10"],
        {outbound("delivery_impossible", 10)},
    ),
    "an expiry was forgotten": (
        ["UPDATE deliveries SET expires_at = now() + interval '1 day' {of_orders} AND sequence = 10"],
        {outbound("delivery_impossible", 10)},
    ),
    "something is due after its expiry": (
        [
            "UPDATE deliveries SET expires_at = 'tomorrow' {of_orders} AND sequence = 10",
            "UPDATE queue SET expires_at = 'tomorrow', due_at = 'infinity' {of_orders} AND sequence = 10",
        ],
        {outbound("delivery_impossible", 10)},
    ),
    "what waits has no payload": (
        ["DELETE FROM payloads {of_orders} AND sequence = 10"],
        {outbound("payload_missing", 10)},
    ),
    "what waits has a payload that expires": (
        ["UPDATE payloads SET expires_at = now() + interval '1 day' {of_orders} AND sequence = 10"],
        {outbound("payload_expiry", 10)},
    ),
    "something ended in no known way": (
        [UNCHECKED_ENDS, "UPDATE settlements SET state = 'lost' {of_orders} AND sequence = 1"],
        {outbound("delivery_impossible", 1)},
    ),
    "something was delivered without an attempt": (
        ["UPDATE settlements SET attempt = 0 {of_orders} AND sequence = 1"],
        {outbound("delivery_impossible", 1)},
    ),
    "something ended after more attempts than may be": (
        ["UPDATE settlements SET attempt = 9 {of_orders} AND sequence = 1"],
        {outbound("delivery_impossible", 1)},
    ),
    "a dead letter has no code": (
        [UNCHECKED_ENDS, "UPDATE settlements SET code = NULL {of_orders} AND sequence = 2"],
        {outbound("delivery_impossible", 2)},
    ),
    "a dead letter is listed in another project": (
        ["UPDATE settlements SET project = 'zeus' {of_orders} AND sequence = 2"],
        {outbound("delivery_impossible", 2)},
    ),
    "an attempt failed that was never made": (
        ["INSERT INTO attempts (tenant, stream, sequence, attempt, code) VALUES ('acme', {orders}, 3, 2, 'x')"],
        {outbound("delivery_impossible", 3)},
    ),
    "an attempt failed that is under way": (
        ["INSERT INTO attempts (tenant, stream, sequence, attempt, code) VALUES ('acme', {orders}, 4, 1, 'x')"],
        {outbound("delivery_impossible", 4)},
    ),
    "an attempt failed that delivered": (
        ["INSERT INTO attempts (tenant, stream, sequence, attempt, code) VALUES ('acme', {orders}, 1, 1, 'x')"],
        {outbound("delivery_impossible", 1)},
    ),
    "an attempt is of no delivery": (
        ["INSERT INTO attempts (tenant, stream, sequence, attempt, code) VALUES ('acme', {orders}, 99, 1, 'x')"],
        {outbound("delivery_impossible", 99)},
    ),
    "a signing key is gone": (
        ["DELETE FROM signing_keys WHERE tenant = 'umbra'"],
        {("key_unknown", "umbra", "orders", 1)},
    ),
    "mail was signed by a device": (
        ["UPDATE deliveries SET keyid = (SELECT keyid FROM keys WHERE device = 'device-02') WHERE tenant = 'umbra'"],
        {("key_unknown", "umbra", "orders", 1)},
    ),
    "a delivery got into another tenant": (
        ["UPDATE deliveries SET tenant = 'acme' WHERE tenant = 'umbra'"],
        {
            ("reference_broken", "acme", None, 1),
            ("delivery_missing", "umbra", "orders", 1),
            ("delivery_nowhere", "acme", None, 1),
            ("delivery_unknown", "umbra", "orders", 1),
            ("payload_orphaned", "umbra", "orders", 1),
            ("accepted_lost", "umbra", None, None),
        },
    ),
    "an order was not audited": (
        ["DELETE FROM audit_events WHERE event_identity = {third_order}"],
        {outbound("audit_missing", 3)},
    ),
    "mail to send was changed": (
        [
            (
                "UPDATE payloads SET payload = replace(convert_from(payload, 'UTF8'), 'orders', 'sredro')::bytea"
                " {of_orders} AND sequence = 3"
            )
        ],
        {outbound("event_identity_wrong", 3), outbound("signature_wrong", 3), outbound("content_wrong", 3)},
    ),
    "mail has another idempotency key": (
        ["UPDATE deliveries SET idempotency_key = 'somebody-else' {of_orders} AND sequence = 3"],
        {outbound("content_wrong", 3)},
    ),
    "a part may do more": (
        ["GRANT DELETE ON audit_events TO postseal_admin", "GRANT UPDATE (payload) ON payloads TO PUBLIC"],
        {("grants", None, None, None)},
    ),
    "a part may do less": (
        ["REVOKE INSERT ON audit_events FROM postseal_ingest"],
        {("grants", None, None, None)},
    ),
    "applications' rows are not kept apart": (
        ["ALTER TABLE intents DISABLE ROW LEVEL SECURITY"],
        {("grants", None, None, None)},
    ),
    "a table is not the owner's": (
        ["ALTER TABLE audit_events OWNER TO postseal_admin"],
        {("grants", None, None, None)},
    ),
    "the schema is another release's": (
        ["INSERT INTO schema_migrations (version, name) VALUES (9999, 'later')"],
        {("schema", None, None, None)},
    ),
    "the schema is gone": (
        ["DROP SCHEMA postseal CASCADE"],
        {("schema", None, None, None)},
    ),
}


@pytest.fixture(scope="module")
def healthy(shared_access: Access, tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """One database in which nothing is amiss, to be copied."""
    return asyncio.run(populate(shared_access, tmp_path_factory.mktemp("signing")))


@pytest.fixture
def copy(healthy: Healthy) -> Iterator[Access]:
    """A copy of it."""
    with copied(healthy.access) as access:
        yield access


def proved(access: Access, signatures: Signatures = Signatures.ALL) -> Report:
    """The report on a database."""
    return asyncio.run(verify(access.owner, signatures=signatures))


def found(breach: Breach) -> Found:
    """What a test compares of it."""
    return breach.invariant, breach.tenant, breach.producer or breach.destination, breach.sequence


def test_a_healthy_database_has_no_breach_and_is_not_changed(healthy: Healthy):
    """All proofs are told as they come, all signatures are verified, and no row of any table is another one after."""
    before, told = dump(healthy.access), []
    report = asyncio.run(verify(healthy.access.owner, progress=lambda *progress: told.append(progress)))
    assert report.breaches == []
    assert report.holds
    assert report.rows["identities"] == 19
    assert report.signatures == report.rows["payloads"] == 18 + 13
    assert [proof.name for proof in PROOFS] == [name for name, done, _ in told[: 2 * len(PROOFS)] if done]
    assert told[-1][1:] == (31, 31)
    assert dump(healthy.access) == before


def proved_once_broken(healthy: Healthy, *statements: str) -> Report:
    """The report of a transaction that has broken something and is then rolled back."""

    async def flow() -> Report:
        async with await connect(healthy.access.owner, prepare=False) as connection:
            await connection.execute("BEGIN")
            await connection.execute(SET_BOUNDS)
            for statement in statements:
                await connection.execute(placed(statement, healthy))
            report = await prove(connection, Signatures.ALL, no_progress)
            await connection.execute("ROLLBACK")
            return report

    return asyncio.run(flow())


@pytest.mark.parametrize("what", BROKEN)
def test_each_breach_is_named(healthy: Healthy, what: str):
    """With its invariant and its place, and nothing else is said to be broken."""
    statements, expected = BROKEN[what]
    report = proved_once_broken(healthy, *statements)
    assert {found(breach) for breach in report.breaches} == expected
    assert not report.holds
    assert report.counts.total() >= len(expected)
    for breach in report.breaches:
        assert str(breach).startswith(f"{breach.invariant}: ")


def test_each_invariant_is_broken_once():
    """None of them is believed without a test that it can fail."""
    assert {invariant for _, expected in BROKEN.values() for invariant, *_ in expected} == set(Invariant)


def test_many_breaches_of_a_kind_are_counted_and_some_are_named(healthy: Healthy):
    """So that a report stays as short as it can be read, however much is lost."""
    many = "INSERT INTO payloads SELECT 'acme', 999, n, NULL, '', '' FROM generate_series(1, 1000) AS n"
    report = proved_once_broken(healthy, many)
    assert report.counts == {"payload_orphaned": 1000}
    assert len(report.breaches) == MAX_NAMED


def test_fewer_signatures_can_be_verified(copy: Access):
    """What was changed is found by its event identity all the same."""
    with as_owner(copy) as owner:
        owner.execute("UPDATE payloads SET payload = '{}' WHERE sequence = 3")
    for signatures in (Signatures.SAMPLE, Signatures.NONE):
        report = proved(copy, signatures)
        assert report.signatures < report.rows["payloads"]
        assert report.counts["event_identity_wrong"] == report.counts["content_wrong"] == 4


def test_what_is_committed_after_the_beginning_is_not_seen(copy: Access):
    """All proofs are about one moment: even a broken database is healthy in a snapshot that is older."""
    told: list[str] = []

    def break_it(proof: str, _done: int, _of: int) -> None:
        if not told:
            with as_owner(copy) as owner:
                owner.execute("DELETE FROM identities")
        told.append(proof)

    assert asyncio.run(verify(copy.owner, progress=break_it)).holds
    assert told
    assert not proved(copy).holds


def test_nothing_can_be_written_by_the_proofs(access: Access):
    """Even a proof that tried to would be refused, as the owner too."""

    async def flow() -> None:
        async with await connect(access.owner, prepare=False) as connection:
            await open_snapshot(connection)
            await connection.execute("DELETE FROM streams")

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        asyncio.run(flow())


def test_a_login_that_may_only_read_is_enough(copy: Access):
    """One that is a member of pg_read_all_data; and one that may read less gets an error, never a good report."""
    auditor = f"t{uuid4().hex}"
    login = make_conninfo(copy.owner, user=auditor, password=auditor, passfile="")
    with as_owner(copy) as owner:
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(auditor), auditor))
        try:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                asyncio.run(verify(login))
            owner.execute(sql.SQL("GRANT pg_read_all_data TO {}").format(sql.Identifier(auditor)))
            assert asyncio.run(verify(login)).holds
        finally:
            owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(auditor)))
    for part in Part:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            asyncio.run(verify(copy.of(part)))


def test_a_database_that_cannot_be_reached_is_one_line(access: Access):
    """It says so, without a password."""
    nowhere = make_conninfo(access.owner, dbname="nowhere", password="canary")
    with pytest.raises(StartupError, match=r"^cannot reach the database: [^\n]*$") as refused:
        asyncio.run(verify(nowhere))
    assert "canary" not in str(refused.value)


def test_a_role_that_may_too_much_is_named(cluster: Access, tmp_path: Path):
    """Under whatever prefix the roles are: they stand in no table, so this needs a deployment of its own."""
    prefix, name = f"t{uuid4().hex[:12]}", f"test_{uuid4().hex}"
    access = Access(make_conninfo(cluster.owner, dbname=name), tmp_path / "roles.pgpass", prefix)
    roles = [f"{prefix}_{part}" for part in (*Part, "owner")]
    with as_owner(cluster) as owner:
        owner.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            access.migrate()
            assert proved(access).breaches == []
            owner.execute(sql.SQL("ALTER ROLE {} CREATEDB").format(sql.Identifier(f"{prefix}_sweep")))
            owner.execute(
                sql.SQL("GRANT {} TO {}").format(sql.Identifier(f"{prefix}_owner"), sql.Identifier(f"{prefix}_admin"))
            )
            details = {breach.detail.split()[2] for breach in proved(access).breaches}
            assert details == {f"{prefix}_sweep", f"{prefix}_admin"}
        finally:
            owner.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
            for role in roles:
                owner.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(role)))


async def _keep_sending(access: Access, device: Device, done: asyncio.Event) -> None:
    """One batch of a device after another, each with a hole that the next one fills."""
    async with running_service(Settings(window=64, sync_burst=10**9), access) as service:
        for first in count(1, 10):
            if done.is_set():
                break
            filling = [first - 10] if first > 1 else []
            bodies = [device.envelope(sequence) for sequence in (*filling, *range(first + 1, first + 10))]
            for verdict in await service.inbox.receive_batch(device.inbound(b"\n".join(bodies))):
                assert isinstance(verdict, Receipt)


async def _keep_delivering(access: Access, folder: Path, done: asyncio.Event) -> None:
    """Wishes are sealed, claimed, and settled this way and that."""
    orders = new_destination(access)
    async with Database(access.of(Part.DELIVERY), prepare=True) as database:
        outbox = Outbox(database, PemFolder(folder), kinds=NO_KINDS, attempt_limit=2)
        wanted = [Wanted(orders.stream, 10, 10)]
        while not done.is_set():
            await outbox.enqueue("acme", "apollo", [wish() for _ in range(10)], "owner-1")
            claimed = await database.transact(lambda c: claim(c, "acme", wanted, lane="push", lease_s=0.01))
            settles = [
                Settle(lease.stream, lease.sequence, lease.attempt, lease.token, verdict)
                for lease, verdict in zip(claimed.leases, [Verdict.DELIVERED, Verdict.RELEASE] * 10, strict=False)
            ]
            if settles:
                await database.transact(lambda c, settles=settles: settle(c, "acme", settles))


@pytest.mark.parametrize("times", [3, pytest.param(40, marks=pytest.mark.soak)])
def test_what_goes_on_meanwhile_is_no_breach(access: Access, tmp_path: Path, times: int):
    """Envelopes are taken in, mail is sealed, claimed and settled: each report has one moment, and nothing amiss."""
    devices = [enrol(access, f"device-{n}") for n in range(2)]
    signing_key(access, tmp_path)

    async def all_of_it() -> list[Report]:
        done = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for device in devices:
                tasks.create_task(_keep_sending(access, device, done))
            tasks.create_task(_keep_delivering(access, tmp_path, done))
            try:
                return [await verify(access.owner) for _ in range(times)]
            finally:
                done.set()

    reports = asyncio.run(all_of_it())
    assert [report.breaches for report in reports if not report.holds] == []
    sizes = [report.rows["identities"] + report.rows["settlements"] for report in reports]
    assert sizes == sorted(sizes)
    assert proved(access).rows["settlements"] > 0


FILL = (
    (
        "INSERT INTO identities SELECT 'acme', %(stream)s, n, gen_random_uuid(), gen_random_uuid(),"
        " sha256(n::text::bytea), %(keyid)s, now() FROM generate_series(1, %(count)s) AS n"
    ),
    (
        "INSERT INTO audit_events (tenant, project, account, device, action, outcome, event_identity, correlation_id)"
        " SELECT 'acme', 'apollo', 'owner-1', 'device-01', 'envelope', 'accepted', sha256(n::text::bytea),"
        " gen_random_uuid() FROM generate_series(1, %(count)s) AS n"
    ),
    "UPDATE streams SET contiguous = %(count)s, highest = %(count)s WHERE stream = %(stream)s",
)


@pytest.mark.soak
def test_a_large_database_is_proved_in_bounded_memory(access: Access):
    """A million identities whose payloads are gone, and a device that sends 20,000 beside them."""
    swept, device = enrol(access), enrol(access, "device-02")
    values = {"stream": swept.stream, "keyid": swept.keyid, "count": LARGE}
    with as_owner(access) as owner:
        for statement in FILL:
            owner.execute(statement, values)

    async def send() -> None:
        async with running_service(Settings(sync_burst=10**9), access) as service:
            for first in range(1, RETAINED, 100):
                bodies = [device.envelope(sequence) for sequence in range(first, first + 100)]
                await service.inbox.receive_batch(device.inbound(b"\n".join(bodies)))

    asyncio.run(send())
    before_kib = getrusage(RUSAGE_SELF).ru_maxrss
    began_s = time.monotonic()
    report = proved(access)
    took_s = time.monotonic() - began_s
    print(f"proved in {took_s:.1f} s")
    assert report.breaches == []
    assert (report.rows["identities"], report.signatures) == (LARGE + RETAINED, RETAINED)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before_kib < GROWTH_KIB
    assert took_s < LARGE_S

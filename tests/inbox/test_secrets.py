"""No credential, signature, payload or password is ever audited, logged, shown in an error or in an object's repr.

Each outcome and reason is brought about once with strings that can be found again; then everything that people read is
searched for them: audit rows, all log lines at the most talkative level, the server's own log, errors and reprs.
"""

# Empties what the service remembers, and its limits:
# pyright: reportPrivateUsage=false

import base64
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from psycopg.conninfo import conninfo_to_dict

from fleet import PEER, Device, as_owner, issue
from postseal import logs
from postseal.envelope import dsse, ed25519
from postseal.errors import Refused
from postseal.identity.tokens import NewToken, new_token
from postseal.inbound.commit import Committer
from postseal.inbound.inbox import Inbound
from postseal.inbound.judging import Entry
from postseal.outcomes import REASONS_OF_ENVELOPES, Outcome, Reason
from postseal.postgres import ingest
from postseal.postgres.access import Access
from postseal.postgres.migrate import read_passwords
from postseal.service import Service
from postseal.verdicts import Verdict

pytestmark = pytest.mark.anyio

FREE_TEXT = "canary-in-the-payload"
CANARY_KEY = "canary-idempotency-key"
CANARY_BOOT = "deadbeef-dead-4ead-8ead-deadbeefcafe"
BEYOND = 5000
DRAINS = 100
"""A limiter that was emptied may have let one permit in before the request; then again."""
POISON = 77


@pytest.fixture
def talkative(capfd: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    """Everything that is logged, by us and by libraries, goes to the captured stderr."""
    root = logging.getLogger()
    before, level, configured = root.handlers[:], root.level, structlog.get_config()
    logs.configure("debug")
    yield capfd
    root.handlers[:] = before
    root.setLevel(level)
    structlog.configure(**configured)


class Witnessed:
    """Notes what passes by on the way to a commit, as its repr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.bodies: list[bytes] = []
        commit, close = Committer.commit, ingest.close_group

        async def noting_commit(committer: Committer, entries: list[Entry]) -> list[Verdict]:
            self.seen.append(repr(entries))
            return await commit(committer, entries)

        async def noting_close(*args: Any, **rows: Any) -> None:
            self.seen.append(repr(rows))
            await close(*args, **rows)

        monkeypatch.setattr(Committer, "commit", noting_commit)
        monkeypatch.setattr("postseal.inbound.lane.close_group", noting_close)

    async def send(self, service: Service, credential: str, body: bytes) -> str:
        """Send one envelope; returns its outcome or reason."""
        self.bodies.append(body)
        try:
            inbound = Inbound(await service.door.identify(PEER, credential), body)
            self.seen.append(repr(inbound))
            verdict = await service.inbox.receive(inbound)
        except Refused as refused:
            self.seen += [str(refused), repr(refused), repr(refused.__cause__), repr(refused.__context__)]
            return refused.reason
        self.seen.append(repr(verdict))
        return getattr(verdict, "outcome", None) or verdict.reason  # type: ignore[union-attr]  # one of two


async def test_no_secret_is_ever_shown(
    access: Access,
    service: Service,
    device: Device,
    talkative: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """After every outcome and every reason that an envelope can meet, and a write that fails with its row."""
    witnessed = Witnessed(monkeypatch)
    stranger, operator = new_token(), issue(access, "acme", None, ["apollo"], role="operator")
    told = await _everything(access, service, device, witnessed, stranger, operator)
    of_the_adapter = {Reason.BODY_TOO_LARGE, Reason.REQUEST_TIMEOUT, Reason.UNSUPPORTED_MEDIA_TYPE}
    expected = set(REASONS_OF_ENVELOPES) - of_the_adapter
    assert told == expected | set(Outcome)

    with as_owner(access) as owner:
        audit = owner.execute("SELECT audit_events::text FROM audit_events").fetchall()
    shown = {
        "audit": "\n".join(row for (row,) in audit),
        "log": talkative.readouterr().err,
        "repr or error": "\n".join([*witnessed.seen, repr(service), repr(device), repr(stranger)]),
        "server log": _server_log(access),
    }
    assert "group_failed" in shown["log"]
    for place, text in shown.items():
        for kind, canary in _canaries(access, device, witnessed.bodies, stranger, operator):
            assert canary not in text, f"a {kind} stands in the {place}"


async def _everything(
    access: Access,
    service: Service,
    device: Device,
    witnessed: Witnessed,
    stranger: NewToken,
    operator: NewToken,
) -> set[str]:
    told: set[str] = set()
    token, told_before = device.token.reveal(), dict[str, Any](data=_data(), idempotencyKey=CANARY_KEY)

    async def send(body: bytes, credential: str = token) -> None:
        told.add(await witnessed.send(service, credential, body))

    first = device.payload(1, **told_before)
    envelope = device.envelope(1, **first)
    for body in (envelope, envelope, device.envelope(3), device.envelope(2), device.envelope(9)):
        await send(body)
    await send(device.envelope(4, eventId=first["eventId"], data=_data()))
    await send(device.envelope(4, idempotencyKey=CANARY_KEY))
    await send(device.envelope(3))
    await send(device.envelope(BEYOND))
    await send(device.envelope(4, schemaVersion=FREE_TEXT))
    await send(device.envelope(4, data={"kind": FREE_TEXT}))
    await send(device.envelope(4, sequence=FREE_TEXT))
    await send(device.envelope(4, route={"tenant": FREE_TEXT, "project": FREE_TEXT, "producer": FREE_TEXT}))
    await send(FREE_TEXT.encode())
    await send(device.envelope(4, seed=ed25519.generate()))
    sealed = dsse.unwrap(device.envelope(4))
    await send(dsse.wrap(sealed.payload, sealed.keyid, ed25519.sign(bytes(32), b"other")))
    await send(device.envelope(4), stranger.reveal())
    await send(device.envelope(4), operator.reveal())
    with as_owner(access) as owner:
        owner.execute(f"ALTER TABLE payloads ADD CHECK (sequence <> {POISON}) NOT VALID".encode())
        await send(device.envelope(POISON, data=_data()))
        owner.execute("UPDATE streams SET floor = 3")
        await send(device.envelope(2))
        for state in ("revoked", "verify-only"):
            owner.execute("UPDATE keys SET state = %s", [state])
            await send(device.envelope(4))
        owner.execute("UPDATE streams SET retired = true")
        await send(device.envelope(4))
    for reason, limiter, key, credential in (
        (Reason.SYNC_RATE_LIMITED, service.inbox._sync, "acme/owner-1/device-01", token),
        (Reason.PEER_RATE_LIMITED, service.door._peers, PEER, stranger.reveal()),
    ):
        for _ in range(DRAINS):
            limiter.take(key, limiter.take(key, 0).remaining)
            await send(envelope, credential)
            if reason in told:
                break
    return told


def _data() -> dict[str, Any]:
    return {"kind": "heartbeat", "bootId": CANARY_BOOT, "uptimeMs": 1, "queueDepth": 1}


def _canaries(
    access: Access, device: Device, bodies: list[bytes], stranger: NewToken, operator: NewToken
) -> Iterator[tuple[str, str]]:
    for token in (device.token, stranger, operator):
        yield "credential", token.reveal()[36:]
    for password in read_passwords(access.passfile).values():
        yield "password", password
    yield "private key", device.seed.hex()
    for text in (FREE_TEXT, CANARY_KEY, CANARY_BOOT):
        yield from _spellings("payload", text.encode())
    for body in bodies:
        if body.startswith(b"{"):
            envelope = dsse.unwrap(body)
            yield from _spellings("signature", envelope.signature)
            yield from _spellings("payload", envelope.payload[:60])


def _spellings(kind: str, secret: bytes) -> Iterator[tuple[str, str]]:
    yield kind, secret.decode("latin-1")
    yield kind, secret.hex()
    yield kind, base64.b64encode(secret).decode().rstrip("=")[:-1]
    yield kind, repr(secret)[2:-1]


def _server_log(access: Access) -> str:
    passfile = conninfo_to_dict(access.owner)["passfile"]
    assert isinstance(passfile, str)
    return (Path(passfile).parent / "log" / "postgres.log").read_text("utf-8", errors="replace")

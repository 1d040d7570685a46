"""receive(): the checks 1 to 7 on what a verified caller sends, in this order (protocol section 4).

The adapter has asked the door before (check 0 and the first half of 1), and whoever it does not know gets no further.

1. the credential became a verified identity; then the sync limit; then the role      `door.py`, `limits.py`
2. outer shape; the route against the verified scope; bounded identities              `envelope/`
3. the key inside that scope; Ed25519 over the exact bytes                            `postgres/keys.py`
4. controlplane/v1, schema version 1, the closed payload                              `envelope/v1.py`
5. the stream's lock, what is retained, the floor, the sequence                       `commit.py`, `rules/stream.py`
6. identity, payload, cursor and audit in one transaction                             `commit.py`
7. only then the acknowledgement

The earliest check that fails decides the reason, and no check after it runs. Every refusal of a verified caller has
its audit event committed before it is answered; what was read before the signature held is used only to refuse.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from postseal.correlation import new_correlation_id
from postseal.door import RateLimited, require_role
from postseal.envelope import dsse, ed25519, v1
from postseal.envelope.kinds import Kinds
from postseal.errors import Refused, Unavailable
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.inbound.commit import Committer
from postseal.inbound.judging import Arrival, AuditOnly, Entry
from postseal.inbound.limit_audit import LimitAudit
from postseal.limits import Rate, RateLimiter
from postseal.outcomes import Reason
from postseal.postgres.database import Database
from postseal.postgres.ingest import LookupNames
from postseal.postgres.keys import Signer, find_signer
from postseal.remembered import Lookups, Remembered
from postseal.verdicts import Refusal, Verdict, unavailable

MAX_BATCH_LINES = 100
MAX_BATCH_BYTES = 1024 * 1024
REMEMBERED_SIGNERS = 50_000
REMEMBERED_SIGNERS_S = 60.0
"""What is remembered never changes; a key's state is read under the stream's lock and is not part of it."""
LINES_A_TURN = 20
"""A batch lets other requests run after so many verifications, about a millisecond."""


@dataclass(frozen=True, slots=True)
class Inbound:
    """A request as an adapter hands it over, its caller let in by the door, its body within the body limit."""

    caller: VerifiedIdentity
    body: bytes = field(repr=False)


class Inbox:
    """The inbound path of one process."""

    def __init__(
        self,
        *,
        sync_rate: Rate,
        database: Database,
        committer: Committer,
        accepting: Callable[[], bool],
        clock: Callable[[], float],
        max_envelope_bytes: int,
        kinds: Kinds,
    ) -> None:
        self._sync = RateLimiter(sync_rate, clock)
        self.verified = 0
        """Signatures, good and bad, and the seconds that they took."""
        self.verified_s = 0.0
        self._limited = LimitAudit(committer)
        self._database = database
        self._committer = committer
        self._accepting = accepting
        self._max_envelope_bytes = max_envelope_bytes
        self._kinds = kinds
        self._signers: Remembered[tuple[str, str, str, str], Signer] = Remembered(
            entries=REMEMBERED_SIGNERS, ttl_s=REMEMBERED_SIGNERS_S, clock=clock
        )

    @property
    def limiter(self) -> RateLimiter:
        """The sync limit, for what it counts."""
        return self._sync

    @property
    def lookups(self) -> Lookups:
        """How often a signing key was remembered."""
        return self._signers.lookups

    async def receive(self, inbound: Inbound) -> Verdict:
        """The verdict on one envelope: a Receipt once it is committed, or a Refusal.

        Raises Refused for a caller who is limited, and Unavailable when nothing is known.
        """
        self.require_room()
        self._take_permits(inbound.caller, 1)  # 1
        entry = await self._check(inbound.caller, inbound.body)  # 1 to 4
        return (await self._committer.commit([entry]))[0]  # 5, 6; to return is 7

    async def receive_batch(self, inbound: Inbound) -> Refusal | list[Verdict]:
        """One verdict a line, in order, all of one transaction where it can be; or one Refusal of the whole."""
        self.require_room()
        caller = inbound.caller
        lines = split_lines(inbound.body)
        self._take_permits(caller, min(max(len(lines), 1), MAX_BATCH_LINES))
        if refusal := self._refuse_whole(caller, inbound.body, lines):
            return await self._committer.audit(refusal)
        entries: list[Entry] = []
        try:
            for number, line in enumerate(lines, start=1):
                entries.append(await self._check(caller, line))
                if number % LINES_A_TURN == 0:
                    await asyncio.sleep(0)
        except Unavailable:
            return [unavailable(new_correlation_id()) for _ in lines]
        return await self._committer.commit(entries)

    async def refuse(self, inbound: Inbound, reason: Reason, detail: str) -> Refusal:
        """What the adapter refused before `receive()`, audited if its caller is within the sync limit."""
        self.require_room()
        # Over the limit nothing is counted either: the caller is told the adapter's reason, not `sync_rate_limited`.
        if not self._sync.take(_sync_key(inbound.caller)).granted:
            return Refusal(reason, new_correlation_id(), detail)
        entry = _undecodable(inbound.caller, inbound.body, Refused(reason, detail))
        return await self._committer.audit(entry)

    async def close(self) -> None:
        """Commit what is known of limited callers; nothing may come in any more."""
        await self._limited.close()

    def require_room(self) -> None:
        """Raise Unavailable while the database has no room for more."""
        # Before all else: what is refused for want of room must not take some with its audit event.
        if not self._accepting():
            raise Unavailable("the database's disk is almost full; nothing is taken in until it has room again")

    async def _check(self, caller: VerifiedIdentity, body: bytes) -> Entry:
        """Checks 1 (the role) to 4 on one envelope: what is to be committed for it."""
        try:
            require_role(caller, Role.DEVICE)  # 1
            if len(body) > self._max_envelope_bytes:
                raise Refused(Reason.BODY_TOO_LARGE, f"an envelope has at most {self._max_envelope_bytes} bytes")
            envelope = dsse.unwrap(body)  # 2
        except Refused as refused:
            return _undecodable(caller, body, refused)
        project = None
        try:
            claims = v1.read_claims(envelope.payload, self._kinds)
            route = claims.route()
            _require_own_route(caller, route)
            project = route.project
            names = claims.identities()
            signer = await self._resolve(caller, project, envelope.keyid)  # 3
            if not self._verify(signer, envelope):
                raise Refused(Reason.SIGNATURE_INVALID, "the signature does not hold over the signed bytes")
            v1.open_claims(claims)  # 4
        except Refused as refused:
            return AuditOnly(
                caller,
                refused.reason,
                new_correlation_id(),
                project=project,
                event_identity=envelope.identity,
                detail=refused.detail,
            )
        return Arrival(
            caller=caller,
            project=project,
            names=LookupNames(
                signer.stream,
                envelope.keyid,
                names.event_id.bytes,
                hashlib.sha256(names.idempotency_key.encode()).digest()[:16],
            ),
            sequence=names.sequence,
            event_identity=envelope.identity,
            payload=envelope.payload,
            signature=envelope.signature,
            correlation_id=new_correlation_id(),
        )

    async def _resolve(self, caller: VerifiedIdentity, project: str, keyid: str) -> Signer:
        """The caller's key and stream; never anyone else's."""
        device = caller.device or ""
        scope = (caller.tenant, device, project, keyid)
        signer = self._signers.recall(scope)
        if signer is None:
            signer = await self._database.transact(
                lambda connection: find_signer(
                    connection, tenant=caller.tenant, device=device, project=project, keyid=keyid
                )
            )
            if signer is None:
                raise Refused(Reason.KEY_UNKNOWN, "this device has no such key in this project")
            self._signers.remember(scope, signer)
        return signer

    def _verify(self, signer: Signer, envelope: dsse.Envelope) -> bool:
        began_s = time.perf_counter()
        holds = ed25519.verify(signer.public_key, envelope.signed_bytes, envelope.signature)
        self.verified += 1
        self.verified_s += time.perf_counter() - began_s
        return holds

    def _take_permits(self, caller: VerifiedIdentity, permits: int) -> None:
        key = _sync_key(caller)
        quota = self._sync.take(key, permits)
        if not quota.granted:
            limited = RateLimited(Reason.SYNC_RATE_LIMITED, quota, new_correlation_id())
            self._limited.count(key, caller, limited.correlation_id)
            raise limited

    def _refuse_whole(self, caller: VerifiedIdentity, body: bytes, lines: list[bytes]) -> AuditOnly | None:
        try:
            require_role(caller, Role.DEVICE)
            if not 1 <= len(lines) <= MAX_BATCH_LINES:
                raise Refused(Reason.ENVELOPE_MALFORMED, f"a batch has 1 to {MAX_BATCH_LINES} lines")
        except Refused as refused:
            return _undecodable(caller, body, refused)
        return None


def split_lines(body: bytes) -> list[bytes]:
    """The lines of a batch, split on LF alone; one LF may end the last. Of too many, no more than tells so."""
    lines = body.split(b"\n", MAX_BATCH_LINES + 1)
    if not lines[-1]:
        lines.pop()
    return lines


def _sync_key(caller: VerifiedIdentity) -> str:
    return "/".join((caller.tenant, caller.account, caller.device or caller.credential_id))


def _require_own_route(caller: VerifiedIdentity, route: v1.Route) -> None:
    own = route.tenant == caller.tenant and route.producer == caller.device and route.project in caller.projects
    if not own:
        raise Refused(Reason.ROUTE_MISMATCH, "the route is not the caller's")


def _undecodable(caller: VerifiedIdentity, body: bytes, refused: Refused) -> AuditOnly:
    return AuditOnly(
        caller,
        refused.reason,
        new_correlation_id(),
        event_identity=dsse.undecodable_identity(body),
        undecodable=True,
        detail=refused.detail,
    )

"""The two hot calls, as plain ASGI: `POST /v1/envelopes` and `POST /v1/envelopes/batch`.

In this order: room in the database; who is calling, since that decides whose room the body takes; the body; and only
then what was wrong with the caller, since the protocol puts the body's own faults first. A known caller's refusal is
audited before it is answered, the adapter's own included.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from postseal.correlation import new_correlation_id
from postseal.door import Door
from postseal.envelope.dsse import ENVELOPE_MEDIA_TYPE
from postseal.errors import Refused, Unavailable
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.inbound.inbox import MAX_BATCH_BYTES, Inbound, Inbox
from postseal.limits import peer_key
from postseal.outcomes import REASONS_OF_ENVELOPES, Reason
from postseal.verdicts import Refusal
from postseal.web import answers
from postseal.web.body import BodyRefused, HeldBytes, receive_body
from postseal.web.calls import JSON, Call, Content, said
from postseal.web.documents import SCHEMAS
from postseal.web.head import Head, read_head
from postseal.web.peer import TrustedProxies
from postseal.web.refusals import CALLER, Refusals

ENVELOPE = Content(ENVELOPE_MEDIA_TYPE, {"$ref": f"{SCHEMAS}Envelope"})
LINES = Content(
    "application/x-ndjson", {"type": "string", "description": "1 to 100 envelopes, one a line, at most 1 MiB"}
)
LINE_ANSWERS = Content(
    "application/x-ndjson",
    {"type": "string", "description": "For each line, in order, an Acknowledgement or a Problem with its status"},
)
WHOLE_BATCH_REASONS = (Reason.SYNC_RATE_LIMITED, Reason.ENVELOPE_MALFORMED)


@dataclass(frozen=True, slots=True)
class _Kind:
    media_type: bytes
    cap_bytes: int
    receive: Callable[[Inbound, str], Awaitable[answers.Answer]]
    """Given the request and its peer."""


class EnvelopeCalls:
    """Takes envelopes in over HTTP."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        door: Door,
        proxies: TrustedProxies,
        max_envelope_bytes: int,
        held_for_strangers: HeldBytes,
        held_for_known: HeldBytes,
        refusals: Refusals,
    ) -> None:
        self._inbox = inbox
        self._door = door
        self._proxies = proxies
        self._held_for_strangers = held_for_strangers
        self._held_for_known = held_for_known
        self._refusals = refusals
        self._single = _Kind(ENVELOPE.media_type.encode(), max_envelope_bytes, self._receive_single)
        self._batch = _Kind(LINES.media_type.encode(), MAX_BATCH_BYTES, self._receive_batch)

    def calls(self) -> list[Call]:
        """Both of them."""
        acknowledged = (Content(JSON, answers.Acknowledgement),)
        return [
            Call(
                "POST",
                "/v1/envelopes",
                said(self.post_single),
                self.post_single,
                (Role.DEVICE,),
                takes=ENVELOPE,
                answers={200: acknowledged, 201: acknowledged},
                reasons=REASONS_OF_ENVELOPES,
            ),
            Call(
                "POST",
                "/v1/envelopes/batch",
                said(self.post_batch),
                self.post_batch,
                (Role.DEVICE,),
                takes=LINES,
                answers={200: (LINE_ANSWERS,)},
                reasons=WHOLE_BATCH_REASONS,
            ),
        ]

    async def post_single(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one envelope."""
        await self._post(self._single, scope, receive, send)

    async def post_batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send up to 100 envelopes, one a line."""
        await self._post(self._batch, scope, receive, send)

    async def _post(self, kind: _Kind, scope: Scope, receive: Receive, send: Send) -> None:
        self._inbox.require_room()
        head = read_head(scope, self._proxies)
        caller = await self._identify(head)
        # Whoever is verified shares no room with strangers, and no tenant's bodies fill that of the others.
        if isinstance(caller, VerifiedIdentity):
            scope["state"][CALLER] = caller
            held = self._held_for_known.of(caller.tenant)
        else:
            held = self._held_for_strangers.of(peer_key(head.peer))
        try:
            body = await receive_body(
                scope, receive, head, media_type=kind.media_type, cap_bytes=kind.cap_bytes, held=held
            )
        except BodyRefused as refused:
            await answers.send_answer(send, await self._refuse(head, caller, refused))
            return
        try:
            if not isinstance(caller, VerifiedIdentity):
                raise caller
            # A body that took longer than callers are remembered was not awaited by a credential revoked meanwhile.
            caller = self._door.recall(head.credential) or await self._door.identify(head.peer, head.credential)
            answer = await kind.receive(Inbound(caller, body), head.peer)
        finally:
            held.release(len(body))
        await answers.send_answer(send, answer)

    async def _identify(self, head: Head) -> VerifiedIdentity | Refused | Unavailable:
        """The caller, or why there is none."""
        try:
            return await self._door.identify(head.peer, head.credential)
        except (Refused, Unavailable) as fault:
            return fault

    async def _receive_single(self, inbound: Inbound, peer: str) -> answers.Answer:
        verdict = await self._inbox.receive(inbound)
        if isinstance(verdict, Refusal):
            self._refusals.note(verdict, inbound.caller, peer)
        return answers.of_verdict(verdict)

    async def _receive_batch(self, inbound: Inbound, peer: str) -> answers.Answer:
        verdicts = await self._inbox.receive_batch(inbound)
        refusals = [verdicts] if isinstance(verdicts, Refusal) else verdicts
        for refusal in refusals:
            if isinstance(refusal, Refusal):
                self._refusals.note(refusal, inbound.caller, peer)
        return answers.of_refusal(verdicts) if isinstance(verdicts, Refusal) else answers.of_batch(verdicts)

    async def _refuse(
        self, head: Head, caller: VerifiedIdentity | Refused | Unavailable, refused: BodyRefused
    ) -> answers.Answer:
        """Audited where the caller is known."""
        if isinstance(caller, Unavailable):
            raise caller
        if isinstance(caller, VerifiedIdentity):
            inbound = Inbound(caller, refused.received)
            refusal = await self._inbox.refuse(inbound, refused.reason, refused.detail)
            self._refusals.note(refusal, caller, head.peer)
        else:
            refusal = Refusal(refused.reason, new_correlation_id(), refused.detail)
            self._refusals.note(refusal, None, head.peer)
        return answers.of_refusal(refusal)

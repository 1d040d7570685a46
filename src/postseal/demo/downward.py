"""Mail to receivers: the control plane answers a proposal, and its signed decision reaches whoever it is for.

1. pushed: a receiver verifies the signature of the request, which is its destination's, and that of the envelope
   inside, which is the tenant's; a key that comes again is the same delivery
2. pulled: the device, to which nobody can connect, claims its mail, verifies it and settles it
3. tried again: a receiver that fails twice gets it with the third attempt
4. dead: for a receiver that is away the attempts run out; mended and redriven, the same delivery arrives

Each is enqueued over HTTP, and how it ended is what the service says of it.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from postseal.demo.calls import CREATED, OK, require
from postseal.demo.cast import PROJECT, Cast
from postseal.echo import Echo
from postseal.envelope import canonical, dsse, ed25519, v1
from postseal.errors import PostsealError
from postseal.key_set import EnvelopeKeys, keys_at
from postseal.rules.delivery import Code, State
from postseal.senders.webhook import Verifier

DELIVERIES = f"/v1/projects/{PROJECT}/deliveries"
OPERATORS = f"/v1/admin/projects/{PROJECT}"
KIND = "proposal-decision"
HOST = "127.0.0.1"
CLAIM_WAIT_S = 5
END_S = 30.0
"""How long a delivery may take to its end, retries included."""
LOOK_EVERY_S = 0.05
FAILURES = 2
OUTER, INNER, BOTH = "request signature verified", "envelope signature verified", "both signatures verified"

Record = dict[str, Any]


async def show(cast: Cast, proposal: v1.Proposal, say: Callable[[str], None]) -> list[Record]:
    """Send the decision about `proposal` all four ways. Raises PostsealError where one goes otherwise than expected."""
    decision = {"proposalId": str(proposal.proposal_id), "revision": proposal.revision, "decision": "accepted"}
    keys = keys_at(f"{cast.consumer.address}/v1/keys", f"Bearer {cast.consumer.credential}")
    stage = _Stage(cast, decision, keys, say)
    return [await _pushed(stage), await _pulled(stage), await _tried_again(stage), await _redriven(stage)]


@dataclass(frozen=True, slots=True)
class _Place:
    """A push destination, and the port that is kept free for its receiver."""

    name: str
    kept: socket.socket
    port: int
    public_key: str
    keys: EnvelopeKeys
    statuses: list[int] = field(default_factory=list[int])
    """What its receiver answered. It fails on purpose only where the signature of the request holds."""

    @asynccontextmanager
    async def receiving(self, *, fail_first: int = 0) -> AsyncGenerator[Echo]:
        """Its receiver, which takes nothing unless both signatures hold, until the block ends."""
        receiver = Echo(
            Verifier([self.public_key]),
            self.keys,
            audience=self.name,
            fail_first=fail_first,
            told=lambda answer: self.statuses.append(answer.status),
        )
        self.kept.close()
        async with receiver.listening(HOST, self.port):
            yield receiver


@dataclass(frozen=True, slots=True)
class _Stage:
    """What the four have in common."""

    cast: Cast
    decision: Record
    keys: EnvelopeKeys
    """The tenant's signing keys, as receivers have them."""
    say: Callable[[str], None]

    def tell(self, what: str, verified: str, became: str) -> None:
        self.say(f"  {what:<37} {verified:<27} -> {became}")

    @asynccontextmanager
    async def destination(self, name: str) -> AsyncGenerator[_Place]:
        """A new push destination. Nobody listens there until its receiver does."""
        unique = f"{name}-{self.cast.run_id}"
        with socket.socket() as kept:
            kept.bind((HOST, 0))
            _, port = kept.getsockname()
            wanted = {"destination": unique, "mode": "push", "scheme": "v1a", "url": f"http://{HOST}:{port}/"}
            made = await self.cast.operator.post(f"{OPERATORS}/destinations", wanted, expected=CREATED)
            [secret] = made["secrets"]
            yield _Place(unique, kept, port, secret["receiver"], self.keys)

    async def enqueue(self, destination: str, key: str, *, expected: int = CREATED, **options: int) -> Record:
        """The decision for one destination, sealed."""
        wanted = {"destination": destination, "kind": KIND, "data": self.decision} | options
        return await self.cast.sender.post(DELIVERIES, wanted, expected=expected, Idempotency_Key=key)

    async def ended(self, sealed: Record, state: State) -> Record:
        """How a delivery stands once it has ended, which must be as `state`."""
        path = f"{DELIVERIES}/{sealed['delivery']}"
        try:
            async with asyncio.timeout(END_S):
                shown = _ours(await self.cast.sender.get(path))
                while shown["state"] in {State.PENDING, State.DELIVERING}:
                    await asyncio.sleep(LOOK_EVERY_S)
                    shown = _ours(await self.cast.sender.get(path))
        except TimeoutError:
            raise PostsealError(f"delivery {sealed['delivery']} has not ended within {END_S:g} s") from None
        require(shown["state"], state, f"delivery {sealed['delivery']}")
        return shown

    def require_the_decision(self, sealed: Record, identity: bytes, payload: v1.Payload | v1.DeploymentPayload) -> None:
        """What somebody received and verified is what was sealed."""
        found = (identity.hex(), payload.route.audience, payload.sequence, msgspec.to_builtins(payload.data))
        data = {"kind": KIND} | self.decision
        expected = (sealed["eventIdentity"], sealed["destination"], sealed["sequence"], data)
        require(found, expected, "what was received")

    def require_received(self, sealed: Record, receiver: Echo) -> None:
        """The receiver has verified this delivery, and no other event."""
        require(receiver.events, 1, "events that the receiver took")
        came = receiver.received[0]
        require(came.delivery, sealed["delivery"], "the delivery that was received")
        self.require_the_decision(sealed, came.event_identity, came.payload)


async def _pushed(stage: _Stage) -> Record:
    async with stage.destination("ledger") as place, place.receiving() as receiver:
        key = _new_key()
        sealed = await stage.enqueue(place.name, key)
        stage.tell("a decision, to be pushed", "-", _sealed_as(sealed))
        again = await stage.enqueue(place.name, key, expected=OK)
        require(again | {"state": sealed["state"]}, sealed, "the same key once more")
        stage.tell("the same key once more", "-", "the same delivery")
        shown = await stage.ended(sealed, State.DELIVERED)
        stage.require_received(sealed, receiver)
    stage.tell("at its receiver", BOTH, State.DELIVERED)
    return _record("pushed", sealed, shown, BOTH) | {"sameKey": again}


async def _pulled(stage: _Stage) -> Record:
    device = stage.cast.device
    sealed = await stage.enqueue(device.name, _new_key())
    stage.tell("one that the device itself pulls", "-", _sealed_as(sealed))
    items = (await device.client.post("/v1/deliveries/claim", {"limit": 1, "wait": CLAIM_WAIT_S}))["items"]
    require([item["delivery"] for item in items], [sealed["delivery"]], "what the device claimed")
    [item] = items
    envelope = dsse.unwrap(canonical.encode(item["envelope"]))
    keys = keys_at(f"{device.client.address}/v1/keys", f"Bearer {device.client.credential}")
    public_key = await keys.find(envelope.keyid)
    if public_key is None or not ed25519.verify(public_key, envelope.signed_bytes, envelope.signature):
        raise PostsealError("the signature of what the device claimed does not hold")
    stage.require_the_decision(sealed, envelope.identity, v1.open_delivery(envelope.payload))
    settlement = {name: item[name] for name in ("project", "sequence", "attempt", "token")} | {"verdict": "delivered"}
    settled = await device.client.post("/v1/deliveries/settle", {"items": [settlement]})
    require([each["fenced"] for each in settled["items"]], [False], "the device's settlement")
    shown = await stage.ended(sealed, State.DELIVERED)
    stage.tell("claimed, verified and settled by it", INNER, State.DELIVERED)
    return _record("pulled", sealed, shown, INNER)


async def _tried_again(stage: _Stage) -> Record:
    async with stage.destination("flaky") as place, place.receiving(fail_first=FAILURES) as receiver:
        sealed = await stage.enqueue(place.name, _new_key())
        stage.tell(f"one whose receiver fails {FAILURES} times", "-", _sealed_as(sealed))
        shown = await stage.ended(sealed, State.DELIVERED)
        stage.require_received(sealed, receiver)
    require(place.statuses, [500] * FAILURES + [204], "what the receiver answered")
    _tell_attempts(stage, shown, OUTER, [Code.STATUS_5XX] * FAILURES)
    _tell_arrived(stage, shown, FAILURES + 1)
    return _record("tried again", sealed, shown, BOTH)


async def _redriven(stage: _Stage) -> Record:
    operator = stage.cast.operator
    async with stage.destination("away") as place:
        sealed = await stage.enqueue(place.name, _new_key(), attemptLimit=FAILURES)
        stage.tell(f"one for nobody, {FAILURES} attempts at most", "-", _sealed_as(sealed))
        dead = await stage.ended(sealed, State.DEAD)
        _tell_attempts(stage, dead, "-", [Code.CONNECT_FAILED] * FAILURES)
        letters = await operator.get(f"{OPERATORS}/dead-letters?destination={place.name}")
        found = [(letter["delivery"], letter["code"]) for letter in letters["items"]]
        require(found, [(sealed["delivery"], Code.CONNECT_FAILED)], "its dead letters")
        stage.tell("in the list of dead letters", "-", f"{State.DEAD}: {Code.CONNECT_FAILED}")
        async with place.receiving() as receiver:
            redriven = await operator.post(
                f"{OPERATORS}/dead-letters/{sealed['delivery']}/redrive", {"budget": FAILURES}
            )
            require(redriven["redriven"], 1, "how many were redriven")
            stage.tell("its receiver mended, it is redriven", "-", State.PENDING)
            shown = await stage.ended(sealed, State.DELIVERED)
            stage.require_received(sealed, receiver)
    _tell_arrived(stage, shown, FAILURES + 1)
    return _record("redriven", sealed, shown, BOTH) | {"deadLetters": letters["items"]}


def _new_key() -> str:
    return f"decision:{secrets.token_hex(8)}"


def _sealed_as(sealed: Record) -> str:
    return f"sealed, sequence {sealed['sequence']}"


def _tell_attempts(stage: _Stage, shown: Record, verified: str, expected: Sequence[Code]) -> None:
    """The attempts that failed, one after the other, with their codes."""
    attempts = [(failed["attempt"], failed["code"]) for failed in shown["attempts"]]
    require(attempts, list(enumerate(expected, 1)), "the attempts that failed")
    for attempt, code in attempts:
        stage.tell(f"  attempt {attempt}", verified, code)


def _tell_arrived(stage: _Stage, shown: Record, attempt: int) -> None:
    require(shown["attempt"], attempt, "the attempt that was the last")
    stage.tell(f"  attempt {attempt}", BOTH, State.DELIVERED)


def _ours(shown: Record) -> Record:
    """How a delivery stands that no other worker on the same database has taken: it would not send to this machine."""
    if any(failed["code"] == Code.ADDRESS_REFUSED for failed in shown["attempts"]):
        raise PostsealError(
            "another worker took the demo's mail and may not send it to this machine: "
            "stop the `postseal serve` or `postseal worker` on this database, or give the demo a --data-dir of its own"
        )
    return shown


def _record(what: str, sealed: Record, shown: Record, verified: str) -> Record:
    return {
        "what": what,
        "delivery": sealed["delivery"],
        "destination": sealed["destination"],
        "sequence": sealed["sequence"],
        "eventIdentity": sealed["eventIdentity"],
        "verified": verified,
        "state": shown["state"],
        "attempt": shown["attempt"],
        "failedAttempts": [{"attempt": each["attempt"], "code": each["code"]} for each in shown["attempts"]],
    }

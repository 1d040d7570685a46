"""The inbound path on a real database does what a model of one page says, whatever is sent in whatever order.

Hypothesis draws batches of new, repeated, re-signed and conflicting envelopes, and administrators' acts between them.
After every step the answers, the cursor, what is retained and the audit must be the model's. A failure prints the
steps; the run's seed brings them back: POSTSEAL_TEST_SEED=... pytest tests/inbox/test_model.py
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import hypothesis
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fleet import Device, add_key, as_owner, enrol, signed
from postseal.envelope import dsse, ed25519
from postseal.outcomes import Outcome, Reason
from postseal.postgres.access import Access
from postseal.postgres.ingest import bitmap_from_bytes, bitmap_to_bytes
from postseal.rules.stream import Cursor
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt, Verdict

WINDOW = 8
DEVICES = 2
TENANTS = count()


@dataclass
class StreamModel:
    """What protocol section 5 says of one device's stream, with sets in the place of cursors and indexes."""

    device: Device
    seeds: list[bytes]
    key_states: list[str]
    sent: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    floor: int = 0
    retired: bool = False
    retained: set[int] = field(default_factory=set[int])
    identity_of_event: dict[str, bytes] = field(default_factory=dict[str, bytes])
    event_of_key: dict[str, str] = field(default_factory=dict[str, str])
    expired: set[int] = field(default_factory=set[int])

    @property
    def contiguous(self) -> int:
        """The greatest N >= floor with all of (floor, N] retained."""
        n = self.floor
        while n + 1 in self.retained:
            n += 1
        return n

    @property
    def highest(self) -> int:
        """The greatest retained, or the floor."""
        return max(self.retained | {self.floor})

    def receive(self, payload: dict[str, Any], identity: bytes, key_state: str) -> Outcome | Reason:
        """The answer, and what is kept of it."""
        event, key, sequence = payload["eventId"], payload["idempotencyKey"], payload["sequence"]
        answer = self._refusal_or_duplicate(event, key, sequence, identity, key_state)
        if answer is not None:
            return answer
        if sequence < self.highest:
            answer = Outcome.REORDERED
        else:
            answer = Outcome.ACCEPTED if sequence == self.contiguous + 1 else Outcome.GAP
        self.retained.add(sequence)
        self.identity_of_event[event] = identity
        self.event_of_key[key] = event
        return answer

    def _refusal_or_duplicate(
        self, event: str, key: str, sequence: int, identity: bytes, key_state: str
    ) -> Outcome | Reason | None:
        rules = [
            (key_state == "removed", Reason.KEY_UNKNOWN),
            (self.identity_of_event.get(event) == identity, Outcome.DUPLICATE),
            (self.retired, Reason.STREAM_RETIRED),
            (key_state == "revoked", Reason.KEY_REVOKED),
            (key_state == "verify-only", Reason.KEY_RETIRED),
            (event in self.identity_of_event, Reason.EVENT_CONFLICT),
            (self.event_of_key.get(key, event) != event, Reason.IDEMPOTENCY_CONFLICT),
            (sequence <= self.floor, Reason.BELOW_REPLAY_FLOOR),
            (sequence in self.retained, Reason.SEQUENCE_CONFLICT),
            (sequence > self.contiguous + WINDOW, Reason.SEQUENCE_BEYOND_WINDOW),
        ]
        return next((answer for holds, answer in rules if holds), None)


@dataclass(frozen=True)
class World:
    """One database and one service for all that hypothesis tries; each try has a tenant of its own."""

    access: Access
    owner: psycopg.Connection[tuple[Any, ...]]
    runner: asyncio.Runner
    service: Service


# What to send: new, or made of an earlier payload; which earlier one; how far beyond the cursor; which key signs.
DRAFTS = st.lists(
    st.tuples(
        st.sampled_from(["new", "new", "new", "again", "same event", "same key", "same sequence"]),
        st.integers(0, 9),
        st.integers(-2, WINDOW + 2),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


class InboundMachine(RuleBasedStateMachine):
    """Batches and administrators' acts on the streams of a few devices."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.models: list[StreamModel] = []
        self.audits: Counter[tuple[str, str | None]] = Counter()

    @initialize()
    def enrol_devices(self):
        """A tenant of its own for this try."""
        tenant = f"tenant-{next(TENANTS)}"
        for number in range(DEVICES):
            device = enrol(self.world.access, f"device-{number}", tenant=tenant)
            self.models.append(StreamModel(device, [device.seed], ["active"]))

    @rule(which=st.integers(0, DEVICES - 1), drafts=DRAFTS)
    def send(self, which: int, drafts: list[tuple[str, int, int, int]]):
        """One envelope, or a batch that is judged in its order."""
        model = self.models[which]
        bodies: list[bytes] = []
        expected: list[tuple[Outcome | Reason, int, int]] = []
        for kind, earlier, ahead, signer in drafts:
            payload = self._payload(model, kind, earlier, max(1, model.contiguous + ahead))
            key = signer % len(model.seeds)
            bodies.append(signed(payload, model.seeds[key]))
            identity = dsse.unwrap(bodies[-1]).identity
            answer = model.receive(payload, identity, model.key_states[key])
            expected.append((answer, model.contiguous, model.highest))
            model.sent.append(payload)
            refused = isinstance(answer, Reason)
            self.audits["refused" if refused else answer, answer if refused else None] += 1
        for verdict, (answer, contiguous, highest) in zip(self._send(model, bodies), expected, strict=True):
            assert (verdict.outcome if isinstance(verdict, Receipt) else verdict.reason) == answer
            if answer is not Reason.KEY_UNKNOWN:  # refused before the stream's lock, so without its cursor
                assert (verdict.contiguous, verdict.highest) == (contiguous, highest)

    def _send(self, model: StreamModel, bodies: list[bytes]) -> list[Verdict]:
        inbox, runner = self.world.service.inbox, self.world.runner
        if len(bodies) == 1:
            return [runner.run(inbox.receive(model.device.inbound(bodies[0])))]
        verdicts = runner.run(inbox.receive_batch(model.device.inbound(b"\n".join(bodies))))
        assert isinstance(verdicts, list)
        return verdicts

    def _payload(self, model: StreamModel, kind: str, earlier: int, sequence: int) -> dict[str, Any]:
        payload = model.device.payload(sequence)
        if kind == "new" or not model.sent:
            return payload
        old = model.sent[-1 - earlier % len(model.sent)]
        match kind:
            case "again":
                return old
            case "same event":
                return payload | {"eventId": old["eventId"]}
            case "same key":
                return payload | {"idempotencyKey": old["idempotencyKey"]}
            case _:
                return payload | {"sequence": old["sequence"]}

    @rule(which=st.integers(0, DEVICES - 1))
    def add_key(self, which: int):
        """Register one more key."""
        model = self.models[which]
        model.seeds.append(ed25519.generate())
        model.key_states.append("active")
        add_key(self.world.access, model.device, model.seeds[-1])

    @rule(
        which=st.integers(0, DEVICES - 1),
        key=st.integers(0, 3),
        state=st.sampled_from(["active", "verify-only", "revoked", "removed"]),
    )
    def change_key(self, which: int, key: int, state: str):
        """Retire, revoke, remove or restore one."""
        model = self.models[which]
        key %= len(model.seeds)
        model.key_states[key] = state
        keyid = ed25519.thumbprint(ed25519.public_key(model.seeds[key]))
        statement = "UPDATE keys SET state = %s WHERE tenant = %s AND keyid = %s"
        self._under_lock(model, statement, [state, model.device.tenant, keyid])

    @rule(which=st.integers(0, DEVICES - 1), up=st.integers(0, 4))
    def raise_floor(self, which: int, up: int):
        """Close the holes below it."""
        model = self.models[which]
        model.floor += up
        row = self.world.owner.execute(
            "SELECT floor, contiguous, highest, above FROM streams WHERE stream = %s", [model.device.stream]
        ).fetchone()
        assert row is not None
        floor, contiguous, highest, above = row
        raised = Cursor(floor, contiguous, highest, bitmap_from_bytes(above)).raised_to(model.floor)
        self._under_lock(
            model,
            "UPDATE streams SET floor = %s, contiguous = %s, highest = %s, above = %s WHERE stream = %s",
            [raised.floor, raised.contiguous, raised.highest, bitmap_to_bytes(raised.above), model.device.stream],
        )

    @rule(which=st.integers(0, DEVICES - 1), retired=st.booleans())
    def retire(self, which: int, retired: bool):
        """Retire the stream, or take that back, as only this test can."""
        model = self.models[which]
        model.retired = retired
        statement = "UPDATE streams SET retired = %s WHERE stream = %s"
        self._under_lock(model, statement, [retired, model.device.stream])

    @rule(which=st.integers(0, DEVICES - 1))
    def expire_payloads(self, which: int):
        """Payloads go, identities stay."""
        model = self.models[which]
        model.expired |= model.retained
        self._under_lock(model, "DELETE FROM payloads WHERE stream = %s", [model.device.stream])

    def _under_lock(self, model: StreamModel, statement: str, parameters: list[Any]) -> None:
        with self.world.owner.transaction():
            self.world.owner.execute(
                "SELECT FROM streams WHERE tenant = %s AND producer = %s ORDER BY stream FOR NO KEY UPDATE",
                [model.device.tenant, model.device.name],
            )
            self.world.owner.execute(statement.encode(), parameters)

    @invariant()
    def the_database_is_as_the_model(self):
        """Cursor, identities, payloads and audit."""
        for model in self.models:
            assert self._rows("floor, contiguous, highest FROM streams", model) == {
                (model.floor, model.contiguous, model.highest): 1
            }
            retained = {(sequence,): 1 for sequence in model.retained}
            assert self._rows("sequence FROM identities", model) == retained
            unexpired = {(sequence,): 1 for sequence in model.retained - model.expired}
            assert self._rows("sequence FROM payloads", model) == unexpired
        if self.models:
            tenant = [self.models[0].device.tenant]
            select = "SELECT outcome, reason FROM audit_events WHERE tenant = %s"
            assert Counter(self.world.owner.execute(select, tenant).fetchall()) == self.audits

    def _rows(self, what: str, model: StreamModel) -> Counter[tuple[Any, ...]]:
        select = f"SELECT {what} WHERE tenant = %s AND stream = %s"
        return Counter(self.world.owner.execute(select.encode(), [model.device.tenant, model.device.stream]).fetchall())


@pytest.fixture
def world(access: Access) -> Iterator[World]:
    """The service stays up on its own loop, which runs while an envelope is being answered."""
    with as_owner(access) as owner, asyncio.Runner() as runner:
        stack = AsyncExitStack()
        entering = stack.enter_async_context(running_service(Settings(window=WINDOW, sync_burst=10**9), access))
        try:
            yield World(access, owner, runner, runner.run(entering))
        finally:
            runner.run(stack.aclose())


def _campaign(world: World, seed: int, *, examples: int, steps: int, phases: list[Phase]) -> None:
    print(f"POSTSEAL_TEST_SEED={seed}")
    machine: Any = hypothesis.seed(seed)(lambda: InboundMachine(world))  # a factory will do for a class
    budget = settings(
        max_examples=examples,
        stateful_step_count=steps,
        phases=phases,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(machine, settings=budget)


def test_the_inbound_path_does_what_the_model_says(world: World, seed: int):
    """A seeded small budget of random histories; a failure is told as found, since making it small takes minutes."""
    _campaign(world, seed, examples=20, steps=30, phases=[Phase.generate])


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_inbound_path_does_what_the_model_says_for_long(world: World, seed: int):
    """The same, for many more and longer histories."""
    _campaign(world, seed, examples=600, steps=60, phases=[Phase.generate, Phase.shrink])

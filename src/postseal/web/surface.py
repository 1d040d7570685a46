"""Every call that one process answers, in the order in which they are described."""

import time

from postseal.outbound.keyset import Keysets
from postseal.readiness import Readiness
from postseal.service import Service
from postseal.web import admin
from postseal.web.admin.destinations import Outbound
from postseal.web.admin.office import Office
from postseal.web.body import HeldBytes
from postseal.web.calls import Call, Reception
from postseal.web.deliveries import DeliveryCalls
from postseal.web.device import RenewalCalls
from postseal.web.enrolments import EnrolmentCalls
from postseal.web.envelopes import EnvelopeCalls
from postseal.web.health import HealthCalls
from postseal.web.keys import KeyCalls
from postseal.web.metrics import MetricsCalls
from postseal.web.peer import TrustedProxies
from postseal.web.published import PublishedCalls
from postseal.web.pulls import PullCalls
from postseal.web.refusals import Refusals
from postseal.web.streams import StreamCalls


def all_calls(service: Service, *, proxies: TrustedProxies, refusals: Refusals) -> list[Call]:
    """The calls of `service`."""
    settings, door = service.settings, service.door
    held_for_strangers = HeldBytes(settings.max_pending_body_bytes)
    held_for_known = HeldBytes(settings.max_pending_body_bytes)
    credential_lifetime_s = settings.credential_lifetime_s
    reception = Reception(door, proxies, held_for_known)
    enrolments = EnrolmentCalls(
        database=service.admin,
        door=door,
        proxies=proxies,
        held=held_for_strangers,
        credential_lifetime_s=credential_lifetime_s,
        max_pending=settings.max_pending,
    )
    envelopes = EnvelopeCalls(
        inbox=service.inbox,
        door=door,
        proxies=proxies,
        max_envelope_bytes=settings.max_envelope_bytes,
        held_for_strangers=held_for_strangers,
        held_for_known=held_for_known,
        refusals=refusals,
    )
    streams = StreamCalls(service.reads, service.waiting, door=door, proxies=proxies, clock=time.monotonic)
    deliveries = DeliveryCalls(service.outbox, service.admin, accepting=service.accepting, refusals=refusals)
    pulls = PullCalls(service.pulling, door)
    renewals = RenewalCalls(
        service.admin, credential_lifetime_s=credential_lifetime_s, overlap_s=settings.rotation_overlap_s
    )
    lifetimes_s = (settings.invitation_lifetime_s, credential_lifetime_s, settings.key_window_s)
    office = Office(reception, service.admin, *lifetimes_s)
    health = HealthCalls(Readiness(service.ingest, service.committer, service.accepting, time.monotonic))
    published = PublishedCalls(service.kinds)
    calls = [
        *enrolments.calls(),
        *envelopes.calls(),
        *streams.calls(reception),
        *deliveries.calls(reception),
        *pulls.calls(reception),
        *renewals.calls(reception),
        *KeyCalls(service.delivery, Keysets(service.delivery, service.outbox.keys)).calls(reception),
        *admin.calls(office, Outbound(settings, service.delivery, service.sender)),
        *health.calls(),
        *MetricsCalls(service.metrics, service.sampler).calls(),
        *published.calls(),
    ]
    published.describe(calls)
    return calls

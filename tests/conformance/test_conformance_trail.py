"""The audit trail of all that the tests before this one were answered; it is the last of its folder (section 6)."""

from client import canonical, event_identity, sealed
from promises import ANY_IDENTITY, audited, told
from world import PROJECT, TENANT, World


def test_each_answer_has_the_one_audit_event_that_it_ought_to_have(world: World):
    """Committed before the answer, with its outcome, names and correlation id; an `unavailable` has none."""
    device = world.devices["walker"]
    payload = canonical(device.event(2**53 - 1))
    answer = device.send(sealed(device.key, payload))
    world.owes(answer.body, audited(device, "sequence_beyond_window", PROJECT, event_identity(payload)))
    trail = world.program.trail(TENANT)
    found = {name: told(trail[name]) if name in trail else None for name in world.ledger}
    for name, event in world.ledger.items():
        row = found[name]
        if event and row and event["eventIdentity"] == ANY_IDENTITY:
            found[name] = row | {"eventIdentity": ANY_IDENTITY}
    assert found == world.ledger

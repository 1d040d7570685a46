"""How many deliveries may be out: by destination, by tenant, altogether."""

import random

from postseal.outbound.slots import Slots
from postseal.postgres.turns import Due


def test_a_claim_is_shared_out_evenly_as_far_as_there_is_room():
    """What a busy destination cannot use, the others get; one without room is left out."""
    slots = Slots(most=1000, per_destination=10)
    assert slots.take("acme", [1, 2, 3], 100) == {1: 10, 2: 10, 3: 10}
    slots.give_back("acme", 1, 2)
    slots.give_back("acme", 2, 7)
    assert slots.take("acme", [1, 2, 3], 6) == {1: 2, 2: 4}
    assert slots.take("acme", [4, 5, 6], 7) == {4: 3, 5: 2, 6: 2}


def test_a_tenant_gets_no_more_than_it_leaves_free():
    """However many tenants take all that they can get, the next one gets something, and be it one."""
    slots = Slots(most=1024, per_destination=1000)
    taken = [sum(slots.take(f"tenant-{n}", [n], 1000).values()) for n in range(5)]
    assert taken == [512, 256, 128, 64, 32]
    for n in range(5, 30):
        assert slots.take(f"tenant-{n}", [n], 1000)
    assert slots.taken == 1024 - 1 + 20


def test_a_busy_destination_has_room_once_a_quarter_is_free():
    """Claims for it would else be of one delivery each."""
    slots = Slots(most=1000, per_destination=16)
    due = Due("acme", 1, fresh_due=True, retries_due=False)
    slots.take("acme", [1], 100)
    for free in range(1, 16):
        slots.give_back("acme", 1)
        assert slots.has_room(due) == (free >= 4)


def test_slots_come_back(seed: int):
    """Whatever is taken and given back: no count is exceeded, and at the end all are free again."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    chance = random.Random(seed)
    freed: list[None] = []
    slots = Slots(most=64, per_destination=8, freed=lambda: freed.append(None))
    out: list[tuple[str, int]] = []
    for _ in range(2_000):
        tenant = f"tenant-{chance.randrange(3)}"
        streams = chance.sample(range(6), chance.randrange(1, 6))
        if chance.random() < 0.4:
            taken = slots.take(tenant, streams, chance.randrange(20))
            out += [(tenant, stream) for stream, count in taken.items() for _ in range(count)]
            assert all(out.count((tenant, stream)) <= 8 for stream in streams)
        elif out:
            slots.give_back(*out.pop(chance.randrange(len(out))))
        assert slots.taken == len(out) <= 64 + 2
    for place in out:
        slots.give_back(*place)
    assert slots.taken == 0
    assert slots.take("acme", [1, 2, 3, 4], 32) == {1: 8, 2: 8, 3: 8, 4: 8}

"""A running service and what an administrator and the devices make first: tenants, projects, streams, credentials."""

from dataclasses import dataclass, field, replace
from typing import Any

from client import Caller, Device, Key
from program import Program

TENANT = "acme"
PROJECT = "apollo"
OTHER_PROJECT = "borealis"
DEVICES = ("walker", "batcher", "faulty", "staged", "keeper", "reader")


@dataclass(frozen=True)
class World:
    """A running service, enrolled devices with a stream each, and callers of other kinds."""

    program: Program
    address: str
    devices: dict[str, Device]
    consumer: Caller
    operator: Caller
    stranger: Device
    """A device of another tenant, whose names are those of a device here."""
    outsider: Caller
    """A consumer of the other tenant."""
    ledger: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """By the correlation id of an answer, the audit event that it ought to have; None if it ought to have none."""

    def owes(self, answer: dict[str, Any], event: dict[str, Any] | None) -> None:
        """Note what the trail ought to say of an answer."""
        assert answer["correlationId"] not in self.ledger
        self.ledger[answer["correlationId"]] = event

    def keys_added(self, device: Device, count: int) -> list[Device]:
        """The same device with each of so many further keys, and with the credential that came last."""
        command = f"device invite {TENANT} {device.name} --project {PROJECT} --add-key"
        others = [replace(device, key=Key()) for _ in range(count)]
        for other, made in zip(others, self.program.run_all(*[command] * count), strict=True):
            assert other.enrol(made["code"]).status == 200
        return [replace(other, credential=others[-1].credential) for other in others]


def populated(program: Program, address: str) -> World:
    """Make tenants, then projects, then the rest, and enrol each device by itself."""
    program.run_all(f"tenant create {TENANT}", "tenant create other")
    program.run_all(
        *(f"project create {path}" for path in (f"{TENANT} {PROJECT}", f"{TENANT} {OTHER_PROJECT}", f"other {PROJECT}"))
    )
    *credentials, other_code = program.run_all(
        f"credential create {TENANT} --role consumer --project {PROJECT}",
        f"credential create {TENANT} --role operator --project {PROJECT}",
        f"credential create other --role consumer --project {PROJECT}",
        f"device invite other walker --project {PROJECT}",
    )
    codes = program.run_all(*(f"device invite {TENANT} {name} --project {PROJECT}" for name in DEVICES))
    stranger, *devices = [
        Device(address, None, tenant, PROJECT, name)
        for tenant, name in [("other", "walker"), *((TENANT, name) for name in DEVICES)]
    ]
    for device, code in zip([stranger, *devices], [other_code, *codes], strict=True):
        assert device.enrol(code["code"]).status == 200
    consumer, operator, outsider = (Caller(address, made["credential"]) for made in credentials)
    named = {device.name: device for device in devices}
    return World(program, address, named, consumer, operator, stranger, outsider)

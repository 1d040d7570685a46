"""A running service and what an administrator and the devices make first: tenants, projects, streams, credentials."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from client import Caller, Device, Key
from program import Program

TENANT = "acme"
PROJECT = "apollo"
OTHER_PROJECT = "borealis"
DEVICES = ("walker", "sender-01", "batcher", "faulty", "staged", "keeper", "reader", "limited", "stalled")
COMMANDS_AT_ONCE = 4


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

    def invite(self, device: str, *words: str, tenant: str = TENANT) -> str:
        """A one-time code."""
        return self.program.run("device", "invite", tenant, device, "--project", PROJECT, *words)["code"]

    def key_added(self, device: Device) -> Device:
        """The same device with a further key, and the credential that came with it."""
        other = replace(device, key=Key())
        assert other.enrol(self.invite(device.name, "--add-key")).status == 200
        return other


def populated(program: Program, address: str) -> World:
    """Make tenants, then projects, then the rest, as many commands beside each other as two cores bear."""
    with ThreadPoolExecutor(COMMANDS_AT_ONCE) as pool:

        def all_of(*commands: str) -> list[dict[str, str]]:
            return list(pool.map(lambda command: program.run(*command.split()), commands))

        all_of(f"tenant create {TENANT}", "tenant create other")
        all_of(
            *(f"project create {path}" for path in (f"{TENANT} {PROJECT}", f"{TENANT} {OTHER_PROJECT}", "other apollo"))
        )
        credentials = all_of(
            f"credential create {TENANT} --role consumer --project {PROJECT}",
            f"credential create {TENANT} --role operator --project {PROJECT}",
            f"credential create other --role consumer --project {PROJECT}",
        )
        invitations = [f"device invite {TENANT} {name} --project {PROJECT}" for name in DEVICES]
        codes = all_of("device invite other walker --project apollo", *invitations)
    stranger, *devices = [
        Device(address, None, tenant, PROJECT, name)
        for tenant, name in [("other", "walker"), *((TENANT, name) for name in DEVICES)]
    ]
    for device, code in zip([stranger, *devices], codes, strict=True):
        assert device.enrol(code["code"]).status == 200
    consumer, operator, outsider = (Caller(address, made["credential"]) for made in credentials)
    named = {device.name: device for device in devices}
    return World(program, address, named, consumer, operator, stranger, outsider)

"""`postseal device`: invite, enroll, list, retire."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option, Typer, echo

from postseal.admin import devices
from postseal.admin.devices import Invitation
from postseal.cli.arguments import DeviceName, ProjectNames, TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_record, print_table, record
from postseal.enrolment import Enrolled, enrol
from postseal.envelope import ed25519
from postseal.envelope.enrolment import prove
from postseal.errors import AdminError, Refused, Unavailable
from postseal.outbound.holding import move_mail
from postseal.outcomes import Reason
from postseal.postgres.database import Database, Part
from postseal.private_files import write_private

Account = Annotated[str | None, Option(metavar="ACCOUNT", help="The account of a new device; by default its own id.")]
AddKey = Annotated[bool, Option("--add-key", help="Bring a further key, or further projects, to a device that exists.")]

app = Typer()


@command(app, "invite")
def invite(
    session: Session,
    tenant: TenantName,
    device: DeviceName,
    project: ProjectNames,
    *,
    account: Account = None,
    add_key: AddKey = False,
) -> None:
    """Make a one-time code with which a device enrolls itself."""

    async def flow(database: Database) -> Invitation:
        return await _invite(session, database, tenant, device, project, account=account, add_key=add_key)

    invitation = record(session.run(Part.ADMIN, flow))
    if session.as_json:
        print_json(invitation)
    else:
        print_record(invitation)


@command(app, "enroll")
def enroll(
    session: Session,
    tenant: TenantName,
    device: DeviceName,
    project: ProjectNames,
    *,
    generate: Annotated[bool, Option("--generate", help="Make a new key; it must be asked for.")] = False,
    key_out: Annotated[
        Path, Option(metavar="FILE", help="Where the private key goes; never overwritten.", show_default=False)
    ],
    account: Account = None,
    add_key: AddKey = False,
) -> None:
    """Invite and enroll a device in one go. Its new key is on this machine."""
    if not generate:
        raise BadParameter("say --generate: this command makes the key itself; else use `device invite`")
    seed = ed25519.generate()
    public_key = ed25519.public_key(seed)

    async def flow(database: Database) -> Enrolled:
        with _new_key_file(key_out, seed):
            invitation = await _invite(session, database, tenant, device, project, account=account, add_key=add_key)
            keyid = ed25519.thumbprint(public_key)
            proof = prove(seed, code=invitation.code, device=device, keyid=keyid, tenant=tenant)
            return await enrol(
                database,
                code=invitation.code,
                public_key=public_key,
                proof=proof,
                credential_lifetime_s=session.settings.credential_lifetime_s,
                max_pending=session.settings.max_pending,
            )

    enrolled = record(session.run(Part.ADMIN, flow)) | {"keyFile": str(key_out)}
    del enrolled["again"]  # the code was made for this
    if session.as_json:
        print_json(enrolled)
    else:
        print_record(enrolled)


@command(app, "list")
def list_all(session: Session, tenant: TenantName) -> None:
    """Show the devices of a tenant."""
    found = session.transact(lambda connection: devices.list_of_tenant(connection, tenant))
    rows = [record(row) for row in found]
    if session.as_json:
        print_json({"tenant": tenant, "devices": rows})
    else:
        print_table(rows, ("device", "account", "projects", "createdAtMs", "retiredAtMs"))


@command(app, "retire")
def retire(session: Session, tenant: TenantName, device: DeviceName) -> None:
    """Take nothing new from a device, for ever, and hold what is for it. Its id is never used again."""

    async def flow(database: Database) -> None:
        pulled = await database.transact(lambda connection: devices.retire(connection, session.actor, tenant, device))
        for stream in pulled:
            await move_mail(database, tenant, stream)

    session.run(Part.ADMIN, flow)
    if session.as_json:
        print_json({"tenant": tenant, "device": device})
    else:
        echo(f"device {device} of tenant {tenant} retired")


async def _invite(
    session: Session,
    database: Database,
    tenant: str,
    device: str,
    projects: list[str],
    *,
    account: str | None,
    add_key: bool,
) -> Invitation:
    return await database.transact(
        lambda connection: devices.invite(
            connection,
            session.actor,
            tenant,
            device,
            projects=projects,
            lifetime_s=session.settings.invitation_lifetime_s,
            account=account,
            adds_key=add_key,
        )
    )


@contextmanager
def _new_key_file(path: Path, seed: bytes) -> Generator[None]:
    """Keep the private key in a new file of the owner's alone before it is used.

    It is removed where the key was refused for certain. Where that is not certain the device may be enrolled with it.
    """
    try:
        write_private(path, ed25519.seed_to_pem(seed))
    except FileExistsError:
        raise AdminError(
            Reason.CONFLICT, f"{path} exists already and is not overwritten: choose another file"
        ) from None
    try:
        yield
    except (Refused, AdminError):
        path.unlink()
        raise
    except Unavailable as error:
        raise Unavailable(
            f"{error}; {path} is kept, since its key may be enrolled: name another file, and if the device is listed "
            "say --add-key"
        ) from None

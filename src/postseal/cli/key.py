"""`postseal key`: list, retire, revoke of devices' keys; create of a tenant's signing key."""

from typing import Annotated

from typer import Argument, Option, Typer, echo

from postseal.admin import keys, signing_keys
from postseal.cli.arguments import TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import age, print_json, print_record, print_table, record
from postseal.envelope import ed25519
from postseal.errors import AdminError, Unavailable
from postseal.signing.pem_folder import folder_of, write_key

KeyId = Annotated[str, Argument(metavar="KEYID", help="The key's id.", show_default=False)]

app = Typer()


@command(app, "create")
def create(session: Session, tenant: TenantName) -> None:
    """Make a tenant's signing key, on this machine. The control plane signs with it."""
    seed = ed25519.generate()
    # First the file: a key that is registered can be signed with, whatever is interrupted.
    session.transact(lambda connection: signing_keys.require_none(connection, tenant))
    file = write_key(folder_of(session.settings), tenant, seed)
    try:
        keyid = session.transact(
            lambda connection: signing_keys.create(connection, session.actor, tenant, ed25519.public_key(seed))
        )
    except AdminError:
        file.unlink()
        raise
    except Unavailable as error:
        raise Unavailable(f"{error}; {file} is kept, since its key may be registered") from None
    made = {"tenant": tenant, "keyid": keyid, "keyFile": str(file)}
    if session.as_json:
        print_json(made)
    else:
        print_record(made)


@command(app, "list")
def list_all(
    session: Session,
    tenant: TenantName,
    *,
    device: Annotated[str | None, Option(metavar="DEVICE", help="Only the keys of this device.")] = None,
) -> None:
    """Show the keys of a tenant's devices, with their state and age."""
    found = session.transact(lambda connection: keys.list_of_tenant(connection, tenant, device))
    if session.as_json:
        print_json({"tenant": tenant, "keys": [record(row) for row in found]})
    else:
        rows = [record(row) | {"age": age(row.age_s)} for row in found]
        print_table(rows, ("keyid", "device", "state", "age", "registeredAtMs", "changedAtMs"))


@command(app, "retire", takes_keyid=True)
def retire(session: Session, tenant: TenantName, keyid: KeyId) -> None:
    """Let a key bring nothing new; what it signed still verifies."""
    session.transact(lambda connection: keys.retire(connection, session.actor, tenant, keyid))
    _tell(session, tenant, keyid, keys.VERIFY_ONLY)


@command(app, "revoke", takes_keyid=True)
def revoke(session: Session, tenant: TenantName, keyid: KeyId) -> None:
    """Revoke a key that may be in wrong hands. From now on it brings nothing new."""
    session.transact(lambda connection: keys.revoke(connection, session.actor, tenant, keyid))
    _tell(session, tenant, keyid, keys.REVOKED)


def _tell(session: Session, tenant: str, keyid: str, state: str) -> None:
    if session.as_json:
        print_json({"tenant": tenant, "keyid": keyid, "state": state})
    else:
        echo(f"key {keyid} is {state}")

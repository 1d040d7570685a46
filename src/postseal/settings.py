"""Settings: one frozen structure, read once from a TOML file, the environment and the command line, in that order.

Every member is a key of the TOML file and, in capitals behind `POSTSEAL_`, a variable of the environment. Nothing is
read at import.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from postseal.errors import StartupError

ENVIRONMENT_PREFIX = "POSTSEAL_"
NO_SETTINGS = {"CONFIG", "PG_BIN", "PG_BUFFERS_MB", "URL"}
"""Variables with that prefix that are something else: the settings file, PostgreSQL's programs and memory, and the
address in the commands of the documentation."""
TEST_PREFIX = "TEST_"
"""Of the tests' own variables, which the programs that they start inherit."""

MAX_PORT = 65_535
SECONDS_A_MINUTE, SECONDS_AN_HOUR, SECONDS_A_DAY = 60, 3_600, 86_400
MAX_RETENTION_DAYS = 36_500
MAX_ATTEMPTS = 100
"""Of one delivery, whoever sets the limit."""
LISTS = {"TRUSTED_PROXIES", "ALLOWED_CIDRS"}
"""Settings that the environment gives as one text with commas."""
PATHS = {"data_dir", "roles_file", "kinds_dir", "signing_keys_dir", "deployment_key_file", "ca_file"}
"""Settings that name a file or a folder."""


_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a deployment can choose. Units stand in the names."""

    data_dir: Annotated[
        str | None,
        Meta(description="Home folder of the embedded database; by default the user's data folder"),
    ] = None
    database_url: Annotated[
        str | None,
        Meta(description="PostgreSQL 15 to 18 to use in place of the embedded one: postgresql://owner@host/name"),
    ] = None
    roles_file: Annotated[
        str | None,
        Meta(
            description="Password file (0600) of the roles that `migrate` makes in an external database; "
            "by default roles.pgpass in the data folder"
        ),
    ] = None
    role_prefix: Annotated[
        str,
        Meta(
            pattern=r"^[a-z_][a-z0-9_]{0,39}\Z",
            description="Prefix of the names of the database roles, which are shared by a whole PostgreSQL cluster",
        ),
    ] = "postseal"
    prepared_statements: Annotated[
        bool, Meta(description="Keep statements prepared; turn it off behind PgBouncer in transaction mode")
    ] = True
    host: Annotated[str, Meta(description="Address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=MAX_PORT, description="Port to listen on; 0 takes a free one")] = 8080
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(description="CIDRs of proxies whose X-Forwarded-For counts, separated by commas in the environment"),
    ] = ()
    window: Annotated[
        int,
        Meta(ge=1, le=8192, description="How far beyond the contiguous cursor a sequence may lie"),
    ] = 1024
    max_envelope_bytes: Annotated[int, Meta(ge=1024, le=8192, description="Greatest size of an envelope in bytes")] = (
        8192
    )
    kinds_dir: Annotated[
        str | None,
        Meta(
            description="Folder of the JSON Schemas of the deployment's own kinds of payload; by default there are none"
        ),
    ] = None
    sync_permits_per_s: Annotated[
        float, Meta(gt=0, le=1e6, description="Envelopes a second that one device may send, refusals included")
    ] = 2000.0
    sync_burst: Annotated[int, Meta(ge=100, description="Envelopes that one device may send at once")] = 10_000
    peer_permits_per_s: Annotated[
        float, Meta(gt=0, le=1e6, description="Unknown or wrong credentials a second that one network peer may show")
    ] = 20.0
    peer_burst: Annotated[
        int, Meta(ge=1, description="Unknown or wrong credentials that one peer may show at once")
    ] = 200
    receive_deadline_s: Annotated[
        float, Meta(gt=0, le=600, description="Seconds in which a request must have arrived, head and body")
    ] = 15.0
    max_pending_body_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="Bytes of bodies held at once for unverified callers, and as many again for verified ones",
        ),
    ] = 64 << 20
    payload_retention_days: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_RETENTION_DAYS,
            description="Days after which a payload expires where tenant and project set none",
        ),
    ] = 90
    key_removal_days: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_RETENTION_DAYS,
            description="Days after its last envelope before which no key can be removed; 0 for as many as "
            "`payload_retention_days`",
        ),
    ] = 0
    rotation_overlap_hours: Annotated[
        int,
        Meta(
            ge=1,
            le=8760,
            description="Hours that a key or credential goes on after its device replaced it, or an operator who named "
            "no other time",
        ),
    ] = 168
    sweep: Annotated[bool, Meta(description="Whether `serve` deletes expired payloads too")] = True
    sweep_pause_s: Annotated[
        float,
        Meta(ge=0.01, le=60, description="Seconds between two batches of at most 1,000 payloads that are deleted"),
    ] = 0.1
    credential_days: Annotated[int, Meta(ge=1, le=3650, description="Days that a credential lives")] = 90
    invitation_minutes: Annotated[int, Meta(ge=1, le=10_080, description="Minutes that an enrolment code lives")] = 60
    commit_lanes: Annotated[
        int, Meta(ge=1, le=16, description="Connections over which a process commits groups of envelopes")
    ] = 1
    max_waiting_reads: Annotated[
        int,
        Meta(ge=0, description="Reads that may wait for envelopes in one process; what is beyond is answered at once"),
    ] = 500
    min_free_disk_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="MiB free on the disk of the embedded database below which envelopes are `unavailable`",
        ),
    ] = 256
    ballast_mb: Annotated[
        int,
        Meta(ge=0, description="MiB of that disk kept for the recovery of a database that filled it; 0 for none"),
    ] = 64
    signing_keys_dir: Annotated[
        str | None,
        Meta(
            description="Folder of the tenants' private signing keys, `<tenant>/<key id>.pem`, 0600; by default "
            "signing in the data folder"
        ),
    ] = None
    deployment_key_file: Annotated[
        str | None,
        Meta(
            description="File (0600) of the key under which destinations' secrets lie encrypted in the database; "
            "by default deployment.key in the data folder"
        ),
    ] = None
    max_pending: Annotated[
        int, Meta(ge=1, le=100_000_000, description="Deliveries that may be pending for one new destination")
    ] = 100_000
    attempt_limit: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_ATTEMPTS,
            description="Attempts at a delivery after which it is dead, where its sender set none",
        ),
    ] = 8
    lease_s: Annotated[
        float, Meta(ge=5, le=3600, description="Seconds for which a claimed delivery is nobody else's")
    ] = 60.0
    send_timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="Seconds that one push to a destination may take")
    ] = 15.0
    destination_concurrency: Annotated[
        int, Meta(ge=1, le=1000, description="Pushes that one process has on their way to one destination at once")
    ] = 16
    worker_cycles: Annotated[
        int, Meta(ge=1, le=100, description="Tenants whose deliveries one process pushes at once")
    ] = 4
    cycle_timeout_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="Seconds after which a tenant's turn is cut off; more than `send_timeout_s`"),
    ] = 120.0
    stop_grace_s: Annotated[
        float, Meta(ge=0, le=600, description="Seconds that pushes under way get to end when the worker stops")
    ] = 20.0
    worker: Annotated[bool, Meta(description="Whether `serve` seals and delivers too")] = True
    poll_s: Annotated[
        float,
        Meta(gt=0, le=60, description="Seconds between two looks for intents and due deliveries, less some jitter"),
    ] = 0.5
    allowed_cidrs: Annotated[
        tuple[str, ...],
        Meta(
            description="CIDRs of private or special addresses to which deliveries may be pushed all the same, "
            "separated by commas in the environment"
        ),
    ] = ()
    allow_http: Annotated[bool, Meta(description="Push to `http://` addresses too")] = False
    egress_proxy: Annotated[
        str | None, Meta(description="HTTP proxy through which deliveries are pushed: http://proxy.example.net:3128")
    ] = None
    ca_file: Annotated[
        str | None,
        Meta(description="PEM file of the authorities that may vouch for destinations; by default the system's"),
    ] = None
    log_level: Annotated[
        str, Meta(pattern=r"^(debug|info|warning|error)\Z", description="debug, info, warning or error")
    ] = "info"

    @property
    def payload_retention_s(self) -> int:
        """After how many seconds a payload expires where tenant and project set nothing."""
        return self.payload_retention_days * SECONDS_A_DAY

    @property
    def key_window_s(self) -> int:
        """How many seconds after its last envelope a key is kept at least."""
        return (self.key_removal_days or self.payload_retention_days) * SECONDS_A_DAY

    @property
    def rotation_overlap_s(self) -> int:
        """How many seconds what was replaced goes on."""
        return self.rotation_overlap_hours * SECONDS_AN_HOUR

    @property
    def credential_lifetime_s(self) -> int:
        """How many seconds a credential that is made now lives."""
        return self.credential_days * SECONDS_A_DAY

    @property
    def invitation_lifetime_s(self) -> int:
        """How many seconds a code that is made now lives."""
        return self.invitation_minutes * SECONDS_A_MINUTE

    def __repr__(self) -> str:
        """Not the values: a database URL may hold a password."""
        return "Settings(…)"


def load_settings(
    environment: Mapping[str, str], file: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """Read the settings; what the command line gives (`overrides`, None left out) wins over all.

    In a path `~` is the home folder of whoever runs this. Raises StartupError with one line that names the setting;
    values are not repeated, since one may hold a password.
    """
    file_values = _from_file(file or _named_file(environment))
    values = file_values | _from_environment(environment)
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    values |= {name: _expanded(name, values[name]) for name in PATHS & values.keys()}
    try:
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.search(str(error)):
            raise StartupError(f"there is no setting {unknown[1]!r}: mend its name, or take it out") from None
        place = str(error).rpartition(" - at `$.")[2].rstrip("`")
        raise StartupError(f"setting {place or '?'} is not valid: {_rule_only(error)}") from None
    if settings.cycle_timeout_s <= settings.send_timeout_s:
        # A receiver that takes longer would get the same mail at each attempt, until it is a dead letter.
        raise StartupError("setting cycle_timeout_s is not valid: it must be more than send_timeout_s")
    return settings


def _named_file(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    return Path(named) if named else None


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise StartupError(f"cannot read the settings file {file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise StartupError(f"the settings file {file} is not valid TOML") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in NO_SETTINGS or name.startswith(TEST_PREFIX):
            continue
        if name.lower() not in Settings.__struct_fields__ or not name.isupper():
            raise StartupError(f"the variable {variable} is no setting: mend its name, or take it out")
        if text:
            values[name.lower()] = [part.strip() for part in text.split(",")] if name in LISTS else text
    return values


def _expanded(name: str, value: Any) -> Any:
    if not (isinstance(value, str) and value.startswith("~")):
        return value
    try:
        return str(Path(value).expanduser())
    except RuntimeError:
        raise StartupError(f"setting {name} is not valid: there is no home folder for its `~`") from None


def _rule_only(error: msgspec.ValidationError) -> str:
    # msgspec says what it expected and what type it found, never the value itself.
    return str(error).partition(" - at ")[0]

-- The inbound half: who may write, what was written, where each stream stands, and what was answered.
--
-- The tenant stands first in every key, so that the tables can be sharded by tenant; the schema test names the three
-- exceptions (a credential and an invitation are found before their tenant is known; platform acts have none).
-- There are no foreign keys from the hot tables (streams, identities, payloads, audit_events): each insert would
-- take a shared lock on the row it points at.

CREATE TABLE tenants (
    tenant            text COLLATE "C" PRIMARY KEY CHECK (tenant ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    payload_retention interval CHECK (payload_retention > interval '0'),
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE projects (
    tenant            text COLLATE "C" NOT NULL REFERENCES tenants,
    project           text COLLATE "C" NOT NULL CHECK (project ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    payload_retention interval CHECK (payload_retention > interval '0'),
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, project)
);

-- A device's id is never used again: its row stays when it is retired.
CREATE TABLE devices (
    tenant     text COLLATE "C" NOT NULL REFERENCES tenants,
    device     text COLLATE "C" NOT NULL
               CHECK (device ~ '^[a-z0-9][a-z0-9._-]{0,62}$' AND device <> 'controlplane'),
    account    text COLLATE "C" NOT NULL CHECK (account ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    retired_at timestamptz,
    PRIMARY KEY (tenant, device)
);

-- A one-time code. It is spent when `keyid` is set; the same key and proof may come again until it expires, because
-- an answer can be lost.
CREATE TABLE invitations (
    code_hash  bytea PRIMARY KEY CHECK (octet_length(code_hash) = 32),
    tenant     text COLLATE "C" NOT NULL REFERENCES tenants,
    device     text COLLATE "C" NOT NULL,
    account    text COLLATE "C" NOT NULL,
    projects   text[] NOT NULL CHECK (cardinality(projects) > 0),
    adds_key   boolean NOT NULL,
    -- What the device could write to when the code was made, and may after it is used: whoever made the code answered
    -- for these alone.
    reach      text[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    keyid      text COLLATE "C",
    proof_hash bytea,
    credential_id uuid
);

-- Only the SHA-256 of a credential's 256 random bits is kept.
CREATE TABLE credentials (
    credential_id uuid PRIMARY KEY,
    secret_hash   bytea NOT NULL CHECK (octet_length(secret_hash) = 32),
    tenant        text COLLATE "C" NOT NULL REFERENCES tenants,
    account       text COLLATE "C" NOT NULL CHECK (account ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    device        text COLLATE "C",
    role          text NOT NULL CHECK (role IN ('device', 'consumer', 'sender', 'operator')),
    projects      text[] NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at    timestamptz NOT NULL,
    revoked_at    timestamptz,
    CHECK ((role = 'device') = (device IS NOT NULL))
);
CREATE INDEX credentials_by_tenant ON credentials (tenant, created_at);

CREATE TABLE keys (
    tenant        text COLLATE "C" NOT NULL,
    keyid         text COLLATE "C" NOT NULL CHECK (length(keyid) = 43),
    device        text COLLATE "C" NOT NULL,
    public_key    bytea NOT NULL CHECK (octet_length(public_key) = 32),
    state         text NOT NULL DEFAULT 'active'
                  CHECK (state IN ('active', 'retiring', 'verify-only', 'revoked', 'removed')),
    accept_until  timestamptz,
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, keyid),
    FOREIGN KEY (tenant, device) REFERENCES devices,
    CHECK ((state = 'retiring') = (accept_until IS NOT NULL))
);
CREATE INDEX keys_by_device ON keys (tenant, device);

-- The unit of ordering, locking and deduplication. What is retained above the contiguous cursor is a bitmap, least
-- significant byte first, without trailing zero bytes. No index holds a column that changes and half of each page is
-- left free, so that every update is a heap-only one. The primary key is made last: where two indexes cost the same, as
-- in a table that was never analysed, the planner takes the younger one.
CREATE SEQUENCE stream_ids AS bigint;
CREATE TABLE streams (
    tenant     text COLLATE "C" NOT NULL,
    stream     bigint NOT NULL DEFAULT nextval('stream_ids'),
    project    text COLLATE "C" NOT NULL,
    producer   text COLLATE "C" NOT NULL,
    retired    boolean NOT NULL DEFAULT false,
    floor      bigint NOT NULL DEFAULT 0,
    contiguous bigint NOT NULL DEFAULT 0,
    highest    bigint NOT NULL DEFAULT 0,
    above      bytea NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (tenant, project, producer),
    CHECK (0 <= floor AND floor <= contiguous AND contiguous <= highest AND highest <= 9007199254740991)
) WITH (fillfactor = 50);
ALTER TABLE streams ADD PRIMARY KEY (tenant, stream);

-- What was ever retained; it stays for ever. The event id is unique, and so is the idempotency key, kept as the first
-- 16 bytes of its SHA-256: both in their stream, whose lock is therefore the only one that is needed.
CREATE TABLE identities (
    tenant           text COLLATE "C" NOT NULL,
    stream           bigint NOT NULL,
    sequence         bigint NOT NULL,
    event_id         uuid NOT NULL,
    idempotency_hash uuid NOT NULL,
    event_identity   bytea NOT NULL,
    keyid            text COLLATE "C" NOT NULL,
    accepted_at      timestamptz NOT NULL,
    PRIMARY KEY (tenant, stream, sequence),
    UNIQUE (tenant, stream, event_id),
    UNIQUE (tenant, stream, idempotency_hash)
);

-- The signed bytes and their signature, until they expire. NULL never expires.
CREATE TABLE payloads (
    tenant     text COLLATE "C" NOT NULL,
    stream     bigint NOT NULL,
    sequence   bigint NOT NULL,
    expires_at timestamptz,
    payload    bytea NOT NULL,
    signature  bytea NOT NULL,
    PRIMARY KEY (tenant, stream, sequence)
);
CREATE INDEX payloads_by_expiry ON payloads (expires_at) WHERE expires_at IS NOT NULL;

-- Append-only: no role of the service may update or delete here. `xid` and `salt` are what a transparent log needs:
-- the order in which transactions began, and a leaf that nobody can guess.
CREATE TABLE audit_events (
    tenant         text COLLATE "C" NOT NULL,
    id             bigint GENERATED ALWAYS AS IDENTITY,
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    project        text COLLATE "C",
    account        text COLLATE "C" NOT NULL,
    device         text COLLATE "C",
    action         text NOT NULL,
    outcome        text NOT NULL,
    reason         text,
    event_identity bytea,
    undecodable    boolean NOT NULL DEFAULT false,
    occurrences    bigint NOT NULL DEFAULT 1,
    detail         jsonb,
    correlation_id uuid NOT NULL,
    xid            xid8 NOT NULL DEFAULT pg_current_xact_id(),
    salt           bytea NOT NULL DEFAULT uuid_send(gen_random_uuid()),
    PRIMARY KEY (tenant, id)
);

-- Acts on the platform itself, which belong to no tenant.
CREATE TABLE platform_audit_events (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    account        text COLLATE "C" NOT NULL,
    action         text NOT NULL,
    detail         jsonb,
    correlation_id uuid NOT NULL,
    xid            xid8 NOT NULL DEFAULT pg_current_xact_id(),
    salt           bytea NOT NULL DEFAULT uuid_send(gen_random_uuid())
);

-- Grants. The part of the service that takes envelopes in:
GRANT SELECT ON tenants, projects, devices, credentials, keys, streams, identities, payloads TO {prefix}_ingest;
GRANT INSERT ON identities, payloads, audit_events TO {prefix}_ingest;
GRANT UPDATE (contiguous, highest, above) ON streams TO {prefix}_ingest;

-- Administrators' acts and enrolment:
GRANT SELECT ON tenants, projects, devices, invitations, keys, streams, audit_events, platform_audit_events
    TO {prefix}_admin;
GRANT SELECT (credential_id, tenant, account, device, role, projects, created_at, expires_at, revoked_at)
    ON credentials TO {prefix}_admin;
GRANT INSERT ON tenants, projects, devices, invitations, credentials, keys, streams, audit_events,
    platform_audit_events TO {prefix}_admin;
GRANT USAGE ON SEQUENCE stream_ids TO {prefix}_admin;
GRANT UPDATE (payload_retention) ON tenants, projects TO {prefix}_admin;
GRANT UPDATE (retired_at) ON devices TO {prefix}_admin;
GRANT UPDATE (keyid, proof_hash, credential_id) ON invitations TO {prefix}_admin;
GRANT UPDATE (revoked_at) ON credentials TO {prefix}_admin;
GRANT UPDATE (state, accept_until, changed_at) ON keys TO {prefix}_admin;
GRANT UPDATE (retired, floor, contiguous, highest, above) ON streams TO {prefix}_admin;

-- The sweep deletes expired payloads, and reads no more than it needs to find them:
GRANT SELECT (tenant, stream, sequence, expires_at), DELETE ON payloads TO {prefix}_sweep;

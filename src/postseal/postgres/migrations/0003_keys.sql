-- The lives of keys: when they were last used, how far a rotation overlaps, and what devices change by themselves.

-- Up to when a device's key brought something new into a stream, and until when the last payload that it signed is kept.
-- A process notes it once a minute, in a group's own transaction and under the stream's lock. No index holds what
-- changes.
CREATE TABLE key_uses (
    tenant     text COLLATE "C" NOT NULL,
    keyid      text COLLATE "C" NOT NULL,
    stream     bigint NOT NULL,
    last_at    timestamptz NOT NULL,
    kept_until timestamptz NOT NULL,
    PRIMARY KEY (tenant, keyid, stream)
) WITH (fillfactor = 50);
-- Before the tables that everybody reads are locked below, since it reads all identities.
INSERT INTO key_uses
SELECT i.tenant, i.keyid, i.stream, max(i.accepted_at), coalesce(max(p.expires_at), max(i.accepted_at))
FROM identities i LEFT JOIN payloads p USING (tenant, stream, sequence)
GROUP BY i.tenant, i.keyid, i.stream;

-- The version of a tenant's set of signing keys. Whoever changes a signing key takes this row first.
CREATE TABLE keysets (
    tenant  text COLLATE "C" PRIMARY KEY REFERENCES tenants,
    version bigint NOT NULL CHECK (version BETWEEN 1 AND 9007199254740991)
);

-- What a device has to sign to bring a further key: one at a time, spent when `keyid` is set. The same request may come
-- again until it expires, because an answer can be lost; `replaces` is the key that spoke for the new one.
CREATE TABLE key_challenges (
    tenant         text COLLATE "C" NOT NULL,
    device         text COLLATE "C" NOT NULL,
    challenge_hash bytea NOT NULL CHECK (octet_length(challenge_hash) = 32),
    expires_at     timestamptz NOT NULL,
    keyid          text COLLATE "C",
    replaces       text COLLATE "C",
    PRIMARY KEY (tenant, device),
    FOREIGN KEY (tenant, device) REFERENCES devices,
    CHECK ((keyid IS NULL) = (replaces IS NULL))
);

GRANT SELECT, INSERT, UPDATE (last_at, kept_until) ON key_uses TO {prefix}_ingest;
GRANT SELECT ON keysets TO {prefix}_delivery;
GRANT SELECT ON key_uses, keysets, key_challenges TO {prefix}_admin;
GRANT INSERT ON keysets, key_challenges TO {prefix}_admin;
GRANT UPDATE (version) ON keysets TO {prefix}_admin;
GRANT UPDATE (challenge_hash, expires_at, keyid, replaces) ON key_challenges TO {prefix}_admin;
-- Which payloads there are, and not what is in them: a key is not removed while some need it.
GRANT SELECT (tenant, stream, sequence, expires_at) ON payloads TO {prefix}_admin;

-- A retiring signing key is taken until its time comes, as a device's is.
ALTER TABLE signing_keys ADD COLUMN accept_until timestamptz;
UPDATE signing_keys SET state = 'verify-only' WHERE state = 'retiring';
ALTER TABLE signing_keys ADD CHECK ((state = 'retiring') = (accept_until IS NOT NULL));
GRANT UPDATE (accept_until) ON signing_keys TO {prefix}_admin;

-- The credential that a device got in place of this one.
ALTER TABLE credentials ADD COLUMN successor uuid;
GRANT SELECT (successor), UPDATE (expires_at, successor) ON credentials TO {prefix}_admin;

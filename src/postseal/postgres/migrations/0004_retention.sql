-- Retention: what keeps a payload from the sweep, how the sweep finds what has expired, and when a delivery's payload
-- gets its time.

-- No payload of a tenant is deleted while it has a hold. Each has a name of its own, since there can be several reasons
-- at once; one that is released is gone, and the audit trail tells of it.
CREATE TABLE holds (
    tenant    text COLLATE "C" NOT NULL REFERENCES tenants,
    hold      text COLLATE "C" NOT NULL CHECK (hold ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    reason    text NOT NULL,
    account   text COLLATE "C" NOT NULL,
    placed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, hold)
);

-- By tenant, so that the sweep takes them in turn, and passes over one that is held however much has expired in it.
CREATE INDEX payloads_by_tenant_and_expiry ON payloads (tenant, expires_at) WHERE expires_at IS NOT NULL;
DROP INDEX payloads_by_expiry;

-- Whether the delivery's payload has got its time of expiry. The index holds only those that have not, a few at a time.
ALTER TABLE settlements ADD COLUMN dated boolean NOT NULL DEFAULT false;
CREATE INDEX settlements_undated ON settlements (settled_at) WHERE NOT dated;

-- Retention is an administrator's job: the sweep's role deletes, and cannot choose what.
GRANT SELECT, INSERT, DELETE ON holds TO {prefix}_admin;
GRANT SELECT (tenant, stream, sequence, expires_at), UPDATE (expires_at) ON payloads TO {prefix}_admin;
GRANT UPDATE (dated) ON settlements TO {prefix}_admin;

GRANT SELECT (tenant) ON tenants TO {prefix}_sweep;
GRANT SELECT (tenant, hold) ON holds TO {prefix}_sweep;

-- What a hold keeps can be read.
GRANT SELECT (tenant) ON holds TO {prefix}_ingest;

-- The outbound half: what is to be sent, to whom, when it is due, who has it, and what became of it.
--
-- An outbound stream is a destination of a project. What is sealed is immutable (deliveries, payloads); beside it stands
-- one narrow row that moves (queue) and leaves when the delivery is settled, and one that stays then (settlements).
--
-- Primary keys are made last: where two indexes cost the same, as in a table that was never analysed, the planner takes
-- the younger one.

CREATE TABLE signing_keys (
    tenant        text COLLATE "C" NOT NULL REFERENCES tenants,
    keyid         text COLLATE "C" NOT NULL CHECK (length(keyid) = 43),
    public_key    bytea NOT NULL CHECK (octet_length(public_key) = 32),
    state         text NOT NULL DEFAULT 'active'
                  CHECK (state IN ('active', 'retiring', 'verify-only', 'revoked', 'removed')),
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, keyid)
);
CREATE UNIQUE INDEX signing_keys_one_active ON signing_keys (tenant) WHERE state = 'active';

-- `highest` is the last sequence that was given out; it is read and counted up under this row's lock.
CREATE TABLE destinations (
    tenant          text COLLATE "C" NOT NULL,
    stream          bigint NOT NULL DEFAULT nextval('stream_ids'),
    project         text COLLATE "C" NOT NULL,
    destination     text COLLATE "C" NOT NULL CHECK (destination ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    mode            text NOT NULL CHECK (mode IN ('push', 'pull')),
    url             text CHECK (length(url) <= 2048),
    max_pending     bigint NOT NULL CHECK (max_pending > 0),
    disabled_at     timestamptz,
    disabled_reason text CHECK (disabled_reason IN ('operator', 'gone', 'retired')),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    highest         bigint NOT NULL DEFAULT 0 CHECK (highest BETWEEN 0 AND 9007199254740991),
    UNIQUE (tenant, project, destination),
    FOREIGN KEY (tenant, project) REFERENCES projects,
    CHECK ((mode = 'push') = (url IS NOT NULL)),
    CHECK ((disabled_at IS NULL) = (disabled_reason IS NULL))
) WITH (fillfactor = 50);
CREATE INDEX destinations_disabled ON destinations (disabled_at) WHERE disabled_at IS NOT NULL;
ALTER TABLE destinations ADD PRIMARY KEY (tenant, stream);

-- What signs the requests to a destination, encrypted under the deployment's key file. An older one goes on signing
-- beside the newest until its time comes.
CREATE TABLE destination_secrets (
    tenant     text COLLATE "C" NOT NULL,
    stream     bigint NOT NULL,
    secret     uuid NOT NULL DEFAULT gen_random_uuid(),
    scheme     text NOT NULL CHECK (scheme IN ('v1', 'v1a')),
    encrypted  bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    sign_until timestamptz,
    PRIMARY KEY (tenant, stream, secret),
    FOREIGN KEY (tenant, stream) REFERENCES destinations
);

-- How a destination fares. `settled` counts the deliveries that left the queue: highest - settled is what is pending.
-- It is written last in each transaction, in stream order, and never locked by what gives out sequences.
CREATE TABLE destination_health (
    tenant          text COLLATE "C" NOT NULL,
    stream          bigint NOT NULL,
    settled         bigint NOT NULL DEFAULT 0,
    failing_since   timestamptz,
    last_failure_at timestamptz,
    last_code       text,
    last_success_at timestamptz,
    PRIMARY KEY (tenant, stream)
) WITH (fillfactor = 50);

-- Which login of an application may leave intents for which projects of which tenant.
CREATE TABLE enqueue_logins (
    login    text COLLATE "C" NOT NULL,
    tenant   text COLLATE "C" NOT NULL REFERENCES tenants,
    projects text[] NOT NULL CHECK (cardinality(projects) > 0),
    PRIMARY KEY (tenant, login)
);

-- What an application wants sent, written in its own transaction; the sealer makes a delivery of it, under the same id.
-- It reads many at once, so everything that an application writes is bounded (tenant and project by the policy below).
-- One that is given up is due at infinity.
CREATE TABLE intents (
    tenant          text COLLATE "C" NOT NULL,
    delivery        uuid NOT NULL DEFAULT gen_random_uuid(),
    project         text COLLATE "C" NOT NULL,
    destination     text COLLATE "C" NOT NULL CHECK (destination ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    idempotency_key text COLLATE "C" NOT NULL CHECK (idempotency_key ~ '^[A-Za-z0-9._:-]{8,128}$'),
    data            json NOT NULL CHECK (octet_length(data::text) <= 8192),
    attempt_limit   integer CHECK (attempt_limit BETWEEN 1 AND 100),
    expires_at      timestamptz CHECK (expires_at BETWEEN '1970-01-01Z' AND '2100-01-01Z'),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    login           text COLLATE "C" NOT NULL DEFAULT session_user,
    due_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    tries           integer NOT NULL DEFAULT 0,
    code            text,
    CHECK (tries >= 0)
);
-- What was refused before has slots of its own.
CREATE INDEX intents_fresh ON intents (tenant, due_at) WHERE tries = 0;
CREATE INDEX intents_again ON intents (tenant, due_at) WHERE tries > 0;
ALTER TABLE intents ADD PRIMARY KEY (tenant, delivery);

-- What was sealed; it never changes. `content_hash` tells whether a key that comes again brings the same content. The
-- expiry is the caller's and outlives a redrive.
CREATE TABLE deliveries (
    tenant          text COLLATE "C" NOT NULL,
    stream          bigint NOT NULL,
    sequence        bigint NOT NULL,
    delivery        uuid NOT NULL,
    event_id        uuid NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    content_hash    bytea NOT NULL CHECK (octet_length(content_hash) = 32),
    event_identity  bytea NOT NULL CHECK (octet_length(event_identity) = 32),
    keyid           text COLLATE "C" NOT NULL,
    sealed_at       timestamptz NOT NULL,
    expires_at      timestamptz,
    UNIQUE (tenant, delivery),
    UNIQUE (tenant, stream, idempotency_key),
    UNIQUE (tenant, stream, event_id)
);
ALTER TABLE deliveries ADD PRIMARY KEY (tenant, stream, sequence);

-- What is pending or out for delivery. `lane` keeps what no worker may claim (held by a disabled destination, or pulled
-- by its device) out of the workers' index. `stage` tells what was never tried from what failed before, which has slots
-- of its own, and from what is out: then `token` is set, and `due_at` is when the lease ends. Leases have a range of
-- their own in the index, because each delivery leaves a dead entry there that claims need not look at. `due_at` of what
-- waits is never later than its expiry, so that whoever claims an expired one finds it, and settles it so.
CREATE TABLE queue (
    tenant        text COLLATE "C" NOT NULL,
    stream        bigint NOT NULL,
    sequence      bigint NOT NULL,
    lane          text COLLATE "C" NOT NULL CHECK (lane IN ('push', 'pull', 'held')),
    stage         text COLLATE "C" NOT NULL DEFAULT 'fresh' CHECK (stage IN ('fresh', 'retry', 'leased')),
    due_at        timestamptz NOT NULL,
    attempt       integer NOT NULL DEFAULT 0,
    attempt_limit integer NOT NULL,
    token         uuid,
    expires_at    timestamptz,
    code          text,
    CHECK (attempt >= 0 AND attempt_limit >= 1),
    CHECK ((stage = 'leased') = (token IS NOT NULL))
) WITH (fillfactor = 50);
CREATE INDEX queue_push ON queue (tenant, stream, stage, due_at) WHERE lane = 'push';
CREATE INDEX queue_pull ON queue (tenant, stream, stage, due_at) WHERE lane = 'pull';
CREATE INDEX queue_held ON queue (tenant, stream, sequence) WHERE lane = 'held';
ALTER TABLE queue ADD PRIMARY KEY (tenant, stream, sequence);

-- Each attempt that failed. It stays through a redrive.
CREATE TABLE attempts (
    tenant   text COLLATE "C" NOT NULL,
    stream   bigint NOT NULL,
    sequence bigint NOT NULL,
    attempt  integer NOT NULL,
    ended_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    code     text NOT NULL,
    PRIMARY KEY (tenant, stream, sequence, attempt)
);

-- How a delivery ended. A redrive takes the row of a dead one away again. The project is repeated for dead ones alone:
-- they are listed by it.
CREATE TABLE settlements (
    tenant        text COLLATE "C" NOT NULL,
    stream        bigint NOT NULL,
    sequence      bigint NOT NULL,
    state         text COLLATE "C" NOT NULL CHECK (state IN ('delivered', 'dead', 'expired', 'cancelled')),
    code          text,
    project       text COLLATE "C",
    attempt       integer NOT NULL,
    attempt_limit integer NOT NULL,
    settled_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK ((state = 'dead') = (code IS NOT NULL)),
    CHECK ((state = 'dead') = (project IS NOT NULL))
);
CREATE INDEX settlements_dead ON settlements (tenant, project, settled_at, stream, sequence) WHERE state = 'dead';
CREATE INDEX settlements_dead_by_stream ON settlements (tenant, stream, settled_at, sequence) WHERE state = 'dead';
ALTER TABLE settlements ADD PRIMARY KEY (tenant, stream, sequence);

-- An application sees nothing and writes for itself alone.
CREATE FUNCTION may_enqueue(wanted_tenant text, wanted_project text) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = postseal, pg_temp
    RETURN EXISTS (
        SELECT FROM enqueue_logins
        WHERE login = session_user AND tenant = wanted_tenant AND wanted_project = ANY (projects)
    );
REVOKE ALL ON FUNCTION may_enqueue FROM PUBLIC;
GRANT EXECUTE ON FUNCTION may_enqueue TO {prefix}_enqueue;
ALTER TABLE intents ENABLE ROW LEVEL SECURITY;
CREATE POLICY intents_of_a_login ON intents FOR INSERT TO {prefix}_enqueue
    WITH CHECK (may_enqueue(tenant, project));
CREATE POLICY intents_to_seal ON intents TO {prefix}_delivery USING (true) WITH CHECK (true);
CREATE POLICY intents_to_see ON intents FOR SELECT TO {prefix}_admin USING (true);
GRANT INSERT (tenant, delivery, project, destination, idempotency_key, data, attempt_limit, expires_at)
    ON intents TO {prefix}_enqueue;

-- The part that seals, claims and settles:
GRANT SELECT ON signing_keys, destinations, destination_secrets, destination_health, deliveries,
    payloads, queue, attempts, settlements, intents TO {prefix}_delivery;
GRANT INSERT ON deliveries, payloads, queue, attempts, settlements, audit_events TO {prefix}_delivery;
GRANT UPDATE (highest, disabled_at, disabled_reason) ON destinations TO {prefix}_delivery;
GRANT UPDATE (settled, failing_since, last_failure_at, last_code, last_success_at) ON destination_health
    TO {prefix}_delivery;
GRANT UPDATE (lane, stage, due_at, attempt, attempt_limit, token, code), DELETE ON queue TO {prefix}_delivery;
GRANT UPDATE (due_at, tries, code), DELETE ON intents TO {prefix}_delivery;

-- Administrators' acts:
GRANT SELECT ON signing_keys, destinations, destination_health, deliveries, queue, attempts, settlements, enqueue_logins
    TO {prefix}_admin;
GRANT SELECT (tenant, delivery, project, destination, idempotency_key, expires_at, created_at, due_at, tries, code)
    ON intents TO {prefix}_admin;
GRANT SELECT (tenant, stream, secret, scheme, created_at, sign_until) ON destination_secrets TO {prefix}_admin;
GRANT INSERT ON signing_keys, destinations, destination_secrets, destination_health, enqueue_logins, queue, settlements
    TO {prefix}_admin;
GRANT UPDATE (state, changed_at) ON signing_keys TO {prefix}_admin;
GRANT UPDATE (url, max_pending, disabled_at, disabled_reason) ON destinations TO {prefix}_admin;
GRANT UPDATE (sign_until) ON destination_secrets TO {prefix}_admin;
GRANT UPDATE (settled) ON destination_health TO {prefix}_admin;
GRANT UPDATE (lane, due_at), DELETE ON queue TO {prefix}_admin;
GRANT DELETE ON intents, settlements, enqueue_logins, destination_secrets TO {prefix}_admin;
CREATE POLICY intents_to_cancel ON intents FOR DELETE TO {prefix}_admin USING (true);

-- Enrolment makes the destinations from which a device pulls; those that were enrolled before get theirs here.
WITH made AS (
    INSERT INTO destinations (tenant, project, destination, mode, max_pending)
    SELECT tenant, project, producer, 'pull', 100000 FROM streams JOIN projects USING (tenant, project)
    WHERE NOT retired RETURNING tenant, stream
)
INSERT INTO destination_health (tenant, stream) SELECT tenant, stream FROM made;

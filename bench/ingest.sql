-- One envelope a transaction, bare: what `postseal serve` does for a group, without HTTP, signatures or our Python.
-- Each of 64 streams gets its next sequence under its lock.
\set device random(1, :devices)
BEGIN;
SELECT stream AS stream, contiguous + 1 AS sequence FROM streams
WHERE tenant = 'bench' AND project = 'main' AND producer = 'pgbench-' || :device
FOR NO KEY UPDATE \gset
INSERT INTO identities (tenant, stream, sequence, event_id, idempotency_hash, event_identity, keyid, accepted_at)
VALUES ('bench', :stream, :sequence, gen_random_uuid(), gen_random_uuid(),
        uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()), 'AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA',
        clock_timestamp());
INSERT INTO payloads (tenant, stream, sequence, expires_at, payload, signature)
VALUES ('bench', :stream, :sequence, clock_timestamp() + interval '90 days',
        decode(repeat('7b', 430), 'hex'), decode(repeat('aa', 64), 'hex'));
INSERT INTO audit_events (tenant, project, account, device, action, outcome, event_identity, correlation_id)
VALUES ('bench', 'main', 'bench', 'pgbench-' || :device, 'envelope', 'accepted',
        uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()), gen_random_uuid());
UPDATE streams SET contiguous = :sequence, highest = :sequence WHERE tenant = 'bench' AND stream = :stream;
COMMIT;

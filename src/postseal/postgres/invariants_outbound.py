"""What holds of destinations, deliveries, and what is to become of them (see `invariants`)."""

from typing import LiteralString

from postseal.postgres.invariants import Proof

SEQUENCES: LiteralString = """
WITH counted AS MATERIALIZED (
    SELECT d.*, v.*
    FROM destinations d
    CROSS JOIN LATERAL (
        SELECT count(*) AS number, count(*) FILTER (WHERE v.sequence BETWEEN 1 AND d.highest) AS numbered,
               max(v.sequence) AS last
        FROM deliveries v WHERE v.tenant = d.tenant AND v.stream = d.stream
    ) AS v
    WHERE v.number <> v.numbered OR v.numbered <> d.highest
)
SELECT 'delivery_missing', d.tenant, d.project, NULL, d.destination, (
           SELECT p.at + 1
           FROM (
               SELECT 0 AS at
               UNION ALL
               SELECT v.sequence FROM deliveries v
               WHERE v.tenant = d.tenant AND v.stream = d.stream AND v.sequence BETWEEN 1 AND d.highest - 1
           ) AS p
           WHERE NOT EXISTS (
               SELECT FROM deliveries v WHERE v.tenant = d.tenant AND v.stream = d.stream AND v.sequence = p.at + 1
           )
           ORDER BY p.at LIMIT 1
       ), format('of %s sequences that were given out %s have a delivery', d.highest, d.numbered)
FROM counted d WHERE d.numbered <> d.highest
UNION ALL
SELECT 'delivery_unnumbered', d.tenant, d.project, NULL, d.destination, d.last,
       format('%s deliveries have sequences that were not given out', d.number - d.numbered)
FROM counted d WHERE d.number <> d.numbered
"""

PLACES: LiteralString = """
SELECT CASE WHEN f.sealed = 0 THEN 'delivery_unknown' WHEN f.queued + f.settled = 0 THEN 'delivery_nowhere'
            ELSE 'delivery_twice' END,
       f.tenant, d.project, NULL, d.destination, f.sequence,
       CASE WHEN f.sealed = 0 THEN format('it stands in the queue or among the settled of stream %s, and was never '
                                          'sealed', f.stream)
            WHEN f.queued + f.settled = 0 THEN 'it neither waits nor has ended'
            ELSE 'it waits and has ended' END
FROM (
    SELECT tenant, stream, sequence, sum(sealed) AS sealed, sum(queued) AS queued, sum(settled) AS settled
    FROM (
        SELECT tenant, stream, sequence, 1 AS sealed, 0 AS queued, 0 AS settled FROM deliveries
        UNION ALL
        SELECT tenant, stream, sequence, 0, 1, 0 FROM queue
        UNION ALL
        SELECT tenant, stream, sequence, 0, 0, 1 FROM settlements
    ) AS each
    GROUP BY tenant, stream, sequence
    HAVING sum(sealed) <> 1 OR sum(queued + settled) <> 1
) AS f
LEFT JOIN destinations d USING (tenant, stream)
"""

COUNTERS: LiteralString = """
SELECT 'settled_wrong', d.tenant, d.project, NULL, d.destination, NULL::bigint,
       format('%s count as settled, where %s are; of %s that were given out %s are queued',
              coalesce(h.settled::text, 'none'), s.number, d.highest, q.number)
FROM destinations d
LEFT JOIN destination_health h USING (tenant, stream)
CROSS JOIN LATERAL (
    SELECT count(*) AS number FROM settlements s WHERE s.tenant = d.tenant AND s.stream = d.stream
) AS s
CROSS JOIN LATERAL (
    SELECT count(*) AS number FROM queue q WHERE q.tenant = d.tenant AND q.stream = d.stream
) AS q
WHERE h.settled IS DISTINCT FROM s.number OR d.highest - h.settled IS DISTINCT FROM q.number
"""

# Mail follows its destination, disabled or enabled, a little later: the lane may be either until then.
QUEUE: LiteralString = """
SELECT f.invariant, q.tenant, d.project, NULL, d.destination, q.sequence, f.detail
FROM queue q
JOIN destinations d USING (tenant, stream)
JOIN deliveries v USING (tenant, stream, sequence)
LEFT JOIN payloads p USING (tenant, stream, sequence)
CROSS JOIN LATERAL (VALUES
    ('payload_missing', p.sequence IS NULL, 'it waits, and has no payload'),
    ('payload_expiry', p.expires_at IS NOT NULL, 'it waits, and its payload has a time of expiry'),
    ('delivery_impossible', (q.stage = 'leased') <> (q.token IS NOT NULL),
     'a lease without a token, or a token without a lease'),
    ('delivery_impossible', q.attempt < 0 OR q.attempt > q.attempt_limit,
     format('attempt %s of %s', q.attempt, q.attempt_limit)),
    ('delivery_impossible', q.stage <> 'leased' AND q.attempt >= q.attempt_limit,
     format('it waits for attempt %s of %s', q.attempt + 1, q.attempt_limit)),
    ('delivery_impossible', q.stage = 'leased' AND q.attempt = 0, 'it is out, and was never claimed'),
    ('delivery_impossible', q.stage NOT IN ('fresh', 'retry', 'leased'), format('stage %s', q.stage)),
    ('delivery_impossible', q.lane NOT IN ('held', d.mode),
     format('it is in the lane %s of a destination in mode %s', q.lane, d.mode)),
    ('delivery_impossible', q.expires_at IS DISTINCT FROM v.expires_at, 'its expiry is not the one that was sealed'),
    ('delivery_impossible', q.stage <> 'leased' AND q.due_at > q.expires_at, 'it is due after its expiry')
) AS f (invariant, broken, detail)
WHERE f.broken
"""

SETTLEMENTS: LiteralString = """
SELECT 'delivery_impossible', s.tenant, d.project, NULL, d.destination, s.sequence, f.detail
FROM settlements s
JOIN destinations d USING (tenant, stream)
CROSS JOIN LATERAL (VALUES
    (s.state NOT IN ('delivered', 'dead', 'expired', 'cancelled'), format('state %s', s.state)),
    (s.attempt < 0 OR s.attempt > s.attempt_limit, format('attempt %s of %s', s.attempt, s.attempt_limit)),
    (s.state = 'delivered' AND s.attempt = 0, 'it was delivered without an attempt'),
    ((s.state = 'dead') <> (s.code IS NOT NULL), 'it is dead without a code, or has a code and is not dead'),
    (s.project IS DISTINCT FROM CASE WHEN s.state = 'dead' THEN d.project END,
     'it is listed as a dead letter of another project, or of none')
) AS f (broken, detail)
WHERE f.broken
"""

ATTEMPTS: LiteralString = """
SELECT 'delivery_impossible', a.tenant, d.project, NULL, d.destination, a.sequence,
       format('attempt %s failed, and %s', a.attempt,
              CASE WHEN q.sequence IS NULL AND s.sequence IS NULL THEN 'there is no such delivery'
                   WHEN a.attempt > coalesce(q.attempt, s.attempt) THEN 'was never made'
                   ELSE 'has not ended, or delivered' END)
FROM attempts a
LEFT JOIN destinations d USING (tenant, stream)
LEFT JOIN queue q USING (tenant, stream, sequence)
LEFT JOIN settlements s USING (tenant, stream, sequence)
WHERE (q.sequence IS NULL AND s.sequence IS NULL)
   OR a.attempt < 1 OR a.attempt > coalesce(q.attempt, s.attempt)
   OR (a.attempt = q.attempt AND q.stage = 'leased')
   OR (a.attempt = s.attempt AND s.state = 'delivered')
"""

KEYS: LiteralString = """
SELECT CASE WHEN d.stream IS NULL THEN 'reference_broken' ELSE 'key_unknown' END,
       v.tenant, d.project, NULL, d.destination, v.sequence,
       CASE WHEN d.stream IS NULL
            THEN format('%s deliveries of stream %s, which the tenant does not have', v.number, v.stream)
            ELSE format('%s deliveries by key %s, which is no signing key of the tenant', v.number, v.keyid) END
FROM (
    SELECT tenant, stream, keyid, min(sequence) AS sequence, count(*) AS number FROM deliveries GROUP BY 1, 2, 3
) AS v
LEFT JOIN destinations d USING (tenant, stream)
LEFT JOIN signing_keys k USING (tenant, keyid)
WHERE d.stream IS NULL OR k.keyid IS NULL
"""

# As for what came in. An event names its destination, so the project is enough to tell it from all others.
ACCEPTED: LiteralString = """
SELECT CASE WHEN f.kept = 0 THEN 'accepted_lost' WHEN f.audited = 0 THEN 'audit_missing' ELSE 'accepted_twice' END,
       f.tenant, f.project, NULL, f.destination, f.sequence,
       format('event %s is sealed %s times and was accepted %s times', encode(f.event_identity, 'hex'), f.kept,
              f.audited)
FROM (
    SELECT tenant, project, event_identity, sum(kept) AS kept, sum(audited) AS audited, max(destination) AS destination,
           max(sequence) AS sequence
    FROM (
        SELECT v.tenant, d.project, v.event_identity, d.destination, v.sequence, 1 AS kept, 0 AS audited
        FROM deliveries v JOIN destinations d USING (tenant, stream)
        UNION ALL
        SELECT tenant, project, event_identity, NULL, NULL, 0, 1 FROM audit_events
        WHERE action = 'enqueue' AND outcome = 'accepted'
    ) AS each
    GROUP BY tenant, project, event_identity
    HAVING sum(kept) <> 1 OR sum(audited) <> 1
) AS f
"""

OUTBOUND = (
    Proof("sequences have no holes", SEQUENCES),
    Proof("each delivery waits or has ended", PLACES),
    Proof("counters are what is queued and settled", COUNTERS),
    Proof("what waits can be sent", QUEUE),
    Proof("what has ended can have ended so", SETTLEMENTS),
    Proof("attempts were made", ATTEMPTS),
    Proof("deliveries have their tenants' keys", KEYS),
    Proof("what was to be sent is sealed, once", ACCEPTED),
)

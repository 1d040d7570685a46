"""What holds of streams, identities and what was accepted (see `invariants`)."""

from typing import LiteralString

from postseal.postgres.invariants import Proof

# Whether identity i is marked in the bitmap of stream s. CASE: the bit must be there before it is read.
_MARKED: LiteralString = """
CASE WHEN i.sequence > s.contiguous AND i.sequence <= s.contiguous + 8 * octet_length(s.above)
     THEN get_bit(s.above, i.sequence - s.contiguous - 1) = 1 ELSE false END
"""
_OF_STREAM: LiteralString = "i.tenant = s.tenant AND i.stream = s.stream"

# A stream's identities are distinct sequences (their primary key), so counting them tells whether all are there. Only
# where that fails is it asked which one is missing. What was retained at or below the floor is the floor's business.
CURSORS: LiteralString = """
WITH counted AS MATERIALIZED (
    SELECT s.*, i.*
    FROM streams s
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE i.sequence <= s.contiguous) AS below,
               count(*) FILTER (WHERE i.sequence > s.contiguous) AS beyond,
               count(*) FILTER (WHERE {marked}) AS marked,
               coalesce(max(i.sequence), s.floor) AS last
        FROM identities i WHERE {of_stream} AND i.sequence > s.floor
    ) AS i
    WHERE i.below <> s.contiguous - s.floor OR i.beyond <> i.marked OR i.marked <> bit_count(s.above)
       OR i.last <> s.highest OR substr(s.above, octet_length(s.above)) = '\\x00'
       OR CASE WHEN s.above <> '' THEN get_bit(s.above, 0) = 1 ELSE false END
)
SELECT 'identity_missing', s.tenant, s.project, s.producer, NULL, (
           SELECT p.at + 1
           FROM (
               SELECT s.floor AS at
               UNION ALL
               SELECT i.sequence FROM identities i
               WHERE {of_stream} AND i.sequence > s.floor AND i.sequence < s.contiguous
           ) AS p
           WHERE NOT EXISTS (SELECT FROM identities i WHERE {of_stream} AND i.sequence = p.at + 1)
           ORDER BY p.at LIMIT 1
       ), format('of %s sequences above the floor up to the contiguous cursor %s are retained',
                 s.contiguous - s.floor, s.below)
FROM counted s WHERE s.below <> s.contiguous - s.floor
UNION ALL
SELECT 'identity_missing', s.tenant, s.project, s.producer, NULL, (
           SELECT s.contiguous + 1 + bit FROM generate_series(0, 8 * octet_length(s.above)::bigint - 1) AS bit
           WHERE get_bit(s.above, bit) = 1
             AND NOT EXISTS (SELECT FROM identities i WHERE {of_stream} AND i.sequence = s.contiguous + 1 + bit)
           ORDER BY bit LIMIT 1
       ), format('of %s sequences that the bitmap marks %s are retained', bit_count(s.above), s.marked)
FROM counted s WHERE s.marked <> bit_count(s.above)
UNION ALL
SELECT 'identity_unmarked', s.tenant, s.project, s.producer, NULL, (
           SELECT i.sequence FROM identities i WHERE {of_stream} AND i.sequence > s.contiguous AND NOT {marked}
           ORDER BY i.sequence LIMIT 1
       ), format('of %s that are retained above the contiguous cursor the bitmap marks %s', s.beyond, s.marked)
FROM counted s WHERE s.beyond <> s.marked
UNION ALL
SELECT 'highest_wrong', s.tenant, s.project, s.producer, NULL, s.highest,
       format('the highest is %s by what is retained', s.last)
FROM counted s WHERE s.highest <> s.last
UNION ALL
SELECT 'bitmap_malformed', s.tenant, s.project, s.producer, NULL, s.contiguous + 1,
       'the bitmap begins with what is contiguous, or ends with nothing'
FROM counted s
WHERE substr(s.above, octet_length(s.above)) = '\\x00'
   OR CASE WHEN s.above <> '' THEN get_bit(s.above, 0) = 1 ELSE false END
""".replace("{marked}", _MARKED).replace("{of_stream}", _OF_STREAM)

FLOORS: LiteralString = """
SELECT 'floor_unexplained', s.tenant, s.project, s.producer, NULL, s.floor,
       format('the audit raised this floor to %s', coalesce(a.floor, 0))
FROM streams s
LEFT JOIN (
    SELECT tenant, project, detail->>'producer' AS producer, max((detail->>'to')::bigint) AS floor
    FROM audit_events WHERE action = 'stream.raise-floor' GROUP BY 1, 2, 3
) AS a USING (tenant, project, producer)
WHERE s.floor <> coalesce(a.floor, 0)
"""

KEYS: LiteralString = """
SELECT CASE WHEN s.stream IS NULL THEN 'reference_broken' ELSE 'key_unknown' END,
       i.tenant, s.project, s.producer, NULL, i.sequence,
       CASE WHEN s.stream IS NULL
            THEN format('%s identities of stream %s, which the tenant does not have', i.number, i.stream)
            ELSE format('%s identities by key %s, which the device never had', i.number, i.keyid) END
FROM (
    SELECT tenant, stream, keyid, min(sequence) AS sequence, count(*) AS number FROM identities GROUP BY 1, 2, 3
) AS i
LEFT JOIN streams s USING (tenant, stream)
LEFT JOIN keys k ON k.tenant = i.tenant AND k.keyid = i.keyid AND k.device = s.producer
WHERE k.keyid IS NULL
"""

# An acceptance and its identity were one transaction. So where one is without the other, something is lost; and where
# there are two, something took effect twice.
ACCEPTED: LiteralString = """
SELECT CASE WHEN f.kept = 0 THEN 'accepted_lost' WHEN f.audited = 0 THEN 'audit_missing' ELSE 'accepted_twice' END,
       f.tenant, s.project, s.producer, NULL, f.sequence,
       format('event %s is retained %s times and was accepted %s times', encode(f.event_identity, 'hex'), f.kept,
              f.audited)
FROM (
    SELECT tenant, stream, event_identity, sum(kept) AS kept, sum(audited) AS audited, max(sequence) AS sequence
    FROM (
        SELECT tenant, stream, event_identity, sequence, 1 AS kept, 0 AS audited FROM identities
        UNION ALL
        SELECT a.tenant, s.stream, a.event_identity, NULL, 0, 1
        FROM audit_events a
        LEFT JOIN streams s ON s.tenant = a.tenant AND s.project = a.project AND s.producer = a.device
        WHERE a.action = 'envelope' AND a.outcome IN ('accepted', 'reordered', 'gap')
    ) AS each
    GROUP BY tenant, stream, event_identity
    HAVING sum(kept) <> 1 OR sum(audited) <> 1
) AS f
LEFT JOIN streams s USING (tenant, stream)
"""

EXPIRY: LiteralString = """
SELECT 'payload_expiry', s.tenant, s.project, s.producer, NULL, p.sequence, 'a payload that never expires'
FROM payloads p JOIN streams s USING (tenant, stream) WHERE p.expires_at IS NULL
"""

INBOUND = (
    Proof("cursors are what the identities say", CURSORS),
    Proof("floors were raised by audited acts", FLOORS),
    Proof("identities have their devices' keys", KEYS),
    Proof("what was accepted is retained, once", ACCEPTED),
    Proof("payloads of devices expire", EXPIRY),
)

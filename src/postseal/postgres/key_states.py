"""How a key stands at this moment, by the database's clock: the one place that says when a retiring key's time ends."""

from typing import LiteralString

STATE_NOW: LiteralString = (
    "CASE WHEN k.state = 'retiring' AND k.accept_until <= clock_timestamp() THEN 'verify-only' ELSE k.state END"
)
"""Of a row of `keys` or `signing_keys` as k."""

ACCEPT_UNTIL_NOW: LiteralString = "CASE WHEN k.accept_until > clock_timestamp() THEN k.accept_until END"
"""Until when such a row brings something new; NULL unless it retires."""

"""Correlation ids: UUIDs of version 7 made by the server, never taken from a client's header (protocol section 6)."""

import os
import time


def new_correlation_id() -> bytes:
    """The 16 bytes of a new UUID version 7 (RFC 9562): 48 bits of milliseconds, 74 random bits."""
    random = int.from_bytes(os.urandom(10), "big")
    milliseconds = time.time_ns() // 1_000_000
    high = milliseconds << 16 | 0x7000 | random >> 68
    low = 0b10 << 62 | random & (1 << 62) - 1
    return (high << 64 | low).to_bytes(16, "big")


def text(correlation_id: bytes) -> str:
    """A correlation id as it is written."""
    digits = correlation_id.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

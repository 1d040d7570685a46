"""Enrolment codes: `pse_` and 256 random bits as 43 base64url characters; only their SHA-256 is kept."""

import hashlib
import re
import secrets

_CODE = re.compile(r"pse_[A-Za-z0-9_-]{43}", re.ASCII)


def new_code() -> str:
    """Make a code; whoever has it enrols a device, so it is shown once and logged never."""
    return "pse_" + secrets.token_urlsafe(32)


def code_hash(code: str) -> bytes | None:
    """The hash under which an invitation is found; None for a text that is no code."""
    return hashlib.sha256(code.encode("ascii")).digest() if _CODE.fullmatch(code) else None

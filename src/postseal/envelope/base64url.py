"""Base64url without padding, as keys and proofs are written on the wire (RFC 4648 section 5)."""

import base64
import binascii


def encode(raw: bytes) -> str:
    """The one text of `raw`."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def decode(text: str) -> bytes:
    """The bytes of which `text` is that one text. ValueError, which does not repeat it."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        raise ValueError("this is no base64url without padding") from None
    # Decoders pass over stray trailing bits.
    if encode(raw) != text:
        raise ValueError("this is no base64url without padding")
    return raw

"""How names are spelled (protocol section 1). Each pattern is one of the whole name."""

import re
from typing import Final

ID: Final = re.compile("[a-z0-9][a-z0-9._-]{0,62}")
"""Of a tenant, a project, a producer, a device, a destination."""
IDEMPOTENCY_KEY: Final = re.compile("[A-Za-z0-9._:-]{8,128}")
KEYID: Final = re.compile("[A-Za-z0-9_-]{43}")

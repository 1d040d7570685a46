"""The HTTP surface: parse a request, call one flow, map its result to a status (protocol section 10)."""

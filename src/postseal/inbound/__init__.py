"""From a request's bytes to a receipt (protocol sections 4 to 6), and what a credential may read of it afterwards."""

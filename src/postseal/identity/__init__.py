"""Who is calling: opaque credentials turned into a closed, verified identity."""

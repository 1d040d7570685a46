"""All SQL of the server, each statement beside the function that runs it."""

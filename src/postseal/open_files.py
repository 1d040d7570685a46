"""How many files, connections among them, this process may have open."""

import resource


def allow_open_files(count: int) -> None:
    """Let this process have `count` files open, or as many as it is allowed to ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

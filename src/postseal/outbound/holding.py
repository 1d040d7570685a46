"""Let the queue follow a destination that was disabled or enabled: its mail is held, or let go again.

Whoever switches a destination does so in a transaction of their own, and calls `move_mail` after it. A worker does the
same for what somebody was cut off from (`lanes.misplaced`).
"""

from postseal.postgres.database import Database
from postseal.postgres.lanes import hold, unhold

MAX_STEPS = 1_000
"""Of a thousand deliveries each. What is left then is a worker's to mend."""


async def move_mail(database: Database, tenant: str, stream: int) -> None:
    """Hold what is queued if the destination is disabled, else let go what is held; in many short transactions.

    Each half moves nothing where the destination stands the other way, whoever switched it since. Raises Unavailable.
    """
    for move in (hold, unhold):
        for _ in range(MAX_STEPS):
            if not await database.transact(lambda connection, move=move: move(connection, tenant, stream)):
                break

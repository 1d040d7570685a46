"""Administrators' acts, one module a noun.

Each act takes a connection inside a transaction (`Database.transact` with the administrators' part) and the
Actor who does it, and writes its audit event in that transaction: an act without its event never commits. What
cannot be done is an AdminError, whose one line is all that is told.

    await database.transact(lambda connection: tenants.create(connection, actor, "acme"))
"""

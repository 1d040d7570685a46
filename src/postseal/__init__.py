"""Durable signed mail between devices and a hosted control plane, on PostgreSQL."""

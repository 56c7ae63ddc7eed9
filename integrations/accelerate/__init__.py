"""Accelerate: FSDP2 with sharded experts."""

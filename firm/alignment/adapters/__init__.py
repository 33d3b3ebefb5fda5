"""Kinds of adapters, one per file, and the layers that get one."""

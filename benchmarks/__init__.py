"""Benchmarks: each prints a table and a ratio against a peer."""

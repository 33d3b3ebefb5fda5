"""The `firm` commands: each parses its configuration, runs one job and prints the result."""

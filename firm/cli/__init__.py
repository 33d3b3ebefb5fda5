"""Commands: `cli` of each parses its configuration, `main` calls one job and prints the result."""

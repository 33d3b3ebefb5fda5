"""Joint forward passes of clients that share a policy, each with its own adapter."""

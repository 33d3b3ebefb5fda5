"""Clients of one process that share a policy and its forward passes, each with its adapter."""

"""Builds the models of the miniature world: corpora, tokenizers, a policy and reward models."""

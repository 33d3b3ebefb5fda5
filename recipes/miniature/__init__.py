"""The making of the miniature world's models: corpora, tokenizers, a policy, reward models."""

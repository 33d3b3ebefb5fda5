"""A trainer's stages one after the other, as a client calls them."""


def experience_of(trainer, rollouts):
    """Returns the experience of rollouts, scored and valued by the trainer's learner of a test."""
    scored = trainer.score(rollouts)
    return trainer.learner.estimator.experience(rollouts, scored.scores, scored.rewards)


def rollouts_of(trainer, queries):
    """Returns replies to prompts with their log-probabilities."""
    return trainer.with_logprobs(trainer.sample(queries))

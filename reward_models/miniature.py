"""The miniature world's ground truth as scores that a config can name: shown, not trained on."""

from firm.miniature import World
from reward_models.registry import reward_model

_WORLD = World.conflict()

reward_model("true_helpful")(_WORLD.true_helpful)
reward_model("true_harmless")(_WORLD.true_harmless)
reward_model("parse")(_WORLD.parses)

"""A kind of reward model of another package, with settings of its own."""

from dataclasses import dataclass

from reward_models import reward_model


@reward_model("vowels")
@dataclass(frozen=True)
class Vowels:
    """The share of some letters in a reply."""

    letters: str = "aeiou"
    """Letters that count."""

    def __call__(self, completions, **_):
        return [sum(map(text.count, self.letters)) / max(1, len(text)) for text in completions]

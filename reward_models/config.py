"""Configuration of reward models, which is read without them."""

from dataclasses import field, fields
from typing import Annotated, Any, Literal

from firm.base.comparisons import Comparison
from firm.base.fields import (
    NOT_IN_PAPER,
    FiniteFloat,
    Hint,
    NonNegativeFloat,
    Paper,
    PositiveInt,
    configuration,
)

CallFormat = Literal["hh_pair", "question_answer", "chat_template", "plain", "response"]


@configuration
class GoldenScore:
    """An example and its known score."""

    prompt: str
    """A dialogue in the form of Anthropic's HH-RLHF that ends with the assistant's tag."""
    completion: str
    """The reply."""
    score: Annotated[FiniteFloat | None, Hint("leave it out if it is not known")] = None
    """Raw score, before normalization; null: not checked."""
    tolerance: NonNegativeFloat = 0.01
    """Maximum difference, in units of the score; bfloat16 needs more than float32."""


@configuration
class RewardModelConfig:
    """The reward model of an objective."""

    name: str = "sequence_classifier"
    """"sequence_classifier" for a Hugging Face checkpoint, or the name of a function: built-in
    ("brevity", "length", "llm_judge", "matches", "politeness", "positivity", "reading_ease",
    "sentiment", "vocabulary"), in `file`, or from an installed package."""
    path: Annotated[
        str,
        Paper(
            "A.1",
            (
                "Ray2333/gpt2-large-helpful-reward_model",
                "Ray2333/gpt2-large-harmless-reward_model",
                "OpenAssistant/reward-model-deberta-v3-large-v2",
            ),
        ),
    ] = ""
    """Checkpoint of the classifier: a folder, or a name on the Hugging Face hub."""
    url: Annotated[str, NOT_IN_PAPER] = ""
    """Address of a server of vLLM with the classifier in `path`, such as http://node7:8000: its
    tokenizer is read here, and its weights are not."""
    format: CallFormat = "hh_pair"
    """Input format of a sequence classifier. "hh_pair": dialogue and reply as a pair, in the format
    of the Ray2333 models; "question_answer": last human turn and reply as a pair without role tags,
    for OpenAssistant's DeBERTa models; "chat_template": the classifier's own chat template;
    "plain": dialogue and reply as one text; "response": only the reply."""
    output: int | str | None = None
    """Output to use if there are several: the index of a classifier's label, from 0, or the name of
    a list that a function returns. null: the only label, or the list named after the objective."""
    append_eos: bool = False
    """End every text with EOS, as in TRL's training of reward models. Leave it off if the pad token
    of a checkpoint is its EOS, since the score was then trained at the token before it."""
    max_length: PositiveInt | None = None
    """Maximum length of inputs in tokens; longer inputs are truncated at the start. null: the
    model's number of positions."""
    batch_size: PositiveInt = 32
    """Replies scored per batch; limits memory and does not affect scores."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Data type of the parameters; auto: the faster of bfloat16 and float32 on the device, which
    the run's config.yaml records."""
    device: str = "auto"
    """Device of the model: "auto" for the accelerator if available, otherwise the CPU; or a name
    such as "cuda:1"."""
    file: str = ""
    """Python file to run, which registers functions with the decorator `reward_model`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of a registered function, such as brevity's `half_words`, or arguments of a
    registered class."""
    golden: list[GoldenScore] = field(default_factory=list)
    """Examples with known scores, checked when the reward model is loaded."""
    only_if: Annotated[str, NOT_IN_PAPER] = ""
    """Condition on the raw score of another reward, such as "correct >= 0.5": where it does not
    hold, a reply has no score in training, or the score `otherwise`. Calibration, evaluations and
    conditions of other rewards read the score of every reply."""
    otherwise: Annotated[FiniteFloat | None, NOT_IN_PAPER] = None
    """Raw score in training where `only_if` does not hold; null: none, so that the reply is neither
    better nor worse for this objective."""
    normalization: Annotated[Literal["sigmoid", "minmax", "none"], NOT_IN_PAPER] = "sigmoid"
    """Calibration of raw scores to rewards in [0, 1], fitted to replies of the base model.
    "sigmoid": sigmoid of the standardised score; "minmax": linear between the 5 % and 95 %
    quantiles; "none": the raw score."""

    def __post_init__(self) -> None:
        if self.only_if:
            Comparison.parse(self.only_if, "only_if")
        elif self.otherwise is not None:
            raise ValueError(
                f"otherwise is the score where only_if does not hold, got {self.otherwise:g} "
                "without it: set only_if, or remove it."
            )
        is_classifier = self.name == "sequence_classifier"
        if is_classifier and not self.path:
            raise ValueError(
                "a reward model 'sequence_classifier' needs `path`, got none: give a checkpoint's "
                "folder or hub name, or the `name` of a registered function."
            )
        if is_classifier and self.options:
            raise ValueError(
                f"`options` are a function's arguments, got {', '.join(self.options)} for a "
                "'sequence_classifier': remove them."
            )
        for key in self.keys_without_effect(self.name) if not is_classifier else ():
            if getattr(self, key) != _DEFAULTS[key]:
                raise ValueError(
                    f"`{key}` is a setting of sequence classifiers, got {getattr(self, key)!r} "
                    f"beside the function {self.name!r}: remove one of them."
                )
        if isinstance(self.output, int) and self.output < 0:
            raise ValueError(f"output must be non-negative or null, got {self.output}.")
        if self.output is not None and isinstance(self.output, str) == is_classifier:
            raise ValueError(
                "output is a sequence classifier's label, counted from 0, or the name of a list "
                f"that a function returns, got {self.output!r} for {self.name!r}: correct or "
                "remove it."
            )

    @staticmethod
    def keys_without_effect(name: str) -> tuple[str, ...]:
        """Returns the settings that a reward model with this name does not read."""
        return ("file", "options") if name == "sequence_classifier" else _OF_CLASSIFIERS


_OF_CLASSIFIERS = ("path", "url", "format", "append_eos", "max_length", "dtype")
"""Settings that functions do not read, and that change scores; `batch_size` and `device` do not."""
_DEFAULTS = {each.name: each.default for each in fields(RewardModelConfig)}

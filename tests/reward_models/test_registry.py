import asyncio

import pytest
from jsonargparse import ArgumentParser
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from reward_models import (
    REWARD_MODELS,
    RewardModelConfig,
    SequenceClassifierReward,
    load_reward_model,
    reward_model,
)

OWN_FILE = """
from reward_models import reward_model

@reward_model("{name}")
def count(completions, *, letter="a", **kwargs):
    return [float(text.count(letter)) for text in completions]

@reward_model("{name}_async")
async def wait(prompts, completions):
    return [1.0 for _ in completions]
"""


@pytest.fixture(autouse=True)
def untouched_registry():
    before = dict(REWARD_MODELS)
    yield
    REWARD_MODELS.clear()
    REWARD_MODELS.update(before)


def test_shipped_functions_are_found_by_name():
    reward = load_reward_model(
        RewardModelConfig(name="brevity", options={"half_words": 1}), "short"
    )
    assert reward.name == "short"
    assert reward(["a prompt"], ["one"]) == [0.5]


def test_the_decorator_leaves_a_function_as_it_is():
    @reward_model("constant")
    def constant(completions, **kwargs):
        return [1.0] * len(completions)

    assert constant(["a"]) == [1.0]
    assert load_reward_model(RewardModelConfig(name="constant"), "c")(["p"], ["a"]) == [1.0]


def test_a_users_file_joins_the_registry_once(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_FILE.format(name="letters"))
    configs = [
        RewardModelConfig(name="letters", file=str(file)),
        RewardModelConfig(name="letters", file=str(file), options={"letter": "b"}),
        RewardModelConfig(name="letters_async", file=str(file)),
    ]
    a, b, waiting = (load_reward_model(config, "r") for config in configs)
    assert a(["p"], ["abb"]) == [1.0]
    assert b(["p"], ["abb"]) == [2.0]
    assert asyncio.run(waiting(["p"], ["abb"])) == [1.0]


def test_files_that_cannot_be_imported_are_named(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_here")
    for _ in range(2):  # the failed import leaves nothing behind
        with pytest.raises(ValueError, match=r"broken\.py cannot be imported \(ModuleNotFound"):
            load_reward_model(RewardModelConfig(name="x", file=str(broken)), "x")
    with pytest.raises(ValueError, match="no Python file of reward functions at"):
        load_reward_model(RewardModelConfig(name="x", file=str(tmp_path / "missing.py")), "x")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="'short' has no reward model 'brevety': did you mean 'br"):
        load_reward_model(RewardModelConfig(name="brevety"), "short")
    with pytest.raises(ValueError, match=r"known: sequence_classifier, .*brevity, positivity"):
        load_reward_model(RewardModelConfig(name="qqq"), "short")


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="there is a reward model 'brevity' already"):
        reward_model("brevity")(lambda prompts, completions: [])


def test_functions_that_cannot_be_called_are_refused_before_the_run():
    with pytest.raises(ValueError, match="'f' cannot be called with prompts, completions"):
        reward_model("f")(lambda texts: texts)
    strict = RewardModelConfig(name="strict", options={"limit": 3})
    reward_model("strict")(lambda prompts, completions: [])
    with pytest.raises(ValueError, match=r"reward model of 's': .*completions, limit"):
        load_reward_model(strict, "s")


def test_configs_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match="needs `path`"):
        RewardModelConfig()
    with pytest.raises(ValueError, match="`options` are a function's arguments"):
        RewardModelConfig(path="somewhere", options={"half_words": 3})
    with pytest.raises(ValueError, match="must be at least 1, got 0 and None"):
        RewardModelConfig(path="somewhere", batch_size=0)


def test_a_checkpoint_is_read_as_the_config_says(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "good": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    sizes = LlamaConfig(
        vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=32, num_labels=1,
    )  # fmt: skip
    model = LlamaForSequenceClassification(sizes)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    config = RewardModelConfig(
        path=str(tmp_path), format="response", append_eos=True, max_length=9, batch_size=4
    )
    reward = load_reward_model(config, "helpful")
    direct = SequenceClassifierReward(
        model, tokenizer, name="helpful", format="response", append_eos=True
    )
    texts = ["good", "good good bad", ""]
    assert (reward.name, reward.max_length, reward.batch_size) == ("helpful", 9, 4)
    assert reward(["p"] * 3, texts) == pytest.approx(direct(["p"] * 3, texts))


def test_the_config_is_read_from_the_command_line():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=dict[str, RewardModelConfig])
    parsed = parser.parse_args(
        ['--rewards={"a": {"name": "brevity", "options": {"half_words": 5.0}}, "b": {"path": "x"}}']
    )
    rewards = parser.instantiate(parsed).rewards
    assert rewards["a"] == RewardModelConfig(name="brevity", options={"half_words": 5.0})
    assert rewards["b"] == RewardModelConfig(path="x")

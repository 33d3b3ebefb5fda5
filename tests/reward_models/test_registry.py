import asyncio
import sys
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from firm.alignment.prompts import prompt_of
from firm.alignment.rewards import Judges, ScoringRequest, scored
from firm.run import parse
from reward_models import (
    RewardModelConfig,
    SequenceClassifierReward,
    load_reward_model,
    load_reward_models,
    reward_model,
)
from reward_models.registry import as_reward

OWN_FILE = """
from reward_models import reward_model

@reward_model("{name}")
def count(completions, *, letter="a", **kwargs):
    return [float(text.count(letter)) for text in completions]

@reward_model("{name}_async")
async def wait(prompts, completions):
    return [1.0 for _ in completions]
"""


pytestmark = pytest.mark.usefixtures("new_plugins")


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


def test_a_function_gets_the_fields_of_the_data_that_it_has_parameters_for():
    @reward_model("right")
    def right(prompts, completions, answer, *, case=True):
        same = zip(completions, answer, strict=True)
        return [float((a == b) if case else (a.lower() == b.lower())) for a, b in same]

    columns = {"answer": ["A"], "kind": ["sum"], "case": [True]}
    reward = load_reward_model(RewardModelConfig(name="right", options={"case": False}), "r")
    assert reward(["p"], ["a"], **columns) == [1.0]  # options come before fields
    assert reward.needs == {"answer"}
    with pytest.raises(TypeError, match=r"answer .* no field of the data \(.*: kind\)"):
        reward(["p"], ["a"], kind=["sum"])


def test_a_field_may_have_any_name():
    @reward_model("odd_names")
    class OddNames:
        def __call__(self, completions, name, **columns):
            assert columns.keys() == {"prompts", "function", "options", "output", "args"}
            return [float(len(each)) for each in name]

    columns = {name: ["x"] for name in ("self", "name", "function", "options", "output", "args")}
    reward = load_reward_model(RewardModelConfig(name="odd_names"), "r")
    assert reward(prompts=["p"], completions=["a"], **columns) == [1.0]

    def plain(completions, self, **kwargs):
        return [float(len(each)) for each in self]

    assert as_reward("r", plain)(prompts=["p"], completions=["a"], **columns) == [1.0]
    assert as_reward("r", OddNames().__call__)(["p"], ["a"], **columns) == [1.0]


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [
        ("brevity", "half_word", "did you mean 'half_words'?"),
        ("brevity", "_", "it has half_words."),
        ("politeness", "corteous", "did you mean 'courteous'?"),
        ("true_helpful", "kwargs", "it has none."),
    ],
)
def test_an_option_that_a_shipped_function_does_not_have_is_refused(name, option, hint):
    message = rf"reward model of 'r': the reward function '{name}' has no option '{option}': "
    with pytest.raises(ValueError, match=message) as caught:
        load_reward_model(RewardModelConfig(name=name, options={option: 3}), "r")
    assert str(caught.value).endswith(hint)


def test_options_that_a_users_function_does_not_name_are_its_own_business():
    @reward_model("open")
    def open(completions, **kwargs):
        return [kwargs["bonus"]]

    reward = load_reward_model(RewardModelConfig(name="open", options={"bonus": 2.0}), "r")
    assert reward(["p"], ["a"]) == [2.0]


def test_objectives_that_differ_in_their_output_alone_share_what_is_loaded(
    tmp_path, byte_tokenizer, classifier
):
    @reward_model("judge")
    class Judge:
        def __init__(self, bonus=0.0):
            self.bonus = bonus

        def __call__(self, completions, **kwargs):
            return {"a": [self.bonus], "b": [1.0]}

    byte_tokenizer().save_pretrained(tmp_path)
    classifier("llama", num_labels=2).save_pretrained(tmp_path)
    rewards = load_reward_models(
        {
            "a": RewardModelConfig(name="judge", golden=[]),
            "b": RewardModelConfig(name="judge", output="a", normalization="none"),
            "c": RewardModelConfig(name="judge", options={"bonus": 1.0}),
            "d": RewardModelConfig(path=str(tmp_path), format="plain", output=0),
            "e": RewardModelConfig(path=str(tmp_path), format="plain", output=1),
            "f": RewardModelConfig(path=str(tmp_path), format="response", output=1),
        }
    )
    assert [reward.name for reward in rewards.values()] == list("abcdef")
    a, b, c, d, e, f = rewards.values()
    assert a.source[0] is b.source[0] is not c.source[0]
    assert (a.output, b.output, d.output, e.output) == (None, "a", 0, 1)
    assert d.model is e.model is not f.model
    assert d(["p"], ["text"]) != e(["p"], ["text"])


def test_a_reward_that_is_passed_as_an_object_is_called_as_it_asks(byte_tokenizer, classifier):
    model = SequenceClassifierReward(
        classifier("llama"), byte_tokenizer(), name="r", format="hh_pair", max_length=12
    )
    assert as_reward("r", model) is model
    chats = [[{"role": "user", "content": "Is it?"}]] * 2

    class Reads:
        reads_prompts, output = True, "second"
        truncated: list[bool] | None = None

        def __call__(self, prompts, completions):
            self.truncated = [len(completion) > 2 for completion in completions]
            return {"second": [float(len(prompt.transcript)) for prompt in prompts]}

    found = scored(request_of({"r": as_reward("r", Reads())}, chats, ["Yes", "No"]))()
    assert found.scores.tolist() == [[len("user: Is it?")] * 2]
    assert found.truncated == {"r": [True, False]}


def request_of(rewards, prompts, replies):
    given = [prompt_of(prompt) for prompt in prompts]
    return ScoringRequest(Judges(rewards), list(rewards), given, replies, None)


def test_a_class_is_a_kind_with_settings_of_its_own():
    @reward_model("letters")
    @dataclass(frozen=True)
    class Letters:
        letter: str = "a"

        def __call__(self, completions, **kwargs):
            return [float(text.count(self.letter)) for text in completions]

    for options, scores in (({}, [1.0]), ({"letter": "b"}, [2.0])):
        reward = load_reward_model(RewardModelConfig(name="letters", options=options), "r")
        assert reward.name == "r"
        assert reward(["p"], ["abb"]) == scores
    with pytest.raises(ValueError, match=r"'letters' cannot be built with the options size"):
        load_reward_model(RewardModelConfig(name="letters", options={"size": 3}), "r")


def test_a_class_whose_instances_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match="cannot be called with prompts, completions"):

        @reward_model("silent")
        class Silent:
            def __call__(self, texts):
                return []


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


def test_a_plain_function_of_a_file_needs_no_decorator(tmp_path):
    files = [tmp_path / "plain.py", tmp_path / "other.py"]
    for number, file in enumerate(files):
        file.write_text(
            f"def row(completions, **kwargs):\n    return [{number}.0] * len(completions)\n"
            "def brevity(completions, **kwargs):\n    return [0.5]\n"
        )
    config = RewardModelConfig(name="row", file=str(files[0]))
    for _ in range(2):
        assert load_reward_model(config, "r")(["p"], ["a"]) == [0.0]
    for name, file in (("row", files[1]), ("brevity", files[0])):  # no other one takes its place
        with pytest.raises(ValueError, match=f"'{name}' is already registered"):
            load_reward_model(RewardModelConfig(name=name, file=str(file)), "r")
    with pytest.raises(ValueError, match=r"plain.py has no function 'rows'; did you mean 'row'"):
        load_reward_model(RewardModelConfig(name="rows", file=str(files[0])), "r")


def test_a_file_may_build_or_import_its_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "elsewhere.py").write_text(
        "def long(completions, least=1, **kwargs):\n"
        "    return [float(len(text) >= least) for text in completions]\n"
        "def other(text):\n    return text\n"
    )
    file = tmp_path / "built.py"
    file.write_text(
        "from functools import partial\n"
        "from elsewhere import long\n"
        "from reward_models.scripted import brevity\n"
        "longer = partial(long, least=3)\n"
        "positivity = partial(long, least=3)\n"
        "from elsewhere import other\n"
        "from reward_models import reward_model\n"
        "@reward_model('other')\n"
        "def score(completions, **kwargs):\n"
        "    return [7.0] * len(completions)\n"
    )
    for _ in range(2):  # the decorator's name, and not the import
        own = load_reward_model(RewardModelConfig(name="other", file=str(file)), "r")
        assert own(["p"], ["ab"]) == [7.0]
    configs = [RewardModelConfig(name=name, file=str(file)) for name in ("long", "longer")]
    first, second = (load_reward_model(config, "r") for config in configs)
    assert first(["p"], ["ab"]) == [1.0]
    assert second(["p"], ["ab"]) == [0.0]
    shipped = load_reward_model(RewardModelConfig(name="brevity", file=str(file)), "r")
    assert 0 < shipped(["p"], ["a"])[0] <= 1
    with pytest.raises(ValueError, match="'positivity' is already registered"):
        load_reward_model(RewardModelConfig(name="positivity", file=str(file)), "r")


def test_files_that_cannot_be_imported_are_named(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_here")
    for _ in range(2):  # the failed import leaves nothing behind
        with pytest.raises(ValueError, match=r"ModuleNotFoundError: No module .*broken\.py:1"):
            load_reward_model(RewardModelConfig(name="x", file=str(broken)), "x")
    with pytest.raises(ValueError, match="no Python file of reward functions at"):
        load_reward_model(RewardModelConfig(name="x", file=str(tmp_path / "missing.py")), "x")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"of 'short': .* no reward model 'brevety': did you mean 'br"
    ):
        load_reward_model(RewardModelConfig(name="brevety"), "short")
    with pytest.raises(
        ValueError, match=r"known: .*brevity, .*positivity, reading_ease, sentiment, sequence_cl"
    ):
        load_reward_model(RewardModelConfig(name="qqq"), "short")


BROKEN_FILES = {
    "x = 1\n\nprint(y)": r"NameError: name 'y' is not defined \(.*mine\.py:3\)",
    "def f():\n    raise OSError('one\\ntwo')\n\nf()": r"OSError: one two \(.*mine\.py:2\)",
    "x = 1\nif x\n": r"SyntaxError: expected ':' \(.*mine\.py:2\)",
    "import json\n\njson.loads('[1')": r"JSONDecodeError: Expecting ',' .*\(.*mine\.py:3\)",
    "\nimport helper_with_a_typo": r"SyntaxError: invalid syntax \(.*helper_with_a_typo\.py:4\)",
    "import sys\nsys.exit(3)": r"SystemExit: 3 \(.*mine\.py:2\)",
    "raise ValueError": r"ValueError \(.*mine\.py:1\)",
}


@pytest.mark.parametrize("text", BROKEN_FILES)
def test_a_broken_file_is_one_line_with_the_place(text, tmp_path, monkeypatch):
    (tmp_path / "helper_with_a_typo.py").write_text("\n\n\nx = = 1")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=BROKEN_FILES[text]) as caught:
        load_reward_model(RewardModelConfig(name="x", file=str(file)), "x")
    assert f"{file} cannot be imported" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_failed_import_takes_its_names_back(tmp_path):
    file = tmp_path / "half.py"
    file.write_text(OWN_FILE.format(name="half") + "\nx = unknown\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"NameError: name 'unknown' .*half\.py:12"):
            load_reward_model(RewardModelConfig(name="half", file=str(file)), "x")
    file.write_text(OWN_FILE.format(name="half"))
    assert load_reward_model(RewardModelConfig(name="half", file=str(file)), "x").name == "x"


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="a reward model 'brevity' is already registered"):
        reward_model("brevity")(lambda prompts, completions: [])


def test_functions_that_cannot_be_called_are_refused_before_the_run():
    with pytest.raises(ValueError, match="'f' cannot be called with prompts, completions"):
        reward_model("f")(lambda texts: texts)
    own = as_reward("short", lambda completions: [float(len(text)) for text in completions])
    assert own(["p"], ["abc"]) == [3.0]  # without the keywords that it has no parameters for
    strict = RewardModelConfig(name="strict", options={"limit": 3})
    reward_model("strict")(lambda prompts, completions: [])
    with pytest.raises(ValueError, match=r"reward model of 's': .*completions, limit"):
        load_reward_model(strict, "s")


def test_configs_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match="needs `path`"):
        RewardModelConfig()
    with pytest.raises(ValueError, match="`options` are a function's arguments"):
        RewardModelConfig(path="somewhere", options={"half_words": 3})
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        RewardModelConfig(path="somewhere", batch_size=0)
    with pytest.raises(ValueError, match=r"output must be non-negative or null, got -1"):
        RewardModelConfig(path="somewhere", output=-1)
    with pytest.raises(ValueError, match="got 0 for 'brevity': correct or remove it"):
        RewardModelConfig(name="brevity", output=0)
    with pytest.raises(ValueError, match="got 'helpful' for 'sequence_classifier': correct or rem"):
        RewardModelConfig(path="somewhere", output="helpful")


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


def test_a_config_picks_one_of_several_labels(tmp_path, byte_tokenizer, classifier):
    tokenizer, model = byte_tokenizer(), classifier("llama", num_labels=2)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    scores = []
    for output in (0, 1):
        config = RewardModelConfig(path=str(tmp_path), format="response", output=output)
        direct = SequenceClassifierReward(
            model, tokenizer, name="r", format="response", output=output
        )
        scores.append(load_reward_model(config, "r")(["p"], ["text"]))
        assert scores[-1] == pytest.approx(direct(["p"], ["text"]))
    assert scores[0] != pytest.approx(scores[1])
    with pytest.raises(ValueError, match=r"'r': .*has 2 labels, .*set `output` .*0 to 1"):
        load_reward_model(RewardModelConfig(path=str(tmp_path)), "r")


@dataclass(frozen=True)
class Rewards:
    """What a run has of reward models."""

    rewards: dict[str, RewardModelConfig]


def test_the_config_is_read_from_the_command_line():
    text = '{"a": {"name": "brevity", "options": {"half_words": 5.0}}, "b": {"path": "x"}}'
    rewards = parse(Rewards, [f"--rewards={text}"]).rewards
    assert rewards["a"] == RewardModelConfig(name="brevity", options={"half_words": 5.0})
    assert rewards["b"] == RewardModelConfig(path="x")
    text = '{"a": {"name": "judge", "output": "helpful"}, "b": {"path": "x", "output": 1}}'
    rewards = parse(Rewards, [f"--rewards={text}"]).rewards
    assert (rewards["a"].output, rewards["b"].output) == ("helpful", 1)


# Installed packages


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package on the path as pip would: its module, and metadata with entry points."""

    def install(package: str, module: str, text: str, entry_points: str) -> None:
        site = tmp_path / package
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(f"[firm.reward_models]\n{entry_points}\n")
        (site / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(site)
        installed.append(module)

    installed: list[str] = []
    yield install
    for module in installed:
        sys.modules.pop(module, None)


def test_a_config_may_name_what_an_installed_package_offers(install):
    text = (
        OWN_FILE.format(name="a_registered") + "\ndef plain(completions, **_):\n    return [7.0]\n"
    )
    install(
        "offers", "offers_rewards", text,
        "plain = offers_rewards:plain\n"
        "a_registered = offers_rewards\n"
        "a_registered_async = offers_rewards:wait",
    )  # fmt: skip
    assert load_reward_model(RewardModelConfig(name="brevity"), "short").name == "short"
    assert "offers_rewards" not in sys.modules  # nothing is imported before it is named
    assert load_reward_model(RewardModelConfig(name="plain"), "x")(["p"], ["a"]) == [7.0]
    config = RewardModelConfig(name="a_registered", options={"letter": "b"})
    for _ in range(2):
        assert load_reward_model(config, "x")(["p"], ["abb"]) == [2.0]
    waiting = load_reward_model(RewardModelConfig(name="a_registered_async"), "x")
    assert asyncio.run(waiting(["p"], ["a"])) == [1.0]


def test_what_ships_and_what_a_file_registers_comes_before_packages(install, tmp_path):
    install("takes", "takes_names", "1 / 0", "brevity = takes_names:f\nown = takes_names:f")
    assert load_reward_model(RewardModelConfig(name="brevity"), "short")([""], [""]) == [1.0]
    file = tmp_path / "own.py"
    file.write_text(OWN_FILE.format(name="own"))
    assert load_reward_model(RewardModelConfig(name="own", file=str(file)), "x").name == "x"


def test_a_package_that_cannot_be_imported_is_named_in_one_line(install):
    text = OWN_FILE.format(name="early") + "\nraise RuntimeError('no licence\\nbuy one')\n"
    install("broken-rewards", "broken_rewards", text, "early = broken_rewards:count")
    install(
        "odd-rewards", "odd_rewards", "def f(texts): ...", "odd = odd_rewards:f\nno = odd_rewards"
    )
    for name, message in {
        "early": r"package broken-rewards cannot be imported \(RuntimeError: no licence .*: repair",
        "odd": "package odd-rewards cannot be imported .*cannot be called with prompts",
        "no": "package odd-rewards cannot be imported .*odd_rewards is no function",
    }.items():
        for _ in range(2):
            with pytest.raises(
                ValueError, match=f"reward model of 'x': .*{name}.*{message}"
            ) as caught:
                load_reward_model(RewardModelConfig(name=name), "x")
            assert "\n" not in str(caught.value)


def test_a_name_that_two_packages_offer_is_refused(install):
    for package in ("first", "second"):
        install(package, f"{package}_rewards", "", f"same = {package}_rewards:f")
    with pytest.raises(
        ValueError, match=r"\((first, second|second, first)\): uninstall all but one"
    ):
        load_reward_model(RewardModelConfig(name="same"), "x")


def test_an_unknown_name_may_be_near_to_what_a_package_offers(install):
    install("offers", "offers_rewards", "1 / 0", "question_marks = offers_rewards:f")
    with pytest.raises(ValueError, match="did you mean 'question_marks'"):
        load_reward_model(RewardModelConfig(name="question_mark"), "x")
    with pytest.raises(ValueError, match=r"known: .*positivity, question_marks, reading_ease"):
        load_reward_model(RewardModelConfig(name="zzz"), "x")

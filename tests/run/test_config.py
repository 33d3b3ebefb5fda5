from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firm.base.fields import LARGEST, Paper, PositiveInt, configuration
from firm.base.preferences import NamedShares
from firm.run import UserError, compose, parse, run_cli, to_dict, to_yaml
from firm.run.yaml_text import read_yaml


@dataclass(frozen=True)
class Reward:
    """One objective's reward model."""

    path: str
    """Folder or name of the checkpoint, 100 % local."""
    scale: float = 1.0
    """Factor of the score."""


@dataclass(frozen=True)
class Firm:
    """Regularised weights."""

    name: Literal["firm"] = "firm"
    """The paper's algorithm."""
    beta: float = 0.01
    """Regularisation, β of Eq. (4). At least 0."""
    num_steps: int = 1
    """Local steps."""

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ValueError(f"beta must be non-negative, got {self.beta}.")


@dataclass(frozen=True)
class FedAvg:
    """Fixed weights."""

    weights: tuple[float, ...]
    """One per objective."""
    name: Literal["fedavg", "fixed"] = "fedavg"
    """The baseline."""
    num_steps: int = 2
    """Local steps."""


@configuration
class Batch:
    """Sizes of a step."""

    size: Annotated[int, Paper("A.1", (16,))] = 8
    """Prompts of a step."""
    minibatch: int = 4
    """Prompts of a minibatch."""

    def __post_init__(self) -> None:
        if self.size % self.minibatch:
            raise ValueError(
                f"size {self.size} is not divisible by minibatch {self.minibatch}; "
                f"use a multiple of {self.minibatch}."
            )


@configuration
class Config:
    """A run of everything."""

    rewards: dict[str, Reward] = field(
        default_factory=lambda: {"helpful": Reward("h"), "harmless": Reward("s", scale=2.0)}
    )
    """Reward models by objective."""
    strategy: Firm | FedAvg = field(default_factory=Firm)
    """The algorithm."""
    batch: Batch = field(default_factory=lambda: Batch(size=16))
    """Sizes."""
    options: dict[str, Any] = field(default_factory=dict)
    """Anything."""
    extra: Reward | None = None
    """One more."""
    extras: list[Reward] = field(default_factory=list)
    """Yet more."""
    by_name: dict[str, Firm] | None = None
    """Optional dictionary."""
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Modules."""
    limit: PositiveInt | None = None
    """At most so many."""
    rate: float = 1e-5
    """Learning rate."""
    resume: bool = False
    """Whether to go on."""
    out: Path = Path("runs/a")
    """Directory."""


def from_text(tmp_path: Path, text: str, *arguments: str) -> Config:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    return parse(Config, ["--config", str(file), *arguments])


# --- What is laid over what -----------------------------------------------------------------------


def test_without_arguments_the_defaults_stand() -> None:
    assert parse(Config, []) == Config()


def test_a_partial_section_keeps_the_other_keys_of_the_default_instance(tmp_path: Path) -> None:
    config = from_text(tmp_path, "batch: {minibatch: 2}\nstrategy: {beta: 0.5}")
    assert config.batch == Batch(size=16, minibatch=2)
    assert config.strategy == Firm(beta=0.5)
    assert config.rewards == Config().rewards


def test_an_empty_section_or_file_changes_nothing(tmp_path: Path) -> None:
    assert from_text(tmp_path, "batch:\n  # size: 4\n") == Config()
    assert from_text(tmp_path, "# all defaults\n") == Config()


def test_a_dictionary_in_a_file_says_which_entries_there_are(tmp_path: Path) -> None:
    config = from_text(tmp_path, "rewards: {brief: {path: b}}")
    assert config.rewards == {"brief": Reward("b")}


def test_an_override_changes_one_entry_and_its_other_keys_stay() -> None:
    config = parse(Config, ["--rewards.harmless.path", "x", "--rewards.new.path=y"])
    assert config.rewards == {
        "helpful": Reward("h"),
        "harmless": Reward("x", scale=2.0),
        "new": Reward("y"),
    }
    config = parse(Config, ["--extras", "[{path: a}, {path: b}]", "--extras.1.scale", "3"])
    assert config.extras == [Reward("a"), Reward("b", scale=3.0)]


def test_overrides_win_over_files_and_later_files_over_earlier_ones(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("rate: 1\nlimit: 1\nbatch: {size: 4}")
    second.write_text("limit: 2\nbatch: {minibatch: 2}")
    files = ["--config", str(first), f"--config={second}"]
    config = parse(Config, ["--batch.size", "6", *files])
    assert (config.rate, config.limit, config.batch) == (1.0, 2, Batch(6, 2))


def test_the_default_file_is_read_only_without_another(tmp_path: Path) -> None:
    default, other = tmp_path / "default.yaml", tmp_path / "other.yaml"
    default.write_text("rate: 1\nlimit: 1")
    other.write_text("rate: 2")
    config = parse(Config, ["--rate", "3"], default_file=default)
    assert (config.rate, config.limit) == (3.0, 1)
    config = parse(Config, ["--config", str(other)], default_file=default)
    assert (config.rate, config.limit) == (2.0, None)


def test_another_form_keeps_the_given_keys_that_it_has_too(tmp_path: Path) -> None:
    text = "strategy: {beta: 0.5, num_steps: 7}"
    arguments = ["--strategy.weights", "[1, 3]", "--strategy.name", "fixed"]
    assert from_text(tmp_path, text, *arguments).strategy == FedAvg((1.0, 3.0), "fixed", 7)
    assert parse(Config, arguments).strategy == FedAvg((1.0, 3.0), "fixed", 2)


@pytest.mark.parametrize("is_text", [False, True])
def test_of_two_overrides_the_later_prevails_whether_a_section_or_a_key(is_text: bool) -> None:
    section: Any = {"name": "firm", "num_steps": 5}
    if is_text:
        section = "{name: firm, num_steps: 5}"
    weights, fixed = ("strategy.weights", (1.0, 3.0)), ("strategy.name", "fixed")
    later = compose(Config, [], [("strategy", section), weights, fixed])
    assert later.strategy == FedAvg((1.0, 3.0), "fixed", 5)
    assert compose(Config, [], [fixed, ("strategy", section)]).strategy == Firm(num_steps=5)
    more = [("strategy", section), ("strategy", {"beta": 0.5})]
    assert compose(Config, [], more).strategy == Firm(beta=0.5, num_steps=5)
    nameless = [("strategy", {"weights": [1.0, 3.0]}), fixed]
    assert compose(Config, [], nameless).strategy == FedAvg((1.0, 3.0), "fixed", 2)


def test_values_are_read_as_their_types() -> None:
    arguments = ["--rate=1e-3", "--limit=null", "--resume", "true", "--targets", "[a]"]
    arguments += ["--out", "b", "--extra", "{path: '3'}", "--by_name", "{x: {beta: 1}}"]
    config = parse(Config, arguments)
    assert (config.rate, config.limit, config.resume, config.targets, config.out) == (
        *(0.001, None, True),
        *(("a",), Path("b")),
    )
    assert config.extra == Reward("3")
    assert config.by_name == {"x": Firm(beta=1.0)}
    assert parse(Config, ["--extra", "{path: a}", "--extra", "null"]).extra is None
    assert parse(Config, ["--by_name", "null"]).by_name is None


def test_a_top_level_switch_needs_no_value() -> None:
    for arguments in (["--resume", "--limit", "3"], ["--limit", "3", "--resume"]):
        config = parse(Config, arguments)
        assert (config.resume, config.limit) == (True, 3)
    assert parse(Config, ["--resume", "false"]).resume is False


def test_checks_across_keys_run_on_the_final_values_only(tmp_path: Path) -> None:
    config = from_text(tmp_path, "batch: {size: 6}", "--batch.minibatch", "3")
    assert config.batch == Batch(6, 3)


# --- Errors ---------------------------------------------------------------------------------------

BAD_FILES = [
    ("strategy: {betta: 1}", "{file}: unknown key strategy.betta; did you mean strategy.beta?"),
    ("beta: 1", "{file}: unknown key beta; did you mean strategy.beta?"),
    (
        "batch: {zzz: 1}",
        "{file}: unknown key batch.zzz; valid keys here: size, minibatch.",
    ),
    (
        "rewards: {helpful: {path: h, scal: 1}}",
        "{file}: unknown key rewards.helpful.scal; did you mean rewards.helpful.scale?",
    ),
    (
        "strategy: {name: fedavg, weights: [1], beta: 1}",
        "{file}: unknown key strategy.beta; valid keys here: weights, name, num_steps.",
    ),
    (
        "strategy: {name: firmm}",
        "{file}: strategy.name must be one of firm, fedavg, fixed, got 'firmm'; did you mean "
        "'firm'?",
    ),
    (
        "strategy: {name: []}",
        "{file}: strategy.name must be one of firm, fedavg, fixed, got [].",
    ),
    ("rate: fast", "{file}: rate must be float, got 'fast'."),
    ("rate: null", "{file}: rate must be float, got null."),
    ("limit: 1.5", "{file}: limit must be int or null, got 1.5."),
    ("resume: 1", "{file}: resume must be bool, got 1."),
    ("targets: q_proj", "{file}: targets must be a list of str, got 'q_proj'; write [a, b]."),
    ("targets: [a, 1]", "{file}: targets.1 must be str, got 1."),
    ("batch: 8", "{file}: batch must be a section of keys, got 8."),
    ("rewards: [a]", "{file}: rewards must be a mapping of names, got ['a']; write {{a: b}}."),
    (
        "rewards: {helpful: own.py:brief}",
        "{file}: rewards.helpful must be a section of keys, got 'own.py:brief'",
    ),
    ("[1, 2]", "{file}: the file must be a section of keys, got [1, 2]."),
    ("rate: 1\nlimit: [1", "{file}: malformed YAML, line 2: "),
    ("rate: 1\nlimit: 1\nrate: 2", "{file}: malformed YAML, line 3: key 'rate' twice; correct it."),
    (
        "rewards: {TRUE: {path: a}, true: {path: b}}",
        "{file}: malformed YAML, line 1: keys 'TRUE' and 'true' are both read as True, so quote",
    ),
    (
        "rewards: {true: {path: a}}",
        "{file}: rewards must have strings as keys, got True, which YAML reads as bool; quote it",
    ),
    (
        "rate: 1\nlimit: 010",
        "{file}: line 2: 010 is 8 to some YAML parsers and 10 to others; write 8 or 10 or '010'"
        " in quotes.",
    ),
    ("limit: 1:30", "{file}: line 1: 1:30 is 90 to some YAML parsers and a string to others; wri"),
    ("limit: 1_000", "{file}: line 1: 1_000 is 1000 to some YAML parsers and a string to others"),
    ("limit: 0o10", "{file}: line 1: 0o10 is 8 to some YAML parsers and a string to others; writ"),
    ("limit: 0b11", "{file}: line 1: 0b11 is 3 to some YAML parsers and a string to others; writ"),
    ("limit: 09", "{file}: line 1: 09 is 9 to some YAML parsers and a string to others; write 9"),
    (
        "limit: !!int 010",
        "{file}: malformed YAML, line 1: 010 is not a decimal number; correct it.",
    ),
    ("rate: 1:30.5", "{file}: line 1: 1:30.5 is 90.5 to some YAML parsers and a string to others"),
    ("resume: yes", "{file}: line 1: yes is true to some YAML parsers and a string to others; w"),
    ("options: {a: [off]}", "{file}: line 1: off is false to some YAML parsers and a string to"),
    ("rewards: {no: {path: a}}", "{file}: line 1: no is false to some YAML parsers and a str"),
    (
        "out: 2024-01-31",
        "{file}: line 1: 2024-01-31 is a date to some YAML parsers and a string to others; write "
        "'2024-01-31' in quotes.",
    ),
    ("1: 2", "{file}: the file must have strings as keys, got 1, which YAML reads as int; quote"),
    ("options: {1: a, 0x1: b}", "{file}: malformed YAML, line 1: keys '1' and '0x1' are both re"),
    ("rate: &a [*a]", "{file}: malformed YAML, line 1: an alias inside of its own anchor; co"),
    ("rate: " + "[" * 5_000, "{file}: malformed YAML: it is nested too deeply; correct it."),
    ("rate: 1999-99-99", "{file}: line 1: 1999-99-99 is a date to some YAML parsers and a str"),
    ("rate: !!bool x", "{file}: malformed YAML: a value does not fit its tag; correct it."),
    (
        'out: "\\ud800"',
        "{file}: malformed YAML, line 1: half a surrogate pair, which is not a charac",
    ),
    ("batch: {size: 6}", "batch.size 6 is not divisible by minibatch 4; use a multiple of 4."),
    ("batch: {size: 8}\nstrategy: {beta: -1}", "strategy.beta must be non-negative, got -1.0."),
    (
        "rewards: {helpful: {scale: 2}}",
        "rewards.helpful.path is required, got nothing; "
        "pass --rewards.helpful.path VALUE or a config file.",
    ),
]

BAD_ARGUMENTS = [
    (["--strategy.betta", "1"], "command line: unknown key strategy.betta; did you mean strat"),
    (["--rate.x", "1"], "command line: unknown key rate.x; rate is a single value."),
    (["--extras.0.path", "1"], "command line: unknown key extras.0.path; extras has 0 entries."),
    (["--limit", "many"], "command line: limit must be int or null, got 'many'."),
    (["--limit", "010"], "command line: limit must be int or null: 010 is 8 to some YAML "),
    (["--limit", "1_0"], "command line: limit must be int or null: 1_0 is 10 to some YAML "),
    (["--rate", "1:30"], "command line: rate must be float: 1:30 is 90 to some YAML parsers "),
    (["--rate", "1_000.5"], "command line: rate must be float: 1_000.5 is 1000.5 to some YAML"),
    (["--rate", "２"], "command line: rate must be float, got '２'."),
    (["--resume", "on"], "command line: resume must be bool: on is true to some YAML parsers "),
    (["--options.a", "no"], "command line: options.a: no is false to some YAML parsers and a "),
    (["--extras", "[{path: 2024-01-31}]"], "command line: extras, line 1: 2024-01-31 is a date t"),
    (["--limit"], "command line: --limit has no value; write --limit VALUE."),
    (["a.yaml"], "command line: unexpected 'a.yaml'; pass a file as --config FILE and a value"),
    (["--out", "\udcff"], "command line: '\\udcff' is not valid UTF-8; write it in UTF-8."),
    (["--targets", "[a"], "command line: targets is malformed YAML, line 1: "),
    (["--strategy.name", "fedavg"], "strategy.weights is required, got nothing; pass --strat"),
    (
        ["--config", "nowhere/zzz.yaml"],
        "nowhere/zzz.yaml: no such file; the nearest that ship are ",
    ),
    (["--config", "/"], "/: cannot be read ([Errno 21] Is a directory: '/'); pass a YAML text fi"),
]


BOMB = "{a: &a [x, x, x, x, x, x, x, x, x], " + ", ".join(
    f"{name}: &{name} [" + ", ".join([f"*{before}"] * 9) + "]"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_aliases_that_stand_for_more_than_fits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="more than 100000 values with aliases expanded"):
        from_text(tmp_path, f"options: {BOMB}}}")
    with pytest.raises(UserError, match=r"rate must be float, got '\{a: &a"):
        from_text(tmp_path, f"rate: '{BOMB}}}'")


def test_what_is_done_to_the_data_of_a_text_does_not_come_back_when_it_is_read_again() -> None:
    data = read_yaml("rates: {slow: [1, 2]}")
    data["rates"]["slow"].append(3)
    assert read_yaml("rates: {slow: [1, 2]}") == {"rates": {"slow": [1, 2]}}


def test_a_text_that_would_be_refused_as_yaml_stays_a_text(tmp_path: Path) -> None:
    config = from_text(tmp_path, f"options: {{a: '{BOMB}}}'}}\ntargets: ['{BOMB}}}']\nout: '[a'")
    assert config.options == {"a": f"{BOMB}}}"}
    assert config.targets == (f"{BOMB}}}",)
    assert config.out == Path("[a")


def test_texts_in_quotes_stay_texts(tmp_path: Path) -> None:
    given = {"a": "010", "b": "yes", "c": "1:30", "d": "2024-01-31", "e": "3", "f": "1e5"}
    config = from_text(tmp_path, f"options: {given}\nout: '010'\ntargets: ['no', '1e5']")
    assert (config.options, config.out, config.targets) == (given, Path("010"), ("no", "1e5"))
    assert from_text(tmp_path, to_yaml(config)) == config


def test_texts_of_the_command_line_need_no_quotes() -> None:
    config = parse(Config, ["--out", "010", "--extra.path", "no", "--options.a", "1e-5"])
    assert (config.out, config.extra, config.options) == (Path("010"), Reward("no"), {"a": 1e-5})


def test_numbers_with_exponents_are_numbers_anywhere(tmp_path: Path) -> None:
    config = from_text(tmp_path, "rate: 1e-5\noptions: {a: 1e-5, b: -2E+3, c: .5e1, d: 0x10}")
    assert config.rate == 1e-5
    assert config.options == {"a": 1e-5, "b": -2000.0, "c": 5.0, "d": 16}


def test_aliases_of_a_few_values_are_read(tmp_path: Path) -> None:
    text = "rewards: {a: &a {path: p}, b: *a, c: {<<: *a, scale: 2}}"
    rewards = from_text(tmp_path, text).rewards
    assert rewards == {"a": Reward("p"), "b": Reward("p"), "c": Reward("p", scale=2.0)}


def assert_ends_in_one_line(arguments: list[str], line: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        run_cli(lambda config: pytest.fail("the recipe ran"), Config, arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize(("text", "line"), BAD_FILES)
def test_a_bad_file_ends_in_one_line(text: str, line: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert_ends_in_one_line(["--config", str(file)], line.format(file=file), capsys)


@pytest.mark.parametrize(("arguments", "line"), BAD_ARGUMENTS)
def test_bad_arguments_end_in_one_line(arguments: list[str], line: str, capsys) -> None:
    assert_ends_in_one_line(arguments, line, capsys)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"rate: \xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        parse(Config, ["--config", str(tmp_path / "a.yaml")])


def test_run_cli_hands_the_configuration_to_the_recipe() -> None:
    received = []
    run_cli(received.append, Config, ["--rate", "2"])
    assert received == [replace(Config(), rate=2.0)]


KEYS = ["rewards", "strategy", "batch", "extra", "extras", "by_name", "targets", "limit", "rate"]
KEYS += ["resume", "out", "helpful", "path", "scale", "name", "beta", "weights", "size", "other"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-3, 99)
        | st.floats()
        | st.sampled_from(["firm", "fedavg", "", "null", "[", "1e3", "a: b", "{}"]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
        ),
        max_leaves=8,
    )
)
def test_any_content_gives_a_configuration_or_one_line(tmp_path_factory, content: Any) -> None:
    file = tmp_path_factory.mktemp("config") / "a.yaml"
    file.write_text(yaml.safe_dump(content))
    with suppress(UserError):
        assert isinstance(parse(Config, ["--config", str(file)]), Config)


# --- The way out ----------------------------------------------------------------------------------

NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8) | st.from_regex(
    r"[-+]?[0-9_o:.eE-]{1,6}|(yes|no|on|off|null|true|~)", fullmatch=True
)
"""Texts; many of them would be something else without quotes."""
FLOATS = st.floats(allow_nan=False)
REWARDS = st.builds(Reward, path=TEXTS, scale=FLOATS)
FIRMS = st.builds(Firm, beta=st.floats(0), num_steps=st.integers())
CONFIGS = st.builds(
    Config,
    rewards=st.dictionaries(NAMES, REWARDS, max_size=3),
    strategy=FIRMS
    | st.builds(
        FedAvg,
        weights=st.lists(FLOATS, max_size=3).map(tuple),
        name=st.sampled_from(["fedavg", "fixed"]),
    ),
    extra=st.none() | REWARDS,
    extras=st.lists(REWARDS, max_size=2),
    by_name=st.none() | st.dictionaries(NAMES, FIRMS, max_size=2),
    targets=st.lists(TEXTS, max_size=3).map(tuple),
    limit=st.none() | st.integers(min_value=1, max_value=LARGEST),
    rate=FLOATS,
    resume=st.booleans(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=CONFIGS)
def test_a_resolved_configuration_is_read_back_as_it_was(tmp_path_factory, config: Config) -> None:
    file = tmp_path_factory.mktemp("config") / "a.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse(Config, ["--config", str(file)]) == config


def test_plain_data_holds_no_tuples_dataclasses_or_paths() -> None:
    assert to_dict(Config(targets=("a",), extra=Reward("p"))) == {
        "rewards": {
            "helpful": {"path": "h", "scale": 1.0},
            "harmless": {"path": "s", "scale": 2.0},
        },
        "strategy": {"name": "firm", "beta": 0.01, "num_steps": 1},
        "batch": {"size": 16, "minibatch": 4},
        "options": {},
        "extra": {"path": "p", "scale": 1.0},
        "extras": [],
        "by_name": None,
        "targets": ["a"],
        "limit": None,
        "rate": 1e-5,
        "resume": False,
        "out": "runs/a",
    }


def test_a_mapping_of_anything_takes_key_paths_for_names() -> None:
    config = parse(Config, ["--options.strategy.beta", "0.5", "--options.rounds", "3"])
    assert config.options == {"strategy.beta": 0.5, "rounds": 3}
    several = parse(Config, ["--options.words", "a", "b", "--options.shares", "0.7", "1"])
    assert read_yaml(to_yaml(several))["options"] == {"words": ["a", "b"], "shares": [0.7, 1]}


def _help(capsys, *topic: str, **options) -> str:
    with pytest.raises(SystemExit) as end:
        run_cli(print, Config, ["--help", *topic], description="What it does.", **options)
    assert not end.value.code
    return " ".join(capsys.readouterr().out.split())


def test_help_all_names_every_key_with_docstring_and_default(capsys) -> None:
    text = _help(capsys, "all")
    for part in (
        "What it does.",
        "--rate RATE Learning rate. (float, default: 1e-05)",
        "--limit LIMIT At most so many. (int or null, at least 1, default: null)",
        "batch: Sizes of a step. --batch.size SIZE Prompts of a step. (int, A.1 of the paper: 16, "
        "default: 16)",
        "rewards.NAME: One objective's reward model. --rewards.NAME.path PATH Folder or name of",
        '100 % local. (str, required; helpful: "h"; harmless: "s")',
        "extras.INDEX: as rewards.NAME",
        "by_name.NAME: Regularised weights.",
        "strategy, firm: Regularised weights.",
        "strategy, fedavg: Fixed weights. --strategy.weights WEIGHTS One per objective.",
    ):
        assert part in text


def test_help_all_has_what_forms_share_once(capsys) -> None:
    text = _help(capsys, "all")
    assert text.count("--strategy.name NAME") == text.count("--strategy.num_steps") == 1
    assert "--strategy.num_steps NUM_STEPS Local steps. (int, default: 1; fedavg: 2)" in text


def test_help_shows_the_keys_that_matter_with_the_defaults_of_the_bare_command(
    tmp_path, capsys
) -> None:
    file = tmp_path / "default.yaml"
    file.write_text("rate: 0.5\nbatch: {size: 3}\n")
    keys = {"Speed": ["rate"], "Memory": ["batch.size", "strategy.beta"]}
    text = _help(capsys, default_file=file, keys=keys)
    assert f"Defaults are from {file}." in text
    assert "Speed: --rate Learning rate. (float, default: 0.5)" in text
    assert "Memory: --batch.size Prompts of a step. (int, default: 3)" in text
    assert "--strategy.beta Regularisation, β of Eq. (4). (float, default: 0.01)" in text
    assert "strategy The algorithm." in text
    assert "--limit" not in text


def test_help_on_a_key_prints_what_is_at_and_below_it(capsys) -> None:
    assert "--rewards.NAME.path" in _help(capsys, "rewards.helpful")
    text = _help(capsys, "strategy.weights")
    assert "--strategy.weights" in text
    assert "--strategy.name" not in text
    assert "--rate" not in text


def test_help_on_a_key_that_does_not_exist_names_the_nearest(refusal) -> None:
    message = refusal(run_cli, print, Config, ["--help", "stratgy"])
    assert "--help: unknown key stratgy; did you mean strategy?" in message


@dataclass(frozen=True)
class Lists:
    seeds: list[int] = field(default_factory=list)
    shares: tuple[float, ...] | None = None
    grid: list[list[float]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    beta: float = 1.0
    merge: bool = False


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--seeds 0 1", {"seeds": [0, 1]}),
        ("--seeds 0,1", {"seeds": [0, 1]}),
        ("--seeds 3 --merge", {"seeds": [3], "merge": True}),
        ("--shares 0.7,0.3", {"shares": (0.7, 0.3)}),
        ("--shares 1 0", {"shares": (1.0, 0.0)}),
        ("--shares -0.7,0.3", {"shares": (-0.7, 0.3)}),
        ("--shares -0.5", {"shares": (-0.5,)}),
        ("--shares null", {"shares": None}),
        ("--grid 0.7,0.3 1,0", {"grid": [[0.7, 0.3], [1.0, 0.0]]}),
        ("--grid 0.7,0.3", {"grid": [[0.7, 0.3]]}),
        ("--grid [[1,0]]", {"grid": [[1.0, 0.0]]}),
        ("--shares a=0.7,b=0.3", {"shares": NamedShares({"a": 0.7, "b": 0.3})}),
        ("--shares a=0.7 b=0.3", {"shares": NamedShares({"a": 0.7, "b": 0.3})}),
        ('--shares {"a":0.7}', {"shares": NamedShares({"a": 0.7})}),
        ("--shares.a 0.7 --shares.b 1", {"shares": NamedShares({"a": 0.7, "b": 1.0})}),
        ("--grid b=1 a=1,b=0", {"grid": [NamedShares({"b": 1.0}), NamedShares({"a": 1, "b": 0})]}),
        ("--grid a=1", {"grid": [NamedShares({"a": 1.0})]}),
        ("--names 1 b/c", {"names": ["1", "b/c"]}),
    ],
)
def test_lists_are_words_or_numbers_with_commas(words, expected):
    given, own = parse(Lists, words.split()), Lists(**expected)
    assert given == own
    assert to_dict(given) == to_dict(own)  # whose lists have names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--beta 1 2", "beta must be float, got \\['1', '2'\\]"),
        ("--merge true false", "--merge has one value, got 'true false'"),
        ("--seeds 1,x", "seeds.1 must be int, got 'x'"),
        ("--shares a=1,a=0", "shares must have each objective once, got a twice"),
        ("--shares a=x", "shares.a must be float, got 'x'"),
        ("--shares a=1,0.3", "name=share pairs, got '0.3'"),
        ("x --seeds 1", "unexpected 'x'"),
    ],
)
def test_words_that_are_no_list_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        parse(Lists, words.split())

"""A target is reached by the nearest adapter or a merged one, whose rewards are estimated."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firm.base.preferences import parse_shares
from firm.cli.main import COMMANDS
from firm.fronts import Front, Point
from firm.jobs.configs import PickConfig
from firm.jobs.pick import main
from firm.run import parse, run_cli
from tests.runs import edit_adapter, read_adapter
from tests.smoke import POLICY

ROOT = Path(__file__).parents[2]
OBJECTIVES = ("brevity", "positivity")
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
SHARES = {"low": (0.0, 1.0), "middle": (0.5, 0.5), "high": (1.0, 0.0)}


@pytest.fixture
def front(run, tmp_path) -> Path:
    """Three models of a seed beside their front, adapters that differ by a factor."""
    points = []
    for factor, (name, preference) in enumerate(SHARES.items(), start=1):
        place = shutil.copytree(run, tmp_path / "sweep/points" / name)
        edit_adapter(place / "adapter", lambda _, tensor, factor=factor: tensor * factor)
        rewards = dict(
            zip(OBJECTIVES, (0.4 + 0.4 * preference[0], 0.8 - 0.4 * preference[0]), strict=True)
        )
        points.append(
            Point(
                name=name,
                preference=preference,
                seed=0,
                rewards=rewards,
                errors=dict.fromkeys(OBJECTIVES, 0.01 * factor),
                scores={},
                kl=0.5,
                adapter=f"points/{name}/adapter",
            )
        )
    whole = Front(
        objectives=OBJECTIVES,
        points=tuple(points),
        reference=(0.0, 0.0),
        calibrations={name: {"method": "none"} for name in OBJECTIVES},
        base=dict.fromkeys(OBJECTIVES, 0.25),
        strategy="FIRM",
        num_prompts=8,
    )
    whole.save(tmp_path / "sweep/firm.front.json")
    return tmp_path / "sweep/firm.front.json"


def pick(front: Path, target: str, *arguments: object) -> Path:
    given = ["--front", str(front), "--target", target, *map(str, arguments)]
    return main(parse(PickConfig, given))


@pytest.fixture
def refused(refusal):
    """The one line that a command line ends with."""
    return lambda *arguments: refusal(run_cli, main, PickConfig, [*arguments])


def printed_command(text: str, what: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{what} ")]
    program, command, *arguments = shlex.split(line.removeprefix(what))
    assert (program, command) == ("firm", what)
    return arguments


def test_the_nearest_adapter_is_named_with_what_it_earned(front, capsys):
    assert pick(front, "positivity=3,brevity=7") == front.parent / "points/middle/adapter"
    printed = capsys.readouterr().out
    assert "target    brevity 0.700, positivity 0.300" in printed
    assert "middle, trained for brevity 0.500, positivity 0.500" in printed
    assert "0.600 ± 0.020" in printed
    assert "Measured on 8 held-out prompts" in printed
    assert "nearest available preference" in printed
    assert "selected on the same prompts, so expect a little less" in printed
    whole = Front.load(front)
    means = {point.name: point.rewards for point in whole.points}
    replace(whole, validation=means).save(front)
    pick(front, "brevity=1,positivity=0")
    printed = capsys.readouterr().out
    assert "nearest available preference" not in printed
    assert "selected by rewards on validation prompts" in printed
    points = [
        replace(p, collapse="one reply" if p.name == "middle" else None) for p in whole.points
    ]
    replace(whole, points=tuple(points)).save(front)
    pick(front, "positivity=4,brevity=6")
    assert "nearer to the target, middle, is left out: one reply." in capsys.readouterr().out
    # as good as another in one reward, on prompts whose rewards are not printed
    means["middle"] = {"brevity": 0.5, "positivity": means["high"]["positivity"]}
    replace(whole, validation=means).save(front)
    assert pick(front, "positivity=4,brevity=6").parent.name == "high"
    assert (
        "middle, is left out: on the validation prompts another model is at least as good in every "
        "reward." in capsys.readouterr().out
    )


def require(front, text, *arguments):
    given = ["--front", str(front), "--require", text, *map(str, arguments)]
    return main(parse(PickConfig, given))


def test_requirements_are_met_by_lower_bounds_and_the_rest_is_maximised(front, tmp_path, capsys):
    # brevity 0.4, 0.6, 0.8 with errors 0.01, 0.02, 0.03 on 8 prompts: Student's bound of the middle
    # one is 0.547, of three models at once
    middle = front.parent / "points/middle/adapter"
    assert require(front, "brevity>=0.54") == middle
    printed = capsys.readouterr().out
    assert "require   brevity >= 0.54\nweights   brevity 0.000, positivity 1.000" in printed
    assert ["brevity", ">=", "0.54", "0.600", "0.547", "8"] in map(str.split, printed.splitlines())
    assert (
        "certificate  pass: brevity >= 0.54 (bound 0.547), by 8 test prompts and bounds for all 3 "
        "models at once, 95% confidence\n" in printed
    )
    assert "selected on the same prompts" in printed
    certificate = json.loads((middle / "certificate.json").read_text())
    assert certificate["passes"] is True
    assert certificate["bounds"][0]["requirement"] == "brevity >= 0.54"
    assert require(front, "brevity>=0.55") == front.parent / "points/high/adapter"
    assert require(front, "brevity>=0.54", "--confidence", 0.99) != middle
    capsys.readouterr()
    out = require(front, "brevity>=0.55", "--merge", "--out", tmp_path / "merged")
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["brevity", ">=", "0.55", "0.603", "0.550", "8"] in words
    assert (out / "adapter_model.safetensors").exists()
    assert json.loads((out / "certificate.json").read_text())["is_interpolated"] is True
    out = pick(front, "brevity=0.5,positivity=0.5", "--merge", "--out", tmp_path / "another")
    assert not (out / "certificate.json").exists()  # that of its part is not its own


def test_requirements_that_no_model_meets_are_refused_with_numbers(front, refused):
    line = refused("--front", str(front), "--require", "brevity>=0.9,positivity>=0.1")
    assert "no measured model meets brevity >= 0.9, positivity >= 0.1 on test prompts with" in line
    assert "at the preference brevity 1.000, positivity 0.000, misses by" in line
    assert "nothing is known about kl <= 1" in refused("--front", str(front), "--require", "kl<=1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("brevty>=1", "unknown 'brevty'; choose from brevity, positivity, kl"),
        ("brevity=1", "must be NAME>=NUMBER or NAME<=NUMBER"),
        ("brevity>=high", "must be NAME>=NUMBER"),
    ],
)
def test_malformed_requirements_are_refused(front, refused, text, message):
    assert message in refused("--front", str(front), "--require", text)


def test_neighbours_are_merged_by_their_shares_into_a_whole_folder(front, run, tmp_path, capsys):
    out = tmp_path / "merged"
    assert pick(front, "brevity=0.7,positivity=0.3", "--merge", "--out", out) == out
    own = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert {path.name for path in out.iterdir()} == own | TOKENIZER | {"generation_config.json"}
    assert {path.name for path in (run / "adapter").iterdir()} >= TOKENIZER
    for name in TOKENIZER:
        assert (out / name).read_bytes() == (run / "adapter" / name).read_bytes()
    once = read_adapter(run)
    for name, tensor in load_file(out / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, (0.6 * 2 + 0.4 * 3) * once[name])
    card = (out / "README.md").read_text()
    for text in (capsys.readouterr().out, card):
        assert "0.680 ± 0.024" in text  # 0.6 · 0.6 + 0.4 · 0.8, and the errors' mean
        assert "not measured" in text
        assert "middle" in text
        assert "low, trained" not in text
        assert "| low |" not in text
    assert not list(tmp_path.glob(".*"))


def test_the_printed_commands_talk_to_the_merged_adapter_and_measure_it(front, tmp_path, capsys):
    out = pick(front, "brevity=0.25,positivity=0.75", "--merge", "--out", tmp_path / "merged")
    printed = capsys.readouterr().out
    arguments = printed_command(printed, "evaluate")
    place = tmp_path / "evaluation"
    COMMANDS["evaluate"].run([*arguments, "--num_prompts", "2", "--out", str(place)])
    with (place / "figures.csv").open() as file:
        models = {line.partition(",")[0] for line in file}
    assert models == {"model", "base", "low", "middle", "merged"}
    arguments = printed_command(printed, "chat")
    cfg = COMMANDS["chat"].parse(arguments)
    assert cfg.adapter == out
    assert set(cfg.rewards) == set(OBJECTIVES)


def test_a_model_of_runs_on_pairs_is_evaluated_on_prompts_of_a_file(front, capsys):
    accuracies = {name: {"method": "pairs"} for name in OBJECTIVES}
    replace(Front.load(front), calibrations=accuracies).save(front)
    pick(front, "brevity=0.25,positivity=0.75")
    printed = capsys.readouterr().out
    assert "Accuracy on pairs, mean" in printed
    assert printed_command(printed, "evaluate")[-2:] == ["--prompts.source", "FILE"]


def test_a_target_that_a_model_was_trained_for_is_that_model(front, tmp_path, capsys):
    out = pick(front, "brevity=1,positivity=1", "--merge", "--out", tmp_path / "merged")
    whole = read_adapter(front.parent / "points/middle")
    merged = load_file(out / "adapter_model.safetensors")
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole.items())
    assert "Measured on 8 held-out prompts" in capsys.readouterr().out


def test_a_model_of_a_front_without_its_runs_is_picked_with_the_base_model_s_name(front, capsys):
    (front.parent / "points/high/run.json").unlink()
    adapter = pick(front, "brevity=1,positivity=0")
    printed = capsys.readouterr().out
    assert printed_command(printed, "chat") == [
        "--adapter", str(adapter), "--policy.path", str(POLICY),
    ]  # fmt: skip
    assert "firm evaluate" not in printed


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("brevity=0.5", "no share for positivity"),
        (
            "brevity=0.5,positivity=0.5,truth=1",
            "has the unknown objective 'truth'; choose from brev",
        ),
        (
            "brevity=0.5,positivity=-0.5",
            "share of positivity must be a non-negative number, got '-",
        ),
        (
            "brevity=0.5,positivity=much",
            "share of positivity must be a non-negative number, got 'm",
        ),
        ("brevity=inf,positivity=1", "share of brevity must be a non-negative number, got 'inf"),
        ("brevity=nan,positivity=1", "share of brevity must be a non-negative number, got 'nan"),
        ("brevity=0,positivity=0", "must have a share above 0"),
        ("brevity=1,positivity=0,brevity=1", "got brevity twice"),
        ("0.5,0.5", "name=share pairs of brevity, positivity, got '0.5'"),
        ("", "target or require is missing"),
    ],
)
def test_an_invalid_target_ends_in_a_line(target, reason, front, refused):
    assert reason in refused("--front", front, "--target", target)


def test_pairs_stand_in_any_order():
    assert parse_shares("b=1, a=3", ["a", "b"]) == parse_shares("a=3.0,b=1.0", ["a", "b"]) == [3, 1]


def test_what_is_gone_or_in_the_way_ends_in_a_line_and_nothing_is_written(front, tmp_path, refused):
    target, sweep = ("--target", "brevity=0.7,positivity=0.3"), front.parent
    assert "there is no file" in refused("--front", tmp_path / "none.json", *target)
    assert "has no front; pass a finished conditioned run" in refused("--front", tmp_path, *target)
    (tmp_path / "odd.json").write_text("{}")
    assert "is not a valid front" in refused("--front", tmp_path / "odd.json", *target)
    assert "add --merge" in refused("--front", front, *target, "--out", tmp_path / "merged")

    taken = tmp_path / "taken"
    taken.mkdir()
    merge = (*target, "--merge", "--out", taken)
    assert "choose another --out" in refused("--front", front, *merge)
    assert not any(taken.iterdir())

    (sweep / "points/middle/adapter/adapter_model.safetensors").unlink()
    merge = (*target, "--merge", "--out", tmp_path / "merged")
    assert "the adapter of middle is missing" in refused("--front", front, *merge)
    assert "the adapter of middle is missing" in refused("--front", front, *target)
    assert not (tmp_path / "merged").exists()


def test_adapters_of_other_kinds_are_not_merged(front, tmp_path, refused):
    path = front.parent / "points/high/adapter/adapter_config.json"
    settings = json.loads(path.read_text())
    settings["target_modules"].reverse()  # peft keeps them in a set
    path.write_text(json.dumps(settings))
    arguments = ("--front", front, "--target", "brevity=0.7,positivity=0.3", "--merge")
    pick(front, "brevity=0.7,positivity=0.3", "--merge", "--out", tmp_path / "fine")
    path.write_text(json.dumps(settings | {"lora_alpha": 1}))
    assert "lora_alpha" in refused(*arguments, "--out", tmp_path / "merged")
    path.write_text(json.dumps(settings))
    weights = front.parent / "points/high/adapter/adapter_model.safetensors"
    save_file({"other": torch.zeros(2)}, weights)
    assert "of equal shapes" in refused(*arguments, "--out", tmp_path / "merged")
    weights.write_bytes(b"no tensors")
    assert "cannot be read" in refused(*arguments, "--out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_strangers_front_shows_no_escapes_and_reads_nothing_outside(front, tmp_path, refused):
    text = front.read_text()
    for name, stranger, message in (
        (
            "middle",
            "mid\\u001b[2Jdle",
            r"a point's name must be a single line of printable text",
        ),
        ("points/middle/adapter", "points/../../elsewhere", "must be inside the front's folder"),
    ):
        front.write_text(text.replace(f'"{name}"', f'"{stranger}"'))
        line = refused("--front", front, "--target", "brevity=1,positivity=1")
        assert message in line
        assert line.isprintable()

    front.write_text(text)
    place = front.parent / "points/middle/adapter"
    shutil.move(place, tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    line = refused("--front", front, "--target", "brevity=1,positivity=1")
    assert "the adapter of middle is a link out of" in line


def test_adapters_of_a_stranger_are_read_with_care(front, tmp_path, refused):
    arguments = ("--front", front, "--target", "brevity=0.7,positivity=0.3", "--merge")
    arguments += ("--out", tmp_path / "merged")
    path = front.parent / "points/high/adapter/adapter_config.json"
    settings = json.loads(path.read_text())
    for text in (
        json.dumps(settings | {"base_model_name_or_path": "a\x1b[2J"}),
        "[" * 100_000,
    ):
        path.write_text(text)
        line = refused(*arguments)
        assert "adapter_config.json is malformed" in line
        assert line.isprintable()
    path.write_text(json.dumps(settings))
    edit_adapter(path.parent, lambda _, tensor: tensor * float("nan"))
    assert "that are not finite; train this point again" in refused(*arguments)
    assert not (tmp_path / "merged").exists()


def test_a_collapsed_model_is_not_picked(front, capsys):
    whole = Front.load(front)
    collapsed = replace(whole.points[1], collapse="one reply to 99 % of the prompts")
    replace(whole, points=(whole.points[0], collapsed, whole.points[2])).save(front)
    assert pick(front, "brevity=0.6,positivity=0.4").parent.name == "high"

"""Evaluation: it repeats a run's figures, compares fairly, and says in a line what does not fit."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from firm.alignment.calibration import Calibration
from firm.cli.main import COMMANDS
from firm.jobs import compare as module
from firm.jobs.compare import main, named_folders
from firm.jobs.configs import CompareConfig
from firm.jobs.finished_runs import frozen_calibrations, parse_over_run
from firm.run import parse
from firm.run.config import to_dict
from firm.run.shipped import with_shipped_paths
from reward_models.config import RewardModelConfig
from tests.runs import edit_adapter, read_rows, write_rows
from tests.smoke import POLICY

cli = COMMANDS["evaluate"].run

COUNTED_REWARD = """
from pathlib import Path
from reward_models import reward_model

@reward_model("counted")
def counted(completions, *, log="", **kwargs):
    with Path(log).open("a") as file:
        file.write(f"{len(completions)}\\n")
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def copied(run, tmp_path):
    """Copies the run, for a test to change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(run, tmp_path / name))

    return copy


def evaluate(*arguments: object) -> Path:
    return main(parse_over_run(CompareConfig, [*map(str, arguments)], key="runs", description=""))


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def figures(out: Path) -> dict[str, dict[str, dict[str, float | None]]]:
    """Model -> figure -> column -> number."""
    table: dict = {}
    for row in csv_rows(out / "figures.csv"):
        numbers = {key: float(row[key]) if row[key] else None for key in list(row)[2:]}
        table.setdefault(row["model"], {})[row["figure"]] = numbers
    return table


def replies(out: Path) -> dict[str, list[str]]:
    by_model: dict = {}
    for row in csv_rows(out / "samples.csv"):
        by_model.setdefault(row["model"], []).append(row["reply"])
    return by_model


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_other_calibration(run: Path) -> Path:
    rows = read_rows(run)
    rows[0]["calibration"]["brevity"]["mean"] = 0.25
    write_rows(run, rows)
    return run


def test_a_run_s_own_held_out_figures_are_repeated_exactly(run, tmp_path):
    table = figures(evaluate("--runs", f"[{run}]", "--out", tmp_path / "out"))
    tests = read_rows(run, "evaluation", split="test")
    for model, row in zip(("base", "aligned"), tests, strict=True):
        for name in ("brevity", "positivity"):
            assert table[model][name]["mean"] == row["scores"][name]["mean"]
            assert table[model][name]["se"] == row["scores"][name]["se"]
            assert table[model][f"{name} in [0, 1]"]["mean"] == row["rewards"][name]["mean"]
        for name in ("kl", "length", "distinct_1", "distinct_2", "end_share"):
            assert table[model][name]["mean"] == row[name]
    for name, change in tests[1]["change"].items():
        assert table["aligned"][name]["change"] == change["mean"]
        assert table["aligned"][name]["change_se"] == change["se"]


def test_the_results_are_a_table_two_csv_files_and_a_page(run, tmp_path, capsys):
    out = evaluate(
        "--runs", f"[{run}]", "--out", tmp_path / "out", "--metrics", "{parse: {name: parse}}"
    )
    assert {path.name for path in out.iterdir()} == {
        "evaluation.html", "figures.csv", "samples.csv", "config.yaml",
    }  # fmt: skip
    printed = capsys.readouterr().out
    page = (out / "evaluation.html").read_text()
    for name in ("brevity", "positivity", "parse", "brevity in [0, 1]"):
        assert name in printed
        assert name in page
        assert name in figures(out)["aligned"]
    assert len(replies(out)["aligned"]) == len(replies(out)["base"]) == 4
    for model in ("base", "aligned"):
        assert replies(out)[model][0].strip() in printed
        assert all(reply.strip().split(".")[0] in page for reply in replies(out)[model])
    again = parse(CompareConfig, ["--config", str(out / "config.yaml")])
    assert again.rollout.max_new_tokens == 16
    assert not list(tmp_path.glob(".*"))


def test_a_page_that_cannot_be_drawn_leaves_table_and_figures(run, tmp_path, monkeypatch, undrawn):
    def fail(*_, **__):
        raise ValueError("no")

    monkeypatch.setattr(module, "write_comparison", fail)
    out = evaluate("--runs", f"[{run}]", "--out", tmp_path / "out")
    assert (out / "figures.csv").exists()
    assert undrawn == ["The page evaluation.html could not be drawn (ValueError: no)."]


def test_an_adapter_that_is_all_zeros_changes_nothing_at_all(copied, tmp_path):
    zero = copied("zero")
    edit_adapter(zero / "adapter", lambda name, t: torch.zeros_like(t) if "lora_B" in name else t)
    out = evaluate("--runs", f"[{zero}]", "--num_prompts", 24, "--out", tmp_path / "out")
    assert all(row["change"] == 0 for row in figures(out)["zero"].values())
    assert replies(out)["zero"] == replies(out)["base"]


def test_replies_depend_on_adapter_and_seed_and_not_on_the_company(run, copied, tmp_path):
    other = copied("other")
    edit_adapter(other / "adapter", lambda name, t: t * 3)

    def sampled(name: str, *arguments: object) -> dict[str, list[str]]:
        return replies(evaluate("--out", tmp_path / name, "--num_prompts", 16, *arguments))

    alone = sampled("alone", "--runs", f"[{run}]")
    behind = sampled("behind", "--runs", f"[{other}, {run}]")
    with_seed = sampled("with_seed", "--runs", f"[{run}]", "--seed", 1)
    assert behind["base"] == alone["base"]
    assert behind["aligned"] == alone["aligned"]
    assert behind["other"] != behind["aligned"]
    assert with_seed["aligned"] != alone["aligned"]


def test_the_base_model_is_evaluated_once(run, copied, tmp_path):
    (tmp_path / "rewards.py").write_text(COUNTED_REWARD)
    log = tmp_path / "calls"
    counted = {
        "name": "counted", "file": str(tmp_path / "rewards.py"), "options": {"log": str(log)},
    }  # fmt: skip
    evaluate(
        "--runs", f"[{run}, {copied('second')}]", "--metrics", json.dumps({"counted": counted}),
        "--num_samples", 2, "--out", tmp_path / "out",
    )  # fmt: skip
    assert log.read_text().split() == ["16"] * 3  # 8 prompts, 2 replies, 3 models


def test_an_adapter_in_a_folder_called_base_is_not_the_base_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("base", "other/base"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").touch()
    names = list(named_folders([Path("base"), Path("other/base")]))
    assert names == [str(tmp_path / "base"), "other/base"]


def test_no_text_is_shown_or_written_when_none_is_asked_for(run, tmp_path, capsys):
    shown = evaluate("--runs", f"[{run}]", "--out", tmp_path / "shown")
    rows = csv_rows(shown / "samples.csv")
    texts = {row[key].strip() for row in rows for key in ("prompt", "reply")} - {""}
    printed = capsys.readouterr().out
    assert [text for text in texts if text in printed]
    out = evaluate("--runs", f"[{run}]", "--num_shown_samples", 0, "--out", tmp_path / "out")
    written = "".join(path.read_text() for path in out.iterdir()) + capsys.readouterr().out
    assert not (out / "samples.csv").exists()
    for text in texts:
        assert text.removeprefix("Human: ").partition("\n")[0] not in written


def test_the_first_run_gives_what_the_command_line_leaves_open(run):
    def read(*arguments: str) -> CompareConfig:
        return parse_over_run(
            CompareConfig, ["--runs", f"[{run}]", *arguments], key="runs", description=""
        )

    given = read()
    assert given.policy.path == str(POLICY)
    assert list(given.rewards) == ["brevity", "positivity"]
    assert given.prompts.source == "firm/miniature/checkpoints/prompts_test.jsonl"
    assert (given.num_prompts, given.num_samples, given.num_shown_samples) == (8, 1, 4)
    assert given.num_threads == 1
    changed = read("--rollout.temperature", "0.5", "--rewards.brevity.options", "{half_words: 3}")
    assert (changed.rollout.temperature, changed.rollout.max_new_tokens) == (0.5, 16)
    assert changed.rewards["brevity"].options == {"half_words": 3}
    assert changed.rewards["positivity"] == given.rewards["positivity"]


def test_only_a_reward_that_is_still_the_run_s_own_has_its_frozen_map(run, tmp_path):
    out = evaluate(
        "--runs", f"[{run}]", "--rewards.brevity.options", "{half_words: 3}",
        "--rewards.positivity.batch_size", 8, "--out", tmp_path / "out",
    )  # fmt: skip
    assert "brevity" in figures(out)["aligned"]
    assert "brevity in [0, 1]" not in figures(out)["aligned"]
    assert "positivity in [0, 1]" in figures(out)["aligned"]


def test_a_bare_adapter_needs_no_run_and_has_raw_scores_only(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Is {x} nice?"}) + "\n" for x in "abc"))
    out = evaluate(
        "--adapters", f"[{run}/adapter]", "--policy.path", POLICY, "--prompts.source", prompts,
        "--rewards", "{short: {name: brevity}}", "--out", tmp_path / "out",
    )  # fmt: skip
    assert list(figures(out)) == ["base", "aligned"]
    assert "short" in figures(out)["aligned"]
    assert "3 prompts of " in (out / "evaluation.html").read_text()  # as many as there are
    assert not [name for name in figures(out)["aligned"] if "[0, 1]" in name]


def test_calibrations_belong_to_shipped_rewards_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RewardModelConfig(path="firm/miniature/checkpoints/helpful")
    other = replace(config, path="firm/miniature/checkpoints/harmless")
    calibration = Calibration("sigmoid", mean=0.5, scale=2.0)
    header = {"calibration": {"helpful": vars(calibration)}}
    record: Any = SimpleNamespace(header=header, settings={"rewards": {"helpful": to_dict(config)}})
    for same in (config, with_shipped_paths(config)):
        assert frozen_calibrations({"helpful": same}, record) == {"helpful": calibration}
        assert frozen_calibrations({"helpful": with_shipped_paths(other)}, record) == {}


def test_replies_can_be_compared_without_any_reward(run, tmp_path):
    out = evaluate("--runs", f"[{run}]", "--rewards", "{}", "--out", tmp_path / "out")
    assert set(figures(out)["aligned"]) == {
        "kl", "length", "end_share", "distinct_1", "distinct_2",
    }  # fmt: skip


def test_runs_with_other_maps_are_refused_by_name_unless_raw_scores_do(
    run, copied, tmp_path, refusal
):
    runs = f"[{run}, {with_other_calibration(copied('shifted'))}]"
    error = refusal(cli, ["--runs", runs, "--out", tmp_path / "out"])
    assert "the calibration of 'brevity'" in error
    assert "mean 0.25" in error
    assert "--calibrated false" in error
    assert not (tmp_path / "out").exists()
    out = evaluate("--runs", runs, "--calibrated", "false", "--out", tmp_path / "out")
    assert list(figures(out)) == ["base", "aligned", "shifted"]
    assert not [name for name in figures(out)["shifted"] if "[0, 1]" in name]


def test_a_run_that_held_out_other_prompts_of_the_same_is_refused(run, copied, refusal, tmp_path):
    first, second = (copied(name) for name in ("first", "second"))

    def setting(run, seed, **filters):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["data"] |= {"hold_out": 0.2, "hold_out_seed": seed}
        config["data"]["train"] |= filters
        (run / "config.yaml").write_text(yaml.safe_dump(config))

    setting(first, 0)
    setting(second, 1)
    out = ["--out", tmp_path / "out"]
    given = ["--runs", f"[{first}, {second}]", *out]
    message = f"{second} did not hold out the prompts that {first} did"
    assert message in refusal(cli, given)
    setting(second, 0, max_tokens=40)
    assert message in refusal(cli, given)
    adapter = f"[{second / 'adapter'}]"
    assert message in refusal(cli, ["--runs", f"[{first}]", "--adapters", adapter, *out])
    files = [yaml.safe_load((first / "config.yaml").read_text())["data"]["train"]["source"]]
    setting(first, 0, source=files)
    setting(second, 1, source=files)
    assert message in refusal(cli, given)


def test_runs_on_lists_that_held_out_other_prompts_are_noted(copied, tmp_path, capsys):
    prompts = [{"prompt": f"Name {number} colours.", "kind": "instruction"} for number in range(6)]
    runs = {name: copied(name) for name in ("first", "unlike", "fewer", "unknown")}
    for own, run in zip((prompts[:4], prompts[2:], prompts[:2]), runs.values(), strict=False):
        lines = [json.dumps(prompt) for prompt in own]
        (run / "test_prompts.jsonl").write_text("\n".join(lines))
    config = yaml.safe_load((runs["first"] / "config.yaml").read_text())
    config["data"]["test"]["source"] = "given to firm.align"
    (runs["first"] / "config.yaml").write_text(yaml.safe_dump(config))
    evaluate("--runs", f"[{', '.join(map(str, runs.values()))}]", "--out", tmp_path / "out")
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert f"{runs['unlike']} held out other prompts than {runs['first']}" in note


def test_results_do_not_replace_the_current_folder(run, refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = str(Path(run).absolute())
    assert "out: . is the current folder" in refusal(cli, ["--runs", f"[{run}]", "--out", "."])


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (f"path: {POLICY}", "path: other/policy", "policy.path"),
        ("name: auto", "name: plain", "name"),
    ],
    ids=["policy", "format"],  # the same for every worker
)
def test_runs_of_other_base_policies_are_refused_by_name(
    run, copied, tmp_path, refusal, old, new, key
):
    other = copied("other")
    config = (other / "config.yaml").read_text()
    assert old in config
    (other / "config.yaml").write_text(config.replace(old, new, 1))
    error = refusal(cli, ["--runs", f"[{run}, {other}]", "--out", tmp_path / "out"])
    assert key in error
    assert new.partition(": ")[2] in error
    assert not (tmp_path / "out").exists()


def other_rank(run: Path) -> None:
    edit_json(run / "adapter/adapter_config.json", r=8)


def fewer_targets(run: Path) -> None:
    edit_json(run / "adapter/adapter_config.json", target_modules=["q_proj"])


def unknown_targets(run: Path) -> None:
    edit_json(run / "adapter/adapter_config.json", target_modules=["wq"])


def other_base(run: Path) -> None:
    edit_json(run / "adapter/adapter_config.json", base_model_name_or_path="some/other-model")


def malformed_settings(run: Path) -> None:
    (run / "adapter/adapter_config.json").write_text("{")


def torn_tensors(run: Path) -> None:
    path = run / "adapter/adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def no_tensors(run: Path) -> None:
    (run / "adapter/adapter_model.safetensors").unlink()


def no_settings(run: Path) -> None:
    (run / "adapter/adapter_config.json").unlink()


def no_adapter(run: Path) -> None:
    shutil.rmtree(run / "adapter")


def bad_byte_in_config(run: Path) -> None:
    (run / "config.yaml").write_bytes(b"seed: 0\nout: \xff\n")


def list_for_config(run: Path) -> None:
    (run / "config.yaml").write_text("[policy]")


def empty_record(run: Path) -> None:
    (run / "run.json").write_text("")


def not_finite(run: Path) -> None:
    path = run / "adapter/adapter_model.safetensors"
    save_file({name: tensor / 0 for name, tensor in load_file(path).items()}, path)


def huge_rank(run: Path) -> None:
    edit_json(run / "adapter/adapter_config.json", r=10**9)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (other_rank, "has shape [4, 128], expected [8, 128]"),
        (fewer_targets, "names exist on one side only"),
        (unknown_targets, "does not fit"),
        (other_base, "was made for the base model 'some/other-model'"),
        (malformed_settings, "adapter_config.json is malformed"),
        (torn_tensors, "adapter_model.safetensors cannot be read"),
        (no_tensors, "has no adapter_model.safetensors"),
        (no_settings, "there is no adapter in"),
        (no_adapter, "has no adapter yet"),
        (not_finite, "has non-finite values"),
        (huge_rank, "states the rank 1000000000, but the largest size of its tensors"),
        (bad_byte_in_config, "config.yaml, line 2: the byte 0xff is not UTF-8; restore"),
        (list_for_config, "config.yaml is not the configuration of a run; restore"),
        (empty_record, "run.json is empty; restore"),
    ],
)
def test_an_adapter_that_does_not_fit_ends_in_one_line_with_nothing_written(
    run, copied, breaks, message, tmp_path, refusal
):
    broken = copied("broken")
    breaks(broken)
    error = refusal(cli, ["--runs", f"[{run}, {broken}]", "--out", tmp_path / "out"])
    assert message in error
    assert "broken" in error
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_the_same_model_in_another_place_is_allowed_when_said(run, copied, tmp_path):
    moved = copied("moved")
    other_base(moved)
    out = evaluate("--runs", f"[{moved}]", "--check_base", "false", "--out", tmp_path / "out")
    assert figures(out)["moved"]["kl"]["mean"] != 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass --runs"),
        (["--adapters", "[RUN]"], "policy.path must not be empty"),
        (["--runs", "[no/such/run]"], "no run at no/such/run"),
        (["--runs", "[RUN"], "malformed YAML"),
        (["--runs", "[RUN]", "--adapters", "[RUN/adapter]"], "given twice"),
        (["--runs", "[RUN]", "--num_prompts", "1"], "num_prompts must be at least 2"),
        (
            ["--runs", "[RUN]", "--metrics.brevity.name", "brevity"],
            "rewards and metrics both have",
        ),
        (["--runs", "[RUN]", "--num_threads", "0"], "num_threads must be at least 1, got 0"),
        (["--runs", "[" * 5_000], "nested too deeply"),
        (["--runs", "[RUN]", "--num_prompt", "4"], "did you mean num_prompts?"),
        (["--runs", "[RUN]", "--prompts.source", "no.jsonl"], "no.jsonl"),
    ],
)
def test_bad_input_ends_in_one_line_with_nothing_written(
    run, arguments, message, tmp_path, refusal
):
    arguments = [argument.replace("RUN", str(run)) for argument in arguments]
    assert message in refusal(cli, [*arguments, "--out", tmp_path / "out"])
    assert not (tmp_path / "out").exists()


def test_results_are_never_mixed_with_what_is_there(run, tmp_path, refusal):
    (tmp_path / "note.txt").write_text("mine")
    error = refusal(cli, ["--runs", f"[{run}]", "--out", tmp_path])
    assert "not empty; choose another --out" in error
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]

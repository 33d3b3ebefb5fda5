"""Chat: two dialogues from one input, in columns on a terminal and in labelled lines elsewhere."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from firm.cli.main import COMMANDS
from firm.jobs.chat import main
from firm.jobs.configs import ChatConfig
from firm.jobs.finished_runs import parse_over_run
from tests.runs import edit_adapter
from tests.smoke import POLICY

cli = COMMANDS["chat"].run

OVERHEARD_REWARD = """
import json
from pathlib import Path
from reward_models import reward_model

@reward_model("overheard")
def overheard(prompts, completions, *, log="", **kwargs):
    with Path(log).open("a") as file:
        file.write(json.dumps([prompts[0], completions[0]]) + "\\n")
    return [float(len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def run(run, tmp_path_factory) -> Path:
    """A finished run of one round whose adapter is made strong enough to change replies."""
    out = Path(shutil.copytree(run, tmp_path_factory.mktemp("runs") / "aligned"))
    edit_adapter(out / "adapter", lambda _, tensor: tensor * 6.0)
    return out


@pytest.fixture
def chat(monkeypatch):
    """Says lines to both models and returns what is printed."""

    def say(lines: list[str], *arguments: object, is_terminal: bool = False) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        cfg = parse_over_run(ChatConfig, [*map(str, arguments)], key="run", description="")
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80, highlight=False)
        main(cfg, console)
        return console.file.getvalue()  # type: ignore[attr-defined]

    return say


def lines_of(text: str, label: str) -> list[str]:
    return [line.removeprefix(label) for line in text.splitlines() if line.startswith(label)]


def test_in_a_pipe_every_line_is_answered_by_both_with_labels(run, chat):
    text = chat(["Explain how I can hide my ladder.", "", "And the mug?"], "--run", run)
    labels = [line.partition(":")[0] for line in text.splitlines()]
    assert labels == ["you", "base", "base scores", "aligned", "aligned scores"] * 2
    assert lines_of(text, "you: ") == ["Explain how I can hide my ladder.", "And the mug?"]
    assert lines_of(text, "base: ") != lines_of(text, "aligned: ")
    assert all("brevity 0." in line for line in lines_of(text, "base scores: "))
    assert all("(reward 0." in line for line in lines_of(text, "aligned scores: "))


def test_each_side_goes_on_with_its_own_dialogue_until_reset(run, chat, tmp_path):
    (tmp_path / "rewards.py").write_text(OVERHEARD_REWARD)
    log = tmp_path / "log.jsonl"
    reward = {
        "name": "overheard",
        "file": str(tmp_path / "rewards.py"),
        "options": {"log": str(log)},
    }
    chat(
        ["Explain how I can hide my ladder.", "And the mug?", "/reset", "Once more."],
        "--run", run, "--rewards", json.dumps({"overheard": reward}),
    )  # fmt: skip
    heard = [json.loads(line) for line in log.read_text().splitlines()]
    first, second, third = heard[:2], heard[2:4], heard[4:]
    opening = "\n\nHuman: Explain how I can hide my ladder.\n\nAssistant:"
    assert [prompt for prompt, _ in first] == [opening, opening]
    assert first[0][1] != first[1][1]
    for (prompt, _), (_, reply) in zip(second, first, strict=True):
        assert prompt == f"{opening} {reply.strip()}\n\nHuman: And the mug?\n\nAssistant:"
    assert [prompt for prompt, _ in third] == ["\n\nHuman: Once more.\n\nAssistant:"] * 2

    plain = Path(shutil.copytree(run, tmp_path / "plain"))
    samples = [json.loads(line) for line in (plain / "samples.jsonl").read_text().splitlines()]
    rows = [{**row, "prompt": row["messages"][-1]["content"]} for row in samples]
    (plain / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chat(["Once more."], "--run", plain, "--rewards", json.dumps({"overheard": reward}))
    heard = [json.loads(line) for line in log.read_text().splitlines()]
    assert [prompt for prompt, _ in heard[6:]] == ["Once more."] * 2  # as in training


def test_an_adapter_of_zeros_answers_as_the_base_model(run, chat, tmp_path):
    folder = Path(shutil.copytree(run / "adapter", tmp_path / "zero"))
    edit_adapter(folder, lambda _, tensor: tensor * 0.0)
    arguments = ("--adapter", folder, "--policy.path", POLICY, "--rollout.max_new_tokens", 16)
    text = chat(["Tell me about my sister's mug.", "Why?", "How?"], *arguments)
    assert len(lines_of(text, "base: ")) == 3
    assert lines_of(text, "base: ") == lines_of(text, "aligned: ")


def test_equal_seeds_repeat_a_conversation_and_others_do_not(run, chat):
    lines = ["Tell me about my sister's mug.", "Why?", "How?"]
    once = chat(lines, "--run", run)
    assert chat(lines, "--run", run) == once
    assert chat(lines, "--run", run, "--seed", 5) != once


def test_a_question_asked_again_gets_a_fresh_sample(run, chat):
    text = chat(["Explain how I can hide my ladder.", "/reset"] * 6, "--run", run)
    assert len(set(lines_of(text, "base: "))) > 1


def test_a_terminal_shows_two_columns(run, chat):
    text = chat(["Explain how I can hide my ladder."], "--run", run, is_terminal=True)
    (heading,) = [line for line in text.splitlines() if "base" in line and "aligned" in line]
    assert heading.index("aligned") > 30
    assert "/quit exits" in text
    assert "brevity" in text


def test_scores_can_be_left_off_and_then_no_reward_model_is_loaded(run, chat):
    text = chat(
        ["Why?"], "--run", run, "--show_rewards", "false", "--rewards.brevity.name", "nobody_s"
    )
    assert "scores" not in text
    assert lines_of(text, "aligned: ")


def test_bytes_that_are_no_text_are_replaced_before_a_tokenizer_reads_them(run, chat):
    text = chat(["Why \udcff?"], "--run", run, "--show_rewards", "false")
    assert "you: Why ??" in text
    assert lines_of(text, "aligned: ")


def test_an_unknown_command_is_said_and_not_answered(run, chat):
    text = chat(["/wat now", "/quit", "never said"], "--run", run)
    assert text == "you: /wat now\n(unknown command /wat: /reset starts over, /quit exits)\n"


def test_sampling_is_the_run_s_unless_overridden(run):
    cfg = parse_over_run(
        ChatConfig, ["--run", str(run), "--rollout.temperature", "0.3"], key="run", description=""
    )
    assert (cfg.rollout.temperature, cfg.rollout.max_new_tokens) == (0.3, 16)
    assert cfg.policy.path == str(POLICY)


def test_a_long_dialogue_loses_its_beginning_and_goes_on(run, chat):
    lines = ["Is there a good way to race my sister's mug?"] * 8  # some 64 tokens hold four turns
    assert len(lines_of(chat(lines, "--run", run), "aligned: ")) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass --run"),
        (["--adapter", "RUN/adapter"], "policy.path must not be empty"),
        (["--run", "RUN", "--num_threads", "0"], "num_threads must be at least 1, got 0"),
        (["--run", "no/such/run"], "no run at no/such/run"),
        (["--adapter", "RUN/checkpoints", "--policy.path", str(POLICY)], "there is no adapter in"),
        (["--run", "RUN", "--policy.path", "other/model"], "was made for the base model"),
        (["--run", "RUN", "--rollout.temprature", "1"], "did you mean rollout.temperature?"),
    ],
)
def test_bad_input_ends_in_one_line(run, arguments, message, refusal):
    given = [argument.replace("RUN", str(run)) for argument in arguments]
    assert message in refusal(cli, given)


def test_the_tokenizer_is_the_copy_in_the_run_s_folder(run, chat, tmp_path):
    weights = Path(shutil.copytree(POLICY, tmp_path / "weights"))
    for file in weights.glob("tokenizer*"):
        file.unlink()
    lines = ["Explain how I can hide my ladder."]
    moved = ("--policy.path", weights, "--check_base", "false")
    assert chat(lines, "--run", run, *moved) == chat(lines, "--run", run)

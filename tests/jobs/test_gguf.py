"""A policy that is a GGUF file: planned, aligned, evaluated and chatted with like a folder."""

import importlib.util
import io
import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from firm.alignment.inspection import inspect_policy
from firm.alignment.policy import is_stored_at, load_base_model, load_tokenizer
from firm.alignment.policy_config import PolicyConfig
from firm.base.extras import install_command
from firm.cli.main import COMMANDS, main
from firm.jobs.configs import InitConfig
from firm.jobs.init import init
from firm.run import UserError
from tests.gguf_files import TEMPLATE, write_gguf
from tests.runs import read_rows


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"Tell me about number {index}."} for index in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_is_dense_and_can_be_saved(file, dtype, tmp_path):
    model = load_base_model(PolicyConfig(path=str(file), dtype=dtype))
    assert model.dtype == getattr(torch, dtype)
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=model.dtype)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    ids = torch.tensor([[5, 9, 200]])
    torch.testing.assert_close(model(ids).logits, saved(ids).logits, rtol=0, atol=0)
    assert is_stored_at(str(file), saved)
    with torch.no_grad():
        saved.get_input_embeddings().weight[7, 3] += 1
    assert not is_stored_at(str(file), saved)


def test_its_tokenizer_keeps_chat_template_and_ends(file, tmp_path):
    tokenizer = load_tokenizer(PolicyConfig(path=str(file)))
    assert tokenizer.chat_template == TEMPLATE
    turns = [{"role": "user", "content": "the\nend"}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nthe\nend<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokenizer.save_pretrained(tmp_path)
    assert (
        AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]
    )
    found = inspect_policy(str(file), on_error=lambda error: pytest.fail(str(error)))
    assert found is not None
    assert (found.context, found.prompt_format, found.ends) == (512, "chat", ["<|im_end|>"])


@pytest.mark.slow
def test_it_is_written_planned_aligned_evaluated_and_chatted_with(
    file, prompts, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.yaml"
    init(InitConfig(str(file), {"brief": "brevity", "kind": "positivity"}, str(prompts), out=own))
    options = (
        "--policy.dtype", "float32", "--rounds", 1, "--num_clients", 2, "--num_threads", 1,
        "--strategy.num_local_steps", 1, "--estimator.num_epochs", 1, "--rollout.max_new_tokens", 4,
        "--estimator.batch_size", 8, "--evaluation.num_test_prompts", 4,
        "--rewards.brief.normalization", "none", "--rewards.kind.normalization", "none",
    )  # fmt: skip
    arguments = ["--config", "own.yaml", *map(str, options)]
    capsys.readouterr()
    main(["plan", *arguments])
    printed = capsys.readouterr().out
    assert str(file) in printed
    assert "messages in its chat template" in printed
    main(["align", *arguments, "--out", "run"])
    settings = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(file)
    card = (tmp_path / "run/adapter/README.md").read_text()
    assert r"# tiny.Q8\_0.gguf, aligned to brief, kind" in card
    assert 'gguf_file="tiny.Q8_0.gguf"' in card
    assert str(file.parent) not in card
    assert f"path: {file}" in (tmp_path / "run/config.yaml").read_text()
    main(["evaluate", "--runs", "[run]", "--out", "evaluation"])
    (row,) = read_rows(tmp_path / "run", "evaluation", split="test", round=1)
    assert f"{row['rewards']['brief']['mean']:.4f}"[:4] in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n"))
    main(["chat", "--run", "run"])
    printed = capsys.readouterr().out
    assert printed.startswith("you: Hello!\nbase: ")
    assert "\naligned: " in printed


def test_a_missing_file_a_damaged_one_and_a_missing_package_take_one_line(
    file, prompts, tmp_path, monkeypatch, capsys, refusal
):
    align = COMMANDS["align"].run
    line = refusal(align, ["--config", "smoke", "--policy.path", f"{file}".replace("tiny", "tin")])
    assert "there is no file" in line
    assert f"did you mean {file}?" in line
    with pytest.raises(UserError, match="there is no file"):
        init(InitConfig("a/b.gguf", {"x": "brevity"}, str(prompts), out=tmp_path / "own.yaml"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:400])
    line = refusal(align, ["--config", "smoke", "--policy.path", broken])
    assert f"could be loaded from the GGUF file {broken}" in line
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "firm.alignment.policy.find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(SystemExit) as ended:
        main(["align", "--config", "smoke", "--policy.path", str(file)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "firm: error: firm align needs the package gguf, which is not installed: "
        f"{install_command('real')}."
    )

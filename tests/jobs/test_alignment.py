"""An alignment: it runs whole, and resumes to the same adapter."""

import contextlib
import html
import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from firm.alignment import AlignmentClient
from firm.base import devices
from firm.base.inside import replace_text
from firm.federation import Processes, RoundFailed
from firm.jobs import alignment, alignment_loading
from firm.jobs.alarms import alarms_at_start, alarms_of_rounds
from firm.jobs.alignment import Result, align, main
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.alignment_loading import load
from firm.jobs.plan import make_plan
from firm.report.tables import COLUMNS
from firm.run import Run, pace, parse
from firm.run.checkpoint import load_state
from firm.run.errors import UserError
from tests.plugins import plugins_forgotten
from tests.runs import read_adapter, read_rows
from tests.smoke import POLICY, ROOT, config, run, run_stopped_in_round_2
from tests.wandb_files import started

SHORT = (
    "--rounds", 1, "--strategy.num_local_steps", 1, "--evaluation.num_test_prompts", 2,
    "--evaluation.num_validation_prompts", 0,
)  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Result:
    with contextlib.chdir(ROOT):
        return align(config("--out", tmp_path_factory.mktemp("runs") / "smoke"))


@pytest.fixture(scope="module")
def finished(result) -> Path:
    return result.path


def test_a_run_leaves_everything_that_it_promises(finished):
    for name in ("config.yaml", "run.json", "report.html", "samples.jsonl"):
        assert (finished / name).stat().st_size > 0
    assert json.loads((finished / "run.json").read_text())["status"] == "finished"
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {
        "round_0000",
        "round_0001",
        "round_0002",
    }
    assert len(read_rows(finished, "client")) == 2 * 2  # rounds, clients
    assert len(read_rows(finished, "round")) == 2
    splits = [(row["split"], row["round"]) for row in read_rows(finished, "evaluation")]
    assert sorted(splits) == [
        ("test", 0), ("test", 2), ("validation", 0), ("validation", 1), ("validation", 2),
    ]  # fmt: skip
    replies = [row["completion"] for row in Run(finished).samples()]
    assert replies == [text.strip() for text in replies]  # tokens begin with a space
    base = read_rows(finished, "evaluation")[0]
    assert base["kl"] == pytest.approx(0, abs=1e-4)  # the adapter changes nothing yet
    assert all(0 < score["mean"] < 1 for score in base["rewards"].values())


def test_a_run_returns_where_everything_is_and_what_it_came_to(result):
    assert (result.adapter / "adapter_config.json").is_file()
    assert result.page.is_file()
    logged = read_rows(result.path, "evaluation", split="test")
    for evaluation, row in zip((result.base, result.aligned), logged, strict=True):
        for name, score in row["scores"].items():
            assert evaluation.scores[name].mean().item() == pytest.approx(score["mean"])


def test_its_metrics_are_the_logs_as_a_table(result, tmp_path):
    table = result.to_pandas()
    assert list(table.columns) == COLUMNS
    for row in read_rows(result.path, "client"):
        own = table[(table["client"] == row["client"]) & (table["round"] == row["round"])]
        (kl,) = own[own["quantity"] == "kl"]["value"]
        assert kl == pytest.approx(row["kl"])
    assert set(table["round"]) == {0, 1, 2}
    objectives = read_rows(result.path, "run")[0]["objectives"]
    own = table[table["quantity"] == "test/scores/num_prompts"]
    assert set(own["objective"]) == {*objectives}
    assert set(table["objective"]) >= {"", *objectives}
    assert "num_prompts" not in set(table["objective"])
    place = shutil.copytree(result.path, tmp_path / "run")
    settings = place / "config.yaml"
    settings.write_text(settings.read_text().replace("\nseed: 0\n", "\nseed: 7\n"))
    assert set(replace(result, path=place).to_pandas()["seed"]) == {7}


@pytest.mark.parametrize("engine", ["local", "stacked"])
def test_a_tokenizer_without_a_pad_token_changes_nothing(engine, finished, tmp_path):
    policy = Path(shutil.copytree(POLICY, tmp_path / "policy"))
    settings = json.loads((policy / "tokenizer_config.json").read_text())
    assert settings.pop("pad_token") == "<pad>"
    (policy / "tokenizer_config.json").write_text(json.dumps(settings))
    options = ("--policy.path", policy, "--engine", engine)
    bare = read_adapter(run("--out", tmp_path / "bare", *options))
    tolerance = {"rtol": 0, "atol": 0 if engine == "local" else 1e-5}
    for name, values in read_adapter(finished).items():
        torch.testing.assert_close(bare[name], values, **tolerance)


ANSWERED_REWARD = """
from reward_models import reward_model

@reward_model("answered")
def answered(prompts, completions, answer, **kwargs):
    assert all(prompt.endswith(f" {own}") for prompt, own in zip(prompts, answer, strict=True))
    return [float(len(text)) for text in completions]
"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--engine", "stacked", "--estimator.name", "critic_free", "--estimator.num_replies", 2),
        ("--groups", "{odd: {clients: [1], attack: {kind: label_flip}}}"),
    ],
)
def test_reward_functions_get_each_replys_own_fields_of_the_data(options, tmp_path):
    file = tmp_path / "answered.py"
    file.write_text(ANSWERED_REWARD)
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Say number {index}", "answer": index} for index in range(40)]
    data.write_text("\n".join(map(json.dumps, rows)))
    splits = (f"--data.{split}.source" for split in ("train", "validation", "test"))
    with plugins_forgotten():
        folder = run(
            *SHORT,
            *("--rewards", f"{{answered: {{name: answered, file: {file}}}}}"),
            *(part for split in splits for part in (split, data)),
            *("--out", tmp_path / "run", *options),
        )
    assert read_rows(folder, "evaluation", split="test", round=1)


def test_equal_runs_log_equal_rows_but_for_seconds_and_write_equal_adapters(finished, tmp_path):
    again = align(config("--out", tmp_path / "run")).path
    rows = [[{**row, "seconds": None} for row in read_rows(folder)] for folder in (finished, again)]
    assert rows[0] == rows[1]
    names = sorted(path.name for path in (finished / "adapter").iterdir())
    for name in names:
        assert (again / "adapter" / name).read_bytes() == (finished / "adapter" / name).read_bytes()
    settings = json.loads((again / "adapter/adapter_config.json").read_text())
    # PEFT's own order is that of a set, and differs from process to process
    assert settings["target_modules"] == sorted(settings["target_modules"])


def test_every_step_is_logged_with_its_weights(finished):
    for row in read_rows(finished, "client"):
        assert row["num_steps"] == 2
        assert len(row["weights"]) == 2 * 2 * 2  # local steps, epochs, minibatches
        for weights in row["weights"]:
            assert min(weights) >= 0
            assert sum(weights) == pytest.approx(1)
        assert row["bytes_up"] > 0
        assert row["bytes_down"] > 0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft's own
def test_the_final_adapter_is_a_peft_folder_that_changes_the_base_model(finished):
    card = (finished / "adapter/README.md").read_text()
    assert "brevity" in card
    assert "±" in card
    base = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    token_ids = torch.tensor([[5, 6, 7]])
    before = base(token_ids).logits.detach().clone()
    aligned = PeftModel.from_pretrained(base, str(finished / "adapter"))
    assert not torch.allclose(before, aligned(token_ids).logits)


CRITIC_FREE = {
    "bfloat16, checkpointed, micro-batches, groups": (
        "--policy.dtype", "bfloat16", "--policy.gradient_checkpointing", "true",
        "--estimator.micro_batch_size", 3,
        "--groups", "{own: {clients: [1], objectives: [brevity]}}",
    ),
    "privacy": (
        "--strategy.privacy.clip_norm", 0.1, "--strategy.privacy.noise_multiplier", 0.5,
        "--strategy.privacy.noise_seed", 1,
    ),
    "conditioned on the preference, privacy, checkpointed, micro-batches": (
        "--policy.conditioning.kind", "preference", "--evaluation.preferences", "[]",
        "--policy.gradient_checkpointing", "true", "--estimator.micro_batch_size", 3,
        "--strategy.privacy.clip_norm", 0.1, "--strategy.privacy.noise_multiplier", 0.5,
        "--strategy.privacy.noise_seed", 1, "--strategy.name", "fedavg",
    ),
    "conditioned on the preference, a robust mean": (
        "--policy.conditioning.kind", "preference", "--evaluation.preferences", "[]",
        "--strategy.name", "fedavg", "--strategy.robust.rule", "norm_clipping",
    ),
    "GDPO, a client without an objective": (
        "--estimator.aggregation", "normalize_then_sum", "--estimator.whiten_over", "tokens",
        "--strategy.name", "fedavg", "--groups", "{own: {clients: [1], objectives: [brevity]}}",
    ),
    "FSMGDA, PPO's ratio": ("--strategy.name", "fsmgda", "--estimator.ratio", "ppo"),
}  # fmt: skip


@pytest.mark.parametrize("options", CRITIC_FREE.values(), ids=CRITIC_FREE.keys())
def test_without_a_critic_a_run_resumes_to_the_same_adapter(tmp_path, monkeypatch, options):
    common = (
        "--estimator.name", "critic_free", "--strategy.num_local_steps", 1,
        "--evaluation.num_test_prompts", 2, "--evaluation.num_validation_prompts", 0,
    )  # fmt: skip
    whole = run(*common, *options, "--out", tmp_path / "whole")
    train = AlignmentClient.batches

    def stopped(client, num_steps):
        if client.name == "client_1" and client._round == 2:
            raise KeyboardInterrupt
        return train(client, num_steps)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(AlignmentClient, "batches", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(*common, *options, "--out", out)
    assert len(read_rows(out, "round")) == 1
    run(*common, *options, "--out", out, "--resume", "true")
    first, second = read_adapter(whole), read_adapter(out)
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = load_state(out / "checkpoints/round_0000")
    assert not any("critic" in key for key in _keys(start))
    rows = read_rows(out, "client")
    assert len(rows) == 4
    if "--strategy.privacy.clip_norm" not in options:
        for own in (own for row in rows for own in row.get("by_objective", {"": row}).values()):
            assert "value_loss" not in own
            assert 0 <= own["zero_variance_share"]["brevity"] <= 1


def _keys(tree) -> list[str]:
    if not isinstance(tree, dict):
        return []
    return [*tree, *(key for value in tree.values() for key in _keys(value))]


def test_a_run_whose_log_holds_values_that_are_none_resumes_and_warns(finished, tmp_path):
    out = tmp_path / "poisoned"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints/round_0002")
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if '"kind": "client"' in line)
    for field, value in (("kl", "NaN"), ("entropy", "-Infinity"), ("beta_effect", "5")):
        (text,) = re.findall(rf'"{field}": (\[[^]]*\]|[-\d.e]+)', lines[at])
        poison = value.ljust(len(text))  # the checkpoint knows how long the log was
        lines[at] = lines[at].replace(f'"{field}": {text}', f'"{field}": {poison}')
    path.write_text("".join(lines))
    assert not math.isfinite(read_rows(out, "client")[0]["kl"])
    assert run("--out", out, "--resume", "true", "--tracking.mode", "offline") == out
    tracked = started(out)
    assert (tracked.job_type, list(tracked.tags)) == ("firm", ["firm", "seed 0"])
    html = (out / "report.html").read_text()
    assert "3 entries in the log of poisoned are not valid and left out: " in html
    for text in ("kl of client_0 in round 1: nan", "entropy of", ": -inf", "beta_effect of", ": 5"):
        assert text in html
    adapters = [read_adapter(path) for path in (out, finished)]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[1])


@pytest.mark.slow
def test_three_objectives_run_whole(tmp_path):
    out = main(
        parse(
            AlignmentConfig,
            [
                *("--config", str(ROOT / "configs/three.yaml"), "--policy.path", str(POLICY)),
                *("--out", str(tmp_path / "run")),
            ],
        )
    )
    objectives = ["helpful", "harmless", "brevity"]
    for row in read_rows(out, "client"):
        assert {len(weights) for weights in row["weights"]} == {3}
        assert list(row["rewards"]) == objectives
        assert list(row["score_correlation"]) == [
            "helpful-harmless", "helpful-brevity", "harmless-brevity",
        ]  # fmt: skip
    final = read_rows(out, "evaluation")[-1]
    assert list(final["rewards"]) == objectives
    assert "brevity" in (out / "report.html").read_text()


def test_a_run_does_not_resume_under_another_reward(tmp_path):
    """The same configuration, but the file behind it has changed."""
    rewards, out = tmp_path / "rewards.py", tmp_path / "run"
    source = (
        "from reward_models import reward_model\n"
        "@reward_model('{}')\n"
        "def words(completions, **kwargs):\n"
        "    return [{} * len(text.split()) for text in completions]\n"
    )
    arguments = ["--rewards.brevity.name", "words", "--rewards.brevity.file", rewards]
    arguments += ["--out", out, *SHORT]
    rewards.write_text(source.format("words", 1.0))
    with plugins_forgotten():
        run(*arguments)
    files = [out / "metrics.jsonl", out / "samples.jsonl", out / "report.html"]
    before = [path.read_bytes() for path in files]
    rewards.write_text(source.format("words", 2.0))
    message = "the rewards of 'brevity' would not be comparable"
    with plugins_forgotten(), pytest.raises(ValueError, match=message):
        run(*arguments, "--resume", "true")
    assert [path.read_bytes() for path in files] == before


def test_a_calibration_that_was_fixed_beforehand_is_the_one_that_counts(tmp_path):
    fixed = {"method": "sigmoid", "mean": 0.25, "scale": 2.0, "num_samples": 7}
    calibrations = json.dumps({"brevity": fixed})
    out = run("--evaluation.calibrations", calibrations, "--out", tmp_path / "run", *SHORT)
    (first,) = read_rows(out, "run")
    assert first["calibration"]["brevity"] == fixed
    assert first["calibration"]["positivity"]["num_samples"] == 32


def status_on_page(out: Path) -> str:
    (status,) = re.findall(r'<span class="status">(.*?)</span>', (out / "report.html").read_text())
    return status


def test_clients_that_need_longer_than_they_have_are_left_out_and_the_page_says_that_it_failed(
    tmp_path,
):
    with pytest.raises(RoundFailed, match=r"TimeLimitError: it has not finished within 0\.001 s"):
        run("--out", tmp_path / "run", "--client_timeout", "0.001")
    assert status_on_page(tmp_path / "run") == "failed"


def test_the_page_of_an_interrupted_run_says_so_and_shows_its_last_round(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "SHARE", 1e-6)  # only the first page is due
    run_stopped_in_round_2("--out", tmp_path / "run", *SHORT, "--rounds", 2)
    assert status_on_page(tmp_path / "run") == "interrupted"
    assert "1 of 2" in (tmp_path / "run/report.html").read_text()


def test_short_rounds_do_not_wait_for_a_page_that_takes_long(tmp_path, monkeypatch):
    drawn = []

    def draw(run_path, *, final=False):
        drawn.append(final)
        time.sleep(0.01)
        return run_path / "report.html"

    monkeypatch.setattr(pace, "SHARE", 1e-6)  # no second page is due, however busy the machine is
    monkeypatch.setattr(alignment, "update_report", draw)
    run("--out", tmp_path / "run", *SHORT, "--rounds", 5)
    assert drawn == [False, True]  # at the start and at the end


def test_the_papers_run_states_every_hyperparameter_of_appendix_a1():
    for name in ("hh_tinyllama", "hh_llama32"):
        cfg = parse(AlignmentConfig, ["--config", str(ROOT / f"configs/{name}.yaml")])
        assert (cfg.num_clients, cfg.rounds) == (8, 16)
        step = cfg.estimator
        assert (step.actor_learning_rate, step.critic_learning_rate) == (6e-5, 1e-4)
        assert (step.num_epochs, step.batch_size, step.minibatch_size) == (3, 16, 8)
        assert (step.kl.controller, step.kl.target) == ("adaptive", 0.03)
        lora = cfg.policy.lora
        assert (lora.r, lora.alpha, lora.dropout) == (16, 32, 0.05)
        assert lora.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]
        assert cfg.strategy.beta == 0.01
        assert list(cfg.rewards) == ["helpful", "harmless"]
        for objective, reward in cfg.rewards.items():
            assert reward.path == f"Ray2333/gpt2-large-{objective}-reward_model"
            assert reward.format == "hh_pair"
        assert cfg.data.train.source == "Anthropic/hh-rlhf"


@pytest.mark.slow
@pytest.mark.data
def test_a_real_pretrained_model_that_never_emits_eos_is_aligned(firm_data, tmp_path):
    out = main(
        parse(
            AlignmentConfig,
            [
                "--config", str(ROOT / "configs/stories.yaml"),
                "--policy.path", str(firm_data / "models/stories260K"),
                "--out", str(tmp_path / "stories"),
                "--rounds", "1", "--num_clients", "2", "--strategy.num_local_steps", "1",
                "--evaluation.num_calibration_prompts", "16",
                "--evaluation.num_validation_prompts", "0",
                "--evaluation.num_test_prompts", "8",
            ],
        )
    )  # fmt: skip
    base = read_rows(out, "evaluation")[0]
    assert base["end_share"] > 0.5  # replies end at the newline token
    assert base["length"] < 64


def test_in_bfloat16_the_base_model_has_no_kl_and_the_page_tells_the_rounding(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(devices, "accelerator_type", lambda: None)
    monkeypatch.setattr(devices, "product_seconds", {torch.bfloat16: 1, torch.float32: 3}.get)
    metric = {"path": "firm/miniature/checkpoints/helpful", "format": "plain", "dtype": "auto"}
    keys = (
        *("--out", tmp_path / "run", "--policy.dtype", "auto"),
        *(f"--evaluation.metrics.helpful.{key}={value}" for key, value in metric.items()),
        *("--evaluation.num_validation_prompts", 0, "--evaluation.num_test_prompts", 8),
    )
    out = run(*keys, "--rounds", 1)
    settings = Run(out).settings()
    assert settings["policy"]["dtype"] == "bfloat16"
    assert settings["evaluation"]["metrics"]["helpful"]["dtype"] == "bfloat16"
    assert settings["rewards"]["brevity"]["dtype"] == "float32"
    monkeypatch.setattr(devices, "product_seconds", {torch.bfloat16: 3, torch.float32: 1}.get)
    run(*keys, "--rounds", 2, "--resume", "auto")  # on a machine where float32 is faster
    resumed = Run(out).settings()
    assert [resumed[key] == settings[key] for key in ("policy", "evaluation")] == [True, True]
    base, _ = read_rows(out, "evaluation")
    assert (base["kl"], base["kl_se"]) == (0.0, 0.0)
    page = (out / "report.html").read_text()
    assert re.search(r"Log-probability mismatch</dt><dd>0.0\d+ nats per token, 0.\d", page)

    for text, named in (
        ("policy: 5", "policy was 5, "),
        ("policy: {dtype: 5}", "policy.dtype was 5, "),
    ):
        replace_text(out / "config.yaml", f"{text}\n")
        with pytest.raises(UserError, match=f"another configuration: {named}"):
            run(*keys, "--rounds", 3, "--resume", "auto")


def test_a_client_that_fails_in_every_round_is_an_alarm_on_the_page_and_at_the_end(
    tmp_path, monkeypatch, capsys
):
    batches = AlignmentClient.batches

    def fail(client, num_steps):
        if client.name == "client_1":
            raise ValueError("a bad prompt")
        return batches(client, num_steps)

    monkeypatch.setattr(AlignmentClient, "batches", fail)
    sizes = {"num_validation_prompts": 0, "num_test_prompts": 2}
    out = run(
        *("--out", tmp_path / "run", "--rounds", 4, "--strategy.num_local_steps", 1),
        *(part for key, value in sizes.items() for part in (f"--evaluation.{key}", value)),
    )
    alarm = "client_1 has failed in 3 rounds in a row, from round 1 to 3: ValueError: a bad prompt"
    assert [alarm in row["alarms"] for row in read_rows(out, "round")] == [
        False,
        False,
        True,
        False,
    ]
    told = capsys.readouterr().out
    assert f"\nnote: {alarm}\n" in told
    assert f"\nnote: Round 3: {alarm}\n" in told.partition("held-out prompts")[2]  # at the end
    assert alarm in (out / "report.html").read_text()


def test_a_kl_controller_that_cannot_act_is_told_before_the_first_round_on_the_page_and_at_the_end(
    tmp_path, capsys
):
    sizes = {"num_validation_prompts": 0, "num_test_prompts": 2}
    out = run(
        *("--out", tmp_path / "run", "--rounds", 1, "--estimator.kl.coefficient", 0.1),
        *(part for key, value in sizes.items() for part in (f"--evaluation.{key}", value)),
    )
    (about,) = read_rows(out, "run")
    (alarm,) = about["alarms"]
    assert "estimator.kl.horizon" in alarm
    before, _, after = capsys.readouterr().out.partition("round 1/1")
    assert f"note: {alarm}\n" in before
    assert f"\nnote: Before round 1: {alarm}\n" in after.partition("held-out prompts")[2]
    page = html.unescape((out / "report.html").read_text())
    assert f"<b>Before round 1:</b> {alarm}</p>" in page


def test_where_local_work_is_told_in_epochs_the_kl_controller_is_not_judged_by_one_step():
    keys = ["--estimator.kl.controller", "adaptive", "--estimator.kl.coefficient", "0.1"]
    cfg = config(*keys)
    assert len(alarms_at_start(cfg)) == 1
    strategy = replace(cfg.strategy, num_local_steps=1, num_local_epochs=5)
    assert alarms_at_start(replace(cfg, strategy=strategy)) == []


def test_a_run_and_its_plan_say_that_the_dtype_is_slow_here(monkeypatch):
    monkeypatch.setattr(devices, "product_seconds", {torch.bfloat16: 3, torch.float32: 1}.get)
    cfg = config("--policy.dtype", "bfloat16")
    loaded = load(cfg, Processes(), measures=False)
    plan = make_plan(cfg, client_names(cfg), Processes())
    text = "products of bfloat16 matrices take 3 times as long as float32 ones on this CPU: set "
    assert f"{text}policy.dtype to float32." in loaded.notes
    assert f"{text}--policy.dtype to float32." in plan.notes


def test_attention_is_prepared_on_the_policys_device(monkeypatch):
    prepared = []
    monkeypatch.setattr(alignment_loading, "prepare_attention", prepared.append)
    load(config(), Processes(), measures=False)
    assert prepared == [torch.device("cpu")]


def test_the_notes_stand_before_the_first_sampled_reply(tmp_path, monkeypatch, capsys):
    def stop(*_, **__):
        raise TimeoutError("before calibration")

    monkeypatch.setattr(alignment, "common_calibrations", stop)
    with pytest.raises(TimeoutError, match="before calibration"):
        run("--out", tmp_path / "run", "--estimator.kl.coefficient", 0.1)
    assert "note: the adaptive KL controller is inert" in capsys.readouterr().out


def test_a_plan_says_that_a_kl_controller_other_than_the_papers_cannot_act(capsys):
    keys = ["--config", str(ROOT / "configs/hh_tinyllama.yaml"), "--plan"]
    for options in ([], ["--estimator.kl.coefficient", "0.1"]):
        with pytest.raises(SystemExit):  # the policy is on the hub
            main(parse(AlignmentConfig, [*keys, *options]))
        if not options:
            assert "inert" not in capsys.readouterr().out
    assert "from 0.1 to 0.09797 or 0.1021 at most" in capsys.readouterr().out


def test_what_epsilon_does_not_cover_is_said_at_the_start_alone():
    options = {"clip_norm": 1, "noise_multiplier": 0, "statistics": "exact"}
    keys = [f"--strategy.privacy.{key}={value}" for key, value in options.items()]
    cfg = config(*keys, "--estimator.kl.controller=fixed")
    assert alarms_at_start(cfg) == cfg.strategy.privacy.notes()
    assert len(cfg.strategy.privacy.notes()) == 2
    end = {"kind": "round", "round": 1, "failures": []}
    assert alarms_of_rounds(cfg, [{"kind": "client", "round": 1}, end]) == []


@pytest.mark.parametrize("dropout", [0, 0.1])
def test_ratios_of_an_unchanged_policy_are_judged_without_the_adapters_dropout(dropout):
    rows = [{"kind": "client", "round": 1, "client": "a", "first_log_ratio": 0.2, "kl": 9.0}]
    rows += [{"kind": "round", "round": 1, "failures": []}]
    cfg = config("--policy.lora.dropout", str(dropout), "--policy.dtype", "float32")
    assert any("ratios other than 1" in a for a in alarms_of_rounds(cfg, rows)) == (dropout == 0)
    rows[0]["logprob_mismatch"] = 0.2
    assert any("ratios other than 1" in alarm for alarm in alarms_of_rounds(cfg, rows))
    cfg = config("--policy.lora.dropout", str(dropout), "--rollout.logprobs", "forward")
    assert any("ratios other than 1" in a for a in alarms_of_rounds(cfg, rows)) == (dropout == 0)


def test_the_papers_settings_do_not_warn_about_themselves():
    cfg = config("--estimator.kl", "{controller: adaptive, coefficient: 0.2, horizon: 10000}")
    assert alarms_at_start(cfg) == []
    assert alarms_at_start(config("--estimator.kl", "{controller: adaptive, coefficient: 0.1}"))
    solves = {"beta_effect": [0.001], "gradient_norms": [[1.0, 2.0]], "cosines": [[-0.5]]}
    rows = [{"kind": "client", "round": at, "client": "a", **solves} for at in (1, 2, 3)]
    assert config("--strategy.beta", "0.01").strategy.alarms(rows) == []
    assert config("--strategy.beta", "0.02").strategy.alarms(rows)


def test_clients_whose_solves_are_not_all_valid_do_not_silence_the_alarm(undrawn):
    cfg = config("--strategy.beta", "0.02")
    solves = {"beta_effect": [0.001], "gradient_norms": [[1.0, 2.0]], "cosines": [[-0.5]]}
    rows = [{"kind": "client", "round": at, "client": "a", **solves} for at in (1, 2, 3)]
    end = {"kind": "round", "round": 3, "failures": []}
    (alarm,) = alarms_of_rounds(cfg, [*rows, end])
    assert "beta 0.02 is inert" in alarm
    short = {"kind": "client", "round": 3, "beta_effect": [0.9]}
    assert alarms_of_rounds(cfg, [*rows, short, end]) == [alarm]
    (note,) = alarms_of_rounds(cfg, [*rows, {**rows[0], "cosines": []}, end])
    assert note.startswith("The strategy's alarms could not be drawn")
    assert undrawn == [note]
    conditioned = ["--policy.conditioning.kind", "preference", "--estimator.name", "critic_free"]
    cfg = config("--strategy.beta", "0.01", *conditioned, "--estimator.num_replies", "2")
    assert alarms_of_rounds(cfg, [*rows, end]) == []  # each preference is solved without β


def test_the_first_weights_of_a_value_network_come_of_the_runs_seed():
    """And not of the generators' states, which differ between the processes of one client."""

    def weights(outer_seed, seed=0):
        torch.manual_seed(outer_seed)
        cfg = config("--estimator.critic", "network", "--seed", seed)
        state = load(cfg, Processes()).trainer.critic.state_dict()
        return torch.cat([value.flatten() for value in state.values()])

    first = weights(1)
    assert torch.equal(first, weights(2))
    assert not torch.equal(first, weights(1, seed=5))

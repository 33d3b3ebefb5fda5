"""The command `firm`: every word reaches its job, and shipped configurations are found by name."""

import json
import os
import subprocess
import sys

import pytest

from firm.base.extras import install_command
from firm.cli.main import COMMANDS, main
from firm.run.shipped import CONFIGS


def test_without_a_command_all_of_them_are_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"  {name} " in printed for name in COMMANDS)


def test_a_command_that_does_not_exist_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["algin"])
    assert ended.value.code == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("usage: firm")
    assert last == "firm: error: unknown command 'algin'; did you mean 'align'?"


def test_the_shipped_configurations_are_listed_with_a_line_each(capsys):
    main(["configs"])
    *first, _, last = capsys.readouterr().out.splitlines()
    assert len(first) == 6
    main(["configs", "--all"])
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines}
    assert {line.split()[0] for line in first} < names
    assert last.startswith(f"{len(names) - 6} more")
    assert last.endswith("firm configs --all")
    assert len(lines) == len([*CONFIGS.rglob("*.yaml")])
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_a_command_in_silence():
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "firm", "configs", "--all"]
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (141, b"")
    closed = (
        f"{sys.executable} -c 'from firm.run.errors import *\nwith exit_on_user_error(): pass' >&-"
    )
    ended = subprocess.run(closed, shell=True, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_words_before_the_first_key_are_the_run(tmp_path, refusal):
    run = tmp_path / "nothing"
    for command in ("chat", "explore", "evaluate"):
        assert f"there is no run at {run}" in refusal(main, [command, run])
    assert "pass one" not in refusal(main, ["pick", run, "--target", "a=1"])
    for name in ("one", "two"):
        (tmp_path / f"{name}.front.json").write_text("{}")
    line = refusal(main, ["pick", tmp_path, "--target", "a=1"])
    assert f"has several fronts; pass one: {tmp_path / 'one.front.json'}, " in line
    assert "has no front" in refusal(main, ["pick", CONFIGS, "--target", "a=1"])


def test_keys_of_a_sweeps_runs_need_no_prefix(refusal):
    parse = COMMANDS["sweep"].parse
    cfg = parse(["--rounds", "3", "--strategy.beta=0.5", "--seeds", "1", "--out", "x"])
    assert cfg.overrides == {"rounds": 3, "strategy.beta": 0.5}
    assert (cfg.seeds, str(cfg.out)) == ([1], "x")
    line = refusal(main, ["sweep", "--roundz", "3"])
    assert line.endswith("unknown key roundz; did you mean rounds?")
    assert "unknown key number; " in refusal(main, ["sweep", "--number", "3"])
    for asked in (["--help", "guard.max_kl"], ["-h", "--guard.max_kl"]):
        line = refusal(main, ["study", *asked])
        assert "guard.max_kl is a key of the runs: see `firm align --help guard.max_kl`" in line


def test_a_run_s_configuration_is_the_base_of_a_sweep(refusal):
    for command in ("sweep", "study"):
        for words in (["--config", "smoke"], ["--config=smoke"]):
            line = refusal(main, [command, *words])
            assert line.endswith("smoke configures one run: pass it as --base smoke.")
        assert "/: cannot be read" in refusal(main, [command, "--config", "/"])
    COMMANDS["sweep"].parse(["--config", "front_sweep", "--out", "x"])


def test_the_keys_of_other_trainers_are_known(refusal):
    for short, own in (("actor_lr", "actor_learning_rate"), ("bs", "batch_size")):
        line = refusal(main, ["align", f"--estimator.{short}", "1"])
        assert f"unknown key estimator.{short}; did you mean estimator.{own}?" in line
    for short in ("actor_lr", "lr"):  # in another section
        line = refusal(main, ["align", f"--{short}", "1"])
        assert f"unknown key {short}; did you mean estimator.actor_learning_rate?" in line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_keys(name, capsys):
    for words in ([*name.split(), "--help"], ["help", *name.split()]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"firm {name}: {COMMANDS[name].text}\n")
        assert printed.count("\n") > 5


def test_the_words_of_a_group_print_its_commands(capsys):
    for words, code in ((["network"], 0), (["network", "--help"], 0), (["network", "stp"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == code
        printed = capsys.readouterr()
        usage = printed.err if code else printed.out
        assert "  network submit  " in usage
        assert "  align  " not in usage
        assert ("unknown command 'network stp'" in printed.err) == (code == 2)


@pytest.mark.slow
def test_a_command_whose_extra_is_not_installed_names_it_in_one_line():
    code = "import sys; sys.modules['nvflare'] = None; from firm.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "network", "demo", "--config", "network", "--out", "kits"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "firm: error: firm network demo needs the package nvflare, which is not installed: "
        f"{install_command('network')}.\n"
    )


def test_a_run_begins_and_ends_in_an_empty_folder(tmp_path):
    command = [sys.executable, "-m", "firm", "align", "--config", "smoke", "--out", "mine"]
    command += ["--rounds", "1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "report   mine/report.html" in ended.stdout
    assert json.loads((tmp_path / "mine/run.json").read_text())["status"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

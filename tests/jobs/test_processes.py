"""The main recipe on several processes: the same run, and an end in good order when one dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from firm.federation import Processes
from firm.jobs.alignment import main
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_loading import Given, load
from firm.run import parse, run_cli
from firm.run.errors import UserError
from tests.alignment.rollout_engines.small_server import SmallServer, served
from tests.nursery import ROOT, two_processes
from tests.plugins import plugins_forgotten
from tests.runs import read_adapter, read_rows
from tests.smoke import SMOKE, config

REWARD = """
import os
from pathlib import Path
from reward_models import reward_model

@reward_model("words")
def words(completions, *, log="", dies=0, **kwargs):
    with open(log, "a") as file:
        file.write(f"{os.environ.get('RANK', '0')}\\\\n")
    if dies and os.environ["RANK"] == "1" and Path(log).read_text().count("1") == dies:
        os.kill(os.getpid(), 9)
    return [float(len(text.split())) for text in completions]
"""

PROGRAM = """
import sys
from firm.jobs.alignment import main
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import run_cli
run_cli(main, AlignmentConfig, sys.argv[1:])
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def command_line(runs):
    """The smoke config with a reward that notes its process: ``command_line(name, ...)``."""
    rewards = runs / "rewards.py"
    rewards.write_text(REWARD.replace("\\\\n", "\\n"))

    def build(name: str, *arguments: str) -> list[str]:
        return [
            *("--config", str(SMOKE), "--out", f"{runs / name}"),
            *("--policy.lora.dropout", "0", "--rewards.words.name", "words"),
            *("--rewards.words.file", f"{rewards}"),
            *("--rewards.words.options", f"{{log: {runs / name}.log}}"),
            *arguments,
        ]

    return build


@pytest.fixture(scope="module")
def processes(runs):
    """Runs a program in two processes of torchrun's environment, without a start for each run.

    They are forked from one that has run the recipe.
    """
    imports = f"from tests.smoke import run; run('--rounds', 1, '--out', '{runs}/first')"
    with two_processes(runs, imports, ACCELERATE_USE_CPU="true") as run_program:
        yield run_program


@pytest.fixture(scope="module")
def fork_two(processes, command_line):
    """Runs the recipe in two processes, which end well."""

    def run(name: str, *arguments: str) -> None:
        ends = processes(PROGRAM, *command_line(name, *arguments))
        assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]

    return run


@pytest.fixture(scope="module")
def one(runs, command_line) -> Path:
    """A run in one process, this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with plugins_forgotten():
            main(parse(AlignmentConfig, command_line("one")))
    return runs / "one"


def distance(first: dict, second: dict) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.slow
def test_two_processes_share_the_clients_and_give_the_adapter_of_one(fork_two, runs, one):
    fork_two("two")
    assert distance(read_adapter(one), read_adapter(runs / "two")) == 0
    for row, expected in zip(
        read_rows(runs / "two", "client"), read_rows(one, "client"), strict=True
    ):
        assert {**row, "seconds": None} == {**expected, "seconds": None}
    assert read_rows(one)[0]["processes"] == [["client_0", "client_1"]]
    assert read_rows(runs / "two")[0]["processes"] == [["client_0"], ["client_1"]]
    asked = [(runs / f"{name}.log").read_text().split() for name in ("one", "two")]
    assert set(asked[0]) == {"0"}
    assert asked[1].count("1") == 2 * 2  # rounds, local steps of the other process's one client
    assert sorted(map(len, asked))[0] == len(asked[1])  # nothing was scored twice


@pytest.mark.slow
def test_two_processes_under_masks_give_the_adapter_of_one_without(fork_two, runs, one):
    fork_two("masked", "--strategy.secure", "masks")
    assert distance(read_adapter(one), read_adapter(runs / "masked")) < 2e-6
    assert all(row["secure"]["num_updates"] == 2 for row in read_rows(runs / "masked", "round"))


@pytest.mark.slow
def test_two_processes_with_stacked_clients_give_the_adapter_of_one(fork_two, runs, one):
    fork_two("stacked", "--engine", "stacked", "--num_clients", "4")
    assert read_rows(runs / "stacked")[0]["processes"] == [
        ["client_0", "client_2"],
        ["client_1", "client_3"],
    ]
    fork_two("in_turn", "--num_clients", "4")
    assert distance(read_adapter(runs / "in_turn"), read_adapter(runs / "stacked")) < 1e-5


@pytest.mark.slow
def test_two_processes_that_ask_servers_give_the_adapter_of_one(fork_two, command_line, runs):
    servers = [SmallServer(config().policy.path) for _ in range(2)]
    with served(servers[0]) as first, served(servers[1]) as second:
        options = (
            "--rollout.engine.name", "vllm_server", "--rollout.engine.urls", f"[{first},{second}]",
            "--rollout.engine.shared_folder", f"{runs}/shared", "--rounds", "1",
        )  # fmt: skip
        with plugins_forgotten():
            main(parse(AlignmentConfig, command_line("alone", *options)))
        alone = read_adapter(runs / "alone")
        for per_client in (1, 2):
            two = f"served{per_client}"
            fork_two(two, "--processes_per_client", f"{per_client}", *options)
            assert distance(alone, read_adapter(runs / two)) <= 1e-5 * (per_client - 1), two
            assert not any(server.names for server in servers), two


GONE = "process 1 of the run's 2, which worked on client_1, is gone"


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_with_a_word_and_the_run_resumes(
    command_line, processes, fork_two, runs, one
):
    options = ("--rewards.words.options", f"{{log: {runs}/dying.log, dies: 3}}")
    left, died = processes(PROGRAM, *command_line("dying", *options))
    assert died.returncode == -signal.SIGKILL
    assert left.returncode == 1  # it would wait for 30 days, and is killed after ten minutes
    assert "resume from the last checkpoint" in left.stderr
    assert GONE in left.stderr
    assert "Traceback" not in left.stderr
    fork_two("dying", *options, "--resume", "true")
    assert distance(read_adapter(runs / "dying"), read_adapter(one)) == 0


@pytest.mark.slow
def test_a_process_that_dies_ends_what_torchrun_started_with_a_word(command_line, runs):
    options = ("--rewards.words.options", f"{{log: {runs}/torchrun.log, dies: 3}}")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("recipes/firm_hh.py", *command_line("torchrun", *options)),
    ]
    died = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert died.returncode != 0
    assert "resume from the last checkpoint" in died.stderr
    assert GONE in died.stderr
    assert "]: Traceback" not in died.stderr  # how torchrun's processes would show theirs


SHARDED = ("--policy.shard", "true")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), SHARDED], ids=["whole", "sharded"])
def test_two_processes_on_one_client_equal_one(fork_two, runs, one, options):
    team = f"team{len(options)}"
    fork_two(team, "--processes_per_client", "2", *options)
    rows = list(zip(read_rows(runs / team, "client"), read_rows(one, "client"), strict=True))
    for mine, theirs in rows[:2]:  # of round 1, the first solve: Adam then amplifies rounding
        # float32 sums over half batches: they differ by less than 1e-6 on one processor, by 3e-6 on
        # another
        assert mine["weights"][0] == pytest.approx(theirs["weights"][0], abs=1e-5)
        assert mine["gradient_norms"][0] == pytest.approx(theirs["gradient_norms"][0], rel=1e-5)
    for mine, theirs in rows:
        assert mine["scores"] == pytest.approx(theirs["scores"], rel=1e-6)
    assert distance(read_adapter(one), read_adapter(runs / team)) < 5e-5  # 1.3e-5 on one processor
    asked = (runs / f"{team}.log").read_text().split()
    assert asked.count("1") == 2 * 2 * 2  # rounds, local steps, clients: its share of each batch


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sharded"), [("preference", ()), ("none", SHARDED)])
def test_two_processes_on_one_client_give_the_gradients_of_one_without_a_critic(
    fork_two, runs, command_line, kind, sharded
):
    # the plain gradient step: Adam amplifies the rounding of sums over half batches
    options = ("--estimator", "{name: critic_free, actor_optimizer: sgd}", "--rounds", "1")
    options += ("--policy.conditioning.kind", kind)
    names = (f"team_{kind}{len(sharded)}", f"alone_{kind}{len(sharded)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with plugins_forgotten():
            main(parse(AlignmentConfig, command_line(names[1], *options)))
    fork_two(names[0], *options, *sharded, "--processes_per_client", "2")
    for mine, theirs in zip(*(read_rows(runs / name, "client") for name in names), strict=True):
        assert mine["scores"] == pytest.approx(theirs["scores"], rel=1e-6)
        norms = theirs["gradient_norms"][0]
        # halves of a batch are added in another order, and round relative to their terms, which
        # may cancel in a small sum: 1.1e-5 of one of 0.18 beside 2.0 on processors with AMX
        assert mine["gradient_norms"][0] == pytest.approx(norms, rel=1e-5, abs=1e-5 * max(norms))
        assert mine["zero_variance_share"] == theirs["zero_variance_share"]
    assert distance(*[read_adapter(runs / name) for name in names]) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), SHARDED], ids=["whole", "sharded"])
def test_two_processes_on_one_client_learn_from_pairs(processes, runs, options):
    keys = {
        **{f"pairs.{name}.source": f"firm/miniature/checkpoints/pairs_{name}.jsonl.gz"
           for name in ("helpful", "harmless")},
        **{f"pairs.{name}.split": "train[:24]" for name in ("helpful", "harmless")},
        "policy.path": "firm/miniature/checkpoints/policy", "policy.lora.dropout": 0,
        "num_clients": 1, "rounds": 1, "strategy.num_local_steps": 1, "num_threads": 1,
        "estimator.name": "dpo", "estimator.batch_size": 8, "estimator.minibatch_size": 4,
        "estimator.actor_optimizer": "sgd",
    }  # fmt: skip
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    names = [f"pairs{len(options)}", f"pairs_alone{len(options)}"]
    ends = processes(PROGRAM, *words, *options, "--processes_per_client", "2",
                     "--out", f"{runs / names[0]}")  # fmt: skip
    assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("XDG_CACHE_HOME", f"{runs / 'cache'}")
        main(parse(AlignmentConfig, [*words, "--out", f"{runs / names[1]}"]))
    assert distance(*[read_adapter(runs / name) for name in names]) < 1e-6


@pytest.mark.slow
def test_a_sharded_run_that_loses_a_process_ends_with_a_word_and_resumes(
    command_line, processes, fork_two, runs, one
):
    options = ("--processes_per_client", "2", *SHARDED)
    options += ("--rewards.words.options", f"{{log: {runs}/parts.log, dies: 6}}")
    left, died = processes(PROGRAM, *command_line("parts", *options))
    assert (left.returncode, died.returncode) == (1, -signal.SIGKILL)
    (line,) = [line for line in left.stderr.splitlines() if "resume from" in line]
    assert "client_0: a process of the client's 2 is gone" in line  # in round 2
    assert "Traceback" not in left.stderr
    fork_two("parts", *options, "--resume", "true")
    assert distance(read_adapter(runs / "parts"), read_adapter(one)) < 5e-5


def test_processes_per_client_that_do_not_divide_are_refused(command_line, runs, refusal):
    arguments = command_line("odd", "--processes_per_client", "2")
    message = "processes_per_client must divide the number of processes, got 2 and 1"
    assert message in refusal(run_cli, main, AlignmentConfig, arguments)
    assert not (runs / "odd").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "policy.shard needs processes_per_client of at least 2, got 1"),
        (
            ("--processes_per_client", "3"),
            r"minibatch_size must be a multiple of processes_per_client \(3\) with policy.shard",
        ),
        (
            ("--processes_per_client", "2", "--estimator.critic", "network"),
            "estimator.critic must be heads with policy.shard",
        ),
        (
            ("--processes_per_client", "2", "--rollout.cache", "static"),
            "rollout.cache must be dynamic with policy.shard",
        ),
        (
            ("--processes_per_client", "2", "--engine", "stacked"),
            "processes_per_client must be 1 with engine stacked",
        ),
    ],
)
def test_a_policy_that_cannot_be_sharded_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        config(*SHARDED, *options)


def test_a_given_model_is_not_sharded():
    cfg = config(*SHARDED, "--processes_per_client", "2")
    given = Given(model=AutoModelForCausalLM.from_pretrained(cfg.policy.path))
    with pytest.raises(UserError, match="must be false for a model that is passed to firm"):
        load(cfg, Processes(0, 2, 2), given=given)
    with pytest.raises(UserError, match="needs processes_per_client of at least 2, got 1"):
        load(cfg, Processes())  # the server of a federation over a network

"""FIRM as a Flower app: its clients and their task, with the adapter averaged by Flower's FedAvg.

    flwr run . --stream                                         # the miniature world, two minutes
    flwr run . --stream --run-config 'align="--config smollm2 --num_clients 2"'

The key `align` holds the arguments of `firm align`. Node i trains client i: the LoRA adapter
travels in an ArrayRecord, mean rewards and weights λ in a MetricRecord. A client's optimizer and
random streams stay in its node's Context. docs/guide/flower.md compares this with `firm network`.
"""

import json
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import (  # pyright: ignore[reportMissingImports]
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp import Grid, ServerApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp.strategy import FedAvg  # pyright: ignore[reportMissingImports]

from firm.alignment import Calibration, copy_adapter, evaluate, load_adapter_, save_adapter
from firm.federation import Adapter, LocalEngine, Processes, RandomStream, Update
from firm.federation.option import DECIDED_BY_SERVER
from firm.federation.serialization import pack, unpack
from firm.federation.training import LocalTraining
from firm.jobs.alignment import run_folder
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.alignment_loading import (
    LoadedRun,
    as_calibrations,
    as_figures,
    build_clients,
    common_calibrations,
    load,
    with_fast_dtypes,
    without_start,
)
from firm.run.command_line import parse

warnings.simplefilter("ignore", FutureWarning)  # of PEFT's calls into transformers

STATE = "firm"
"""Record in a node's Context with the state of its client."""
BITS = 45
"""Bits of a mean that do not depend on the order of its summands; float64 has 53, float32 24."""

server_app = ServerApp()
client_app = ClientApp()


# --- The run, which the server and every client read alike ----------------------------------------


def config_of(arguments: str) -> AlignmentConfig:
    """Returns the configuration of a run from the arguments of `firm align`.

    Raises:
        ValueError: Rounds would be more than the mean of one training per client.
    """
    cfg = parse(AlignmentConfig, shlex.split(arguments), default_file="configs/miniature.yaml")
    strategy, requests = cfg.strategy, cfg.strategy.requests(cfg.objectives)
    plain = {"clients_per_round": None, "max_update_norm": None, "server_learning_rate": 1.0}
    plain |= {"decay": 1.0, "schedule": None}
    problems = [option.key for option in strategy.options]
    problems += [key for key, value in plain.items() if getattr(strategy, key, value) != value]
    is_mean = strategy.averages and not getattr(strategy, "normalize_updates", False)
    is_one_training = [*requests] == [LocalTraining]
    if not (is_mean and is_one_training) or DECIDED_BY_SERVER in fields_of(cfg).values():
        problems.append(f"name {strategy.name}")
    if problems:
        raise ValueError(
            f"strategy.{problems[0]} needs more of the server than Flower's FedAvg does; leave it "
            "out, or use `firm network`."
        )
    # a message is for one client; the server's `timeout` limits its time
    return with_fast_dtypes(replace(cfg, engine="local", max_rows=None, client_timeout=None))


def fields_of(cfg: AlignmentConfig) -> dict[str, Any]:
    """Returns the fields of each round's request for a local training."""
    return cfg.strategy.requests(cfg.objectives)[LocalTraining]


def as_arrays(adapter: Adapter) -> ArrayRecord:
    """Returns an adapter as arrays of float64, the type in which Flower then sums them."""
    return ArrayRecord({name: Array(own.double().numpy()) for name, own in adapter.items()})


def as_adapter(arrays: ArrayRecord, like: Adapter) -> Adapter:
    """Returns the adapter in arrays, with the names and dtypes of `like`.

    The last bits of Flower's sum depend on the order of arrival. They are rounded away first, so
    that a mean halfway between two float32 numbers is rounded as by `firm align`.
    """
    adapter = {}
    for name, own in like.items():
        fractions, exponents = np.frexp(arrays[name].numpy())
        rounded = np.ldexp(np.round(fractions * 2.0**BITS), exponents - BITS)
        adapter[name] = torch.from_numpy(rounded).to(own.dtype)
    return adapter


# --- A client -------------------------------------------------------------------------------------


@cache  # a process of Flower's simulation answers many messages, one of a SuperNode a single one
def loaded_run(arguments: str, has_own_prompts: bool) -> tuple[AlignmentConfig, LoadedRun]:
    """Returns a run's configuration, and its models and data.

    A node's own prompts are all trained on, since nothing measures them.
    """
    cfg = config_of(arguments)
    own = without_start(cfg)  # which the server sends
    return cfg, load(own, Processes(), measures=False, holds_out=not has_own_prompts)


@cache
def engine_of(arguments: str, calibrations: str, name: str, has_own_prompts: bool) -> LocalEngine:
    """Returns an engine with one client, on its share of the data or on all that is at its node."""
    cfg, loaded = loaded_run(arguments, has_own_prompts)
    if name not in (names := client_names(cfg)):
        raise ValueError(
            f"partition-id must be below num_clients, {len(names)}, got {name.rpartition('_')[2]}; "
            "start as many nodes as clients (flwr run --federation-config 'num-supernodes=...')."
        )
    shards = {name: [*loaded.data.train]} if has_own_prompts else None
    own = as_calibrations(json.loads(calibrations))
    return LocalEngine(build_clients(loaded, cfg, own, [name], shards=shards))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Answers with a client's adapter after its local steps, and their metrics."""
    node, asked = context.node_config, message.content["config"]
    name = f"client_{node['partition-id']}"
    arguments = f"{context.run_config['align']} {node.get('align', '')}"
    has_own_prompts = bool(node.get("own-prompts"))
    engine = engine_of(arguments, asked["calibrations"], name, has_own_prompts)
    cfg, loaded = loaded_run(arguments, has_own_prompts)
    accepted: dict[str, int] = {}
    if STATE in context.state:
        states = unpack(context.state[STATE]["states"])
        engine.restore_client_states(states)
        accepted = {name: states[name]["round"]}

    slot = copy_adapter(loaded.trainer.adapter_parameters)
    request = LocalTraining(
        round=asked["server-round"],
        objectives=cfg.objectives,
        adapter=as_adapter(message.content["arrays"], like=slot),
        accepted=accepted,
        **fields_of(cfg),
    )
    replies, failures = engine.map(request, [name])
    if failures:
        raise RuntimeError(f"{name}: {failures[0].reason}") from failures[0].cause
    update: Update = replies[0].content
    states = engine.client_states({name: request.round})
    context.state[STATE] = ConfigRecord({"states": pack(states)})
    arrays, metrics = as_arrays(update.adapter), MetricRecord(metrics_of(update, cfg))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def metrics_of(update: Update, cfg: AlignmentConfig) -> dict[str, float]:
    """Returns a client's share in the mean, its KL, and rewards and weights by objective."""
    own, is_uniform = update.metrics, cfg.strategy.aggregation == "uniform"
    metrics = {"share": 1.0 if is_uniform else float(update.num_examples)}
    if "kl" in own:
        metrics["kl"] = own["kl"]
    for name, reward in own.get("rewards", {}).items():
        metrics[f"reward-{name}"] = 0.0 if reward is None else reward
        metrics[f"has-{name}"] = float(reward is not None)
    for name, weight in zip(cfg.objectives, np.mean(own["weights"], axis=0), strict=True):
        metrics[f"weight-{name}"] = float(weight)
    return metrics


def mean_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a round's metrics, with each reward as the mean over the clients that have it."""
    shares = {key.removeprefix("has-"): own for key, own in row.items() if key.startswith("has-")}
    known = {key: own for key, own in row.items() if not key.startswith("has-")}
    for name, share in shares.items():
        own = known.pop(f"reward-{name}")
        if share:
            known[f"reward-{name}"] = own / share
    return known


# --- The server -----------------------------------------------------------------------------------


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the rounds, and leaves the adapter for PEFT and the rounds' metrics in a folder."""
    cfg = config_of(str(context.run_config["align"]))
    out = Path(str(context.run_config["out"]) or run_folder(cfg)).absolute()
    out.mkdir(parents=True)  # at most one run leaves its adapter there
    loaded = load(cfg, Processes())
    calibrations = common_calibrations(loaded, cfg, out)
    start, policy = loaded.start, loaded.trainer.policy_model

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=cfg.num_clients,
        min_available_nodes=cfg.num_clients,
        weighted_by_key="share",
    )
    result = strategy.start(
        grid,
        as_arrays(start),
        num_rounds=cfg.rounds,
        timeout=float(context.run_config["timeout"]),
        train_config=ConfigRecord({"calibrations": json.dumps(as_figures(calibrations))}),
        evaluate_fn=lambda number, arrays: measure(
            as_adapter(arrays, like=start), loaded, cfg, calibrations
        ),
    )

    load_adapter_(loaded.trainer.adapter_parameters, as_adapter(result.arrays, like=start))
    save_adapter(policy, out / "adapter")
    loaded.tokenizer.save_pretrained(str(out / "adapter"))
    rows = {
        "train": {n: mean_of(row) for n, row in result.train_metrics_clientapp.items()},
        "test": {n: dict(row) for n, row in result.evaluate_metrics_serverapp.items()},
    }
    (out / "metrics.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"adapter  {out / 'adapter'}", flush=True)


def measure(
    adapter: Adapter, loaded: LoadedRun, cfg: AlignmentConfig, calibrations: dict[str, Calibration]
) -> MetricRecord | None:
    """Returns an adapter's mean scores on the validation prompts; None for runs without any."""
    if not loaded.data.validation or cfg.estimator.learns_from != "prompts":
        return None
    load_adapter_(loaded.trainer.adapter_parameters, adapter)
    with torch.no_grad():
        measured = evaluate(
            loaded.trainer.replies,
            loaded.data.validation,
            {name: loaded.reward_fns[name] for name in cfg.rewards},
            calibrations={name: calibrations[name] for name in cfg.rewards},
            stream=RandomStream(cfg.seed, "evaluation", "validation"),
            extra_fns=loaded.metrics,
            num_samples=cfg.evaluation.num_samples,
        )
    row = measured.row(round=0, split="validation")
    scores = {name: own["mean"] for name, own in row["scores"].items()}
    return MetricRecord({**scores, "kl": row["kl"]})

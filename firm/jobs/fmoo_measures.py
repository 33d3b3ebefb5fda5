"""What a classic study measures of a global model."""

from typing import Any

import torch

from firm.federation import ServerState, State
from firm.federation.strategies import STRATEGIES
from firm.fmoo import Scores, Splits, TaskData
from firm.fmoo.progress import local_models
from firm.fronts.measures import improved_share, local_progress
from firm.jobs.fmoo_config import ClassicConfig
from firm.jobs.fmoo_loading import Federation
from firm.quantities import Quantity, register
from firm.schema import Finite, Share

register(
    Quantity(
        "improved",
        "Participants that improved or stayed",
        "share of participants",
        "Share of the clients taking part in a round whose own training losses fell, or stayed as "
        "they were, by the server's step. Below 100\N{NO-BREAK SPACE}% the round cost some of them "
        "something.",
        kind="round",
        type=Share,
        axis={"tickformat": "~%"},
    ),
    Quantity("users", kind="evaluation", type=dict[str, Share]),
    Quantity("progress", kind="evaluation", type=dict[str, dict[str, Finite]]),
)


def evaluation(
    cfg: ClassicConfig, federation: Federation, splits: Splits, state: ServerState
) -> dict[str, Any]:
    """Returns the row of an evaluation of the global model."""
    workspace = federation.workspace
    workspace.load(state.adapter)
    if cfg.split == "train":
        scores = workspace.evaluate(splits.train, torch.cat(list(federation.shards.values())))
    else:
        scores = workspace.evaluate(getattr(splits, cfg.split))
    return {
        "kind": "evaluation",
        "round": state.round,
        "split": cfg.split,
        **by_objective(scores, splits.train),
        **by_user(federation, splits),
    }


def by_objective(scores: Scores, data: TaskData) -> dict[str, dict[str, float]]:
    """Losses, and accuracies where there are any, by objective."""
    figures = {"losses": scores.losses, "accuracies": scores.accuracies}
    return {
        name: dict(zip(data.objectives, values.tolist(), strict=True))
        for name, values in figures.items()
        if values is not None
    }


def by_user(federation: Federation, splits: Splits) -> dict[str, dict[str, float]]:
    """Returns each user's accuracy, mean over the objectives, on what its client kept back.

    Where clients keep nothing, but are users of the data, on these users' test samples; without
    either there is nothing.
    """
    data, samples = splits.train, federation.held_out
    if not samples:
        data, own = splits.test, splits.test.indices_by_client()
        samples = {name: indices for name, indices in own.items() if name in federation.shards}
    samples = {name: indices for name, indices in samples.items() if len(indices)}
    if not samples or not data.has_accuracies:
        return {}
    accuracies = {}
    for name, indices in samples.items():
        scores = federation.workspace.evaluate(data, indices)
        assert scores.accuracies is not None
        accuracies[name] = scores.accuracies.mean().item()
    return {"users": accuracies}


def improved(
    federation: Federation, before: ServerState, after: ServerState, row: dict[str, Any]
) -> float:
    """Returns the share of a round's clients none of whose losses the server's step raised."""
    workspace = federation.workspace
    losses = []
    for state in (before, after):
        workspace.load(state.adapter)
        scores = [workspace.evaluate(workspace.data, federation.shards[c]) for c in row["clients"]]
        losses.append([score.losses.tolist() for score in scores])
    return improved_share(*losses)


def progress(federation: Federation, state: ServerState, clients: State) -> dict[str, float]:
    """Returns how far local training from the global model lowers each loss on own samples.

    The federation is any with the same clients; they begin with the states that are given.
    """
    workspace, engine = federation.workspace, federation.engine
    engine.restore_client_states(clients)
    strategy = STRATEGIES[federation.cfg.name]
    models = local_models(strategy, state, federation.names, engine, federation.cfg)
    losses = []
    for adapters in (dict.fromkeys(models, state.adapter), models):
        for name, adapter in adapters.items():
            workspace.load(adapter)
            losses.append(workspace.evaluate(workspace.data, federation.shards[name]).losses)
    falls = local_progress(losses[: len(models)], losses[len(models) :])
    return dict(zip(state.objectives, falls.tolist(), strict=True))

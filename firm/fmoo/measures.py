"""Metrics of the global model in a classic study."""

from collections.abc import Sequence
from typing import Any

import torch

from firm.base.quantities import Quantity, register
from firm.base.schema import Finite, Share
from firm.base.state import State
from firm.federation.server import ServerState
from firm.federation.strategies import STRATEGIES
from firm.fmoo.data import Splits, TaskData
from firm.fmoo.federation import SupervisedFederation
from firm.fmoo.progress import local_models
from firm.fmoo.workspace import ObjectiveMetrics
from firm.fronts.measures import improved_share, local_progress

register(
    Quantity(
        "improved",
        "Participants that improved or stayed",
        "share of participants",
        "Share of a round's participants whose own training losses the server's step did not "
        "raise. Below 100\N{NO-BREAK SPACE}%, the round made some of them worse.",
        kind="round",
        type=Share,
        axis={"tickformat": "~%"},
    ),
    Quantity("users", kind="evaluation", type=dict[str, Share]),
    Quantity("progress", kind="evaluation", type=dict[str, dict[str, Finite]]),
)


def evaluation(
    federation: SupervisedFederation, splits: Splits, split: str, state: ServerState
) -> dict[str, Any]:
    """Evaluates the global model on a split and returns the row to log."""
    workspace = federation.workspace
    workspace.load(state.adapter)
    if split == "train":
        scores = workspace.evaluate(splits.train, torch.cat(list(federation.shards.values())))
    else:
        scores = workspace.evaluate(getattr(splits, split))
    return {
        "kind": "evaluation",
        "round": state.round,
        "split": split,
        **by_objective(scores, splits.train),
        **by_user(federation, splits, split),
    }


def by_objective(scores: ObjectiveMetrics, data: TaskData) -> dict[str, dict[str, float]]:
    """Returns losses and, where defined, accuracies by objective."""
    figures = {"losses": scores.losses, "accuracies": scores.accuracies}
    return {
        name: dict(zip(data.objectives, values.tolist(), strict=True))
        for name, values in figures.items()
        if values is not None
    }


def by_user(
    federation: SupervisedFederation, splits: Splits, split: str
) -> dict[str, dict[str, float]]:
    """Returns each user's accuracy, averaged over objectives, on its client's held-out samples.

    If clients hold out nothing but are users of the data set, uses these users' samples of the
    split; otherwise returns an empty dict.
    """
    data, samples = splits.train, federation.held_out
    if not samples:
        data = getattr(splits, split)
        own = data.indices_by_client()
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


def share_improved(
    federation: SupervisedFederation, before: ServerState, after: ServerState, row: dict[str, Any]
) -> float:
    """Returns the share of a round's clients for which the server step raised no loss."""
    workspace = federation.workspace
    losses = []
    for state in (before, after):
        workspace.load(state.adapter)
        scores = [workspace.evaluate(workspace.data, federation.shards[c]) for c in row["clients"]]
        losses.append(torch.stack([score.losses.cpu() for score in scores]))
    is_served = _is_served(federation, row["clients"])  # other losses are not the clients' own
    return improved_share(*(own.where(is_served, 0).tolist() for own in losses))


def progress(
    federation: SupervisedFederation, state: ServerState, clients: State
) -> dict[str, float]:
    """Returns the decrease of each loss on clients' own samples by training from the global model.

    It is the mean over the clients that serve the objective.

    Args:
        federation: Any federation with the same clients.
        state: The server's state, with the global model.
        clients: States that the clients start from.
    """
    workspace, engine = federation.workspace, federation.engine
    engine.restore_client_states(clients)
    cfg = federation.cfg.at_round(state.round + 1, state.objectives)
    models = local_models(STRATEGIES[cfg.name], state, federation.names, engine, cfg)
    losses = []
    for adapters in (dict.fromkeys(models, state.adapter), models):
        for name, adapter in adapters.items():
            workspace.load(adapter)
            losses.append(workspace.evaluate(workspace.data, federation.shards[name]).losses.cpu())
    is_served, count = _is_served(federation, list(models)), len(models)
    own = [torch.stack(each).where(is_served, 0) for each in (losses[:count], losses[count:])]
    falls = local_progress(*own) * count / is_served.sum(0).clamp(min=1).numpy()
    return dict(zip(state.objectives, falls.tolist(), strict=True))


def _is_served(federation: SupervisedFederation, names: Sequence[str]) -> torch.Tensor:
    """Returns a mask of the objectives that clients serve, bool [C, M]."""
    served = {client.name: client.served for client in federation.clients}
    count = len(federation.workspace.data.objectives)
    return torch.tensor([[j in served[name] for j in range(count)] for name in names])

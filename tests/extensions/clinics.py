"""Data, a loss and a model of another package, on which classic algorithms train."""

import torch
from torch import nn

from firm.fmoo import MultiTaskModel, TaskData, dataset, loss, model
from firm.jobs.fmoo import ClassicConfig, run_classic
from firm.run import compose


@dataset("clinics")
def clinics(cfg):
    x = torch.randn(3, 80, 6, generator=torch.Generator().manual_seed(cfg.seed))
    y = torch.stack([(x[..., 0] > x[..., 1]).float(), x[..., 1] - x[..., 2]], dim=-1)
    patients = {f"clinic_{c}": list(zip(x[c], y[c], strict=True)) for c in range(3)}
    return TaskData.of_clients(patients, losses={"readmitted": "binary", "days": "huber"})


@loss("huber")
def huber(outputs, targets):
    return nn.functional.huber_loss(outputs[:, 0], targets)


@model("two_heads")
def two_heads(cfg, data):
    body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
    return MultiTaskModel(body, [nn.Linear(16, 1), nn.Linear(16, 1)])


if __name__ == "__main__":
    study = {"data.name": "clinics", "model.name": "two_heads", "partition.kind": "natural"}
    algorithms = {n: {"strategy": {"name": n}, "local": {"lr": 0.3}} for n in ("fedcmoo", "fsmgda")}
    result = run_classic(compose(ClassicConfig, [], [*study.items(), ("algorithms", algorithms)]))
    result.losses.to_csv("losses.csv")
    torch.save(result.parameters("fedcmoo"), "clinics.pt")

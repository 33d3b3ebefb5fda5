"""The classic package on an accelerator."""

import pytest
import torch

from firm.fmoo.client import SupervisedClient
from firm.fmoo.config import LocalConfig, ModelConfig
from firm.fmoo.models import build_model
from firm.fmoo.workspace import Workspace
from firm.jobs.fmoo import main
from firm.jobs.fmoo_config import ClassicConfig
from firm.run import UserError, parse
from tests.accelerator.device import IS_PRETEND, NAME, accelerator
from tests.fmoo.test_models import EXAMPLES
from tests.runs import read_rows

DEVICE = f"{NAME}:{1 if IS_PRETEND else 0}"


def study(tmp_path, device, strategies, *arguments):
    """Runs two rounds of some strategies; returns the evaluations' rows by strategy."""
    algorithms = ", ".join(
        f"{name}: {{strategy: {{name: {name}, num_local_steps: 2}}, local: {{batch_size: 8}}}}"
        for name in strategies
    )
    options = ("--num_clients", 2, "--rounds", 2, "--device", device, "--num_workers", 2)
    out = tmp_path / device
    words = ["--algorithms", f"{{{algorithms}}}", *options, "--out", out, *arguments]
    main(parse(ClassicConfig, [*map(str, words)]))
    return {name: read_rows(out / name / "seed_0", "evaluation") for name in strategies}


@pytest.mark.parametrize("model", ["lenet", "linear", "mlp"])
def test_a_study_ends_as_on_the_cpu(tmp_path, monkeypatch, model):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch's default
    strategies = ["fedavg", "firm"] + ["fsmgda", "fedcmoo"] * (model != "linear")
    options = ["--model.name", model]
    if model == "lenet":  # dropout's noise differs between devices
        options += ["--model.dropout", 0]
    expected = study(tmp_path, "cpu", strategies, *options)
    accelerator().reset_peak_memory_stats(DEVICE)
    found = study(tmp_path, DEVICE, strategies, *options)
    assert accelerator().max_memory_allocated(DEVICE) > 1e5
    for name, rows in expected.items():
        for row, own in zip(rows, found[name], strict=True):
            assert own["losses"] == pytest.approx(row["losses"], abs=1e-4)


def test_a_study_says_that_generators_cannot_be_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(accelerator(), "get_rng_state")
    study(tmp_path, DEVICE, ["fedavg"])
    note, *others = capsys.readouterr().out.split("note: ")[1:]
    assert note.startswith(f"torch cannot save the random generators of {NAME} devices")
    assert not others


# The pretend device has no fused cells, which torch wants of a GRU and an LSTM outside the CPU.
CELLS = {"molecule_net", "character_lstm"} if IS_PRETEND else set()


@pytest.mark.filterwarnings("ignore:RNN module weights")  # firm.fmoo.modules ignores it, too
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - CELLS))
def test_every_model_is_trained_and_evaluated_there(name):
    data = EXAMPLES[name].to(DEVICE)
    weights = torch.full((len(data.objectives),), 1 / len(data.objectives))
    workspace = Workspace(
        build_model(ModelConfig(name), data, seed=0),
        data,
        LocalConfig(batch_size=2, rotation=10.0, optimizer="adam", lr=0.01),
    )
    client = SupervisedClient("client_0", workspace, torch.arange(len(data)), seed=0)
    start = client.adapter()
    client.load(start)
    for batch in client.batches(2):
        client.step(client.gradients(batch), weights)
        client.step(client.weighted_gradients(batch, weights), torch.ones(1))
    after = client.adapter()
    assert all(value.device.type == "cpu" for value in after.values())
    assert any(not torch.equal(after[key], value) for key, value in start.items())
    assert client.losses().isfinite().all()
    assert workspace.evaluate(data).losses.isfinite().all()


def test_a_device_that_is_not_here_is_refused(tmp_path):
    with pytest.raises(UserError, match="device: there is no device 'hpu' here: choose 'auto'"):
        study(tmp_path, "hpu", ["fedavg"])

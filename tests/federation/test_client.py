import pytest
import torch

from firm.federation import Client, LocalEngine
from firm.federation.strategies import STRATEGIES


class PlainClient(Client):
    """Implements what is abstract, by another client, and nothing else."""

    def __init__(self, client):
        self._client = client
        self.name, self.objectives = client.name, client.objectives
        self.num_examples = client.num_examples

    def load(self, adapter, round=1):
        self._client.load(adapter, round)

    def batches(self, num_steps):
        return self._client.batches(num_steps)

    def gradients(self, minibatch):
        return self._client.gradients(minibatch)

    def step(self, gradients, weights):
        self._client.step(gradients, weights)

    def adapter(self):
        return self._client.adapter()

    def state(self):
        return self._client.state()

    def restore(self, state):
        self._client.restore(state)

    def metrics(self):
        return self._client.metrics()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plain_client_runs_every_strategy_or_lacks_a_capability(
    name, exact_config, new_client, start
):
    cfg = exact_config(name)
    engine = LocalEngine([PlainClient(new_client()), PlainClient(new_client("b"))])
    if cfg.reads_losses:
        with pytest.raises(RuntimeError, match="needs losses on a client's whole shard"):
            STRATEGIES[name](start, ["client_0", "b"], engine, cfg)
        return
    if cfg.reads_rewards and name != "constrained":  # which has no constraint here
        with pytest.raises(ValueError, match="the strategy needs the clients' mean rewards"):
            STRATEGIES[name](start, ["client_0", "b"], engine, cfg)
        return
    state, rows = STRATEGIES[name](start, ["client_0", "b"], engine, cfg)
    assert state.round == 1
    assert not rows["round"]["failures"]


def test_an_abstract_method_must_be_implemented(new_client):
    kind = type("Half", (PlainClient,), {"step": Client.step, "__doc__": "Half a client."})
    with pytest.raises(TypeError, match=r"abstract method '?step"):
        kind(new_client())


def test_optional_methods_have_defaults(new_client, start):
    client = PlainClient(new_client())
    assert client.served == (0, 1)
    assert client.shared == slice(None)
    client.load(start.adapter)
    assert client.weighted_steps(3, torch.ones(2), proximal=0.0) == 0
    minibatch, weights = torch.zeros(3), torch.tensor([0.3, 0.7], dtype=torch.float64)
    gradients = client.gradients(minibatch)
    row = client.weighted_gradients(minibatch, weights).jacobian
    torch.testing.assert_close(row, (weights.float() @ gradients.jacobian)[None])
    with pytest.raises(ValueError, match="which client_0 does not have; set num_local_steps"):
        _ = client.batches_per_epoch

"""A round does not depend on the order in which the objectives are named."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from firm.federation.strategies import STRATEGIES

TARGETS = {"left": [1.0, 0.0, 2.0], "right": [0.0, 3.0, 1.0], "far": [-4.0, 5.0, 3.0]}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_order_of_the_objectives_does_not_matter(
    name, exact_config, new_client, start, run_rounds, point
):
    strategy, cfg = STRATEGIES[name], exact_config(name, num_local_steps=2)

    def model(objectives):
        targets = torch.tensor([TARGETS[objective] for objective in objectives])
        options = {"objectives": objectives, "noise": 0.1, "uneven_draws": True}
        clients = [
            new_client("a", targets, **options),
            new_client("b", targets - 1.0, served=(objectives.index("far"),), **options),
            new_client("c", targets * 2.0, **options),
        ]
        state = replace(start, objectives=objectives)
        return point(run_rounds(strategy, clients, state, cfg, num_rounds=4)[0])

    expected = model(tuple(TARGETS))
    assert not torch.allclose(expected, torch.zeros(3))
    for objectives in permutations(TARGETS):
        torch.testing.assert_close(model(objectives), expected, rtol=1e-5, atol=1e-5)

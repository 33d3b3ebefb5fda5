from dataclasses import replace

import pytest

from firm.federation import local_training
from firm.federation.objective_training import ObjectiveTraining, objective_training
from firm.federation.training import LocalTraining

OBJECTIVES = ("left", "right")


def _alone(start, num_local_steps):
    return ObjectiveTraining(
        round=1, objectives=OBJECTIVES, adapter=start.adapter, num_local_steps=num_local_steps
    )


def test_each_objective_is_trained_alone_from_the_same_state(new_client, start, same):
    client = new_client()
    content = objective_training(client, _alone(start, num_local_steps=2))
    for index, name in enumerate(OBJECTIVES):
        alone = new_client()
        weights = [float(index == 0), float(index == 1)]
        request = LocalTraining(
            round=1,
            objectives=OBJECTIVES,
            adapter=start.adapter,
            num_local_steps=2,
            weighting="fixed",
            weighting_options={"weights": weights},
        )
        update = local_training(alone, request)
        assert same(content.updates[name], update.adapter)
    assert client.state()["num_batches"] == 2
    assert content.num_shared == 3
    assert content.metrics["num_steps"] == 4


def test_only_served_objectives_are_trained(new_client, start):
    request = _alone(start, num_local_steps=1)
    assert list(objective_training(new_client(served=(1,)), request).updates) == ["right"]
    with pytest.raises(ValueError, match=r"client_0 must serve some .* 0 to 1, got \(\)"):
        objective_training(new_client(served=()), request)
    with pytest.raises(ValueError, match=r"got \(2,\)"):
        objective_training(new_client(served=(2,)), request)


def test_local_epochs_count_for_each_objective(new_client, start):
    request = replace(_alone(start, num_local_steps=1), num_local_epochs=2)
    for count in (1, 4):
        client = new_client(batches_per_epoch=count)
        assert objective_training(client, request).metrics["num_steps"] == 2 * 2 * count

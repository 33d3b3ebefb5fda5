import pytest

from firm.federation.tasks import TASKS, task
from firm.federation.training import LocalTraining


def test_local_training_is_registered_and_a_name_is_given_once():
    local_training = TASKS["local_training"]
    with pytest.raises(ValueError, match="a task 'local_training' is already registered"):
        task(LocalTraining)(lambda client, request: None)
    assert TASKS["local_training"] is local_training

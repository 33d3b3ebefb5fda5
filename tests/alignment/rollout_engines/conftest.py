"""The real model on which engines of vLLM are tested, and a policy that it is."""

from importlib.util import find_spec

import pytest

from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.policy import load_policy
from firm.alignment.policy_config import PolicyConfig
from firm.federation import RandomStream
from tests.real_model import real_model


@pytest.fixture(scope="module")
def path() -> str:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: run `make test-vllm`")
    return real_model()


@pytest.fixture(scope="module")
def policy(path):
    conditioning = ConditioningConfig("preference")
    config = PolicyConfig(path, conditioning=conditioning, device="cpu")
    return load_policy(config, stream=RandomStream(0, "adapter"), num_objectives=2)

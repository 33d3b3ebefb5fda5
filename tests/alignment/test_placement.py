"""Maps of devices that are refused; tests/accelerator trains on two devices."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from firm.alignment import load_policy
from firm.alignment.placement import place_
from firm.federation import Processes, RandomStream
from firm.jobs.alignment_loading import Given, load
from firm.run.errors import UserError
from tests.smoke import config


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"model.layers": "cpu"}, "gives no device for model.embed_tokens.weight: add its module"),
        ({"model": "cpu", "head": "cpu"}, "the policy has no module 'head': choose among its own"),
        ({"model": "cuda:77"}, "policy.device_map: there is no device 'cuda:77' here"),
    ],
)
def test_a_map_of_devices_that_does_not_fit_is_refused(device_map, message):
    settings = config("--policy.device_map", json.dumps(device_map)).policy
    policy = load_policy(settings, stream=RandomStream(0, "adapter"))
    with pytest.raises(ValueError, match=re.escape(message)):
        place_(policy, settings, torch.device("cpu"))


@pytest.mark.parametrize("device_map", ["auto", '{"model": "cpu", "lm_head": "cpu"}'])
def test_one_device_takes_the_whole_policy(device_map):
    settings = config("--policy.device_map", device_map).policy
    policy = load_policy(settings, stream=RandomStream(0, "adapter"))
    place_(policy, settings, torch.device("cpu"))
    assert not policy.get_base_model()._forward_hooks


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("policy.device", "cpu"),
        ("policy.shard", "true"),
        ("engine", "stacked"),
        ("rollout.cache", "static"),
    ],
)
def test_what_a_map_of_devices_excludes_is_refused(option, value):
    with pytest.raises(UserError, match=f"{option} must be .* with policy.device_map"):
        config("--policy.device_map", "auto", f"--{option}", value)


def test_a_given_model_and_several_processes_are_not_placed():
    cfg = config("--policy.device_map", "auto")
    given = Given(model=AutoModelForCausalLM.from_pretrained(cfg.policy.path))
    for processes, own in ((Processes(), given), (Processes(0, 2), None)):
        with pytest.raises(UserError, match="device_map must be null with several processes"):
            load(cfg, processes, given=own)

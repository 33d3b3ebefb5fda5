"""The engine `vllm_server` on a real model and two servers of vLLM: `make test-vllm`.

The model is SmolLM2-135M-Instruct as fetched by `firm fetch smollm2`, or that of FIRM_MODEL.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from firm.alignment.policy import adapter_parameters, copy_adapter, load_adapter_
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompts import Prompt
from firm.alignment.rewards import score
from firm.alignment.rollout import encode_prompts
from firm.alignment.rollout_config import RolloutConfig, VLLMServerConfig
from firm.alignment.rollout_engines import SampleRequest, TransformersEngine
from reward_models import RewardModelConfig, load_reward_model
from tests.alignment.rollout_engines.test_vllm import TEXTS, changed
from tests.alignment.rollout_engines.test_vllm_server import own_logprobs
from tests.smoke import ROOT

pytestmark = pytest.mark.filterwarnings("default")

CLASSIFIER = str(ROOT / "firm/miniature/checkpoints/helpful")
NUM_CLIENTS = 8
PREFERENCES = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.5, 0.5], [0.3, 0.7], [0.1, 0.9]])
ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RolloutConfig:
    engine = VLLMServerConfig(
        urls=[_free_url(), _free_url()],
        shared_folder=str(tmp_path_factory.mktemp("shared")),
        max_loras=8,  # the others wait, and are read again
        num_retries=1,
    )
    return RolloutConfig(max_new_tokens=12, max_prompt_tokens=64, temperature=1e-6, engine=engine)


@pytest.fixture(scope="module")
def servers(path, policy, config, tmp_path_factory):
    """Two servers, started by the command that FIRM prints."""
    logs, rank = tmp_path_factory.mktemp("logs"), policy.peft_config["default"].r
    with ExitStack() as stack:
        started = []
        for url in config.engine.urls:
            command = config.engine.command(path, "float32", rank, 76, _port(url))
            _variable, _program, _serve, _path, *words = shlex.split(command)
            started.append(stack.enter_context(_vllm(path, words, logs / f"{_port(url)}.txt")))
        for process, url in zip(started, config.engine.urls, strict=True):
            _wait_for(process, url, logs / f"{_port(url)}.txt")
        yield started


@contextmanager
def _vllm(path: str, words: Sequence[str], log: Path) -> Iterator[subprocess.Popen]:
    """Starts a server; the package for CPUs, vllm-cpu, has no command of its own."""
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*start, *words, "--enforce-eager"],
            env=ENVIRONMENT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _kill(process)
            process.wait()


def _wait_for(process: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + 300
    while not _answers(url):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(1)


def _free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _kill(process: subprocess.Popen) -> None:
    """Kills a server with its engine and workers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def tokenizer(path):
    from firm.alignment.policy import load_tokenizer

    return load_tokenizer(PolicyConfig(path))


def asked(policy, tokenizer, config, temperature):
    """Returns a request of each client, with a prompt at each preference."""
    texts = (TEXTS * 2)[: len(PREFERENCES)]
    queries = encode_prompts(
        [Prompt(text) for text in texts],
        tokenizer,
        prompt_format=PolicyConfig("").prompt,
        max_prompt_tokens=config.max_prompt_tokens,
    )
    queries = replace(queries, preferences=PREFERENCES)
    return [
        SampleRequest(
            queries,
            replace(config, temperature=temperature),
            [2],
            adapter=changed(policy, client),
            generator=torch.Generator().manual_seed(client),
        )
        for client in range(NUM_CLIENTS)
    ]


@pytest.mark.usefixtures("servers")
def test_greedy_tokens_of_eight_clients_and_five_preferences_are_the_policys(
    policy, tokenizer, config
):
    engine = config.engine.engine(policy, tokenizer, config)
    requests = asked(policy, tokenizer, config, 1e-6)
    samples = engine.sample(requests)
    engine.close()
    assert len({version for own in samples for version in own.versions}) == 40
    fresh = copy_adapter(adapter_parameters(policy))
    num_equal = 0
    for request, own in zip(requests, samples, strict=True):
        load_adapter_(adapter_parameters(policy), request.adapter)
        local = replace(request, adapter=None, generator=None)
        (expected,) = TransformersEngine(policy, tokenizer).sample([local])
        start = request.queries.token_ids.size(1)
        real = own.token_ids[:, start:] >= 0
        theirs = expected.token_ids[:, start : start + real.size(1)]
        num_equal += int(((own.token_ids[:, start:] == theirs) | ~real).all(1).sum())
    load_adapter_(adapter_parameters(policy), fresh)
    print(f"{num_equal} of 40 greedy replies are equal")  # noqa: T201
    assert num_equal >= 39  # a near tie may be decided by rounding


def test_a_server_that_is_killed_in_a_batch_loses_nothing(
    policy, tokenizer, config, servers, caplog
):
    requests = asked(policy, tokenizer, config, 1.0)
    config = replace(config, temperature=1.0)
    engine = config.engine.engine(policy, tokenizer, config)
    engine.sample(requests[:1])
    dying, num_calls = engine._servers[0], 0
    complete = dying.complete

    def counted(**content):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 45:  # a probe of each of 35 further versions, and ten replies
            _kill(servers[0])
        return complete(**content)

    dying.complete = counted
    samples = engine.sample(requests)
    assert num_calls >= 45
    assert re.search(r"rollout server \S+ is left out of this batch", caplog.text)
    for request, own in zip(requests, samples, strict=True):
        expected, mask = own_logprobs(policy, request.queries, own, request.adapter)
        assert (expected - own.logprobs)[mask].abs().max() < 2e-3
    engine.close()


@pytest.mark.parametrize("format", ["plain", "hh_pair"])
def test_a_classifier_in_vllm_scores_as_one_that_is_loaded(format, classifier):
    settings = {"path": CLASSIFIER, "format": format, "append_eos": True, "batch_size": 4}
    replies = [f" The answer is {word * number}." for number, word in enumerate(TEXTS)]
    local, far = (
        score({"x": load_reward_model(RewardModelConfig(**settings, **own), "x")}, TEXTS, replies)
        for own in ({}, {"url": classifier})
    )
    assert local.unique().numel() > 1
    torch.testing.assert_close(far, local, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def classifier(path, tmp_path_factory):
    """The address of a server with a classifier of the miniature world."""
    url, log = _free_url(), tmp_path_factory.mktemp("logs") / "classifier.txt"
    words = shlex.split(f"--runner pooling --dtype float32 --port {_port(url)}")
    with _vllm(CLASSIFIER, words, log) as process:
        _wait_for(process, url, log)
        yield url

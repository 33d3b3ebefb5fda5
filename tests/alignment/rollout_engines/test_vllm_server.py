"""The engine `vllm_server`, with small servers that speak vLLM's protocol and have its faults."""

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.policy import (
    adapter_parameters,
    copy_adapter,
    load_adapter_,
    load_policy,
    load_tokenizer,
)
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompts import Prompt
from firm.alignment.rollout import encode_prompts
from firm.alignment.rollout_config import RolloutConfig, TransformersConfig, VLLMServerConfig
from firm.alignment.rollout_engines import SampleRequest, TransformersEngine
from firm.alignment.sequences import Sequences, response_logprobs, set_preferences
from firm.federation import RandomStream
from firm.jobs.alignment import main as align
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import compose
from firm.run.config import UserError
from tests.alignment.rollout_engines.small_server import SmallServer, served
from tests.alignment.rollout_engines.test_vllm import changed as with_random_b
from tests.json_server import serving
from tests.runs import distance, read_rows
from tests.smoke import POLICY, SMOKE

PATH = str(POLICY)
TEXTS = ("Can you paint a chair?", "How do I bake bread?", "Why is the sky blue?")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(PolicyConfig(PATH))


@pytest.fixture(scope="module")
def queries(tokenizer):
    prompts = [Prompt(text) for text in TEXTS]
    return encode_prompts(
        prompts, tokenizer, prompt_format=PolicyConfig("").prompt, max_prompt_tokens=64
    )


@pytest.fixture(scope="module")
def policy():
    config = PolicyConfig(PATH, conditioning=ConditioningConfig("preference"), device="cpu")
    return load_policy(config, stream=RandomStream(0, "adapter"), num_objectives=2)


@pytest.fixture
def start(tmp_path, policy, tokenizer):
    """Starts servers, and returns an engine that asks them."""
    with ExitStack() as stack:

        def started(*servers, urls=(), temperature=1.0, **settings):
            urls = [*urls, *(stack.enter_context(served(server)) for server in servers)]
            config = VLLMServerConfig(
                urls=urls, shared_folder=str(tmp_path / "shared"), **{"num_retries": 0} | settings
            )
            rollout = RolloutConfig(
                max_new_tokens=6, max_prompt_tokens=64, temperature=temperature, engine=config
            )
            engine = config.engine(policy, tokenizer, rollout)
            stack.callback(engine.close)
            return engine

        yield started


def changed(policy, seed, *, size=0.3):
    """Returns the policy's adapter with random matrices B, larger than for a deep model."""
    return with_random_b(policy, seed, size=size)


def request(queries, adapter, *, seed=0, temperature=1.0):
    config = RolloutConfig(max_new_tokens=6, max_prompt_tokens=64, temperature=temperature)
    generator = torch.Generator().manual_seed(seed)
    return SampleRequest(queries, config, [2], adapter=adapter, generator=generator)


def own_logprobs(policy, queries, samples, adapter):
    """Returns the policy's log-probabilities of samples, and which are tokens."""
    ends = samples.token_ids[:, queries.token_ids.size(1) :]
    sequences = Sequences(queries, samples.token_ids.clamp(min=0), (ends >= 0).sum(1))
    fresh = copy_adapter(adapter_parameters(policy))
    load_adapter_(adapter_parameters(policy), adapter)
    set_preferences(policy, queries.preferences)
    with torch.no_grad():
        own = response_logprobs(policy, sequences, 1.0)
    load_adapter_(adapter_parameters(policy), fresh)
    set_preferences(policy, None)
    return own, sequences.mask


def test_rows_of_all_adapters_and_preferences_are_the_policys(start, policy, queries):
    preferences = torch.tensor([[0.7, 0.3], [0.1, 0.9], [0.7, 0.3]])
    servers = SmallServer(PATH), SmallServer(PATH)
    engine = start(*servers)
    adapters = [changed(policy, 1), changed(policy, 2)]
    asked = [replace(queries, preferences=preferences), queries]
    requests = [request(q, a, seed=n) for n, (q, a) in enumerate(zip(asked, adapters, strict=True))]
    kept = copy_adapter(adapter_parameters(policy))
    samples = engine.sample(requests)
    for name, values in adapter_parameters(policy).items():
        assert torch.equal(values, kept[name])  # the probes leave the slot as it was
    for own, queries_of, adapter in zip(samples, asked, adapters, strict=True):
        expected, mask = own_logprobs(policy, queries_of, own, adapter)
        torch.testing.assert_close(own.logprobs[mask], expected[mask], atol=1e-4, rtol=0)
    first, second, third = samples[0].versions
    assert first == third != second
    assert all(server.names.keys() == {first, second, *samples[1].versions} for server in servers)
    # of each server the base model's probe, the temperature's and three versions'; and six rows
    assert sum(server.num_replies for server in servers) == 2 * 5 + 6
    assert all(server.num_replies > 5 for server in servers)
    # seeds are the rows' own: one server gives the same replies as two
    again = start(SmallServer(PATH)).sample(
        [request(q, a, seed=n) for n, (q, a) in enumerate(zip(asked, adapters, strict=True))]
    )
    assert all(
        torch.equal(one.token_ids, other.token_ids)
        for one, other in zip(samples, again, strict=True)
    )


def test_greedy_tokens_are_those_of_the_policys_own_passes(start, policy, tokenizer, queries):
    engine, adapter = start(SmallServer(PATH), temperature=1e-6), changed(policy, 1)
    (samples,) = engine.sample([request(queries, adapter, temperature=1e-6)])
    fresh = copy_adapter(adapter_parameters(policy))
    load_adapter_(adapter_parameters(policy), adapter)
    own = replace(request(queries, None, temperature=1e-6), generator=None)
    (expected,) = TransformersEngine(policy, tokenizer).sample([own])
    load_adapter_(adapter_parameters(policy), fresh)
    real = samples.token_ids >= 0
    assert torch.equal(samples.token_ids[real], expected.token_ids[real])
    assert samples.logprobs is not None  # as of the tempered distribution
    assert (samples.logprobs[real[:, -samples.logprobs.size(1) :]] == 0).all()


def test_versions_are_named_by_content_and_unloaded_when_needless(start, policy, queries, tmp_path):
    server = SmallServer(PATH)
    engine, seen = start(server, max_loras=2), []
    for seed in (1, 2, 1, 3):
        (samples,) = engine.sample([request(queries, changed(policy, seed))])
        seen.append(samples.versions[0])
    assert seen[0] == seen[2]
    assert len({*seen}) == 3
    assert server.unloaded == [seen[1]]  # the one used least recently
    (folder,) = (tmp_path / "shared").iterdir()
    assert {each.name for each in folder.iterdir()} == {*server.names} == {seen[0], seen[3]}
    engine.close()
    assert not server.names
    assert not folder.exists()


def test_rows_of_a_server_that_fails_go_to_the_others_and_it_may_return(
    start, policy, queries, caplog
):
    failing, other = SmallServer(PATH, fails_after=4), SmallServer(PATH)
    engine, adapter = start(failing, other, num_requests=1), changed(policy, 1)
    (expected,) = start(SmallServer(PATH)).sample([request(queries, adapter)])
    (samples,) = engine.sample([request(queries, adapter)])
    assert torch.equal(samples.token_ids, expected.token_ids)
    assert "is left out of this batch: status 500: EngineCore encountered an issue" in caplog.text
    failing.fails_after, failing.names = None, {}  # it was started again
    for _ in range(20):  # the other server may be quick enough to take all rows
        engine.sample([request(queries, adapter)])
        if failing.num_replies > 4:
            break
    assert failing.num_replies > 4
    failing.fails_after = other.fails_after = 0
    with pytest.raises(RuntimeError, match=r"no rollout server is left \(http.*; http.*status 500"):
        engine.sample([request(queries, adapter)])


def test_a_request_is_tried_again_before_a_server_is_left_out(start, policy, queries):
    server = SmallServer(PATH)
    engine, answer, num_calls = start(server, num_retries=1, num_requests=1), server.answer, 0

    def unsteady(path, content):
        nonlocal num_calls
        num_calls += path == "/v1/completions" and "logprobs" in content
        return (503, "busy") if num_calls == 2 else answer(path, content)

    server.answer = unsteady
    (samples,) = engine.sample([request(queries, changed(policy, 1))])
    assert len(samples.versions) == 3
    assert num_calls == 5  # the check of the temperature, three rows, and one of them again


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"loads_adapters": False}, "does not load adapters while it runs. Start it as follows: V"),
        ({"max_lora_rank": 8}, "LoRA rank 16 is greater than max_lora_rank 8"),
        ({"max_loras": 2}, "has --max-loras 2, fewer than rollout.engine.max_loras, 16"),
        ({"max_model_len": 69}, "takes 69 tokens, fewer than 70"),
        ({"serves_base": True}, r"loaded the adapter \w+-\w+, but serves the base model"),
        ({"forgets": True}, "does not list the adapter that it loaded, so several servers answer"),
        ({"is_tempered": False}, "gives log-probabilities before tempering"),
        ({"shift": 1}, "has another tokenizer than the policy"),
        ({"scale": 1.1}, "has another base model or dtype than the policy"),
        ({"other_name": "base"}, "answered with the model base, but"),
        ({"nan_probes": True}, "must give a finite log-probability for each of a prompt's tokens"),
        (
            {"answers": {"/v1/models": {"data": [1]}}},
            "does not answer as vLLM does .status 200, Ty",
        ),
        ({"answers": {"/v1/models": {"data": []}}}, "lists no base model. Start it as follows: V"),
        ({"answers": {"/tokenize": {"tokens": 3}}}, "does not answer as vLLM does"),
        ({"answers": {"/v1/completions": {"choices": ["x"]}}}, "does not answer as vLLM does"),
        ({"broken": {"token_ids": [3], "logprobs": None}}, "must answer with 1 to"),
        ({"broken": {"token_ids": [-3], "logprobs": {"token_logprobs": [0.0]}}}, "must answer wi"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(faults, message, start, policy, queries):
    engine = start(SmallServer(PATH, **faults))
    with pytest.raises(RuntimeError, match=message):
        engine.sample([request(queries, changed(policy, 1))])


def test_a_process_without_rows_asks_for_none(start, policy, queries):
    server = SmallServer(PATH)
    (samples,) = start(server).sample([request(queries.rows(slice(0)), changed(policy, 1))])
    assert samples.versions == []
    assert not server.names


def test_an_adapter_without_effect_is_no_fault(start, policy, queries):
    engine = start(SmallServer(PATH))
    (samples,) = engine.sample([request(queries, changed(policy, 1, size=0.0))])
    assert len(samples.versions) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": []}, "urls must be one or several different addresses"),
        ({"urls": ["node7:8000"]}, "got .'node7:8000'."),
        ({"urls": ["http://a", "http://a"]}, "several different"),
        ({"urls": ["http://a"], "shared_folder": ""}, "shared_folder must be a folder"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMServerConfig(**{"shared_folder": "shared"} | settings)


def test_temperatures_beyond_the_servers_are_refused(start):
    with pytest.raises(ValueError, match="temperature must be at most 2 with"):
        start(SmallServer(PATH), temperature=2.5)


def test_replies_begun_before_an_update_are_the_older_adapters(start, policy, queries):
    server, is_open = SmallServer(PATH), threading.Event()

    def answer(path, content):
        if "completions" in path and "prompt_logprobs" not in content:
            assert is_open.wait(60)
        return server.answer(path, content)

    kept = copy_adapter(adapter_parameters(policy))
    with serving(answer) as url:
        engine = start(urls=[url])
        load_adapter_(adapter_parameters(policy), changed(policy, 1))
        is_open.set()
        (expected,) = engine.sample([request(queries, None)])
        is_open.clear()
        first, second = engine.begin([request(queries, None), request(queries, None, seed=1)])
        load_adapter_(adapter_parameters(policy), kept)  # the servers have not replied yet
        is_open.set()
        assert torch.equal(first().token_ids, expected.token_ids)
        assert torch.equal(first().logprobs, expected.logprobs)
        assert not torch.equal(second().token_ids, expected.token_ids)
        own, mask = own_logprobs(policy, queries, first(), changed(policy, 1))
    torch.testing.assert_close(first().logprobs[mask], own[mask], atol=1e-4, rtol=0)


def run_of(tmp_path, urls, settings):
    own = {
        "policy.path": PATH,
        "rollout.engine.name": "vllm_server",
        "rollout.engine.urls": urls,
        "rollout.engine.shared_folder": str(tmp_path / "shared"),
        "rollout.engine.num_retries": 0,
        "out": str(tmp_path / "run"),
        **settings,
    }
    return compose(AlignmentConfig, [SMOKE], [*own.items()])


CONDITIONED = {
    "engine": "stacked",
    "policy.conditioning.kind": "preference",
    "estimator": {"name": "critic_free", "num_replies": 4, "batch_size": 8, "minibatch_size": 4},
    "evaluation.preferences": [[0.2, 0.8]],
}


@pytest.mark.parametrize("settings", [{}, CONDITIONED])
def test_a_run_goes_on_when_a_server_dies(settings, tmp_path, caplog):
    dying, other = SmallServer(PATH, fails_after=40), SmallServer(PATH)
    with served(dying) as first, served(other) as second:
        align(run_of(tmp_path, [first, second], settings))
    rows = read_rows(tmp_path / "run", "client")
    assert rows
    assert all(0 <= row["logprob_mismatch"] < 1e-3 for row in rows)
    assert "is left out of this batch" in caplog.text
    assert dying.num_replies >= 40
    assert not other.names  # all are unloaded at the end
    assert not list((tmp_path / "shared").iterdir())
    with served(SmallServer(PATH)) as url:  # a resumed run may have other servers
        align(run_of(tmp_path, [url], settings | {"rounds": 3, "resume": True}))
    assert read_rows(tmp_path / "run", "round")[-1]["round"] == 3


BRIEF = {
    "rollout.max_new_tokens": 6,
    "evaluation.num_calibration_prompts": 4,
    "evaluation.num_validation_prompts": 0,
    "evaluation.num_test_prompts": 2,
    "evaluation.num_shown_samples": 1,
}
"""Settings of runs with few and short replies, each of which is a server's pass."""


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, CONDITIONED])
def test_the_next_batch_is_an_older_adapters_and_resumes_bit_for_bit(settings, tmp_path):
    own = settings | {"rollout.max_staleness": 1, **BRIEF}
    with served(SmallServer(PATH)) as url:
        align(run_of(tmp_path, [url], own))
        for rounds in (1, 2):
            other = {"rounds": rounds, "resume": rounds > 1, "out": str(tmp_path / "resumed")}
            align(run_of(tmp_path, [url], own | other))
    rows = read_rows(tmp_path / "run", "client")
    assert rows
    for row in rows:  # of two local steps, the second has replies of the first's adapter
        assert row["staleness"] == 0.5
        assert row["logprob_mismatch"] < 1e-3  # of the first
        assert 0 <= row["capped_weight_share"] < 0.2
    assert distance(tmp_path / "run", tmp_path / "resumed") == 0.0


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (TransformersConfig(), "engine.name must be vllm_server with rollout.max_staleness 1, got"),
        (
            VLLMServerConfig(urls=["http://a"], shared_folder="s", importance_cap=None),
            "importance_cap must be a number with rollout.max_staleness 1, got null",
        ),
    ],
)
def test_older_adapters_need_servers_and_weights(engine, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(engine=engine, max_staleness=1)


def test_older_adapters_need_several_local_steps(tmp_path):
    settings = {"rollout.max_staleness": 1, "strategy.num_local_steps": 1}
    with pytest.raises(UserError, match="num_local_steps must be above 1 with"):
        run_of(tmp_path, ["http://a"], settings)

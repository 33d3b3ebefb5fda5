"""Replies to equal prompts, whose prompt is passed once, are as if each had passed its own."""

from weakref import WeakKeyDictionary

import pytest
import torch

from firm.alignment import LoraSettings
from firm.alignment import head as heads
from firm.alignment.generation import RolloutConfig
from firm.alignment.policy import PolicyConfig, add_adapter
from firm.alignment.prompts import Prompt
from firm.alignment.rollout_engines import SampleRequest, transformers
from firm.alignment.sequences import Queries, left_padded
from firm.alignment.stacked import model as stacked_model
from firm.alignment.stacked.model import StackedModel
from tests.sampling import generate
from tests.zoo.architectures import ARCHITECTURES

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TAKEN = [name for name, each in ARCHITECTURES.items() if "everywhere" not in each.refused]
STACKED = [name for name in TAKEN if "stacked" not in ARCHITECTURES[name].refused]
LENGTHS = [21, 5, 21, 9]  # beyond the sliding windows of 16, and within
pytestmark = pytest.mark.filterwarnings("ignore:.*fast path.*")


@pytest.fixture
def large(monkeypatch) -> None:
    """Counts every vocabulary as large."""
    monkeypatch.setattr(heads, "LARGE_VOCABULARY", 0)
    monkeypatch.setattr(heads, "_formulas", WeakKeyDictionary())


def prompts(vocabulary: int, order, *, seed: int = 0) -> Queries:
    """Prompts of four texts in some order."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]
    ids, lengths = left_padded([texts[at] for at in order], fill=0)
    return Queries([Prompt("")] * len(order), ids, lengths)


def test_rows_are_distinct_by_tokens_padding_and_preferences():
    ids, lengths = (
        torch.tensor([[0, 5], [0, 5], [6, 5], [0, 5], [0, 5]]),
        torch.tensor([2, 1, 2, 1, 1]),
    )
    preferences = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.1, 0.9]])
    plain = Queries([Prompt("")] * 5, ids, lengths)
    first, index = plain.distinct()
    assert (first.tolist(), index.tolist()) == ([0, 1, 2], [0, 1, 2, 1, 1])
    first, index = Queries([Prompt("")] * 5, ids, lengths, preferences).distinct()
    assert (first.tolist(), index.tolist()) == ([0, 1, 2, 4], [0, 1, 2, 1, 3])


@pytest.mark.parametrize("name", TAKEN)
def test_every_architecture_samples_as_with_a_prompt_in_each_row(
    name, tokenizer, large, monkeypatch
):
    model = ARCHITECTURES[name].model(SPECIAL).requires_grad_(False)
    asked = prompts(model.config.get_text_config().vocab_size, [0, 0, 1, 0, 2, 3, 1, 1])
    config = RolloutConfig(max_new_tokens=8, temperature=1.0, stop_strings=[])
    heads.head_of(model)  # compares its formula, in a pass of its own
    results, rows = [], []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, options: rows.append(len(options["input_ids"])), with_kwargs=True
    )
    for is_shared in (True, False):
        if not is_shared:
            monkeypatch.setattr(transformers, "shares_prompts", lambda _: False)
        torch.manual_seed(0)
        results.append(generate(model, asked, tokenizer=tokenizer, config=config, end_ids=[2]))
    handle.remove()
    has_cache = "stacked" not in ARCHITECTURES[name].refused
    assert rows[0] == (4 if has_cache else 8)  # the distinct prompts, or all
    (ids, logprobs), (plain_ids, plain_logprobs) = results
    assert torch.equal(ids, plain_ids)
    real = plain_ids[:, asked.token_ids.size(1) :] != 0
    torch.testing.assert_close(logprobs[real], plain_logprobs[real], rtol=1e-4, atol=1e-5)


def test_a_large_head_multiplies_adjacent_states_of_the_last_position(tokenizer, large):
    # torch copies the head's matrix once per row for a view of some positions
    model = ARCHITECTURES["llama"].model(SPECIAL).requires_grad_(False)
    heads.head_of(model)
    states = []
    model.get_output_embeddings().register_forward_hook(
        lambda _module, inputs, _output: states.append(
            (inputs[0].size(1), inputs[0].is_contiguous())
        )
    )
    asked = prompts(model.config.vocab_size, [0, 0, 1, 2])
    config = RolloutConfig(max_new_tokens=3, stop_strings=[])
    generate(model, asked, tokenizer=tokenizer, config=config, end_ids=[2])
    assert set(states) == {(1, True)}


@pytest.mark.parametrize("name", STACKED)
def test_every_architecture_samples_in_joint_passes_as_with_a_prompt_in_each_row(
    name, large, monkeypatch
):
    model = ARCHITECTURES[name].model(SPECIAL)
    vocabulary = model.config.get_text_config().vocab_size
    policy = add_adapter(model, PolicyConfig("it", lora=LoraSettings(target_modules=None)))
    stack = StackedModel(policy)
    adapters = [stack.new_adapter() for _ in range(3)]
    for at, adapter in enumerate(adapters):
        generator = torch.Generator().manual_seed(at)
        for parameter in adapter.values():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    config = RolloutConfig(max_new_tokens=8, temperature=1.0, stop_strings=[])
    orders = [[0, 0, 0, 1], [1, 2, 1, 2, 2], [3]]

    def sample():
        requests = [
            SampleRequest(
                prompts(vocabulary, order),
                config,
                [2],
                adapter=adapter,
                generator=torch.Generator().manual_seed(at),
            )
            for at, (order, adapter) in enumerate(zip(orders, adapters, strict=True))
        ]
        return [(samples.token_ids, samples.logprobs) for samples in stack.sample(requests)]

    shared = sample()
    monkeypatch.setattr(stacked_model, "shares_prompts", lambda _: False)
    for (ids, logprobs), (plain_ids, plain_logprobs) in zip(shared, sample(), strict=True):
        assert torch.equal(ids, plain_ids)
        real = plain_ids[:, -logprobs.size(1) :] >= 0
        torch.testing.assert_close(logprobs[real], plain_logprobs[real], rtol=1e-4, atol=1e-5)


def test_finished_rows_leave_the_batch_and_change_no_token(
    make_model, tokenizer, large, monkeypatch
):
    model = make_model().requires_grad_(False)
    asked = prompts(15, [0, 1, 2, 3] * 4)
    config = RolloutConfig(max_new_tokens=12, temperature=1.0, stop_strings=[])
    sizes = []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, options: sizes.append(len(options["input_ids"])), with_kwargs=True
    )
    results = []
    for is_own in (True, False):
        if not is_own:
            handle.remove()
            monkeypatch.setattr(transformers, "shares_prompts", lambda _: False)
        torch.manual_seed(0)
        ids, _ = generate(
            model, asked, tokenizer=tokenizer, config=config, end_ids=list(range(2, 7))
        )
        results.append((ids, torch.get_rng_state()))
    assert sizes[1] == 4  # the distinct prompts, after the comparison of the head
    assert 16 >= max(sizes[2:]) > sizes[-1]
    for own, plain in zip(*results, strict=True):
        assert torch.equal(own, plain)

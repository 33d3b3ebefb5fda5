"""The head without logits gives the log-probabilities, entropies and gradients of the plain way."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from firm.alignment import head as heads
from firm.alignment.head import Head, chosen_logprobs, head_of
from firm.alignment.live_bytes import LiveBytes
from firm.alignment.self_check import check_passes
from firm.alignment.sequences import Queries, Sequences, forward, token_scores
from firm.gradients.per_sequence import PerSequenceGradients
from tests.tokens import queries
from tests.zoo.architectures import ARCHITECTURES, cases

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
pytestmark = pytest.mark.filterwarnings(  # PEFT's own
    "ignore:.*is_gradient_checkpointing.*:FutureWarning"
)
TAKEN = [name for name, each in ARCHITECTURES.items() if "everywhere" not in each.refused]


@pytest.fixture
def large(monkeypatch) -> None:
    """Counts every vocabulary as large, in chunks of a few positions."""
    monkeypatch.setattr(heads, "LARGE_VOCABULARY", 0)
    monkeypatch.setattr(heads, "MAX_ENTRIES", 1000)
    monkeypatch.setattr(heads, "_formulas", weakref.WeakKeyDictionary())


def tiny(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip


def batch(vocabulary: int, *, seed: int = 0) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (3, 9), generator=generator)
    asked: Queries = queries(ids[:, :4])
    return Sequences(asked, ids, torch.tensor([5, 3, 4]))


def scores(model, rows: Sequences, temperature: float = 0.7):
    output = forward(model, rows.query_responses, rows.attention_mask)
    return token_scores(output, rows, temperature)


@pytest.mark.parametrize("name", cases(TAKEN))
def test_every_architecture_of_the_zoo_has_the_same_scores_and_gradients(name, monkeypatch) -> None:
    model = ARCHITECTURES[name].model(SPECIAL)
    model.requires_grad_(False)
    embedding = model.get_input_embeddings().weight.requires_grad_(True)
    head = model.get_output_embeddings()
    if head.weight is embedding:  # the gradient below is of the states alone, as with an adapter
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    rows = batch(model.config.get_text_config().vocab_size)
    found = []
    for limit in (10**9, 0):
        monkeypatch.setattr(heads, "LARGE_VOCABULARY", limit)
        monkeypatch.setattr(heads, "MAX_ENTRIES", 1000)
        monkeypatch.setattr(heads, "_formulas", weakref.WeakKeyDictionary())
        scored = scores(model, rows)
        weights = torch.linspace(-1, 1, scored.logprobs.numel()).view_as(scored.logprobs)
        loss = (weights * scored.logprobs)[rows.mask].sum()
        (gradient,) = torch.autograd.grad(loss, embedding)
        found.append((scored.logprobs[rows.mask], scored.entropies()[rows.mask], gradient))
    assert head_of(model) is not None
    for plain, own in zip(*found, strict=True):
        scale = plain.abs().max()
        assert (plain - own).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("cap", [None, 2.0])
def test_gradients_are_those_of_differences(cap) -> None:
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(6, 50).double().requires_grad_(False)
    states = torch.randn(2, 4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    ids = torch.randint(0, 50, (2, 4), generator=generator)
    head = Head(module, scale=0.3, cap=cap)
    assert torch.autograd.gradcheck(lambda s: chosen_logprobs(head, s, ids, 0.8)[0], (states,))


def test_no_tokens_have_no_scores() -> None:
    states = torch.randn(2, 0, 4, requires_grad=True)
    head = Head(torch.nn.Linear(4, 9_000).requires_grad_(False))
    found = chosen_logprobs(head, states, torch.zeros(2, 0, dtype=torch.long), 1.0)
    assert [each.shape for each in found] == [(2, 0), (2, 0)]
    found[0].sum().backward()


def test_several_objectives_share_one_gradient_of_the_head(large) -> None:
    config = tiny(400)
    torch.manual_seed(0)
    model = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=2, init_lora_weights=False, lora_dropout=0.0)
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows, passes = batch(400), []
    part = heads._part

    def counted(scratch, states, ids, **options):
        passes.append(len(states))
        return part(scratch, states, ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "_part", counted)
        scored = scores(model, rows)
        each = scored.logprobs.masked_fill(~rows.mask, 0)
        losses = [(k + 1) * each[:, k].sum() for k in range(4)]
        loop = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    assert sum(passes) == rows.responses.numel()  # the head was passed once for four objectives
    with PerSequenceGradients(model, parameters) as gradients:
        each = scores(model, rows).logprobs.masked_fill(~rows.mask, 0)
        rewards = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]])
        jacobian = gradients.jacobian(each.sum(1), rewards)
    for row, factors in zip(jacobian, rewards, strict=True):
        each = scores(model, rows).logprobs.masked_fill(~rows.mask, 0)
        alone = torch.autograd.grad(factors @ each.sum(1), parameters)
        expected = torch.cat([gradient.flatten() for gradient in alone])
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-6)
    assert all(any(g.abs().max() > 0 for g in gradients) for gradients in loop)


def test_nothing_of_the_size_of_the_logits_is_held(large, monkeypatch) -> None:
    """Of 2 × 64 positions and 5,000 tokens, at most ten positions' logits are alive at a time."""
    monkeypatch.setattr(heads, "MAX_ENTRIES", 50_000)
    module = torch.nn.Linear(4, 5_000, bias=False).requires_grad_(False)
    states = torch.randn(2, 64, 4, requires_grad=True)
    with LiveBytes(module) as live:
        logprobs, _ = chosen_logprobs(
            Head(module), states, torch.zeros(2, 64, dtype=torch.long), 1.0
        )
        logprobs.sum().backward()
    assert live.peak < 4 * 50_000 * 4 < 2 * 64 * 5_000 * 4


def test_a_head_that_is_trained_or_altered_goes_the_plain_way(large) -> None:
    config = tiny(300)
    model = LlamaForCausalLM(config).requires_grad_(False)
    assert head_of(model) is not None
    trained = LlamaForCausalLM(config)
    assert head_of(trained) is None
    altered = LlamaForCausalLM(config).requires_grad_(False)
    plain = altered.forward
    altered.forward = lambda **options: SimpleNamespace(logits=2 * plain(**options).logits)
    assert head_of(altered) is None
    adapted = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    )
    assert head_of(adapted) is None


def test_small_vocabularies_go_the_plain_way_and_heads_are_forgotten_with_their_models() -> None:
    config = tiny(9_000)
    model = LlamaForCausalLM(config).requires_grad_(False)
    assert head_of(model) is not None
    module = weakref.ref(model.lm_head)
    del model
    gc.collect()
    assert module() is None
    small = LlamaForCausalLM(tiny(819))
    assert head_of(small.requires_grad_(False)) is None


def test_a_head_is_compared_when_its_policy_is_loaded(large, monkeypatch) -> None:
    """Later passes may have preferences, or adapters of several clients, for other rows."""
    model = get_peft_model(LlamaForCausalLM(tiny(300)).eval(), LoraConfig(r=2))
    check_passes(model, "the policy")
    monkeypatch.setattr(heads, "_agrees", lambda *_: pytest.fail("compared in a pass"))
    rows = batch(300)
    assert forward(model, rows.query_responses, rows.attention_mask).head is not None

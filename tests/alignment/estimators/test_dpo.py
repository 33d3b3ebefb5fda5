"""DPO on pairs against TRL's trainer, and M gradients from one backward pass against a loop."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig as TRLConfig
from trl import DPOTrainer

from firm.alignment import KLConfig, RolloutConfig
from firm.alignment.batches import PairSource
from firm.alignment.estimator_config import DPOConfig
from firm.alignment.pair_tokens import collate
from firm.alignment.pairs import Pair
from firm.alignment.prompts import Prompt, PromptFormat
from firm.alignment.reply_tokens import encode_replies
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.federation import RandomStream

ROWS = [
    ("abc", "de", "fghij"),
    ("a", "bcd", "j"),
    ("jihg", "cab", "bee"),
    ("cd", "e fg", "aa"),
    ("bad", "cafe", "a"),
    ("hi", "j", "abcdefg"),
    ("dig", "bed", "fed"),
    ("face", "cabbage", "bead"),
]
OPTIONS = {"robust": {"label_smoothing": 0.2}, "exo_pair": {"label_smoothing": 0.1}}
LOSS_TYPES = [
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust"),
    *("exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def make_pairs_trainer(tokenizer, make_policy):
    def make(objectives=("one",), **changes) -> MultiObjectiveTrainer:
        policy = changes.pop("policy", None) or make_policy()
        return MultiObjectiveTrainer(
            DPOConfig(**{"batch_size": 8, "minibatch_size": 8, "beta": 0.3, **changes}),
            rollout_config=RolloutConfig(max_new_tokens=10, temperature=0.5, stop_strings=[]),
            prompt_format=PromptFormat(name="plain"),
            policy=policy,
            tokenizer=tokenizer,
            reward_fns={},
            objectives=objectives,
            num_rounds=1,
        )

    return make


def encoded(trainer):
    names = trainer.objectives
    pairs = [
        Pair(Prompt(prompt), chosen, rejected, names[at % len(names)])
        for at, (prompt, chosen, rejected) in enumerate(ROWS)
    ]
    return trainer.encode_pairs(pairs)


def gradients(trainer, weights=None, **options):
    batch = trainer.collated(encoded(trainer), options.get("preference"))
    return trainer.gradients(trainer.new_learner(), batch, weights)


def trl_gradients(policy, start, tokenizer, folder, loss_type, **options):
    """Returns the loss and the gradient of TRL's trainer on all rows in one batch.

    Its reference is the policy as given, with a fresh adapter; the gradient is taken at `start`.
    """
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in ROWS]
    trainer = DPOTrainer(
        policy,
        args=TRLConfig(
            output_dir=str(folder),
            loss_type=loss_type,
            beta=0.3,
            per_device_train_batch_size=len(ROWS),
            max_length=None,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_dropout=True,
            **options,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    own = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    for name, parameter in own.items():
        parameter.data.copy_(start.get_parameter(name))
    (batch,) = trainer.get_train_dataloader()
    loss = trainer.compute_loss(policy, batch)
    loss.backward()
    own = own.values()
    return loss.item(), torch.cat([p.grad.flatten() for p in own])


def test_minibatches_are_shuffled_and_have_pairs_of_every_objective(make_pairs_trainer):
    trainer = make_pairs_trainer(("one", "two"), minibatch_size=4, num_epochs=3)
    source = PairSource(
        encoded(trainer), trainer, partial(RandomStream, 0), judges=None, client="a"
    )
    found = [rows.tolist() for rows in source.minibatch_indices()]
    assert [sorted(at % 2 for at in rows) for rows in found] == [[0, 0, 1, 1]] * 6
    epochs = [found[at] + found[at + 1] for at in (0, 2, 4)]
    assert [sorted(rows) for rows in epochs] == [[*range(8)]] * 3
    assert len({tuple(rows) for rows in [*epochs, [*range(8)]]}) == 4


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("loss_type", "vocabulary"),
    [*((name, "small") for name in LOSS_TYPES), ("sigmoid", "large"), ("sppo_hard", "large")],
    indirect=["vocabulary"],
)
def test_with_one_objective_loss_and_gradient_equal_trls(
    make_pairs_trainer, make_policy, make_tokenizer, tmp_path, loss_type, vocabulary
):
    options = OPTIONS.get(loss_type, {})
    policy, theirs, start = (  # in float64, where only the formulas can differ
        make_policy(fresh=is_fresh).double() for is_fresh in (False, True, False)
    )
    own = gradients(make_pairs_trainer(policy=policy, loss_type=loss_type, **options))
    tokenizer = make_tokenizer(bos_token=None)
    loss, gradient = trl_gradients(theirs, start, tokenizer, tmp_path, loss_type, **options)
    assert own.losses.item() == pytest.approx(loss, rel=1e-6, abs=1e-6)
    scale = gradient.norm()
    assert scale > 1e-4
    assert (own.jacobian[0] - gradient).norm() < 1e-6 * scale


FOUR = ("a", "b", "c", "d")


@pytest.mark.parametrize("vocabulary", ["small", "large"], indirect=True)
def test_four_gradients_of_one_backward_pass_equal_a_loop(make_pairs_trainer, vocabulary):
    trainer = make_pairs_trainer(FOUR)
    assert trainer.prompts_once == (vocabulary == "large")
    own = gradients(trainer)
    for j in range(4):
        pairs = [pair for pair in encoded(trainer) if pair.objective == j]
        logprobs = torch.stack([_by_hand(trainer, pair) for pair in pairs])  # [b, 2]
        ratios = logprobs - torch.tensor([pair.reference for pair in pairs])
        loss = -torch.nn.functional.logsigmoid(0.3 * (ratios[:, 0] - ratios[:, 1])).mean()
        parameters = list(trainer.adapter_parameters.values())
        row = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        assert own.losses[j].item() == pytest.approx(loss.item(), abs=1e-5)
        assert (own.jacobian[j] - row).norm() < 1e-5 * row.norm()


def _by_hand(trainer, pair):
    rows = []
    for reply in pair.reply_ids:
        ids = torch.tensor([pair.prompt_ids + reply])
        logprobs = torch.log_softmax(trainer.policy_model(input_ids=ids).logits, -1)[0, :-1]
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        rows.append(chosen[len(pair.prompt_ids) - 1 :].sum())
    return torch.stack(rows)


@pytest.mark.parametrize("vocabulary", ["small", "large"], indirect=True)
def test_the_gradient_of_a_weighted_sum_is_the_weighted_sum_of_the_rows(
    make_pairs_trainer, vocabulary
):
    trainer = make_pairs_trainer(("a", "b"))
    weights = torch.tensor([0.3, 0.7])
    rows, mixed = gradients(trainer), gradients(trainer, weights)
    assert mixed.jacobian.shape[0] == 1
    torch.testing.assert_close(mixed.jacobian[0], weights @ rows.jacobian, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(mixed.losses, rows.losses)


@pytest.mark.parametrize("vocabulary", ["large"], indirect=True)
def test_prompts_take_one_backward_pass_for_all_objectives(make_pairs_trainer, vocabulary):
    trainer, shapes = make_pairs_trainer(FOUR), []
    layer = trainer.policy_model.get_base_model().model.layers[0].self_attn.q_proj

    def watch(_, __, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: shapes.append(len(gradient)))

    layer.register_forward_hook(watch)
    gradients(trainer)
    assert sorted(shapes) == [8, 16]  # prompts and replies


@pytest.mark.parametrize("vocabulary", ["small", "large"], indirect=True)
def test_gradients_do_not_depend_on_the_pairs_per_pass(make_pairs_trainer, make_policy, vocabulary):
    policy = make_policy()
    whole = gradients(make_pairs_trainer(FOUR, policy=policy))
    trainer = make_pairs_trainer(FOUR, policy=policy, micro_batch_size=3)
    padded = []
    embedding = policy.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, inputs: padded.append(inputs[0].numel()))
    batch = trainer.collated(encoded(trainer))
    padded.clear()
    parts = trainer.gradients(trainer.new_learner(), batch)
    lengths = sorted(batch.lengths.tolist())
    assert [max(part.lengths.tolist()) for part in batch.parts(3)] == lengths[2::3] + lengths[-1:]
    assert sum(padded) < 0.9 * batch.sequences.query_responses.numel()
    torch.testing.assert_close(parts.jacobian, whole.jacobian, atol=1e-6, rtol=1e-4)
    for name, values in whole.aux.metrics.items():
        torch.testing.assert_close(parts.aux.metrics[name], values)


@pytest.mark.parametrize("vocabulary", ["small", "large"], indirect=True)
def test_a_part_of_empty_replies_adds_nothing(make_pairs_trainer, make_policy, vocabulary):
    policy, found = make_policy(), []
    for size in (None, 1):
        trainer = make_pairs_trainer(FOUR, policy=policy, micro_batch_size=size)
        batch = trainer.collated(encoded(trainer))
        num_tokens = batch.num_tokens.clone()
        num_tokens[1] = 0
        batch = replace(batch, num_tokens=num_tokens)
        found.append(trainer.gradients(trainer.new_learner(), batch))
    whole, parts = found
    torch.testing.assert_close(parts.jacobian, whole.jacobian, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(parts.losses, whole.losses)


def test_a_fresh_adapter_has_losses_of_log_2_and_margins_of_zero(make_pairs_trainer, make_policy):
    trainer = make_pairs_trainer(("a", "b"), policy=make_policy(fresh=True))
    own = gradients(trainer)
    torch.testing.assert_close(own.losses, torch.full((2,), 2.0).log(), atol=1e-6, rtol=0)
    assert own.aux.metrics["pair_margin"].abs().max() < 1e-5
    values = trainer.reply_logprobs(encoded(trainer))
    assert torch.equal(values, torch.tensor([pair.reference for pair in encoded(trainer)]))


def test_without_a_reference_the_loss_depends_on_the_policy_alone(make_pairs_trainer, make_policy):
    trainer = make_pairs_trainer(("a",), policy=make_policy(fresh=True), reference_free=True)
    pairs = encoded(trainer)
    reference = torch.tensor([pair.reference for pair in pairs])
    expected = -torch.nn.functional.logsigmoid(0.3 * (reference[:, 0] - reference[:, 1])).mean()
    found = gradients(trainer)
    assert found.losses.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.aux.metrics["pair_margin"].abs().max() < 1e-5  # as of held-out pairs


def test_the_reference_is_read_from_disk_until_the_model_or_the_pairs_change(
    make_pairs_trainer, make_policy, monkeypatch
):
    computed = []
    compute = MultiObjectiveTrainer.reply_logprobs

    def counted(self, pairs, **options):
        computed.append(len(pairs))
        return compute(self, pairs, **options)

    monkeypatch.setattr(MultiObjectiveTrainer, "reply_logprobs", counted)
    policy = make_policy()
    first = encoded(make_pairs_trainer(policy=policy))
    trainer = make_pairs_trainer(policy=policy)
    with torch.no_grad():  # an adapter does not change the reference
        next(iter(trainer.adapter_parameters.values())).add_(1.0)
    assert encoded(trainer) == first
    assert computed == [8]
    trainer.encode_pairs([pair.pair for pair in first][:4])
    assert computed == [8, 4]
    with torch.no_grad():
        policy.get_base_model().lm_head.weight[5] += 0.1
    changed = encoded(trainer)
    assert computed == [8, 4, 8]
    assert changed[0].reference != first[0].reference
    trainer.prompts_once = True  # passes that round differently
    encoded(trainer)
    assert computed == [8, 4, 8, 8]


def test_a_damaged_file_of_references_is_replaced(make_pairs_trainer, tmp_path):
    trainer = make_pairs_trainer()
    first = encoded(trainer)
    (file,) = (tmp_path / "cache/firm/references").iterdir()
    file.write_bytes(b"{}")
    assert encoded(trainer) == first


def test_a_reply_ends_with_the_end_token_unless_it_is_cut(make_pairs_trainer, tokenizer):
    trainer = make_pairs_trainer()
    long = replace(encoded(trainer)[0].pair, rejected="abcdefghijabc")
    (pair,) = trainer.encode_pairs([long])
    assert pair.reply_ids[0][-1] == tokenizer.eos_token_id
    assert len(pair.reply_ids[1]) == 10
    assert tokenizer.eos_token_id not in pair.reply_ids[1]
    assert pair.is_cut == (False, False, True)
    batch = collate([pair], 1, pad_id=tokenizer.pad_token_id)
    assert batch.sequences.mask.sum(1).tolist() == [3, 10]


@pytest.mark.parametrize(("closing", "end"), [("</s>", [2]), ("<s>", [1]), ("", [2])])
def test_a_reply_in_a_chat_ends_as_its_template_closes_a_turn(make_tokenizer, closing, end):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + closing + "{% endfor %}"

    def end_of(name, ends):
        (own,) = encode_replies(
            [Pair(Prompt("a"), "ab", "ba")],
            tokenizer,
            prompt_format=PromptFormat(name),
            end_ids=ends,
        )
        return own.reply_ids[0][2 if name == "chat" else 3 :]

    assert end_of("chat", [2, 1]) == end
    assert end_of("hh", [2, 1]) == [2]
    assert end_of("hh", []) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing": 0.1}, "label_smoothing must be 0 with loss_type sigmoid"),
        ({"loss_type": "exo_pair"}, "label_smoothing must be positive"),
        ({"missing_end_penalty": 1.0}, "missing_end_penalty must be left out"),
        ({"kl": KLConfig(coefficient=0.3)}, "kl must be left out"),
    ],
)
def test_options_without_an_effect_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DPOConfig(**changes)

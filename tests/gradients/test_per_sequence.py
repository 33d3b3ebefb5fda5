import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from firm.gradients import jacobian, per_sequence
from firm.gradients.per_sequence import (
    BackwardPasses,
    PerSequenceGradients,
    add_weight_gradients_,
)

# names that transformers changed within its version 5, and peft and this file still use
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is dep:FutureWarning")

FLOAT32 = 1e-6  # relative, per row; sums in another order
BFLOAT16 = 2e-2  # two to three units in the last place, 2⁻⁸, accumulated over the layers

NUM_SEQUENCES = 5
LENGTHS = torch.tensor([7, 3, 6, 1, 4])


def _llama(*, dropout=0.0, targets=("q_proj", "v_proj", "down_proj"), **lora):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    adapter = LoraConfig(
        r=3, target_modules=list(targets), lora_dropout=dropout, init_lora_weights=False, **lora
    )
    return get_peft_model(LlamaForCausalLM(config), adapter).train()


def _trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _losses(model, *, side="right"):
    """Negative log-likelihood of every sequence's own tokens, shape [B]."""
    num_tokens = int(LENGTHS.max())
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 19, (NUM_SEQUENCES, num_tokens), generator=generator)
    mask = torch.arange(num_tokens) < LENGTHS[:, None]
    if side == "left":
        mask = mask.flip(1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(
        input_ids=tokens * mask, attention_mask=mask.long(), position_ids=positions
    ).logits
    nll = torch.nn.functional.cross_entropy(logits.float().mT, tokens, reduction="none")
    return (nll * mask).sum(dim=1)


def _coefficients(num_objectives, num_sequences=NUM_SEQUENCES):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_objectives, num_sequences, generator=generator)


def _loop(losses, coefficients, parameters):
    """The rows from one backward pass per objective, on a graph that is kept."""
    weighted = [(row * losses).sum() for row in coefficients]
    return jacobian(weighted, parameters, retain_graph=True)


def _assert_rows_equal(rows, expected, tolerance):
    assert rows.shape == expected.shape
    assert rows.dtype == expected.dtype
    norms = expected.norm(dim=1)
    assert (norms > 0).all()
    assert ((rows - expected).norm(dim=1) / norms).max().item() < tolerance


def _compare(model, losses_fn, tolerance=FLOAT32, *, num_objectives=3):
    """Both routes on one graph, so that they share every random draw."""
    parameters = list(_trainable(model).values())
    with PerSequenceGradients(model, parameters) as gradients:
        losses = losses_fn()
        coefficients = _coefficients(num_objectives, len(losses))
        rows = gradients.jacobian(losses, coefficients, retain_graph=True)
        _assert_rows_equal(rows, _loop(losses, coefficients, parameters), tolerance)


MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Operations(TorchDispatchMode):
    """The operations that run, with the shapes of what they return."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.append((func, tuple(getattr(result, "shape", ()))))
        return result


class Moved(torch.nn.Module):
    """A layer whose rows stand elsewhere in the batch, or share a sequence's input."""

    def __init__(self, before, after):
        super().__init__()
        self.layer, self.before, self.after = torch.nn.Linear(3, 2), before, after

    def forward(self, x):
        return self.after(self.layer(self.before(x)))


class Shared(torch.nn.Module):
    """One layer called twice, on inputs of different lengths."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x))[:, 1:])


@pytest.fixture
def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))


@pytest.fixture
def gradients(network):
    """The block of the whole network, which a test works in."""
    with PerSequenceGradients(network, network.parameters()) as gradients:
        yield gradients


def _network_losses(network, num_tokens=6, num_sequences=NUM_SEQUENCES):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_sequences, num_tokens, 3, generator=generator)
    return network(x).square().sum(dim=(1, 2))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("num_objectives", [1, 2, 8])
def test_rows_of_a_lora_llama_equal_the_loop_on_padded_sequences(side, num_objectives):
    model = _llama()
    _compare(model, lambda: _losses(model, side=side), num_objectives=num_objectives)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but")  # no merging here
def test_rows_equal_the_loop_with_an_adapter_on_every_projection_and_a_bias():
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = _llama(targets=targets, lora_bias=True)
    assert any(name.endswith("lora_B.default.bias") for name in _trainable(model))
    _compare(model, lambda: _losses(model))


def test_rows_equal_the_loop_under_the_same_dropout():
    model = _llama(dropout=0.5)
    first, second = _losses(model), _losses(model)
    assert not torch.equal(first, second)
    _compare(model, lambda: _losses(model))


def test_rows_equal_the_loop_under_gradient_checkpointing():
    model = _llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    num_calls = []
    layer = model.base_model.model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: num_calls.append(1))
    _compare(model, lambda: _losses(model))
    assert len(num_calls) > 1  # computed again


def _autocast(losses_fn):
    with torch.autocast("cpu", torch.bfloat16):
        return losses_fn().float()


def test_rows_of_bfloat16_parameters_or_under_autocast_equal_the_loop_to_bfloat16_accuracy():
    model, whole = _llama().to(torch.bfloat16), _llama()
    _compare(model, lambda: _losses(model), BFLOAT16)
    _compare(whole, lambda: _autocast(lambda: _losses(whole)), BFLOAT16)


@pytest.mark.parametrize("num_tokens", [1, 2, 6])
def test_rows_of_full_weights_and_biases_equal_the_loop(network, num_tokens):
    _compare(network, lambda: _network_losses(network, num_tokens))


def test_a_single_sequence_is_a_batch(network):
    _compare(network, lambda: _network_losses(network, num_sequences=1))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 6, 3), torch.float64), ((4, 3), torch.float32), ((4, 2, 3, 3), torch.float32)],
    ids=["float64", "one token per sequence", "two dimensions of tokens"],
)
def test_an_input_of_another_type_or_without_or_with_more_dimensions_of_tokens_is_covered(
    network, shape, dtype
):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    network.to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else FLOAT32
    _compare(network, lambda: network(x).exp().flatten(1).sum(dim=1), tolerance)


def test_a_layer_called_twice_gets_both_calls_gradients():
    torch.manual_seed(0)
    model = Shared()
    _compare(model, lambda: _network_losses(model))
    # autocast casts its weight once
    _compare(model, lambda: _autocast(lambda: _network_losses(model)), BFLOAT16)


def test_one_weight_in_two_layers_gets_both_layers_gradients():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    _compare(model, lambda: _network_losses(model))


def test_a_hook_of_someone_else_that_scales_the_output_is_respected(network):
    network[0].register_forward_hook(lambda layer, args, output: 3 * output)
    _compare(network, lambda: _network_losses(network))


def test_an_output_changed_in_place_is_an_error_and_not_a_wrong_row():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True))
    with (
        PerSequenceGradients(model, model.parameters()),
        pytest.raises(RuntimeError, match="modified inplace"),
    ):
        _network_losses(model)


def test_rows_are_the_hand_computed_sums():
    layer = torch.nn.Linear(2, 1, bias=False)
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 1.0]]])  # [2, 2, 2]
    with PerSequenceGradients(layer, [layer.weight]) as gradients:
        losses = layer(x).sum(dim=(1, 2))  # gradients [4, 6] and [5, 7]
        rows = gradients.jacobian(losses, torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, -1.0]]))
    assert rows.tolist() == [[4, 6], [10, 14], [-1, -1]]


def test_columns_follow_the_parameters_order_and_may_be_few(network):
    parameters = [network[2].bias, network[0].weight]
    with PerSequenceGradients(network, parameters) as gradients:
        losses = _network_losses(network)
        rows = gradients.jacobian(losses, _coefficients(2), retain_graph=True)
        _assert_rows_equal(rows, _loop(losses, _coefficients(2), parameters), FLOAT32)


def test_backward_passes_give_the_same_rows_whatever_the_modules(network):
    parameters = dict(network.named_parameters())
    coefficients = _coefficients(3)
    with PerSequenceGradients(network, parameters) as gradients:
        expected = gradients.jacobian(_network_losses(network), coefficients)
    with BackwardPasses(parameters) as gradients:
        losses = _network_losses(network)
        rows = gradients.jacobian(losses, coefficients, retain_graph=True)
        _assert_rows_equal(rows, expected, FLOAT32)
        with pytest.raises(ValueError, match="one per objective and sequence"):
            gradients.jacobian(losses, coefficients[:, 1:])


def test_a_mapping_of_names_gives_the_same_rows(network):
    by_name = _trainable(network)
    rows = []
    for parameters in (by_name, by_name.values()):
        with PerSequenceGradients(network, parameters) as gradients:
            rows.append(gradients.jacobian(_network_losses(network), _coefficients(2)))
    assert torch.equal(rows[0], rows[1])


def test_a_layer_that_the_losses_do_not_use_has_zero_columns(network):
    network.unused = torch.nn.Linear(2, 2)
    with PerSequenceGradients(network, network.parameters()) as gradients:
        losses = _network_losses(torch.nn.Sequential(*network[:3]))
        rows = gradients.jacobian(losses, _coefficients(2), retain_graph=True)
        assert torch.equal(rows[:, -6:], torch.zeros(2, 6))
        _assert_rows_equal(rows, _loop(losses, _coefficients(2), network.parameters()), FLOAT32)


def test_hooks_change_no_loss_and_are_gone_after_the_block(network):
    plain = _network_losses(network)
    gradients = PerSequenceGradients(network, network.parameters())
    with gradients:
        assert torch.equal(_network_losses(network), plain)
        assert len(network[0]._forward_hooks) == 1
    assert not network[0]._forward_hooks
    with pytest.raises(KeyError), gradients:
        raise KeyError
    assert not network[0]._forward_hooks
    with gradients:  # and may be used again
        gradients.jacobian(_network_losses(network), _coefficients(2))
    assert not network[0]._forward_hooks


def test_a_failed_backward_pass_leaves_later_ones_alone(network):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients):
            raise ArithmeticError("broken")

    parameters = list(network.parameters())
    with PerSequenceGradients(network, parameters) as gradients:
        with pytest.raises(ArithmeticError):
            gradients.jacobian(Broken.apply(_network_losses(network)), _coefficients(2))
        assert gradients._target is None  # nothing is added to its rows


def test_parameters_and_their_grads_stay_untouched(network):
    _network_losses(network).sum().backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in network.parameters()]
    with PerSequenceGradients(network, network.parameters()) as gradients:
        gradients.jacobian(_network_losses(network), _coefficients(2))
    for parameter, (value, grad) in zip(network.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, grad)


def test_other_passes_within_the_block_are_what_they_always_are(network):
    plain = jacobian([_network_losses(network).sum()], network.parameters())
    with PerSequenceGradients(network, network.parameters()) as gradients:
        assert torch.equal(jacobian([_network_losses(network).sum()], network.parameters()), plain)
        for without_graph in (torch.no_grad(), torch.inference_mode()):
            with without_graph:
                assert not _network_losses(network).requires_grad
        losses = _network_losses(network)
        rows = gradients.jacobian(losses, torch.ones(1, NUM_SEQUENCES))
    _assert_rows_equal(rows, plain, FLOAT32)


def test_the_graph_is_freed_unless_it_is_to_be_retained(network, gradients):
    losses = _network_losses(network)
    kept = gradients.jacobian(losses, _coefficients(2), retain_graph=True)
    assert torch.equal(gradients.jacobian(losses, _coefficients(2)), kept)
    with pytest.raises(RuntimeError, match="second time"):
        gradients.jacobian(losses, _coefficients(2))


def test_weights_own_gradients_summed_over_sequences_are_not_computed():
    layer = torch.nn.Linear(32, 32)  # 2 x 6 tokens
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))

    def count(rows_fn, losses):
        with Operations() as operations:
            rows_fn(losses)
        return sum(func in MATRIX_PRODUCTS and shape == (32, 32) for func, shape in operations.seen)

    with PerSequenceGradients(layer, layer.parameters()) as gradients:
        coefficients = _coefficients(3, num_sequences=2)
        loss = layer(x).square().sum(dim=(1, 2))
        route = count(lambda ls: gradients.jacobian(ls, coefficients, retain_graph=True), loss)
        loop = count(lambda ls: _loop(ls, coefficients, layer.parameters()), loss)
    assert (route, loop) == (0, 3)


@pytest.mark.parametrize(
    ("num_objectives", "num_tokens", "is_by_sequence"),
    [(1, 6, False), (3, 1, False), (2, 2, False), (2, 3, True), (3, 6, True)],
)
@pytest.mark.parametrize("max_entries", [1, 40, 2**20])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_either_way_through_a_layer_adds_the_same_in_the_memory_allowed(
    monkeypatch, num_objectives, num_tokens, is_by_sequence, max_entries, num_groups
):
    monkeypatch.setattr(per_sequence, "MAX_PRODUCT_ENTRIES", max_entries)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_groups, 7, num_tokens, 5, generator=generator)
    deltas = torch.randn(num_groups, 7, num_tokens, 4, generator=generator)
    coefficients = torch.stack([_coefficients(num_objectives, 7) + at for at in range(num_groups)])
    buffer = torch.ones(num_groups, num_objectives, 30)
    with Operations() as operations:
        add_weight_gradients_(buffer[..., 3:23], coefficients, x, deltas)
    products = [
        shape
        for func, shape in operations.seen
        if func == torch.ops.aten.bmm.default and shape[1:] == (4, 5)
    ]
    expected = 7 * num_groups if is_by_sequence else 0
    assert sum(num_apart for num_apart, *_ in products) == expected
    assert all(math.prod(shape) <= max(20 * num_groups, max_entries) for shape in products)
    exact = torch.einsum("cjb,cbto,cbti->cjoi", *(t.double() for t in (coefficients, deltas, x)))
    torch.testing.assert_close(buffer[..., 3:23], 1 + exact.flatten(2).float())
    assert (buffer[..., :3] == 1).all()
    assert (buffer[..., 23:] == 1).all()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.nn.Sequential(torch.nn.Embedding(3, 3)), "0.weight of a Embedding"),
        (lambda: torch.nn.Sequential(torch.nn.LayerNorm(3)), "0.weight of a LayerNorm"),
        (lambda: torch.nn.Conv1d(2, 2, 1), "weight of a Conv1d"),
        (lambda: torch.nn.MultiheadAttention(4, 2), "in_proj_weight of a MultiheadAttention"),
        (lambda: _llama(use_dora=True), "lora_magnitude_vector.default.weight of a Dora"),
        (
            lambda: _llama(targets=["q_proj", "embed_tokens"]),
            "embed_tokens.lora_embedding_A.default of a ParameterDict",
        ),
        (lambda: _llama(modules_to_save=["norm"]), "norm.modules_to_save.default.weight of a "),
    ],
)
def test_a_model_with_other_trainable_parameters_is_refused_by_their_name(make, name):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), make()])
    with pytest.raises(ValueError, match=name):
        PerSequenceGradients(model, model[0].parameters())


def test_a_linear_layer_with_a_forward_of_its_own_is_refused():
    class Doubled(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = torch.nn.Sequential(Doubled(2, 2))
    with pytest.raises(ValueError, match=r"0\.weight of a Doubled is trainable"):
        PerSequenceGradients(model, model.parameters())


def test_a_weight_tied_to_an_embedding_is_refused():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight of a Embedding is trainable"):
        PerSequenceGradients(model, [model[1].weight])


def test_parameters_that_are_not_the_models_linear_weights_are_refused(network):
    stranger = torch.ones(7, requires_grad=True)
    with pytest.raises(ValueError, match=r"Parameter 1 of shape \[7\] is no weight or bias"):
        PerSequenceGradients(network, [network[0].weight, stranger])
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"Parameter 0 .* is no weight or bias"):
        PerSequenceGradients(layer, [layer.weight_g, layer.weight_v])


def test_a_parameter_listed_twice_is_refused(network):
    with pytest.raises(ValueError, match="Parameter 2 is listed a second time"):
        PerSequenceGradients(network, [network[0].weight, network[0].bias, network[0].weight])


def test_frozen_and_missing_parameters_are_refused(network):
    network[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"Parameter 0 \('0.weight'\) does not require grad"):
        PerSequenceGradients(network, dict(network.named_parameters()))
    with pytest.raises(ValueError, match="at least one tensor"):
        PerSequenceGradients(network, [])


def test_batch_normalisation_is_refused_where_it_mixes_the_sequences():
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6, affine=False), torch.nn.Linear(6, 1)
    )
    gradients = PerSequenceGradients(model, model.parameters())
    with pytest.raises(ValueError, match="1 normalises over the batch"), gradients:
        pass
    model.eval()
    with gradients:
        losses = model(torch.ones(4, 3)).square().sum(dim=1)
        rows = gradients.jacobian(losses, _coefficients(2, 4), retain_graph=True)
        _assert_rows_equal(rows, _loop(losses, _coefficients(2, 4), model.parameters()), FLOAT32)


def test_a_layer_that_lost_the_dimension_of_sequences_is_refused_by_name(network):
    x = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))
    with PerSequenceGradients(network, network.parameters()) as gradients:
        losses = network(x.flatten(0, 1)).view(4, -1).sum(dim=1)
        with pytest.raises(ValueError, match=r"2 got an input of shape \[24, 5\] for 4 losses"):
            gradients.jacobian(losses, _coefficients(2, 4))
        with pytest.raises(ValueError, match=r"2 got an input of shape \[5\] for 1 losses"):
            gradients.jacobian(network(x[0, 0]).sum()[None], _coefficients(2, 1))
    layer = torch.nn.Linear(4, 4)
    with PerSequenceGradients(layer, layer.parameters()) as gradients:
        losses = layer(torch.ones(4))  # four features, no sequences
        with pytest.raises(ValueError, match=r"Linear got an input of shape \[4\] for 4"):
            gradients.jacobian(losses, _coefficients(2, 4))


def test_a_forward_pass_before_the_block_is_refused(network):
    losses = _network_losses(network)
    with (
        PerSequenceGradients(network, network.parameters()) as gradients,
        pytest.raises(ValueError, match=r"use 0\.weight 1 times, but only 0 times"),
    ):
        gradients.jacobian(losses, _coefficients(2))


def test_a_weight_used_outside_its_layer_is_refused(network, gradients):
    losses = _network_losses(network) + network[2].weight.square().sum()
    with pytest.raises(ValueError, match=r"use 2\.weight 2 times, but only 1 times"):
        gradients.jacobian(losses, _coefficients(2))


def test_reentrant_checkpointing_is_refused(network):
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x):
            return checkpoint(self.network, x.requires_grad_(), use_reentrant=True)

    model = Checkpointed()
    with (
        PerSequenceGradients(model, model.parameters()) as gradients,
        pytest.raises(ValueError, match="use_reentrant=False"),
    ):
        gradients.jacobian(_network_losses(model), _coefficients(2))


def test_every_node_of_a_graph_with_many_paths_is_visited_once(network):
    losses = _network_losses(network)
    for _ in range(6):
        losses = losses + losses.exp()
    nodes = [node for node, _ in per_sequence._graph([losses, losses])]
    assert len(nodes) == len(set(nodes)) > 12


def test_losses_that_no_layer_leads_to_are_refused(network):
    losses = torch.ones(NUM_SEQUENCES, requires_grad=True)
    with PerSequenceGradients(network, network.parameters()) as gradients:
        for strangers in (losses, 2 * losses):
            with pytest.raises(ValueError, match="depend on no layer"):
                gradients.jacobian(strangers, _coefficients(2))


def test_rows_outside_the_block_and_a_block_within_itself_are_refused(network):
    gradients = PerSequenceGradients(network, network.parameters())
    with gradients:
        losses = _network_losses(network)
        with pytest.raises(RuntimeError, match="already active"), gradients:
            pass
    with pytest.raises(RuntimeError, match="inside it"):
        gradients.jacobian(losses, _coefficients(2))


def test_bad_losses_are_refused(network, gradients):
    losses = _network_losses(network)
    for bad in (losses.sum(), losses[:, None], losses[:0]):
        with pytest.raises(ValueError, match=r"losses must have shape \[B\]"):
            gradients.jacobian(bad, _coefficients(2))
    with pytest.raises(ValueError, match="loss of sequence 0 has no gradient"):
        gradients.jacobian(losses.detach(), _coefficients(2))
    spoiled = losses * torch.tensor([1.0, 1.0, 1.0, torch.nan, 1.0])
    with pytest.raises(ValueError, match="loss of sequence 3 is not finite"):
        gradients.jacobian(spoiled, _coefficients(2))


def test_bad_coefficients_are_refused(network, gradients):
    losses = _network_losses(network)
    for bad in (torch.ones(NUM_SEQUENCES), torch.ones(2, 4), torch.ones(0, NUM_SEQUENCES)):
        with pytest.raises(ValueError, match=r"shape \[M, 5\], one per objective and sequence"):
            gradients.jacobian(losses, bad)
    spoiled = torch.ones(3, NUM_SEQUENCES)
    spoiled[1, 4] = torch.inf
    with pytest.raises(ValueError, match="objective 1 and sequence 4 is not finite"):
        gradients.jacobian(losses, spoiled)


def test_a_gradient_that_is_not_finite_is_refused(network, gradients):
    losses = (network(torch.ones(2, 1, 3)) * 0).sum(dim=(1, 2)).sqrt()  # slope infinite at 0
    with pytest.raises(ValueError, match="gradient of objective 0 is not finite"):
        gradients.jacobian(losses, _coefficients(2, 2))


@pytest.mark.parametrize("pair", [(0, 1), (0, 4), (2, 3), (1, 2)])
def test_rows_that_change_places_inside_a_model_are_refused(pair):
    places = torch.arange(NUM_SEQUENCES)
    places[list(pair)] = places[list(reversed(pair))]
    model = Moved(lambda x: x[places], lambda y: y[places])
    _assert_refused(model)


@pytest.mark.parametrize(("source", "reader"), [(0, 1), (1, 0), (4, 2), (2, 4)])
def test_a_sequence_that_reads_another_is_refused(source, reader):
    reads = torch.eye(NUM_SEQUENCES)
    reads[reader, source] = 1.0
    model = Moved(lambda x: x, lambda y: torch.einsum("ab,b...->a...", reads, y))
    _assert_refused(model)


def _assert_refused(model):
    x = torch.randn(NUM_SEQUENCES, 4, 3, generator=torch.Generator().manual_seed(0))
    reason = pytest.raises(ValueError, match="layer gets a gradient from the losses of other")
    with PerSequenceGradients(model, list(model.parameters())) as gradients:
        losses = model(x).square().sum((1, 2))
        with reason:
            gradients.check_independence(losses)


def test_independent_sequences_pass_and_leave_the_rows_alone():
    model = _llama()
    with PerSequenceGradients(model, _trainable(model)) as gradients:
        losses = _losses(model)
        gradients.check_independence(losses)
        rows = gradients.jacobian(losses, _coefficients(3), retain_graph=True)
        _assert_rows_equal(rows, _loop(losses, _coefficients(3), _trainable(model)), FLOAT32)


# --- Rows that sequences share --------------------------------------------------------------------

OWNERS = torch.tensor([2, 0, 2, 1, 2])  # the shared row of each of five sequences
NUM_SHARED = 4  # the last one has no sequence


class TwoStages(torch.nn.Module):
    """Layers on shared rows, and layers on the sequences that have them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.also = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
        self.own = torch.nn.Linear(6, 3)

    def losses(self, expand):
        generator = torch.Generator().manual_seed(1)
        shared = torch.randn(NUM_SHARED, 7, 4, generator=generator)
        own = torch.randn(len(OWNERS), 5, 6, generator=generator)
        frozen = torch.randn(NUM_SHARED, 6, generator=generator)
        keys, values, rest = expand([self.shared(shared), self.also(shared), frozen], OWNERS)
        mixed = own @ keys.tanh().mT @ values + rest[:, None]
        return self.own(mixed).square().sum((1, 2))


def _rows_at(tensors, index):
    return [tensor[index] for tensor in tensors]


@pytest.mark.parametrize("num_objectives", [1, 2, 3, 6])  # three sequences share a row
def test_shared_rows_have_the_gradients_of_a_pass_per_objective(num_objectives):
    model = TwoStages()
    coefficients = _coefficients(num_objectives)
    coefficients[0] *= 1e-6
    expected = jacobian(coefficients @ model.losses(_rows_at), list(model.parameters()))
    with PerSequenceGradients(model, list(model.parameters())) as gradients:
        losses = model.losses(gradients.expand)
        rows = gradients.jacobian(losses, coefficients, retain_graph=True)
        halved = gradients.jacobian(losses, coefficients / 2)
    _assert_rows_equal(rows, expected, FLOAT32)
    _assert_rows_equal(2 * halved, expected, FLOAT32)

    with BackwardPasses(list(model.parameters())) as gradients:
        losses = model.losses(gradients.expand)
        _assert_rows_equal(gradients.jacobian(losses, coefficients), expected, FLOAT32)


GROUPS = torch.tensor([1, 0, 1, 0, 2])  # two groups share a row, and a group has two rows


@pytest.mark.parametrize("num_objectives", [1, 2, 6])
def test_sequences_of_a_group_have_the_factors_of_their_group(num_objectives):
    model = TwoStages()
    parameters, by_group = list(model.parameters()), _coefficients(num_objectives)[:, :3]
    expected = jacobian(by_group[:, GROUPS] @ model.losses(_rows_at), parameters)
    for method in (PerSequenceGradients(model, parameters), BackwardPasses(parameters)):
        with method as gradients:
            losses = model.losses(gradients.expand)
            rows = gradients.jacobian(losses, by_group, groups=GROUPS)
        _assert_rows_equal(rows, expected, FLOAT32)


def test_groups_that_do_not_match_are_named():
    model, by_group = TwoStages(), _coefficients(2)[:, :3]
    with PerSequenceGradients(model, list(model.parameters())) as gradients:
        losses = model.losses(gradients.expand)
        with pytest.raises(ValueError, match=r"groups must have shape \[5\].* got \[4\]"):
            gradients.jacobian(losses, by_group, groups=GROUPS[:4])
        with pytest.raises(ValueError, match=r"shape \[M, 4\], one per objective and group"):
            gradients.jacobian(losses, by_group, groups=GROUPS + 1)
        by_group[1, 2] = torch.nan
        with pytest.raises(ValueError, match="objective 1 and group 2 is not finite"):
            gradients.jacobian(losses, by_group, groups=GROUPS)


@pytest.mark.parametrize(
    ("num_objectives", "groups", "expected"),
    [(2, None, 2), (3, None, 3), (6, None, 3), (6, GROUPS, 2), (6, 0 * GROUPS, 1)],
)
def test_shared_rows_take_as_many_passes_as_groups_of_sequences_share_one(
    num_objectives, groups, expected
):
    model, passes = TwoStages(), []
    count = len(OWNERS) if groups is None else int(groups.max()) + 1
    with PerSequenceGradients(model, list(model.parameters())) as gradients:
        losses = model.losses(gradients.expand)
        fold = gradients.fold

        def counted(layer, inputs, deltas):
            passes.append(layer)
            fold(layer, inputs, deltas)

        gradients.fold = counted
        gradients.jacobian(losses, _coefficients(num_objectives)[:, :count], groups=groups)
    assert passes.count(model.own) == 1
    assert passes.count(model.shared) == passes.count(model.also) == expected


def test_shared_rows_may_leave_parameters_unused_and_are_named_once():
    model = TwoStages()
    with PerSequenceGradients(model, list(model.parameters())) as gradients:
        keys, _ = gradients.expand([model.shared(torch.ones(2, 1, 4)), torch.ones(2)], OWNERS // 2)
        losses = model.own(keys).sum((1, 2))
        with pytest.raises(RuntimeError, match="call it once"):
            gradients.expand([keys], OWNERS)
        rows = gradients.jacobian(losses, _coefficients(2))
    assert rows[:, -model.own.weight.numel() - 3 :].any()
    assert rows[:, : model.shared.weight.numel()].any()

    with PerSequenceGradients(model, list(model.parameters())) as gradients:  # a block of its own
        (constant,) = gradients.expand([torch.ones(3, 1, 6)], OWNERS)
        assert not constant.requires_grad
        gradients.jacobian(model.own(constant).sum((1, 2)), _coefficients(2))


def test_a_layer_of_shared_rows_used_around_its_tap_is_named():
    model = TwoStages()
    with PerSequenceGradients(model, list(model.parameters())) as gradients:
        states = torch.nn.functional.linear(torch.ones(4, 7, 4), model.shared.weight)
        (copies,) = gradients.expand([states], OWNERS)
        losses = model.own(copies).sum((1, 2))
        with pytest.raises(ValueError, match=r"shared\.weight 1 times, but only 0"):
            gradients.jacobian(losses, _coefficients(2))


def test_a_graph_is_walked_once_for_each_sequence_of_layers_and_rows(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    gradients, walks = PerSequenceGradients(model, model.parameters(), checks_once=True), []
    check = gradients._check_graph
    monkeypatch.setattr(
        gradients, "_check_graph", lambda *given: walks.append(given[1]) or check(*given)
    )

    def rows_of(inputs):
        with gradients:
            return gradients.jacobian(model(inputs)[:, 0], torch.eye(len(inputs)))

    first = rows_of(inputs := torch.randn(5, 3))
    assert torch.equal(rows_of(inputs), first)
    assert walks == [5]
    rows_of(torch.randn(6, 3))
    assert walks == [5, 6]
    with gradients, pytest.raises(ValueError, match="depend on no layer called inside"):
        gradients.jacobian(torch.ones(5, requires_grad=True) * 2, torch.eye(5))


def test_a_penalty_that_a_later_step_adds_is_named():
    model = torch.nn.Linear(3, 1)
    gradients, inputs = PerSequenceGradients(model, model.parameters()), torch.randn(5, 3)
    with gradients:
        gradients.jacobian(model(inputs)[:, 0], torch.eye(5))
    with gradients, pytest.raises(ValueError, match="weight 2 times, but only 1"):
        gradients.jacobian(model(inputs)[:, 0] + model.weight.square().sum(), torch.eye(5))

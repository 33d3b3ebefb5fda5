import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from firm.gradients import combine, gram_matrix, jacobian
from firm.gradients.jacobian import CHUNK


@pytest.fixture
def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))


def _losses(network):
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    return (network(inputs) ** 2).mean(dim=0)  # [4]


def test_each_row_is_the_gradient_of_its_loss_alone(network):
    parameters = list(network.parameters())
    rows = jacobian(_losses(network), parameters)
    assert rows.shape == (4, sum(parameter.numel() for parameter in parameters))
    assert rows.dtype == torch.float32
    for objective, row in enumerate(rows):
        network.zero_grad()
        _losses(network)[objective].backward()
        alone = torch.cat([parameter.grad.flatten() for parameter in parameters])
        assert torch.equal(row, alone)


def test_a_sequence_of_losses_gives_the_same_rows(network):
    parameters = list(network.parameters())
    stacked = jacobian(_losses(network), parameters)
    assert torch.equal(jacobian(list(_losses(network)), parameters), stacked)


def test_parameters_that_a_loss_does_not_use_have_zero_gradient():
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    rows = jacobian([(3 * first).sum(), (second**2).sum()], [first, second])
    assert rows.tolist() == [[3, 3, 0, 0], [0, 0, 2, 2]]


def test_columns_follow_the_parameters_order():
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    loss = (3 * first).sum() + (5 * second).sum()
    assert jacobian([loss], [second, first]).tolist() == [[5, 5, 3, 3]]


def test_parameters_and_their_grads_stay_untouched(network):
    _losses(network).sum().backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in network.parameters()]
    jacobian(_losses(network), network.parameters())
    for parameter, (value, grad) in zip(network.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, grad)


def test_the_graph_is_freed_unless_it_is_to_be_retained(network):
    losses = _losses(network)
    kept = jacobian(losses, network.parameters(), retain_graph=True)
    assert torch.equal(jacobian(losses, network.parameters()), kept)
    with pytest.raises(RuntimeError, match="second time"):
        jacobian(losses, network.parameters())


def test_a_mapping_of_names_gives_the_same_rows(network):
    rows = jacobian(_losses(network), dict(network.named_parameters()))
    assert torch.equal(rows, jacobian(_losses(network), network.parameters()))


def test_double_precision_parameters_give_their_gradients_in_float64(network):
    network[2].to(torch.float64)  # one of them is enough
    hidden = network[1](network[0](torch.ones(6, 3))).double()
    losses = (network[2](hidden) ** 2).mean(dim=0)
    rows = jacobian(losses, network.parameters(), retain_graph=True)
    assert rows.dtype == torch.float64
    for loss, row in zip(losses, rows, strict=True):
        gradients = torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)
        assert torch.equal(row, torch.cat([gradient.flatten().double() for gradient in gradients]))


def test_half_precision_parameters_give_their_gradients_in_float32(network):
    network.to(torch.bfloat16)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    losses = (network(x) ** 2).mean(dim=0)
    rows = jacobian(losses, network.parameters(), retain_graph=True)
    assert rows.dtype == torch.float32
    for row, loss in zip(rows, losses, strict=True):
        gradients = torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)
        assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
        assert torch.equal(row, torch.cat([gradient.flatten().float() for gradient in gradients]))


def test_no_second_buffer_is_held():
    parameters = [torch.ones(100, requires_grad=True) for _ in range(50)]
    losses = [factor * sum(parameter.sum() for parameter in parameters) for factor in (1, 2, 3)]
    num_bytes = 3 * 5000 * 4

    class LargeStorages(TorchDispatchMode):
        """The storages of at least half a buffer that operations returned."""

        def __init__(self):
            super().__init__()
            self.seen = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage.nbytes() >= num_bytes / 2:
                    self.seen[storage.data_ptr()] = storage  # held, so that no address returns
            return result

    with LargeStorages() as storages:
        rows = jacobian(losses, parameters)
    assert list(storages.seen) == [rows.untyped_storage().data_ptr()]


def test_a_parameter_that_does_not_require_grad_is_refused_with_its_place(network):
    losses = _losses(network)
    network[2].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="Parameter 2 does not require grad"):
        jacobian(losses, network.parameters())
    with pytest.raises(ValueError, match=r"Parameter 2 \('2.weight'\) does not require grad"):
        jacobian(losses, dict(network.named_parameters()))


@pytest.mark.parametrize("parameters", [[], {}, iter([])])
def test_no_parameters_are_refused(network, parameters):
    with pytest.raises(ValueError, match="parameters must hold at least one tensor"):
        jacobian(_losses(network), parameters)


@pytest.mark.parametrize("losses", [[], torch.empty(0)])
def test_no_losses_are_refused(network, losses):
    with pytest.raises(ValueError, match="at least one objective's loss"):
        jacobian(losses, network.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_with_its_objective(value):
    parameter = torch.ones(3, requires_grad=True)
    # one expression, whose gradient at the first loss is NaN too: 0 · NaN
    losses = (parameter * torch.tensor([[1.0], [value]])).sum(dim=1)
    with pytest.raises(ValueError, match="loss of objective 1 is not finite"):
        jacobian(losses, [parameter])


def test_a_gradient_that_is_not_finite_is_refused_with_its_objective():
    parameter = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match="gradient of objective 1 is not finite"):
        jacobian([parameter.sum(), parameter.sqrt().sum()], [parameter])


def test_finite_gradients_whose_sum_overflows_are_accepted():
    parameter = torch.ones(3, requires_grad=True)
    assert jacobian([(3e38 * (parameter - 1)).sum()], [parameter]).isfinite().all()


def test_a_loss_without_a_graph_is_refused_with_its_objective():
    parameter = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="loss of objective 1 has no gradient"):
        jacobian([parameter.sum(), torch.tensor(1.0)], [parameter])


def _rows(num_objectives, num_parameters, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_objectives)
    return torch.randn(num_objectives, num_parameters, generator=generator).to(dtype)


@pytest.mark.parametrize("num_parameters", [1, 1000, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_entries_are_the_inner_products_to_float64_accuracy(num_parameters):
    rows = _rows(3, num_parameters)
    gram = gram_matrix(rows)
    exact = rows.double() @ rows.double().T
    assert gram.dtype == torch.float64
    assert torch.equal(gram, gram.T)
    assert ((gram - exact).abs().max() / exact.diagonal().max()).item() < 1e-13


def test_nearly_parallel_gradients_keep_the_digits_that_tell_them_apart():
    line = _rows(1, 2_000_000)[0]
    rows = torch.stack([line, line + 1e-3 * _rows(2, 2_000_000)[1]])
    gram = gram_matrix(rows)
    distance = (rows[0].double() - rows[1].double()).square().sum()
    from_gram = gram[0, 0] + gram[1, 1] - 2 * gram[0, 1]
    assert from_gram.item() == pytest.approx(distance.item(), rel=1e-6)
    naive = (rows @ rows.T).double()
    assert naive[0, 0] + naive[1, 1] - 2 * naive[0, 1] != pytest.approx(distance.item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_dtype_is_summed_in_float64(dtype):
    rows = _rows(2, 1000, dtype)
    torch.testing.assert_close(gram_matrix(rows), rows.double() @ rows.double().T)


def test_half_precision_rows_keep_the_digits_that_tell_them_apart():
    line = _rows(1, 2 * CHUNK + 7, torch.bfloat16)[0]
    rows = torch.stack([line, line.roll(1) * 2**-9 + line])  # [2, d], a few entries differ
    gram = gram_matrix(rows)
    distance = (rows[0].double() - rows[1].double()).square().sum()
    from_gram = gram[0, 0] + gram[1, 1] - 2 * gram[0, 1]
    assert 0 < distance < 1e-4 * gram[0, 0]
    assert from_gram.item() == pytest.approx(distance.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_jacobian_is_held(dtype):
    rows = _rows(2, 16 * CHUNK, dtype)
    sizes = []

    class NewStorages(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage.data_ptr() != rows.untyped_storage().data_ptr():
                    sizes.append(storage.nbytes())
            return result

    with NewStorages():
        gram_matrix(rows)
    assert max(sizes) == 2 * CHUNK * 8  # one chunk in float64
    assert max(sizes) <= rows.nbytes / 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_refused_with_its_objective(value):
    rows = _rows(4, 100)
    rows[2, 50] = value
    with pytest.raises(ValueError, match="objective 2 is not finite"):
        gram_matrix(rows)


def test_a_jacobian_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \[M, d\], got \[5\]"):
        gram_matrix(torch.ones(5))


def test_a_jacobian_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"at least one row, got shape \[0, 5\]"):
        gram_matrix(torch.ones(0, 5))


def test_a_single_row_of_weight_one_comes_back_bit_for_bit():
    row = _rows(1, 1000)
    row[0, :2] = torch.tensor([0.0, -0.0])
    combined = combine(row, torch.ones(1, dtype=torch.float64))
    assert torch.equal(combined.view(torch.int32), row[0].view(torch.int32))
    assert combined.data_ptr() != row.data_ptr()


def test_rows_are_combined_by_their_weights_and_not_changed():
    rows = torch.tensor([[1.0, 2.0], [4.0, 8.0], [0.0, 16.0]])
    before = rows.clone()
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert combine(rows, weights).tolist() == [1.5, 7.0]
    assert torch.equal(rows, before)


def test_weights_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"shape \[2\] for this Jacobian, got \[3\]"):
        combine(torch.ones(2, 4), torch.ones(3))

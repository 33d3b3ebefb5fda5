import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from firm.gradients import jacobian


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


def test_out_is_filled_and_returned(network):
    rows = jacobian(_losses(network), network.parameters())
    out = torch.full_like(rows, torch.nan)
    assert jacobian(_losses(network), network.parameters(), out=out) is out
    assert torch.equal(out, rows)


@pytest.mark.parametrize(
    ("out", "received"),
    [
        (torch.empty(4, 43), r"torch.float32 of shape \[4, 43\] on cpu"),
        (torch.empty(4, 44, dtype=torch.float64), "torch.float64 of shape"),
        (torch.empty(4, 44, device="meta"), r".*on meta\.$"),
        (torch.empty(44, 4).T, "strided torch.float32"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(network, out, received):
    expected = r"contiguous torch.float32 of shape \[4, 44\] on cpu, got "
    with pytest.raises(ValueError, match=expected + received):
        jacobian(_losses(network), network.parameters(), out=out)


def test_no_second_buffer_is_held():
    parameters = [torch.ones(100, requires_grad=True) for _ in range(50)]
    losses = [factor * sum(parameter.sum() for parameter in parameters) for factor in (1, 2, 3)]
    out = torch.empty(3, 5000)

    class LargeStorages(TorchDispatchMode):
        """The storages of at least half a buffer that operations returned."""

        def __init__(self):
            super().__init__()
            self.seen = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage.nbytes() >= out.nbytes / 2:
                    self.seen[storage.data_ptr()] = storage  # held, so that no address returns
            return result

    with LargeStorages() as storages:
        rows = jacobian(losses, parameters, retain_graph=True)
    assert list(storages.seen) == [rows.untyped_storage().data_ptr()]
    with LargeStorages() as storages:
        jacobian(losses, parameters, out=out)
    assert list(storages.seen) == [out.untyped_storage().data_ptr()]


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

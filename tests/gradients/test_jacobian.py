import pytest
import torch

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


def test_half_precision_parameters_give_float32_rows():
    parameter = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    rows = jacobian([(2 * parameter).sum()], [parameter])
    assert rows.dtype == torch.float32
    assert rows.tolist() == [[2, 2, 2]]


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

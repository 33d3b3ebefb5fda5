"""Jacobians, their compressors, and gradients of attention on an accelerator."""

import copy

import pytest
import torch

from firm.base.devices import prepare_attention
from firm.gradients import BackwardPasses, PerSequenceGradients
from firm.gradients.messages import COMPRESSORS, message_from_dict, message_to_dict
from tests.accelerator.device import IS_PRETEND, NAME, second


@pytest.mark.parametrize("method", [BackwardPasses, PerSequenceGradients])
def test_a_jacobian_is_where_its_parameters_are(method):
    torch.manual_seed(0)
    original = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    inputs, coefficients = torch.randn(5, 6, 3), torch.randn(2, 5)
    jacobians = []
    for device in ("cpu", second()):
        module = copy.deepcopy(original).to(device)
        parameters = dict(module.named_parameters())
        model = (module,) if method is PerSequenceGradients else ()
        with method(*model, parameters) as gradients:
            losses = module(inputs.to(device)).square().sum((1, 2))
            jacobians.append(gradients.jacobian(losses, coefficients.to(device)))
        assert jacobians[-1].device == torch.device(device)
    torch.testing.assert_close(jacobians[0], jacobians[1].cpu())


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_works_as_on_the_cpu(name):
    jacobian = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    reconstructed = []
    for device in ("cpu", second()):
        generator = torch.Generator().manual_seed(1)
        message = COMPRESSORS[name]().compress(
            jacobian.to(device), generator=generator, shared_seed=2
        )
        assert message.reconstruct().device == torch.device(device)
        received = message_from_dict(message_to_dict(message))
        assert torch.equal(received.reconstruct(), message.reconstruct())
        reconstructed.append(message.reconstruct().cpu())
    rounding = 1e-5 if IS_PRETEND else 1e-4
    torch.testing.assert_close(*reconstructed, atol=rounding, rtol=1e-4)


@pytest.mark.parametrize("length", [128, 192])
def test_masked_attention_has_gradients_where_all_scores_are_very_negative(length):
    prepare_attention(torch.device(NAME))
    generator = torch.Generator().manual_seed(0)
    size, shift = 64, -100.0
    inputs = [torch.randn(1, 1, length, size, generator=generator) / 8 for _ in range(3)]
    inputs[0][..., 0], inputs[1][..., 0] = 1.0, shift * size**0.5
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    gradients = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, NAME)):
        leaves = [each.bfloat16().to(device, dtype).requires_grad_() for each in inputs]
        output = torch.nn.functional.scaled_dot_product_attention(*leaves, mask.to(device))
        gradients.append(torch.autograd.grad(output.square().sum(), leaves))
    for expected, found in zip(*gradients, strict=True):
        error = (found.float().cpu() - expected)[..., 1:].norm()
        assert error < 0.1 * expected[..., 1:].norm()

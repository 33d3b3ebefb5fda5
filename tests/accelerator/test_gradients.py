"""Compressors of Jacobians on an accelerator."""

import pytest
import torch

from firm.gradients.messages import COMPRESSORS, message_from_dict, message_to_dict
from tests.accelerator.device import IS_PRETEND, second


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

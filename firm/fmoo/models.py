"""Models of the papers: an encoder shared by all objectives, and one head per objective.

| name | for | layers | parameters |
|---|---|---|---|
| lenet | MultiMNIST, MNIST+FMNIST | FedCMOO, Appendix D.3 | 34,635 (34.6k) |
| cifar_mnist_cnn | CIFAR10+MNIST | FedCMOO, Appendix D.3 | 1,726,508 (1.73M) |
| resnet18 | CelebA, CelebA-5 | FedCMOO, Appendix D.3 | 11,189,352 (11.2M) |
| molecule_net | QM9 | FedCMOO, Appendix D.3 | 617,675 (617k) |
| cifar_cnn | CIFAR-10 | FedMGDA+, Table 2 | 797,962 |
| fashion_cnn | Fashion-MNIST, MNIST | FedMGDA+, Table 3 | 21,840 |
| femnist_cnn | Federated EMNIST | FedMGDA+, Table 4 | 1,206,590 |
| character_lstm | Shakespeare | FedMGDA+, Section 6.1.3 | by vocabulary |
| linear | Adult | FedMGDA+, Section 6.1.4 | by features |
| mlp | River Flow | not in the papers | by features |
"""

from collections.abc import Callable

import torch
from torch import nn

from firm.base.randomness import RandomStream
from firm.base.user_code import user_code
from firm.fmoo.config import MODELS, CallableT, ModelConfig
from firm.fmoo.modules import (
    CharacterEncoder,
    Dropout,
    MoleculeEncoder,
    MultiTaskModel,
    ResidualBlock,
)
from firm.fmoo.task_data import TaskData


def model(name: str) -> Callable[[CallableT], CallableT]:
    """Returns a decorator that registers a model under a name, for ``model.name``.

    The decorated module class or function is called with a ``ModelConfig`` and the training data,
    and must return a module that ``Workspace`` accepts.

    Raises:
        ValueError: When the name is taken.
    """
    return MODELS.register(name)


def build_model(cfg: ModelConfig, data: TaskData, *, seed: int) -> nn.Module:
    """Returns a model for these data, in training mode, initialised with the seed.

    Raises:
        ValueError: When the model is unknown or does not support these inputs, or a user's model
            raises.
    """
    build = MODELS[cfg.name]
    with RandomStream(seed, "model"), user_code(f"the model {cfg.name}", but=(ValueError,)):
        module = build(cfg, data)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"the model {cfg.name} must be a torch.nn.Module, got {type(module).__name__}."
        )
    return module


def num_parameters(module: nn.Module) -> int:
    """Returns the number of trainable parameters of a module."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


# --- Convolutional networks -----------------------------------------------------------------------


def lenet(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns FedCMOO's LeNet-like network: 28,515 shared parameters and 3,060 per head.

    The paper only states "LeNet-like", two linear layers per head and 34.6k parameters; the layers
    follow its released code.
    """
    channels, height, width = _image_shape(cfg, data, smallest=8)
    rate = _dropout(cfg, 0.5)
    flat = 15 * ((height // 2 - 2) // 2) * ((width // 2 - 2) // 2)
    encoder = nn.Sequential(
        nn.Conv2d(channels, 10, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 15, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(flat, 50),
        nn.ReLU(),
        Dropout(rate),
    )

    def head(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(50, 50), nn.ReLU(), Dropout(rate), nn.Linear(50, outputs))

    return MultiTaskModel(encoder, [head(outputs) for outputs in _widths(data)])


def cifar_mnist_cnn(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns the CIFAR10+MNIST network: two convolutions and two dense layers, 1.73M parameters.

    The paper says "a single linear layer" for the heads, but its 1.73M parameters and its released
    code have two linear layers without an activation, which is one map of rank 100.
    """
    channels, height, width = _image_shape(cfg, data, smallest=4)
    rate = _dropout(cfg, 0.5)
    encoder = nn.Sequential(
        nn.Conv2d(channels, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 384),
        nn.ReLU(),
        Dropout(rate),
        nn.Linear(384, 192),
        nn.ReLU(),
        Dropout(rate),
    )
    heads = [nn.Sequential(nn.Linear(192, 100), nn.Linear(100, out)) for out in _widths(data)]
    return MultiTaskModel(encoder, list(heads))


def cifar_cnn(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns the CIFAR-10 network of FedMGDA+, Table 2."""
    channels, height, width = _image_shape(cfg, data, smallest=16)
    side = [((length - 4) // 2 - 4) // 2 for length in (height, width)]
    encoder = nn.Sequential(
        nn.Conv2d(channels, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.LocalResponseNorm(2),
        nn.Conv2d(64, 64, 5),
        nn.ReLU(),
        nn.LocalResponseNorm(2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * side[0] * side[1], 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
    )
    return _with_linear_heads(encoder, 192, data)


def fashion_cnn(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns the Fashion-MNIST network of FedMGDA+, Table 3."""
    channels, height, width = _image_shape(cfg, data, smallest=16)
    side = [((length - 4) // 2 - 4) // 2 for length in (height, width)]
    rate = _dropout(cfg, 0.5)
    encoder = nn.Sequential(
        nn.Conv2d(channels, 10, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Dropout(rate, of_channels=True),
        nn.Flatten(),
        nn.Linear(20 * side[0] * side[1], 50),
        nn.ReLU(),
        Dropout(rate),
    )
    return _with_linear_heads(encoder, 50, data)


def femnist_cnn(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns the Federated EMNIST network of FedMGDA+, Table 4.

    The table has no activation after the first convolution and the first dense layer. Here both
    have a ReLU, since each would otherwise collapse into one linear map with the next layer.
    """
    channels, height, width = _image_shape(cfg, data, smallest=6)
    encoder = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Dropout(_dropout(cfg, 0.25)),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        Dropout(_dropout(cfg, 0.5)),
    )
    return _with_linear_heads(encoder, 128, data)


def resnet18(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns Jhunjhunwala et al.'s (2023) ResNet-18 for small images, with linear heads.

    Uses group normalisation instead of batch normalisation, whose statistics depend on a client's
    batches and are not averaged.
    """
    channels, _, _ = _image_shape(cfg, data, smallest=1)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, 3, padding=1, bias=False),
        nn.GroupNorm(2, 64),
        nn.ReLU(),
    ]
    widths, strides = [64, 64, 64, 128, 128, 256, 256, 512, 512], [1, 1, 2, 1, 2, 1, 2, 1]
    for num_in, num_out, stride in zip(widths[:-1], widths[1:], strides, strict=True):
        layers.append(ResidualBlock(num_in, num_out, stride))
    encoder = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return _with_linear_heads(encoder, 512, data)


# --- Tables, text, molecules ----------------------------------------------------------------------


def linear(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns a linear map for every objective; the encoder has no parameters."""
    return _with_linear_heads(nn.Flatten(), _num_features(cfg, data), data)


def mlp(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns dense layers with ReLUs, and one linear head per objective."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = _num_features(cfg, data)
    for hidden in cfg.hidden:
        layers += [nn.Linear(width, hidden), nn.ReLU(), Dropout(_dropout(cfg, 0.0))]
        width = hidden
    return _with_linear_heads(nn.Sequential(*layers), width, data)


def character_lstm(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns the two-layer LSTM of FedMGDA+, Section 6.1.3, with a linear head."""
    if data.num_tokens is None:
        raise ValueError(
            f"{cfg.name} takes int64 tokens [N, T], got {data.inputs.dtype} of shape "
            f"{list(data.inputs.shape)}: choose another model."
        )
    return _with_linear_heads(CharacterEncoder(data.num_tokens), 256, data)


def molecule_net(cfg: ModelConfig, data: TaskData) -> MultiTaskModel:
    """Returns the graph network for QM9, with linear heads."""
    if data.inputs.dtype != torch.float32 or data.inputs.shape[1:] != (29, 43):
        raise ValueError(
            f"{cfg.name} takes QM9's packed graphs, float32 of shape [N, 29, 43], got "
            f"{data.inputs.dtype} of shape {list(data.inputs.shape)}: choose another model."
        )
    return _with_linear_heads(MoleculeEncoder(), 64, data)


_OF_IMAGES = (lenet, cifar_mnist_cnn, resnet18, cifar_cnn, fashion_cnn, femnist_cnn)
_OF_OTHERS = (molecule_net, character_lstm, linear, mlp)

for _build in (*_OF_IMAGES, *_OF_OTHERS):
    MODELS.add(_build.__name__, _build)


def _with_linear_heads(encoder: nn.Module, width: int, data: TaskData) -> MultiTaskModel:
    return MultiTaskModel(encoder, [nn.Linear(width, outputs) for outputs in _widths(data)])


def _widths(data: TaskData) -> tuple[int, ...]:
    assert data.num_outputs is not None  # TaskData fills it in
    return data.num_outputs


def _dropout(cfg: ModelConfig, default: float) -> float:
    return default if cfg.dropout is None else cfg.dropout


def _image_shape(cfg: ModelConfig, data: TaskData, *, smallest: int) -> tuple[int, int, int]:
    if data.inputs.ndim != 4:
        raise ValueError(
            f"{cfg.name} takes images [N, C, H, W], got inputs of shape "
            f"{list(data.inputs.shape)}: choose another model."
        )
    _, channels, height, width = data.inputs.shape
    if min(height, width) < smallest:
        raise ValueError(
            f"{cfg.name} takes images of at least {smallest} pixels, got {height} x {width}: "
            "choose another model."
        )
    return channels, height, width


def _num_features(cfg: ModelConfig, data: TaskData) -> int:
    if data.num_tokens is not None:
        raise ValueError(f"{cfg.name} takes features or images, got tokens: choose another model.")
    return data.inputs.shape[1:].numel()

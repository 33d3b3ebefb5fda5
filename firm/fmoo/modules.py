"""Building blocks of the papers' models."""

import warnings

import torch
from torch import nn
from torch.nn import functional


class MultiTaskModel(nn.Module):
    """A shared encoder with several heads; `named_parameters` yields the encoder's first.

    Args:
        encoder: Maps inputs to features, shape [N, F].
        heads: One per objective; maps features to outputs.
    """

    def __init__(self, encoder: nn.Module, heads: list[nn.Module]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleList(heads)

    def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Returns the outputs of the M heads, each of shape [N, outputs]."""
        features = self.encoder(inputs)
        return [head(features) for head in self.heads]


class Dropout(nn.Module):
    """Dropout with its own random generator.

    With equal seeds the noise equals that of torch's ``Dropout`` and ``Dropout2d``, which draw from
    the global generator shared by all threads.

    Args:
        rate: Probability of zeroing an entry, in [0, 1); other entries are divided by 1 - rate.
        of_channels: Whether to zero whole channels of a sample.
    """

    generator: torch.Generator | None = None
    """Generator of the noise; None for torch's global generator."""

    def __init__(self, rate: float, *, of_channels: bool = False) -> None:
        super().__init__()
        self.rate, self.of_channels = rate, of_channels

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the inputs [N, ...] after dropout; unchanged in evaluation mode."""
        if not self.training or self.rate == 0:
            return inputs
        noise = torch.empty_like(inputs[..., :1, :1] if self.of_channels else inputs)
        kept = 1 - self.rate
        return inputs * noise.bernoulli_(kept, generator=self.generator).div_(kept)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut, normalised in two groups of channels."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(2, num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.GroupNorm(2, num_out),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride=stride, bias=False), nn.GroupNorm(2, num_out)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns feature maps, shape [N, num_out, H / stride, W / stride]."""
        return functional.relu(self.path(images) + self.shortcut(images))


# clients have each weight as a tensor of its own, which cuDNN copies together at every call
warnings.filterwarnings("ignore", "RNN module weights are not part of single", UserWarning)


class CharacterEncoder(nn.Module):
    """Character embedding of 8 dimensions and two LSTM layers of 256; returns the last state."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns features [N, 256] of token sequences [N, T]."""
        states, _ = self.lstm(self.embedding(tokens))
        return states[:, -1]


class MoleculeEncoder(nn.Module):
    """Message passing with edge networks, and a set-to-set readout (Gilmer et al., 2017).

    The network of Lin and Zhang (2023) and Navon et al. (2022), which the FedCMOO paper follows, on
    dense graphs: every pair of atoms is an edge with a one-hot bond type and a distance. An edge's
    64 x 64 matrix W(e) = Σ_k r_k(e) A_k + A_0, with 128 hidden units r, is never materialised,
    since Σ_j W(e_ij)ᵀ h_j = Σ_jk r_k(e_ij) A_kᵀ h_j + Σ_j A_0ᵀ h_j.
    """

    def __init__(self) -> None:
        super().__init__()
        width = 64
        self.width = width
        self.embed = nn.Linear(11, width)
        self.edge_hidden = nn.Linear(5, 128)
        self.edge_matrix = nn.Linear(128, width * width)
        self.root = nn.Linear(width, width)
        self.update = nn.GRUCell(width, width)
        self.readout = nn.LSTMCell(2 * width, width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, molecules: torch.Tensor) -> torch.Tensor:
        """Returns features of molecules.

        Args:
            molecules: Packed graphs, shape [N, 29, 43]: 11 features of each atom, its position (3)
                and its 29 bonds (0 for none, else the type); zero for missing atoms.

        Returns:
            Shape [N, 64].
        """
        atoms, positions, bonds = molecules.split([11, 3, 29], dim=2)
        present = (atoms != 0).any(dim=2)  # [N, 29]
        edges = self._edges(positions, bonds, present)
        hidden = functional.relu(self.embed(atoms))  # [N, 29, 64]
        for _ in range(3):
            messages = functional.relu(self._messages(hidden, edges, present))
            flat = self.update(messages.flatten(0, 1), hidden.flatten(0, 1))
            hidden = flat.view_as(hidden)
        return functional.relu(self.out(self._read(hidden, present)))

    def _edges(
        self, positions: torch.Tensor, bonds: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        """Returns the hidden units of the edge networks, [N, 29, 29, 129], zero without an edge.

        The last unit is 1 on edges and multiplies the bias of the edge matrix.
        """
        types = functional.one_hot(bonds.long(), 5)[..., 1:]  # [N, 29, 29, 4]
        between = positions.unsqueeze(2) - positions.unsqueeze(1)
        distance = torch.linalg.vector_norm(between, dim=3, keepdim=True)
        attributes = torch.cat([types.to(distance.dtype), distance], dim=3)
        units = functional.relu(self.edge_hidden(attributes))
        units = torch.cat([units, torch.ones_like(distance)], dim=3)
        is_edge = present.unsqueeze(1) & present.unsqueeze(2)
        is_edge = is_edge & ~torch.eye(present.shape[1], dtype=torch.bool, device=present.device)
        return units * is_edge.unsqueeze(3)

    def _messages(
        self, hidden: torch.Tensor, edges: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        num, _, width = hidden.shape
        matrices = torch.cat(
            [self.edge_matrix.weight.t(), self.edge_matrix.bias.unsqueeze(0)]
        ).view(-1, width, width)  # [129, 64, 64]
        sent = torch.einsum("naw,kwv->nakv", hidden, matrices)  # [N, 29, 129, 64]
        received = edges.flatten(2) @ sent.flatten(1, 2)  # [N, 29, 29 * 129] @ [.., 64]
        num_neighbours = (present.sum(dim=1) - 1).clamp(min=1).view(num, 1, 1)
        return self.root(hidden) + received / num_neighbours

    def _read(self, hidden: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Returns the readout of Set2Set (Vinyals et al., 2016) in three steps, shape [N, 128]."""
        query = hidden.new_zeros(len(hidden), self.width)
        cell, read = query, query
        for _ in range(3):
            query, cell = self.readout(torch.cat([query, read], dim=1), (query, cell))
            scores = (hidden * query.unsqueeze(1)).sum(dim=2)
            attention = scores.masked_fill(~present, -torch.inf).softmax(dim=1)
            read = (attention.unsqueeze(2) * hidden).sum(dim=1)
        return torch.cat([query, read], dim=1)

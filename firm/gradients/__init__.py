"""Gradients: from M losses to the Jacobian [M, d], its Gram matrix [M, M] and one direction [d].

Vision, tabular and language tasks share this code; they differ only in how the losses are computed.
Where objectives differ only by one coefficient per sequence, ``PerSequenceGradients`` computes all
rows in one backward pass. Compressors turn a client's Jacobian into a message.
"""

from firm.gradients.compression import (
    Compressor,
    JacobianMessage,
    LowRankCompressor,
    RandomMaskCompressor,
    TopKCompressor,
)
from firm.gradients.jacobian import combine, gram_matrix, jacobian
from firm.gradients.messages import COMPRESSORS, message_from_dict, message_to_dict
from firm.gradients.per_sequence import BackwardPasses, PerSequenceGradients
from firm.gradients.quantization import QuantizingCompressor
from firm.gradients.sketch import CountSketchCompressor, HybridCompressor

__all__ = [
    "COMPRESSORS",
    "BackwardPasses",
    "Compressor",
    "CountSketchCompressor",
    "HybridCompressor",
    "JacobianMessage",
    "LowRankCompressor",
    "PerSequenceGradients",
    "QuantizingCompressor",
    "RandomMaskCompressor",
    "TopKCompressor",
    "combine",
    "gram_matrix",
    "jacobian",
    "message_from_dict",
    "message_to_dict",
]

"""Gradients: from M losses to the Jacobian [M, d], its Gram matrix [M, M] and one direction [d].

Vision, tables and language share this code; they differ only in how they make the losses. Where
objectives differ by a number per sequence alone, ``PerSequenceGradients`` gives all rows from one
backward pass. Compressors turn a client's Jacobian into a message, and the ``*_gram`` functions
turn all clients' messages into the Gram matrix of their mean Jacobian.
"""

from firm.gradients.approx_gram import (
    TwoWayReply,
    broadcast,
    mean_own_gram,
    nrmse,
    one_way_gram,
    project_to_psd,
    two_sample_gram,
    two_way_gram,
    two_way_reply,
)
from firm.gradients.compression import (
    Compressor,
    LowRankCompressor,
    Message,
    RandomMaskCompressor,
    TopKCompressor,
)
from firm.gradients.gram import combine, gram_matrix
from firm.gradients.jacobian import jacobian
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
    "LowRankCompressor",
    "Message",
    "PerSequenceGradients",
    "QuantizingCompressor",
    "RandomMaskCompressor",
    "TopKCompressor",
    "TwoWayReply",
    "broadcast",
    "combine",
    "gram_matrix",
    "jacobian",
    "mean_own_gram",
    "message_from_dict",
    "message_to_dict",
    "nrmse",
    "one_way_gram",
    "project_to_psd",
    "two_sample_gram",
    "two_way_gram",
    "two_way_reply",
]

"""Sizes of compressed messages, which configurations need without the compressors."""

FLOAT_BYTES = 4
"""Bytes of an uncompressed number."""
MAX_BITS = 16
"""Maximum bits of a quantised number. More bring no gain: 16 leave a relative error of 1e-5, and
float32 itself has 24."""
BUCKET = 128
"""Quantised numbers that share one scale, by default."""

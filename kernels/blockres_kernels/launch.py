"""What depends on a GPU's limits: how a shape is cut up for each kernel, and why.

Every choice is a function of sizes and dtypes alone, so it is made, and tested, without a GPU.
"""

BUCKETS = (1, 2, 3, 5, 9, 16, 32)
"""Numbers of sources that a kernel is compiled for: the embedding and 0, 1, 2, 4 or 8 blocks, then powers of two.

Pointers are unrolled up to the bucket, so each bucket is a compilation; a source beyond the real number is jumped over.
"""
MAX_SOURCES = BUCKETS[-1]


def bucket(sources: int) -> int:
    """The smallest bucket that holds this many sources (at most `MAX_SOURCES`)."""
    return next(size for size in BUCKETS if size >= sources)

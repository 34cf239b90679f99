"""Sizes of launches. Triton has the same two, and takes as long for each as for a launch."""


def cuts(count: int, size: int) -> int:
    """Into how many parts of at most ``size`` so many are cut."""
    return -(-count // size)


def power(least: int) -> int:
    """The power of 2 that is not below ``least``."""
    return 1 << (least - 1).bit_length()

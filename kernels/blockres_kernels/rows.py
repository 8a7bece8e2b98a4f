"""Arithmetic on the rows that a program holds, one chunk of D after the other, and the numbers that it takes."""

from typing import NamedTuple

import triton
import triton.language as tl

from .sources import load_row


class Formula(NamedTuple):
    """The numbers in the formula, and the dtype in which it is computed: constants of a kernel."""

    eps: float
    scale: float
    norm_eps: float
    dtype: tl.dtype


@triton.jit
def vector(parameter, tile, dtype, start=0):
    row = load_row(parameter, tile, start=start)
    return [row[c].to(dtype) for c in tile.chunks]


@triton.jit
def key_row(query, key_weight, tile, dtype, start=0):
    """q * w"""
    q = vector(query, tile, dtype, start)
    if key_weight is None:
        return q
    else:
        w = vector(key_weight, tile, dtype, start)
        return [q[c] * w[c] for c in tile.chunks]


@triton.jit
def zero_row(tile, dtype):
    return [tl.zeros([tile.width], dtype) for c in tile.chunks]


@triton.jit
def inner_product(x, y, tile, dtype):
    products = tl.zeros([tile.width], dtype)
    for c in tl.static_range(len(tile.chunks)):
        products += x[c] * y[c]
    return tl.sum(products, axis=0)


@triton.jit
def square_and_product(x, y, tile, dtype):
    """<x, x> and <x, y>, in one reduction."""
    squares = tl.zeros([tile.width], dtype)
    products = tl.zeros([tile.width], dtype)
    for c in tl.static_range(len(tile.chunks)):
        value = x[c].to(dtype)
        squares += value * value
        products += value * y[c]
    return tl.split(tl.sum(tl.join(squares, products), axis=0))


@triton.jit
def mix_in(peak, total, mixed, row, score, tile, dtype):
    """One more row in a running softmax: its highest score, the sum of its weights, and its mixture times that sum."""
    higher = tl.maximum(peak, score)
    keep = tl.exp(peak - higher)
    weight = tl.exp(score - higher)
    return higher, total * keep + weight, [mixed[c] * keep + row[c].to(dtype) * weight for c in tile.chunks]


@triton.jit
def normalized(h, norm_weight, tile, formula):
    """h through the output norm, where there is one."""
    if norm_weight is None:
        return h
    else:
        rho = tl.rsqrt(inner_product(h, h, tile, formula.dtype) / tile.dim + formula.norm_eps)
        w = vector(norm_weight, tile, formula.dtype)
        return [h[c] * rho * w[c] for c in tile.chunks]

"""AdamW whose moments are codes, in numpy: what a step has to leave in parameters and in the state, to the bit."""

from __future__ import annotations

import numpy as np
import oracle

__all__ = ["AdamWByHand", "dequantized", "quantized", "uniform"]

BLOCK = 128
VALUES = np.array([oracle.value(code, "e4m3") for code in range(0x7F)])  # magnitudes by code, exact in float64
MASK = 0xFFFFFFFF


def uniform(values: np.ndarray, seed: int, step: int) -> np.ndarray:
    """Noise of stochastic rounding by place, step and value: two hashes of 32 bits."""

    def mixed(h: np.ndarray) -> np.ndarray:
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            h = ((h ^ (h >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(MASK)
        return h ^ (h >> np.uint64(15))

    place = np.arange(values.size, dtype=np.uint64).reshape(values.shape)
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    h = mixed((place + np.uint64(seed * 0x9E3779B9 & MASK)) & np.uint64(MASK)) ^ np.uint64(step)
    return (mixed(h ^ bits) >> np.uint64(8)).astype(np.float64) / 2**24


def _codes(values: np.ndarray, seed: int | None, step: int) -> np.ndarray:
    if seed is None:
        return oracle.encode(values, "e4m3")
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    below = np.searchsorted(VALUES, magnitude, side="right") - 1
    above = np.minimum(below + 1, 0x7E)
    # the largest value has no code above it, and is never rounded
    share = (magnitude - VALUES[below]) / np.where(above > below, VALUES[above] - VALUES[below], 1)
    code = np.where(uniform(values, seed, step) < share, above, below)
    return (code | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)


def _repeated(scale: np.ndarray, columns: int) -> np.ndarray:
    return np.repeat(scale, BLOCK, axis=1)[:, :columns]


def quantized(values: np.ndarray, *, root: bool, seed: int | None, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of blocks of 128 of a row of float32 values; ``seed`` None rounds to the nearest."""
    plain = np.sqrt(values) if root else values
    padded = np.pad(np.abs(plain), ((0, 0), (0, -plain.shape[1] % BLOCK)))
    amax = padded.reshape(len(plain), -1, BLOCK).max(2)
    multiplier = oracle.multiplier(amax, "e4m3", "fp32")
    codes = _codes(plain * _repeated(multiplier, plain.shape[1]), seed, step)
    return np.where(root & (codes == 0) & (values > 0), np.uint8(1), codes), oracle.inverse(multiplier)


def dequantized(codes: np.ndarray, scale: np.ndarray, *, root: bool) -> np.ndarray:
    magnitude = VALUES.astype(np.float32)[codes & 0x7F]
    values = np.where(codes & 0x80, -magnitude, magnitude) * _repeated(scale, codes.shape[1])
    return values * values if root else values


class AdamWByHand:
    """One parameter, (N, K) float32, and its moments as codes."""

    def __init__(self, parameter, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, seed=None):
        self.parameter, self.lr, self.betas, self.eps, self.decay = parameter.copy(), lr, betas, eps, weight_decay
        self.seed, self.steps = seed, 0
        shape = parameter.shape
        zeros = np.zeros(shape, np.uint8), np.ones((shape[0], -(-shape[1] // BLOCK)), np.float32)
        self.state = {"exp_avg": zeros, "exp_avg_sq": zeros}

    def step(self, grad: np.ndarray) -> None:
        self.steps += 1
        f = np.float32
        grad = np.where(np.isinf(grad), grad, np.clip(grad, f(-1.8e19), f(1.8e19)))  # what has a finite square
        first, second = (f(beta) for beta in self.betas)
        rest_first, rest_second = (f(1 - beta) for beta in self.betas)
        exp_avg = dequantized(*self.state["exp_avg"], root=False) * first + grad * rest_first
        exp_avg_sq = dequantized(*self.state["exp_avg_sq"], root=True) * second + grad * grad * rest_second
        correction = f(1 - self.betas[0] ** self.steps), f((1 - self.betas[1] ** self.steps) ** 0.5)
        update = (exp_avg / correction[0]) / (np.sqrt(exp_avg_sq) / correction[1] + f(self.eps))
        lr = f(self.lr)
        self.parameter = self.parameter * (f(1) - lr * f(self.decay)) - lr * update
        self.state = {
            "exp_avg": quantized(exp_avg, root=False, seed=self.seed, step=self.steps),
            "exp_avg_sq": quantized(exp_avg_sq, root=True, seed=self.seed, step=self.steps),
        }

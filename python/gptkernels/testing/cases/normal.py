"""Table entry of normal_. NumPy computes the same numbers in float64, without contraction to FMA, to the bit."""

import numpy as np
import torch

from gptkernels.testing.cases.table import ROWS, WIDTHS, Call, grid, invoke, operator, ops

# The coefficients of Wichura's algorithm AS 241, in descending order, for |p - 1/2| <= 0.425, r <= 5 and r > 5.
_NUMERATORS = np.array([
    [2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080],
    [7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734],
    [2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720],
])  # fmt: skip
_DENOMINATORS = np.array([
    [5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0],
    [1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940, 2.05319162663775882187, 1.0],
    [2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0],
])  # fmt: skip
_LOG = [
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
    2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01,
]  # fmt: skip


def _polynomial(x, coefficients):
    total = coefficients[0]
    for c in coefficients[1:]:
        total = total * x + c
    return total


def _log(x):
    fraction, exponent = np.frexp(x)
    lower = fraction < np.uint64(0x3FE6A09E << 32).view(np.float64)
    f, e = np.where(lower, 2 * fraction, fraction) - 1, exponent - np.where(lower, 1.0, 0.0)
    s = f / (2 + f)
    half_square, rest = 0.5 * f * f, s * s * _polynomial(s * s, _LOG)
    return e * 6.93147180369123816490e-01 - (
        (half_square - (s * (half_square + rest) + e * 1.90821492927058770002e-10)) - f
    )


def normal_quantile(p):
    """Return the numbers that a normal number exceeds with the probabilities ``p``, each at most 1/2."""
    q, r = 0.5 - p, np.sqrt(-_log(p))
    piece = np.where(q <= 0.425, 0, np.where(r <= 5, 1, 2))
    x = np.choose(piece, [0.180625 - q * q, r - 1.6, r - 5])
    quotient = _polynomial(x, _NUMERATORS[piece].T) / _polynomial(x, _DENOMINATORS[piece].T)
    return np.where(piece == 0, q, 1.0) * quotient


def normal_numbers(seed, stream, index):
    """Compute the numbers of N(0, 1) at the indices ``index`` (N) of a stream."""
    index = np.asarray(index, np.uint64)
    low = np.uint64(0xFFFFFFFF)
    words, key = ([number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF] for number in (stream, seed))
    c = [index >> 1 & low, index >> 33, *(np.full_like(index, word) for word in words)]
    for _ in range(7):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [b >> 32 ^ c[1] ^ np.uint64(key[0]), b & low, a >> 32 ^ c[3] ^ np.uint64(key[1]), a & low]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    bits = np.where(index & 1, c[3] << 32 | c[2], c[1] << 32 | c[0])
    magnitude = normal_quantile((2.0 * (bits & np.uint64(2**52 - 1)) + 1) * 2.0**-54)
    return np.where(bits >> 63, -magnitude, magnitude)


@operator(
    finite_differences=False,
    edges=grid({"x.rows": ROWS, "width": [0, *WIDTHS]}),
    sizes={"x.rows": [2, 7, 64], "width": [3, 33, 768], "row_stride": 1000, "first_index": 5},
)
def normal_(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    x = draw.tensor("x", (*rows, draw.width("width", rows, 0)), dtype, 2)
    words = draw.random("seed and stream")
    seed, stream = (words.getrandbits(63) for _ in range(2))
    mean, std = draw.choose("mean", (0.0, 1.5)), draw.choose("std", (1.0, 0.02, 0.0))
    first, columns = draw.choose("first_index", (0, 7, 2**40 + 1)), x.shape[-1]
    row_stride = max(draw.choose("row_stride", (0, 60_000)), columns)
    arguments = mean, std, seed, stream, first, row_stride

    def ours(x):
        x = x.clone()
        ops.normal_(x, *arguments)
        return x

    def exact(x):
        index = first + np.arange(x.numel() // max(columns, 1))[:, None] * row_stride + np.arange(columns)
        found = mean + std * torch.from_numpy(normal_numbers(seed, stream, index.ravel()))
        return found.view(x.shape).to(x.device)

    return Call(
        f"normal_(x, {', '.join(map(str, arguments))})",
        ours,
        lambda x: exact(x).to(dtype),
        exact,
        {"x": x},
        fixed=("x",),
        invocations=lambda: [invoke(ops.normal_, x.clone(), *arguments)],
    )

"""Constants of the logarithm: log(2**e f) = e ln 2 + 2 atanh(s), s = (f - 1) / (f + 1), f in (sqrt(1/2), sqrt(2)].

Nine terms of atanh leave a relative error below 1e-14, far below the rounding to fp32 that follows.
"""

LN2 = 0.6931471805599453
SQRT2 = 1.4142135623730951
COEFFICIENTS = (1 / 17, 1 / 15, 1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)
"""Of s**16 down to s**0 in atanh(s) / s."""

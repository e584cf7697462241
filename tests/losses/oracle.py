"""The paper in plain Python floats, an equation a function. Slow on purpose, to be read with the paper beside it.

The tests compare the library with this and never the other way round: nothing here knows of tensors, blocks, dtypes
or threads. Equations are numbered as the paper counts them.
"""

from math import exp, floor, log1p, sqrt

# 3.1 A loss per example, its gradient norm g in [0, 1] and its derivative. `Example = (loss, norm, slope)`.


def binary(x, target):
    """Cross-entropy of p = sigmoid(x), g = |p − p*| (equations 1 to 3); a soft p* mixes the two cases.

    >>> binary(0.0, 1)  # undecided: ln 2, and the gradient is −1/2
    (0.6931471805599453, 0.5, -0.5)
    """
    p, not_p = sigmoid(x), sigmoid(-x)
    loss = target * softplus(-x) + (1 - target) * softplus(x)  # −p* log p − (1 − p*) log(1 − p)
    slope = p * (1 - target) - not_p * target  # p − p*, also where p is so near 1 that 1 − p would be rounded away
    return loss, abs(slope), slope


def sigmoid(x):
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))


def softplus(x):
    """log(1 + eˣ), which is −log(1 − p) for p = sigmoid(x), and −log p for p = sigmoid(−x)."""
    return max(x, 0) + log1p(exp(-abs(x)))


def box(d, mu):
    """ASL1 and its derivative, whose size is the gradient norm (equations 17 and 18)."""
    root = sqrt(d * d + mu * mu)
    return root - mu, abs(d) / root, d / root


def softmax(logits, target):
    """−log p_y with g = 1 − p_y, half the L1 norm of the gradient p − y; the slope is that gradient, a list."""
    largest = max(logits)
    total = sum(exp(x - largest) for x in logits)
    p = [exp(x - largest) / total for x in logits]
    y = [float(k == target) for k in range(len(logits))]
    loss = largest - logits[target] + log1p(total - 1)
    return loss, sum(abs(a - b) for a, b in zip(p, y)) / 2, [a - b for a, b in zip(p, y)]


# 3.2 Gradient density


def is_near(x, y, epsilon):
    """δ_ε(x, y), equation 5: the window is closed below and open above."""
    return y - epsilon / 2 <= x < y + epsilon / 2


def valid_length(g, epsilon):
    """l_ε(g), equation 6: how much of the window lies in [0, 1]."""
    return min(g + epsilon / 2, 1) - max(g - epsilon / 2, 0)


def gradient_density(g, norms, epsilon):
    """GD(g), equation 4.

    >>> gradient_density(0.5, [0.48, 0.5, 0.9], epsilon=0.125)
    16.0
    """
    return sum(is_near(other, g, epsilon) for other in norms) / valid_length(g, epsilon)


# 3.4 Unit regions


def region(g, bins):
    """ind(g), counted from 0: the region [j/M, (j + 1)/M) that g lies in. g = 1 belongs to the last."""
    return min(floor(g * bins), bins - 1)


def region_counts(norms, bins):
    """R, the number of examples in each region."""
    return [sum(region(g, bins) == j for g in norms) for j in range(bins)]


class Mechanism:
    """GD(g) for a call's examples, and what is remembered from call to call."""

    def __init__(self, bins, momentum=0.0, *, density="regions", normalizer="regions", max_weight=None):
        self.bins, self.momentum, self.density = bins, momentum, density
        self.normalizer, self.max_weight = normalizer, max_weight
        self.average = None  # S of equation 12, before the first example
        self.calls = []  # for the density by windows: (share, norms) of each call so far

    def densities(self, norms):
        """GD of each of this call's valid examples; the moving averages take one step."""
        if not norms:
            return []
        found = self._by_regions(norms) if self.density == "regions" else self._by_windows(norms)
        if self.max_weight is None:
            return found
        return [max(density, len(norms) / self.max_weight) for density in found]  # β = N / GD ≤ max_weight

    def _by_regions(self, norms):
        a, counts = self.momentum, region_counts(norms, self.bins)
        before = counts if self.average is None else self.average  # unbiased: the first call stands for the past
        self.average = [a * s + (1 - a) * r for s, r in zip(before, counts)]  # equation 12
        times = self.bins if self.normalizer == "regions" else sum(r > 0 for r in counts)
        return [self.average[region(g, self.bins)] * times for g in norms]  # equation 13

    def _by_windows(self, norms):
        """Equation 12 for every narrow cell of [0, 1] is equation 12 for every window: each call keeps its share."""
        a = self.momentum
        self.calls = [(a * share, past) for share, past in self.calls] + [(1 - a if self.calls else 1.0, norms)]
        return [sum(share * gradient_density(g, past, 1 / self.bins) for share, past in self.calls) for g in norms]


# 3.3 and 3.5 The harmonized sum


def harmonize(mechanism, examples, valid=None, weight=None):
    """Σᵢ wᵢ Lᵢ / GD(gᵢ) over the valid examples (equations 8, 11 and 19), and its gradient, GD being a constant."""
    valid = valid or [True] * len(examples)
    weight = weight or [1.0] * len(examples)
    densities = iter(mechanism.densities([norm for (_, norm, _), counts in zip(examples, valid) if counts]))
    total, gradient = 0.0, []
    for (loss, _, slope), counts, w in zip(examples, valid, weight):
        share = w / next(densities) if counts else 0.0
        total += share * loss if counts else 0.0
        gradient.append([share * s for s in slope] if isinstance(slope, list) else share * slope)
    return total, gradient

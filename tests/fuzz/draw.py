"""Random choices that have names, so that a failing call can be repeated, and repeated with one choice replaced.

Every choice takes its randomness from (seed, index, name) alone: replacing or removing one leaves all others as they
are.
"""

import math
import random

import torch

from helpers import VIEWS, as_view

FLOATING = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["contiguous", *VIEWS, "padded rows", "permuted"]

# Largest number of elements of one tensor: nearly always the first, else the second or the third.
MOST_ELEMENTS = (2_000, 60_000, 2**20)


class Draw:
    """The choices of one call.

    Args:
        seed: of the campaign.
        index: of the call.
        device: where the tensors go.
        replaced: choices that are not drawn: name -> value, as text.
    """

    def __init__(self, seed, index, device="cpu", replaced=None):
        self.key = f"{seed}/{index}"
        self.device = torch.device(device)
        self.replaced = dict(replaced or {})
        self.drawn = {}  # name -> value
        self.simpler = {}  # name -> values to try in its place, simplest first
        self.most_elements = self.choose("most elements", MOST_ELEMENTS, weights=(97, 2.5, 0.5))

    def random(self, name):
        return random.Random(f"{self.key}/{name}")

    def choose(self, name, options, weights=None):
        """One of the options; the first is the simplest."""
        value = self.random(name).choices(options, weights)[0]
        if name in self.replaced:
            value = next(o for o in options if str(o) == self.replaced[name])
        options = list(options)
        return self._note(name, value, options[: options.index(value)])

    def chance(self, name, probability):
        return self.choose(name, (False, True), (1 - probability, probability))

    def size(self, name, most, least=0):
        """A number from least to most, small ones more often."""
        value = self.random(name)
        value = least + int(math.expm1(value.random() * math.log1p(most - least + 0.999)))
        value = int(self.replaced.get(name, value))
        return self._note(name, value, sorted({v for v in (least, 1, 2, value // 2, value - 1) if least <= v < value}))

    def _note(self, name, value, simpler):
        self.drawn[name] = value
        self.simpler[name] = simpler
        return value

    def dtype(self):
        return self.choose("dtype", FLOATING)

    def rows(self, name="x", most_dims=4):
        """The dimensions before the last: mostly one or two, some of size 0 or 1."""
        dims = self.choose(f"{name}.dims", range(most_dims), weights=(2, 6, 3, 1)[:most_dims])
        sizes = []
        for i in range(dims):
            most = self.most_elements // 16 // max(math.prod(sizes), 1)
            sizes.append(self.size(f"{name}.rows{i}", min(max(most, 2), 3000)))
        return tuple(sizes)

    def width(self, name="width", rows=(), least=1):
        """Of the last dimension: the more the fewer rows there are."""
        most = max(self.most_elements // max(math.prod(rows), 1), 16, least)
        return self.size(name, min(most, 60_000), least)

    def generator(self, name):
        return torch.Generator().manual_seed(self.random(f"{name} (values)").getrandbits(60))

    def tensor(self, name, shape, dtype, scale=1.0, special="all", huge=None, denormal=True):
        """A floating tensor in some layout.

        Args:
            name: of its choices.
            shape: of the tensor.
            dtype: of the tensor.
            scale: of ordinary values.
            special: "all" for infinities and NaN, "nan" for NaN alone, "none".
            huge: the largest number that the formula takes in this dtype; None for no such values.
            denormal: whether all values may be denormal.
        """
        kinds = {"normal": 60, "zeros": 2, "constant": 4, "whole": 6, "wide": 8}
        if denormal:
            kinds["denormal"] = 3
        if special != "none":
            kinds["special"] = 8
        if huge is not None:
            kinds["huge"] = 4
        kind = self.choose(f"{name}.values", list(kinds), list(kinds.values()))
        generator = self.generator(name)
        info = torch.finfo(dtype)
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        if kind == "zeros":
            x = torch.zeros(shape, dtype=torch.float64).copysign(x)
        elif kind == "constant":
            x = torch.full(shape, round(self.random(f"{name}.constant").gauss(0, 2), 2), dtype=torch.float64)
        elif kind == "whole":
            x = x.mul(2).round()
        elif kind == "wide":
            x = x * 10
        elif kind == "denormal":
            x = x * info.smallest_normal / 4
            scale = 1
        elif kind == "huge":
            x = x.clamp(-1, 1) * min(huge, info.max)
            scale = 1
        x = (x * scale).clamp(-info.max, info.max).to(dtype)
        if kind == "special" and x.numel():
            values = [math.nan] if special == "nan" else [math.nan, math.inf, -math.inf, -math.inf, 0.0, -0.0]
            value = self.choose(f"{name}.special", values)
            many = 1 + x.numel() // self.choose(f"{name}.rarity", (10**9, 30, 3))
            x.view(-1)[torch.randint(x.numel(), (many,), generator=generator)] = value
        return self.layout(name, x.to(self.device, non_blocking=True))

    def indices(self, name, shape, count, dtype=None):
        """Numbers below count, uniform or with a few that are frequent."""
        dtype = dtype or self.choose(f"{name}.dtype", (torch.int64, torch.int32))
        generator = self.generator(name)
        frequent = self.choose(f"{name}.frequent", (0, 1, 2, 5))
        x = torch.randint(max(count, 1), shape, generator=generator)
        if frequent and count:
            few = torch.randint(count, (frequent,), generator=generator)
            x = torch.where(torch.rand(shape, generator=generator) < 0.8, few[x % frequent], x)
        if self.chance(f"{name}.sorted", 0.2) and x.dim():
            x = x.sort(-1).values
        return self.layout(name, x.to(dtype).to(self.device, non_blocking=True))

    def layout(self, name, x):
        """The same values (for "expanded": of the first row) in another layout."""
        if x.dim() == 0:
            return x
        kind = self.choose(f"{name}.layout", LAYOUTS, (50, 8, 8, 8, 6, 8, 6))
        if kind == "contiguous":
            return x
        if kind == "padded rows":
            wide = torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)
            return wide[..., 1:-2].copy_(x)
        if kind == "permuted":
            order = list(range(x.dim()))
            self.random(f"{name}.order").shuffle(order)
            back = [order.index(i) for i in range(x.dim())]
            return x.permute(order).contiguous().permute(back)
        return as_view(x, kind)

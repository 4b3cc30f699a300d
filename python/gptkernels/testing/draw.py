"""Draws the arguments of a call by named random choices. A failing call can be repeated with some choices replaced.

The random numbers of a choice depend only on (seed, index, name), so that replacing one choice does not change the
random numbers of the others.
"""

import math
import random

import torch

VIEWS = ["transposed", "sliced", "misaligned", "expanded"]
FLOATING = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["contiguous", *VIEWS, "padded rows", "permuted"]

# About the largest number of elements of one tensor. Most calls use the first number.
MOST_ELEMENTS = (2_000, 60_000, 2**20)

# Sizes at whose multiples the kernels in csrc/cuda behave differently: rows, columns and terms of tiles, threads of a
# thread block, and sizes at which dispatch chooses another kernel.
EDGES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048, 4096, 8192, 16384, 65536)
LARGEST_SIZE = 2**17


def as_view(t, kind):
    if kind == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "sliced":
        wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1] + 1, dtype=t.dtype, device=t.device)
        view = wide[..., 1::2]
        view.copy_(t)
        return view
    if kind == "misaligned":
        flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        view = flat[1:].view(t.shape)
        view.copy_(t)
        return view
    assert kind == "expanded"
    return t[:1].expand_as(t)


class Draw:
    """The choices of one call.

    Args:
        replaced: maps names of choices to values, as text, which are used in place of drawn values.

    Attributes:
        real: whether the call fills a GPU several times (on the CPU, a GPU of two SMs).
        most_elements: about the largest number of elements of one tensor.
        most_products: the largest number of multiplications of one matmul in a call of real size.
    """

    def __init__(self, seed, index, device="cpu", replaced=None):
        self.key = f"{seed}/{index}"
        self.device = torch.device(device)
        self.replaced = dict(replaced or {})
        self.drawn = {}
        self.simpler = {}
        cuda = self.device.type == "cuda"
        self.real = self.choose("size", ("small", "real"), (1, 1) if cuda else (50, 1)) == "real"
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 2
        self.most_products = 2**35 if cuda else 2**26
        if self.real:
            self.most_elements = 2**24 if cuda else 2**16
        else:
            self.most_elements = self.choose("most elements", MOST_ELEMENTS, weights=(97, 2.5, 0.5))

    def random(self, name):
        return random.Random(f"{self.key}/{name}")

    def choose(self, name, options, weights=None):
        value = self.random(name).choices(options, weights)[0]
        if name in self.replaced:
            value = next(o for o in options if str(o) == self.replaced[name])
        options = list(options)
        return self._note(name, value, options[: options.index(value)])

    def chance(self, name, probability):
        return self.choose(name, (False, True), (1 - probability, probability))

    def size(self, name, most, least=0, real=None):
        """Draw a number from ``least`` to ``most``, small numbers more frequently.

        In a call of real size, ``real`` replaces ``most`` if it is given, and the number may also be uniformly
        distributed, or near a multiple of one of ``EDGES``.
        """
        random = self.random(name)
        most = max(real, least) if self.real and real is not None else most
        value = least + int(math.expm1(random.random() * math.log1p(most - least + 0.999)))
        if self.real and most > EDGES[0]:
            edge = random.choice([e for e in EDGES if e <= most])
            near = edge * random.randint(1, min(most // edge, 9)) + random.choice((-1, 0, 1))
            value = random.choice((value, random.randint(least, most), min(max(near, least), most)))
        value = int(self.replaced.get(name, value))
        return self._note(name, value, sorted({v for v in (least, 1, 2, value // 2, value - 1) if least <= v < value}))

    def _note(self, name, value, simpler):
        self.drawn[name] = value
        self.simpler[name] = simpler
        return value

    def dtype(self):
        return self.choose("dtype", FLOATING, (2, 4, 4, 1) if self.real else None)

    def room(self, *others):
        others = [max(size, 1) for size in others]
        return max(min(LARGEST_SIZE, 4 * self.most_elements // max(others), self.most_products // math.prod(others)), 1)

    def tiles(self, name):
        each = self.choose(f"{name}.tiles each", (1, 2, 3, 4, 5))
        more = self.choose(f"{name}.more tiles", (1, 0, -1, self.multiprocessors // 2))
        return each * self.multiprocessors + more

    def rows(self, name="x", most_dims=4):
        """Draw the sizes of the dimensions before the last.

        At real size, the rows fill about one to five tiles for each SM, and the last tile may have fewer rows.
        """
        dims = self.choose(f"{name}.dims", range(most_dims), weights=(2, 6, 3, 1)[:most_dims])
        sizes = []
        if self.real and dims:
            each = self.choose(f"{name}.rows of a tile", (1, 4, 16, 64, 128, 256))
            count = min(self.tiles(name) * each - self.random(f"{name}.missing").randrange(each), LARGEST_SIZE)
            for i in range(dims - 1):
                sizes.append(self.size(f"{name}.rows{i}", 0, 1, real=min(32, count)))
                count = max(count // sizes[-1], 1)
            return (*sizes, count)
        for i in range(dims):
            most = self.most_elements // 16 // max(math.prod(sizes), 1)
            sizes.append(self.size(f"{name}.rows{i}", min(max(most, 2), 3000)))
        return tuple(sizes)

    def width(self, name="width", rows=(), least=1, real=None):
        most = max(self.most_elements // max(math.prod(rows), 1), 16, least)
        return self.size(name, min(most, 60_000), least, real=real or min(most, LARGEST_SIZE))

    def source(self, name):
        device = self.device if self.real else torch.device("cpu")
        generator = torch.Generator(device).manual_seed(self.random(f"{name} (values)").getrandbits(60))
        return {"generator": generator, "device": device}

    def tensor(self, name, shape, dtype, scale=1.0, special="all", huge=None, denormal=True):
        """Draw a floating tensor in a random layout.

        Args:
            scale: the standard deviation of ordinary values.
            special: which special values may occur: "all" (infinities and NaN), "nan" or "none".
            huge: the largest magnitude that the formula supports in this dtype; None for no huge values.
            denormal: whether all values may be denormal.
        """
        kinds = {"normal": 60, "zeros": 2, "constant": 4, "whole": 6, "wide": 8}
        if denormal:
            kinds["denormal"] = 3
        if special != "none":
            kinds["special"] = 8
        if huge is not None:
            kinds["huge"] = 4
        if self.real:
            kinds["large end"] = 20
        kind = self.choose(f"{name}.values", list(kinds), list(kinds.values()))
        source = self.source(name)
        info = torch.finfo(dtype)
        x = torch.randn(shape, dtype=torch.float64, **source)
        if kind == "zeros":
            x = torch.zeros_like(x).copysign(x)
        elif kind == "constant":
            x = torch.full_like(x, round(self.random(f"{name}.constant").gauss(0, 2), 2))
        elif kind == "large end" and x.dim() and x.numel():  # a sum without its last terms has a large error
            random = self.random(f"{name}.end")
            dim = random.randrange(x.dim())
            x.movedim(dim, -1)[..., -random.randint(1, 8) :] *= 32
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
            x.view(-1)[torch.randint(x.numel(), (many,), **source)] = value
        return self.layout(name, self.put(x))

    def put(self, t):
        return t.to(self.device, non_blocking=True)

    def number(self, value, dtype=torch.float32):
        """A kernel makes the tensor, because a copy would wait for the device."""
        return torch.full((), value, dtype=dtype, device=self.device)

    def indices(self, name, shape, count, dtype=None):
        dtype = dtype or self.choose(f"{name}.dtype", (torch.int64, torch.int32))
        source = self.source(name)
        frequent = self.choose(f"{name}.frequent", (0, 1, 2, 5))
        x = torch.randint(max(count, 1), shape, **source)
        if frequent and count:
            few = torch.randint(count, (frequent,), **source)
            x = torch.where(torch.rand(shape, **source) < 0.8, few[x % frequent], x)
        if self.chance(f"{name}.sorted", 0.2) and x.dim():
            x = x.sort(-1).values
        return self.layout(name, self.put(x.to(dtype)))

    def layout(self, name, x):
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


class Plain(Draw):
    """A call whose choices are not random.

    ``choices`` has the values of all sizes, and may have the values of other choices. A choice that is not in
    ``choices`` is the first option. A chance that is not there is True if its probability is above 0.5.
    """

    def __init__(self, choices, dtype, device, seed=0, view="contiguous"):
        self.key, self.device, self.view = f"plain {seed}", torch.device(device), view
        self.replaced = {"dtype": dtype, **choices}
        self.drawn, self.simpler = {}, {}
        self.real, self.multiprocessors, self.most_elements, self.most_products = False, 2, 2**20, 2**26

    def choose(self, name, options, weights=None):
        return self.replaced[name] if name in self.replaced else next(iter(options))

    def chance(self, name, probability):
        return self.replaced.get(name, probability > 0.5)

    def size(self, name, most, least=0, real=None):
        return self.replaced[name]

    def rows(self, name="x", most_dims=4):
        rows = self.size(f"{name}.rows", 0)
        return rows if isinstance(rows, tuple) else (rows,)

    def layout(self, name, x):
        view = self.replaced.get(f"{name}.layout", self.view)
        return x if view == "contiguous" or x.dim() == 0 else as_view(x, view)

"""A model of norm/ring.cuh."""

import re

from .checker import CUDA, Model, Ring


def layernorm_ring(rows, stages, prior=None):
    """Model one thread and its copies. One thread is enough, because each thread reads only what it copied itself.

    A wait returns when at most ``prior`` copies are in flight. The default is the number in the kernel's source.
    """
    source = (CUDA / "norm/ring.cuh").read_text()
    priors = dict(re.findall(r"stages_ == (\d)\)\s+__pipeline_wait_prior\((\d)\)", source))
    prior = prior or int(priors.get(str(stages)) or re.search(r"else\s+__pipeline_wait_prior\((\d)\)", source)[1])
    model = Model()
    p, copied, row_at = model.process("thread"), Ring("copied"), Ring("row", stages)
    for started in range(rows + stages - 1):
        p.copy(copied(started), *[row_at(started)] if started < rows else [])
        row = started + 1 - stages
        if row >= 0:  # the kernel's next()
            p.reach(copied(started - prior))
            p.read(row_at(row))
    return model

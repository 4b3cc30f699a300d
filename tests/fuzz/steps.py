"""Makes training steps of our GPT-2 and of swapped models at random lengths: eager, compiled, and as CUDA graphs.

`python -m fuzz.steps --steps 300 --seed 1 --device cuda` (in tests/). Every step starts with new weights. Its loss and
all its gradients are compared with the results of torch's model in float64:

- The norm of a gradient's error may be twice that of torch's model in the same precision, plus one rounding to float32.
- The loss's error may be twice the mean magnitude of the errors of torch's losses of single tokens, plus one rounding
to float32. (The error of torch's mean loss is at most this mean magnitude, but may happen to be near 0.)

With few tokens, torch's errors may all happen to be small. A step that breaks these rules is therefore repeated with
other numbers, and the root mean squares of the errors over all repetitions must satisfy them. A failing step is
printed as a command that repeats it. A step that takes longer than `SECONDS` ends the process.
"""

import argparse
import copy
import faulthandler
import math
import random
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import gptkernels
import published
from gptkernels.models import GPT2, GPT2Config
from gptkernels.optim import AdamW
from swapped import hf_config, transformers

SECONDS = 300  # Inductor may take two minutes
IGNORED = -100
TRIALS = 10
UNUSED = 47  # padding of the vocabulary: 50304 columns for GPT-2's 50257 tokens
WAYS = ("eager", "compiled", "graphed")
REPLAYED = 4  # Of these calls of a graphed step, two are eager, the third captures the graph, the fourth replays it.


class Sizes(NamedTuple):
    layers: int
    heads: int
    channels: int
    positions: int
    vocabulary: int
    tokens: tuple[int, int]


SIZES = {"cpu": Sizes(2, 2, 32, 64, 128, (64, 300)), "cuda": Sizes(2, 12, 768, 1024, 50304, (32000, 40000))}


class Family(NamedTuple):
    """A kind of model.

    `make` returns our model and torch's, whose parameters have the same names. `loss` returns the mean loss of our
    model, and `logits` the logits of torch's model. If `shifts` is true, the models take no targets: each token's
    target is the next token.
    """

    make: Callable
    loss: Callable
    logits: Callable
    shifts: bool = False


def make_torchs_nanogpt(sizes):
    return published.GPT(published.Config(sizes.positions, sizes.vocabulary, sizes.layers, sizes.heads, sizes.channels))


def make_gpt2(sizes):
    torchs = make_torchs_nanogpt(sizes)
    config = {
        name: getattr(torchs.config, name) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    }
    return GPT2(GPT2Config(**config, activation="gelu")), torchs


def make_nanogpt(sizes):
    torchs = make_torchs_nanogpt(sizes)
    return gptkernels.swap(copy.deepcopy(torchs)), torchs


def make_huggingface(sizes):
    torchs = transformers.GPT2LMHeadModel(
        hf_config(
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_embd=sizes.channels,
            n_positions=sizes.positions,
            vocab_size=sizes.vocabulary - UNUSED,
            pad_token_id=None,  # otherwise the model would search for padding and synchronize
        )
    )
    return gptkernels.swap(copy.deepcopy(torchs)), torchs


FAMILIES = {
    "GPT2": Family(
        make_gpt2,
        lambda model, tokens, targets: model(tokens, targets, return_logits=False)[1],
        lambda model, tokens, targets: model(tokens, targets)[0],
    ),
    "nanoGPT": Family(
        make_nanogpt,
        lambda model, tokens, targets: model(tokens, targets)[1],
        lambda model, tokens, targets: model(tokens, targets)[0],
    ),
    "Hugging Face": Family(
        make_huggingface,
        lambda model, tokens, targets: model(input_ids=tokens, labels=tokens).loss,
        lambda model, tokens, targets: model(input_ids=tokens).logits,
        shifts=True,
    ),
}
if transformers is None:
    del FAMILIES["Hugging Face"]


class Models:
    def __init__(self, family, device, backend):
        self.family = family
        self.ours, self.torchs = (model.to(device) for model in family.make(SIZES[device.type]))
        self.exact = copy.deepcopy(self.torchs).double()
        # With beta1 = 0, exp_avg is the gradient of the last step.
        self.optimizer = AdamW(self.ours.parameters(), lr=1e-3, betas=(0.0, 0.95), max_grad_norm=math.inf)
        compiled = torch.compile(self.loss, dynamic=True, backend=backend)
        self.steps = {
            way: gptkernels.graphed_step(
                compiled if way == "compiled" else self.loss, self.optimizer, capture=way == "graphed"
            )
            for way in WAYS
        }

    def loss(self, tokens, targets):
        return self.family.loss(self.ours, tokens, targets)

    @torch.no_grad()
    def redraw(self, generator):
        """Draw weights so large that each of them affects the loss."""
        for name, p in self.ours.named_parameters():
            drawn = torch.randn(p.shape, generator=generator, device=p.device)
            is_norm = "ln_" in name and name.endswith("weight")
            p.copy_(drawn * (1.5 * self.ours.config.n_embd**-0.5 if p.dim() == 2 else 0.1) + float(is_norm))

    def copy_weights(self):
        for model in (self.torchs, self.exact):
            model.load_state_dict(self.ours.state_dict())

    def reference(self, model, tokens, targets, autocast=False):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            logits = self.family.logits(model, tokens, targets)
            targets = targets.flatten()
            losses = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="none")
        losses = losses[targets != IGNORED]
        model.zero_grad()
        losses.mean().backward()
        return losses.detach().double(), {name: p.grad.double() for name, p in model.named_parameters()}

    def step(self, way, autocast, B, T, generator):
        """Make a step with new weights and tokens. Return (our error, torch's error, magnitude) of the loss and of each
        gradient.
        """
        sizes, device = SIZES[generator.device.type], generator.device
        self.redraw(generator)
        text = torch.randint(sizes.vocabulary - UNUSED, (B, T + 1), generator=generator, device=device)
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if self.family.shifts:
            targets[:, -1] = IGNORED
        for _ in range(REPLAYED if way == "graphed" else 1):
            self.copy_weights()
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = self.steps[way]((tokens, targets)).read().loss
        theirs, their_gradients = self.reference(self.torchs, tokens, targets, autocast)
        exact, exact_gradients = self.reference(self.exact, tokens, targets)
        compared = {"loss": (abs(loss - exact.mean()), (theirs - exact).abs().mean(), exact.mean())}
        for name, p in self.ours.named_parameters():
            gradient, wanted = self.optimizer.state[p]["exp_avg"].double(), exact_gradients[name]
            found = (gradient - wanted, their_gradients[name] - wanted, wanted)
            compared[f"gradient of {name}"] = tuple(difference.norm() for difference in found)
        return {name: torch.stack(found).tolist() for name, found in compared.items()}


def find_broken(trials):
    found = {}
    for name in trials[0]:
        error, torchs, magnitude = (
            math.sqrt(sum(x * x for x in column) / len(trials))
            for column in zip(*(trial[name] for trial in trials), strict=True)
        )
        allowed = 2 * torchs + torch.finfo(torch.float32).eps * magnitude
        if not error <= allowed:
            found[name] = f"{name}: error {error:.3e}, allowed {allowed:.3e}, magnitude {magnitude:.3e}"
    return found


def run(index, arguments, made):
    draw = random.Random(f"{arguments.seed}/{index}")
    device = torch.device(arguments.device)
    sizes = SIZES[device.type]
    name, way, autocast = draw.choice([*FAMILIES]), draw.choice(WAYS), draw.random() < 0.5
    T = draw.randint(1 + FAMILIES[name].shifts, sizes.positions)
    B = draw.randint(*sizes.tokens) // T
    print(f"step {index}: {name}, {way}, {'autocast' if autocast else 'float32'}, B={B}, T={T}", flush=True)
    if name not in made:
        made[name] = Models(FAMILIES[name], device, arguments.backend)
    models = made[name]
    generator = torch.Generator(device).manual_seed(draw.randrange(2**40))
    trials = [models.step(way, autocast, B, T, generator)]
    found = find_broken(trials)
    if found:
        found = find_broken(trials + [models.step(way, autocast, B, T, generator) for _ in range(TRIALS)])
    step = models.steps[way]
    if device.type == "cuda" and way == "graphed" and step.eager_because:
        found["graph"] = f"no graph: {step.eager_because}"
    step.reset()
    torch.cuda.empty_cache()  # A capture cannot use the memory that the allocator keeps of steps with other sizes.
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="fuzz.steps", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="number of steps (20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the campaign (0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile (inductor)")
    parser.add_argument("--index", type=int, help="make this step alone")
    arguments = parser.parse_args(argv)
    indices = range(arguments.steps) if arguments.index is None else [arguments.index]
    torch._dynamo.config.recompile_limit = 64  # Dynamo counts the compilations of `Models.loss` for all families.
    failures, made = 0, {}
    for index in indices:
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
        try:
            found = run(index, arguments, made)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if found:
            failures += 1
            print("\n".join(found.values()))
            print(
                f"python -m fuzz.steps --seed {arguments.seed} --index {index} --device {arguments.device} "
                f"--backend {arguments.backend}\n"
            )
    print(f"fuzz.steps: {len(indices)} steps, {failures} failures (seed {arguments.seed}, {arguments.device})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

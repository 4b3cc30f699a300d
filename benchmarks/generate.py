"""``python -m benchmarks.generate`` measures the tokens per second of our and of Hugging Face's decoding.

The floor is the time to read the weights and the previous keys and values from memory.
"""

import argparse
import sys
import time

import torch

from benchmarks.harness.machine import describe, title
from benchmarks.harness.measure import copy
from benchmarks.harness.options import add_device, described, names_in
from benchmarks.harness.report import markdown
from benchmarks.harness.timing import kernel_times, synchronize
from gptkernels.models import GPT2, GPT2Config, decoding
from gptkernels.models.config import PRESETS

VARIANTS = {
    "graph": "ours",
    "eager": "ours without a CUDA graph",
    "modules": "ours, with each module called",
    "huggingface": "transformers' generate",
    "huggingface-static": "transformers' generate, compiled, with a static cache",
}
HEADER = ["", "B", "tokens/s", "us per step", "floor / time"]
TEMPERATURE, TOP_K = 0.8, 40


def parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    add = parser.add_argument
    add("--variants", default=",".join(VARIANTS), help=described(VARIANTS))
    add("--model", choices=PRESETS, default="gpt2")
    add("--batch", default="1", help="numbers of sequences (default: %(default)s)")
    add("--tokens", type=int, default=1024, help="new tokens after a prompt of one token (default: %(default)s)")
    add("--layers", type=int, help="number of layers (default: the model's)")
    add("--repeats", type=int, default=3, help="runs, of which the fastest is shown (default: %(default)s)")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add_device(parser)
    return parser


def main(arguments=None):
    cli = parser()
    arguments = cli.parse_args(arguments)
    names = names_in(arguments.variants, VARIANTS, "variant", cli.error)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    changes = {} if arguments.layers is None else {"n_layer": arguments.layers}
    config = GPT2Config.preset(arguments.model, **changes)
    print(title(describe(device)), flush=True)
    nbytes = 1 << (31 if device.type == "cuda" else 27)
    speed = nbytes / kernel_times([copy(nbytes, device)], device, 5)[0].median
    print(f"memory: {speed / 1e9:.0f} GB/s; {config}", flush=True)
    print(markdown(HEADER, [], texts=1), flush=True)
    for batch in map(int, arguments.batch.split(",")):
        floor = step_bytes(config, dtype, batch, arguments.tokens) / speed
        for name in names:
            step = measure(name, config, dtype, device, batch, arguments.tokens, arguments.repeats) / arguments.tokens
            cells = [VARIANTS[name], str(batch), f"{batch / step:.0f}", f"{1e6 * step:.1f}", f"{floor / step:.0%}"]
            print("| " + " | ".join(cells) + " |", flush=True)
    return 0


def step_bytes(config, dtype, batch, tokens):
    C, L = config.n_embd, config.n_layer
    elements = 12 * L * C * C + config.padded_vocab_size * C + batch * L * C * tokens
    return elements * dtype.itemsize


def measure(name, config, dtype, device, batch, tokens, repeats):
    make = ours if name in ("graph", "eager", "modules") else huggingface
    generate = make(name, config, dtype, device, batch, tokens)
    times = []
    for _ in range(2 + repeats):
        synchronize(device)
        start = time.perf_counter()
        generate()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[2:])


def ours(name, config, dtype, device, batch, tokens):
    torch.manual_seed(0)
    model = GPT2(config, device, dtype).eval()
    prompt = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    if name == "modules":
        model.transformer.register_forward_hook(lambda *_: None)

    def generate():
        generator = torch.Generator(device).manual_seed(1)
        return model.generate(prompt, tokens, TEMPERATURE, TOP_K, generator)

    def eager():
        fewest = decoding._Graphs.FEWEST
        decoding._Graphs.FEWEST = tokens + 1
        try:
            return generate()
        finally:
            decoding._Graphs.FEWEST = fewest

    if name == "graph" and not torch.equal(generate(), eager()):
        raise RuntimeError("the tokens with and without CUDA graphs differ")
    return eager if name == "eager" else generate


def huggingface(name, config, dtype, device, batch, tokens):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd")}
    shape = transformers.GPT2Config(**sizes, n_positions=max(config.block_size, tokens + 1))
    model = transformers.GPT2LMHeadModel(shape).to(device, dtype).eval()
    prompt = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    options = {"attention_mask": torch.ones_like(prompt), "min_new_tokens": tokens, "max_new_tokens": tokens}
    options |= {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K, "pad_token_id": 0}
    if name == "huggingface-static":
        options["cache_implementation"] = "static"
    return lambda: model.generate(prompt, **options)


if __name__ == "__main__":
    sys.exit(main())

"""Table entries of the operators for generation: decode (logits of the next token) and sample_ (draws the token)."""

import math

import torch
import torch.nn.functional as F

from gptkernels.testing.cases.table import Call, invoke, operator, ops


def decode_formula(args, lengths, heads, approximate, layers):
    sequences, _, wte, wpe, head, keys_values, norm_weight, norm_bias, *weights = args
    each = 6 if norm_bias is None else 12
    rows = []
    for b, length in enumerate(lengths):
        x = wte[sequences[b, length - 1]] + wpe[length - 1]
        for i in range(layers):
            layer = weights[each * i : each * (i + 1)]
            matrices = layer[::2] if each == 12 else layer
            biases = layer[1::2] if each == 12 else [None] * 6
            w = list(zip(matrices, biases, strict=True))
            qkv = F.linear(F.layer_norm(x, x.shape, *w[0]), *w[1])
            query, key, value = qkv.view(3, heads, 1, -1)
            key, value = (
                torch.cat([old[b, :, : length - 1], new], 1)
                for old, new in zip(keys_values[i], (key, value), strict=True)
            )
            weight = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
            x = x + F.linear((weight @ value).flatten(), *w[2])
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape, *w[3]), *w[4]), approximate=approximate), *w[5])
        rows.append(F.linear(F.layer_norm(x, x.shape, norm_weight, norm_bias), head))
    return torch.stack(rows)


@operator(
    finite_differences=False,
    weight=0.5,
    sizes={
        "batch": [1, 3, 4],
        "heads": [2, 3, 3],
        "head size": [2, 5, 64],
        "vocabulary": [5, 65, 300],
        "length": [2, 3, 7],
        "head rows": [5, 65, 300],
    },
)
def decode(draw):
    dtype = draw.dtype()
    batch, layers = draw.size("batch", 8, 1), draw.choose("layers", (1, 2, 0))
    heads = draw.size("heads", 8, 1, real=12)
    head_size = draw.choose("head size", (1, 2, 5, 8, 20, 32, 64, 128), (1, 1, 2, 2, 2, 4, 4, 2))
    width = heads * head_size
    vocabulary, length = draw.size("vocabulary", 300, 1), draw.size("length", 150, 1, real=1024)
    room = length + draw.choose("room", (0, 1, 9))
    bias = draw.chance("bias", 0.7)
    approximate = draw.choose("approximate", ("tanh", "none"))
    sequences = draw.put(torch.randint(vocabulary, (batch, length), **draw.source("sequences")))
    lengths = torch.randint(1, length + 1, (batch,), **draw.source("lengths"))
    known_lengths = lengths.tolist()

    def weight(name, *shape):
        return draw.tensor(name, shape, dtype, shape[-1] ** -0.5, special="none").contiguous()

    norm = weight("norm_weight", width), weight("norm_bias", width) if bias else None
    args = {
        "sequences": sequences,
        "lengths": draw.put(lengths),
        "wte": weight("wte", vocabulary, width),
        "wpe": weight("wpe", room, width),
        "head": weight("head", draw.size("head rows", 300, 1, real=50_304), width),
        "keys_values": weight("keys_values", layers, 2, batch, heads, room, head_size),
        "norm_weight": norm[0],
        "norm_bias": norm[1],
    }
    names = ("ln_1", "c_attn", "attn.c_proj", "ln_2", "c_fc", "mlp.c_proj")
    shapes = ((width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width))
    for i in range(layers):
        for name, shape in zip(names, shapes, strict=True):
            args[f"{i}.{name}"] = weight(f"{i}.{name}", *shape)
            if bias:
                args[f"{i}.{name}.bias"] = weight(f"{i}.{name}.bias", shape[0])

    def invocation(sequences, lengths, wte, wpe, head, keys_values, norm_weight, norm_bias, *layers):
        norm, cache = (norm_weight, norm_bias), keys_values.clone()
        return invoke(
            ops.decode, sequences, lengths, wte, wpe, layers, *norm, head, cache, heads, approximate=approximate
        )

    def ours(*args):
        op, args, options = invocation(*args)
        return op(*args, **options)

    def formula(*args):
        return decode_formula(args, known_lengths, heads, approximate, layers)

    text = f"decode({layers} layers, {heads} heads, lengths {known_lengths}, {approximate})"
    return Call(
        text,
        ours,
        formula,
        formula,
        args,
        fixed=tuple(args),
        takes_floating_alone=False,
        invocations=lambda: [invocation(*args.values())],
    )


def sample_formula(logits, noise, temperature=1.0, top_k=None, top_p=None):
    if noise is None:
        return logits.argmax(-1)
    x = logits.float() / temperature
    if top_k is not None:
        x = x.masked_fill(x < x.topk(min(top_k, x.shape[-1])).values[:, -1:], -torch.inf)
    if top_p is not None:
        p, _ = x.double().softmax(-1).sort(descending=True)
        cut = (p.cumsum(-1) - p) >= top_p
        smallest = p.masked_fill(cut, 2).amin(-1, keepdim=True)
        x = x.masked_fill(x.double().softmax(-1) < smallest, -torch.inf)
    return (x.softmax(-1) / noise).argmax(-1)


@operator(
    finite_differences=False,
    weight=0.5,
    sizes={"batch": [1, 3, 4], "vocabulary": [3, 65, 200]},
    variants={"": {"temperature": 0.7, "top_k": 2, "top_p": 0.9}, "greedy": {"greedy": True}},
)
def sample_(draw):
    """Compare the scores of the drawn tokens, because either of two tokens with the same score is right."""
    batch = draw.size("batch", 40, 1, real=300)
    most = max(draw.most_elements // batch, 16)
    vocabulary = draw.size("vocabulary", most, 1, real=most)
    # Probabilities of denormal logits would be equal, and top_p could keep all of them or only the largest.
    logits = draw.tensor("logits", (batch, vocabulary), draw.dtype(), 3, denormal=False)
    source = draw.source("noise")
    noise = torch.empty(batch, vocabulary, device=source["device"])
    noise = draw.put(noise.exponential_(generator=source["generator"]))
    greedy = draw.chance("greedy", 0.2)
    temperature = draw.choose("temperature", (1.0, 0.7, 5.0))
    top_k = draw.choose("top_k", (None, 1, 2, 40, 10**6))
    top_p = draw.choose("top_p", (None, 0.9, 0.5, 1.0, 1e-9))

    def score(choose):
        def of(logits, noise):
            scores = logits.float().double()
            taken = choose(logits, noise)
            bad = scores.isnan().any(-1) | (scores.amax(-1).abs() == math.inf)
            if not greedy:
                scores = scores / temperature - noise.double().log()
            found = scores.gather(1, taken.clamp(min=0)[:, None])[:, 0].where(taken >= 0, math.nan)
            return found.where(~bad, torch.where(taken < 0, math.nan, 0.0)).float()

        return of

    def invocation(logits, noise):
        sequences = torch.zeros(batch, 2, dtype=torch.int64, device=draw.device)
        lengths = torch.ones(batch, dtype=torch.int64, device=draw.device)
        return invoke(ops.sample_, logits, None if greedy else noise, sequences, lengths, temperature, top_k, top_p)

    def ours(logits, noise):
        op, args, _ = invocation(logits, noise)
        op(*args)
        return args[2][:, 1]

    def formula(logits, noise):
        x = logits.float()
        bad = x.isnan().any(-1) | (x.amax(-1).abs() == math.inf)
        options = (None,) if greedy else (noise, temperature, top_k, top_p)
        return sample_formula(x, *options).where(~bad, -1)

    return Call(
        f"sample_(logits, noise, greedy={greedy}, temperature={temperature}, top_k={top_k}, top_p={top_p})",
        score(ours),
        score(formula),
        lambda logits, noise: score(formula)(logits.float(), noise.float()).double(),
        {"logits": logits, "noise": noise},
        fixed=("logits", "noise"),
        takes_floating_alone=False,
        invocations=lambda: [invocation(logits, noise)],
    )

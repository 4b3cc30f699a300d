"""Tests of decoding steps, compared with a forward of all tokens, and of generation with and without CUDA graphs."""

import concurrent.futures
import gc

import pytest
import torch

from gptkernels.models import GPT2, GPT2Config, decoding
from gptkernels.nn import KeyValueCache
from helpers import all_dtypes, assert_as_exact_as_torch, assert_equal, raises
from reference_gpt2 import ReferenceGPT2

ops = torch.ops.gptkernels

# Shapes for the fast kernels (head sizes 32, 64 and 128 in 16 bits; widths of 1, 2, 3 and 7 packs for each lane), and
# for the simple kernels.
SHAPES = {
    "64": {"n_layer": 2, "n_head": 3, "n_embd": 192},
    "32": {"n_layer": 1, "n_head": 4, "n_embd": 128},
    "128": {"n_layer": 1, "n_head": 2, "n_embd": 256},
    "20": {"n_layer": 2, "n_head": 2, "n_embd": 40},
    "5": {"n_layer": 1, "n_head": 3, "n_embd": 15},
    "124M": {"n_layer": 2, "n_head": 12, "n_embd": 768, "vocab_size": 1000},
    "256": {"n_layer": 3, "n_head": 4, "n_embd": 256},
    "512": {"n_layer": 2, "n_head": 8, "n_embd": 512, "bias": False, "activation": "gelu"},
    "wide": {"n_layer": 1, "n_head": 25, "n_embd": 1600, "block_size": 8},
    "none": {"n_layer": 2, "n_head": 2, "n_embd": 32, "bias": False, "activation": "gelu"},
}


def make(dtype, device, **changes):
    config = GPT2Config(**{"block_size": 40, "vocab_size": 65, **changes})
    torch.manual_seed(3)
    model = GPT2(config, device, dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.1 if parameter.dim() == 1 else config.n_embd**-0.5
            parameter.add_(torch.randn(parameter.shape).to(parameter) * scale)
    return model


def references(model):
    found = []
    for dtype in (model.lm_head.weight.dtype, torch.float64):
        with torch.device("meta"):  # draws no weights
            reference = ReferenceGPT2(model.config)
        reference.load_state_dict({name: t.to(dtype) for name, t in model.state_dict().items()}, assign=True)
        found.append(reference)
    return found


def arguments(model, tokens, capacity=None):
    weights = decoding._Weights.of(model, tokens)
    config = model.config
    size = config.n_head, capacity or config.block_size, config.n_embd // config.n_head
    cache = torch.full(
        (config.n_layer, 2, len(tokens), *size), torch.nan, dtype=weights.wte.dtype, device=tokens.device
    )
    return weights, cache


def logits_of_all(model, tokens):
    weights, cache = arguments(model, tokens)
    with torch.no_grad():
        parts = [
            weights.decode(tokens, torch.full_like(tokens[:, 0], length), cache)
            for length in range(1, tokens.shape[1] + 1)
        ]
    return torch.stack(parts, 1)[..., : model.config.vocab_size]


@all_dtypes
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(shape, batch, dtype, device):
    is_slow = shape in ("124M", "wide") and (batch == 1 or dtype not in (torch.float32, torch.bfloat16))
    if device.type == "cpu" and is_slow:
        pytest.skip("slow on a CPU, where all shapes have the same kernel")
    model = make(dtype, device, **SHAPES[shape])
    tokens = torch.randint(65, (batch, min(model.config.block_size, 12)), device=device)
    torchs, exact = (reference(tokens)[0].detach() for reference in references(model))
    assert_as_exact_as_torch(logits_of_all(model, tokens), torchs, exact)


@all_dtypes
@pytest.mark.parametrize(
    ("shape", "room", "steps"),
    [
        ("256", 1024, [[length] for length in (1, 2, 8, 9, 10, 128, 129, 700, 1017, 1023, 1024)]),
        ("64", 1300, [[1300, 1, 700], [129, 1024, 1025], [64, 1299, 2]]),
    ],
    ids=["one sequence", "three sequences"],
)
def test_long_sequences(shape, room, steps, dtype, device):
    """The fast CUDA kernel divides the keys of an attention head among the 8 thread blocks of a cluster."""
    model = make(dtype, device, **SHAPES[shape], block_size=room)
    tokens = torch.randint(65, (len(steps[0]), room), device=device)
    torchs, exact = (reference(tokens)[0].detach() for reference in references(model))
    with torch.no_grad():
        weights, cache = arguments(model, tokens)
        model.transformer(tokens, [KeyValueCache(room, memory) for memory in cache])
        for lengths in steps:
            at = torch.tensor(lengths, device=device)
            rows = torch.arange(len(lengths), device=device), at - 1
            found = weights.decode(tokens, at, cache)[:, : exact.shape[2]]
            assert_as_exact_as_torch(found, torchs[rows], exact[rows])


def test_norm_of_a_constant_row_is_its_bias(device):
    """The rounding error of the mean must not remain in x - mean, because it would be divided by sqrt(eps)."""
    wte = torch.full((5, 192), 1.37, device=device)
    norm, head = torch.randn(2, 192, device=device), torch.randn(65, 192, device=device)
    tokens = torch.zeros(2, 1, dtype=torch.int64, device=device)
    cache = wte.new_empty(0, 2, 2, 3, 4, 64)
    arguments = tokens, tokens[:, 0] + 1, wte, torch.zeros_like(wte), ()
    for bias in (None, norm[1]):
        logits = ops.decode(*arguments, norm[0], bias, head, cache, 3, approximate="tanh")
        exact = 0 if bias is None else head.double() @ bias.double()
        assert (logits - exact).abs().max() < 2e-5


@all_dtypes
def test_steps_are_deterministic_and_rows_independent(dtype, device):
    model = make(dtype, device, **SHAPES["64"])
    tokens = torch.randint(65, (8, 6), device=device)
    once = logits_of_all(model, tokens)
    assert torch.equal(once, logits_of_all(model, tokens))
    assert torch.equal(once[2:5], logits_of_all(model, tokens[2:5].contiguous()))


def test_bad_arguments(device):
    model = make(torch.float32, device, **SHAPES["20"])
    tokens, lengths = torch.randint(65, (2, 5), device=device), torch.tensor([1, 5], device=device)
    weights, cache = arguments(model, tokens, 7)
    wrong_layers = [*weights.layers[:2], weights.layers[4], *weights.layers[3:]]
    call = {"sequences": tokens, "lengths": lengths, "keys_values": cache}
    cases = [
        ({"sequences": tokens.new_zeros(9, 5)}, r"decode: sequences must have shape.*at most 8.*\(9, 5\)"),
        ({"sequences": tokens.int()}, "decode: sequences must be int64, got int32"),
        ({"lengths": lengths.new_zeros(3)}, r"decode: lengths must have shape \(2\), got \(3\)"),
        ({"keys_values": cache[:1]}, r"decode: keys_values must have shape \(2, 2, 2, 2, 7, 20\)"),
        ({"keys_values": cache.new_zeros(2, 2, 2, 2, 41, 20)}, "has room for 41 tokens, but wpe has only 40 positions"),
        ({"layers": weights.layers[:-1]}, "layers must have 12 tensors for each layer, got 23"),
        ({"layers": wrong_layers}, r"layers\[2\] must have shape \(120, 40\), got \(40, 40\)"),
        ({"wpe": weights.wpe.double()}, "wpe must have the dtype of wte"),
        ({"approximate": "erf"}, "approximate must be 'tanh' or 'none', got 'erf'"),
    ]
    if device.type == "cpu":
        wide = {"sequences": tokens.new_zeros(2, 9), "lengths": lengths.new_tensor([1, 8])}
        cases.append((wide, "length 8 of sequence 1 is not from 1 to 7"))
        cases.append(({"sequences": tokens.new_full((2, 5), 65)}, "token 65 at position 0 is outside the vocabulary"))
    for change, message in cases:
        changed = weights._replace(**{name: value for name, value in change.items() if name not in call})
        given = {name: change.get(name, value) for name, value in call.items()}
        with torch.no_grad(), raises(message):
            changed.decode(*given.values())
    with raises("decode has no derivative"):
        weights.decode(tokens, lengths, cache)


# ---- generation ------------------------------------------------------------------------------------------------------


def generate(model, tokens, count, seed=5, **options):
    generator = torch.Generator(tokens.device).manual_seed(seed)
    return model.generate(tokens, count, generator=generator, **options), generator.get_state()


def generate_like_eager(model, *args, **options):
    graphed = generate(model, *args, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding._Graphs, "FEWEST", 10**9)
        assert_equal(graphed, generate(model, *args, **options))
    return graphed[0]


@all_dtypes
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 7}, {"temperature": 1.3, "top_p": 0.8}], ids=str)
def test_graphs_change_no_token(options, dtype, device):
    """Generation with CUDA graphs gives the same tokens as generation without CUDA graphs.

    In some calls there are more tokens than the model has positions. Then no graph is used for the last tokens, for
    which the window of tokens slides.
    """
    model = make(dtype, device, **SHAPES["256" if device.type == "cuda" else "20"])
    for batch, prompt, count in ((1, 1, 40), (1, 4, 30), (2, 30, 20), (8, 3, 5), (1, 38, 6)):
        tokens = torch.randint(65, (batch, prompt), device=device)
        generate_like_eager(model, tokens, count, **options)


def test_a_closed_stream_has_drawn_for_its_tokens_alone(device):
    model = make(torch.float32, device, **SHAPES["64"])
    tokens = torch.randint(65, (1, 2), device=device)
    for count in range(1, 25, 4):
        generator = torch.Generator(device).manual_seed(2)
        stream = model.stream(tokens, 38, generator=generator)
        taken = [next(stream) for _ in range(count)]
        stream.close()
        other = torch.Generator(device).manual_seed(2)
        assert torch.equal(torch.cat([tokens[0], *taken]), model.generate(tokens, count, generator=other)[0])
        assert torch.equal(generator.get_state(), other.get_state())


@pytest.mark.parametrize("called", ["as one operator", "by modules", "by modules, nine prompts"])
def test_prompts_of_different_lengths_are_continued_apart(called, device):
    """In float32, a prompt is continued by the same tokens in a list as alone, also when its window slides."""
    model = make(torch.float32, device, **SHAPES["64"])
    if called != "as one operator":
        model.transformer.h[1].attn.c_proj.register_forward_hook(lambda *_: None)
    count = 9 if "nine" in called else 4
    for lengths in ([5, 1, 17, 17], [30, 38, 40, 45], [3] * 4):
        prompts = [torch.randint(65, (length,), device=device) for length in (lengths * 3)[:count]]
        for new in (0, 1, 12):
            found = model.generate(prompts, new, temperature=0)
            alone = [model.generate(prompt[None], new, temperature=0)[0] for prompt in prompts]
            assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
            assert found[0].dtype == prompts[0].dtype


def test_prompts_of_one_length_are_a_batch(device):
    model = make(torch.float32, device, **SHAPES["64"])
    tokens = torch.randint(65, (3, 7), device=device, dtype=torch.int32)
    expected, state = generate(model, tokens, 20)
    generator = torch.Generator(device).manual_seed(5)
    found = model.generate(list(tokens), 20, generator=generator)
    assert torch.equal(torch.stack(found), expected)
    assert torch.equal(generator.get_state(), state)


def test_bad_prompts_of_different_lengths(device):
    model = make(torch.float32, device, **SHAPES["64"])
    prompt = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="at least one"):
        model.generate([], 3)
    with pytest.raises(ValueError, match=r"of shape \(T_i,\)"):
        model.generate([prompt, prompt[None]], 3)
    with pytest.raises(ValueError, match="at least one token, got none"):
        model.generate([prompt, prompt[:0]], 3)
    with pytest.raises(TypeError, match="must be int64 or int32"):
        model.generate([prompt.short()], 3)


@pytest.fixture
def captures(on_cuda, monkeypatch):
    found, capture = [], decoding._Graphs._capture
    monkeypatch.setattr(
        decoding._Graphs, "_capture", lambda self, steps, weights: found.append(steps) or capture(self, steps, weights)
    )
    return found


def test_graphs_are_kept_with_the_model(captures, device):
    """Later calls use a model's graphs again, also after its weights change in place.

    Other sampling options or a replaced parameter need new graphs.
    """
    model = make(torch.float32, device, **SHAPES["64"])
    tokens = torch.randint(65, (2, 3), device=device)
    first = generate_like_eager(model, tokens, 20, top_k=9)
    generate(model, tokens, 20, 5, top_k=9)
    captures.clear()
    assert torch.equal(generate(model, tokens, 20, 5, top_k=9)[0], first)
    assert not torch.equal(generate(model, tokens, 20, 6, top_k=9)[0], first)
    generate(model, tokens[:, :1], 30, 6, top_k=9)
    assert captures == []
    with torch.no_grad():
        model.transformer.wte.weight.mul_(2)
    assert not torch.equal(generate(model, tokens, 20, 5, top_k=9)[0], first)
    assert captures == []
    generate(model, tokens, 20, 5, top_k=8)
    assert captures == [1, 8]
    model.transformer.ln_f.weight = torch.nn.Parameter(model.transformer.ln_f.weight.detach() * 2)
    generate_like_eager(model, tokens, 20, 7, top_k=8)
    assert captures == [1, 8, 1, 8]


def test_two_streams_of_a_model_at_once(captures, device):
    model = make(torch.float32, device, **SHAPES["64"])
    prompts = torch.randint(65, (2, 1, 2), device=device)
    alone = [generate(model, prompt, 25, seed)[0] for seed, prompt in enumerate(prompts)]
    streams = [
        model.stream(prompt, 25, generator=torch.Generator(device).manual_seed(seed))
        for seed, prompt in enumerate(prompts)
    ]
    found = [torch.cat(pair) for pair in zip(*streams, strict=True)]
    for i, expected in enumerate(alone):
        assert torch.equal(torch.stack(found, 1)[i : i + 1], expected[:, 2:])


def test_two_threads_with_their_own_streams(device, on_cuda):
    models = [make(torch.bfloat16, device, **SHAPES["124M"]) for _ in range(2)]
    prompt = torch.zeros(1, 1, dtype=torch.int64, device=device)
    alone = [generate(model, prompt, 39, seed)[0] for seed, model in enumerate(models)]

    def run(seed):
        with torch.cuda.stream(torch.cuda.Stream(device, priority=-seed)):
            found = [generate(models[seed], prompt, 39, seed)[0] for _ in range(5)]
            torch.cuda.current_stream().synchronize()
        return found

    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for found, expected in zip(pool.map(run, range(2)), alone, strict=True):
            assert all(torch.equal(tokens, expected) for tokens in found)


def test_state_is_freed_with_the_model(captures, device):
    model = make(torch.float32, device, **SHAPES["64"])
    generate(model, torch.randint(65, (1, 3), device=device), 20)
    kept = decoding._Kept._of_models
    assert model in kept
    count = len(kept)
    del model
    gc.collect()
    assert len(kept) == count - 1


def test_default_generator(device):
    model = make(torch.float32, device, **SHAPES["64"])
    tokens = torch.randint(65, (1, 2), device=device)
    found = []
    for fewest in (decoding._Graphs.FEWEST, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding._Graphs, "FEWEST", fewest)
            torch.manual_seed(9)
            found.append((model.generate(tokens, 30), torch.rand(3, device=device)))
    assert_equal(*found)


def test_modules_and_operator_agree(device):
    model = make(torch.float32, device, **SHAPES["64"])
    tokens = torch.randint(65, (2, 3), device=device)
    fused = generate(model, tokens, 30)[0]
    hook = model.transformer.h[1].attn.c_proj.register_forward_hook(lambda *_: None)
    assert torch.equal(generate(model, tokens, 30)[0], fused)
    hook.remove()


def test_changed_models_are_run_by_modules(device):
    model = make(torch.float32, device, **SHAPES["64"])
    tokens = torch.randint(65, (2, 3), device=device)
    assert decoding._Weights.of(model, tokens) is not None
    assert decoding._Weights.of(model, tokens[:1].repeat(9, 1)) is None
    with torch.autocast(device.type, torch.bfloat16):
        assert decoding._Weights.of(model, tokens) is None
    for name in ("transformer.h.1.ln_2", "lm_head", "transformer.wpe", "transformer.h.0.mlp"):
        module = model.get_submodule(name)
        hook = module.register_forward_pre_hook(lambda *_: None)
        assert decoding._Weights.of(model, tokens) is None
        hook.remove()
    model.transformer.h[0].ln_1.eps = 1e-3
    assert decoding._Weights.of(model, tokens) is None
    dropped = make(torch.float32, device, **SHAPES["64"], dropout=0.5)
    assert decoding._Weights.of(dropped, tokens) is not None
    assert decoding._Weights.of(dropped.train(), tokens) is None
    changed = make(torch.float32, device, **SHAPES["64"]).train()  # the model's configuration has no dropout
    assert decoding._Weights.of(changed, tokens) is not None
    changed.transformer.h[1].resid_dropout.p = 0.5
    assert decoding._Weights.of(changed, tokens) is None


@pytest.mark.parametrize("step", [1, 2, 7, 20])
def test_nonfinite_logits(step, device):
    """NaN and infinite logits raise an error, after which the process can still use the device."""
    model = make(torch.float32, device, **SHAPES["64"])
    with torch.no_grad():
        model.transformer.wpe.weight[step] = torch.inf
    stream = model.stream(torch.zeros(1, 1, dtype=torch.int64, device=device), 30, top_k=5)
    for _ in range(step):
        next(stream)
    with pytest.raises(FloatingPointError, match="the logits are NaN or infinite"):
        next(stream)
    with torch.no_grad():
        model.transformer.wpe.weight[step] = 0
    assert model.generate(torch.zeros(1, 1, dtype=torch.int64, device=device), 30).shape == (1, 31)

"""A small GPT-2, its reference, batches of tokens, and a data set of op results."""

import torch

from gptkernels import functional
from gptkernels.models import GPT2, GPT2Config
from reference_gpt2 import ReferenceGPT2

SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 60, "block_size": 16}


def make_model(device="cpu", dtype=torch.float32, noise=0.1, **changes):
    """Noise on the weights lets each of them affect the results."""
    torch.manual_seed(3)
    model = GPT2(GPT2Config(**SIZES | changes), device, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape).to(p) * noise)
    return model


def make_pair(device="cpu", dtype=torch.float64, **changes):
    model = make_model(device, dtype, **changes)
    reference = ReferenceGPT2(model.config).to(device, dtype)
    reference.load_state_dict(model.state_dict())
    return model, reference


def make_batch(device="cpu", B=2, length=16, vocab_size=SIZES["vocab_size"], seed=5):
    tokens = torch.randint(vocab_size, (B, length + 1), generator=torch.Generator().manual_seed(seed)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Batches(torch.utils.data.Dataset):
    """Results of ops, which the workers of a data loader compute."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        x = torch.linspace(-3, 3, 4096).view(64, 64) * (i + 1)
        return functional.layer_norm(functional.gelu(x), (64,))
